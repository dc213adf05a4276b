"""A capture ends whole, or leaves everything as it was."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue.devices import Device

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell's background job ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@segue.break_point
def plus_one(y: Tensor) -> Tensor:
    return y + 1


@segue.break_point
def fails(y: Tensor) -> Tensor:
    raise ValueError("the break's own error")


def _host_read(x: Tensor) -> Tensor:
    return x * (x.sum() * 2).item()


def _own_error(x: Tensor) -> Tensor:
    plus_one(x).mul_(2)
    raise ValueError("first error")


def _swallowed_host_read(x: Tensor) -> Tensor:
    y = plus_one(x * 2)
    try:
        y.sum().item()
    except Exception:
        y = y * 3
    return y


def _swallowed_break(x: Tensor) -> Tensor:
    try:
        return fails(x * 2)
    except ValueError:
        return x * 3


def _interrupted(x: Tensor) -> Tensor:
    plus_one(x * 2).add_(1)
    raise KeyboardInterrupt


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], type[BaseException]]] = {
    "a host read": (_host_read, Exception),
    "an error of the forward": (_own_error, ValueError),
    "an error of a break": (fails, ValueError),
    "a host read whose error is swallowed": (_swallowed_host_read, Exception),
    "a break whose error is swallowed": (_swallowed_break, ValueError),
    "a shape error": (lambda x: x * 2 @ torch.ones(7, 7, device=x.device), RuntimeError),
    "an interrupt": (_interrupted, KeyboardInterrupt),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_failed_capture_leaves_earlier_and_later_captures_and_random_numbers_working(device: Device, fault: str) -> None:
    forward, expected = FAULTS[fault]
    place = device.torch_device
    pool = device.new_pool()
    x = torch.ones(4, device=place)
    earlier = segue.BreakableCapture(pool=pool)
    with earlier:
        out = plus_one(x * 2) * 1
    live = pool.usage().live

    failed = segue.BreakableCapture(pool=pool, name="bucket 4")
    with pytest.raises(expected), failed:
        forward(x)
    assert pool.usage().live == live
    assert gc.isenabled()
    assert segue.capture_phase() is None
    assert segue.BreakableCapture.current() is None
    with pytest.raises(segue.SegueError, match="bucket 4 can't be replayed: it failed"):
        failed.replay()

    torch.rand(3, device=place)
    x.fill_(5)
    earlier.replay()
    assert out.tolist() == [11.0] * 4
    again = segue.BreakableCapture(pool=pool)
    with again:
        new = plus_one(x * 3) * 1
    again.replay()
    assert new.tolist() == [16.0] * 4
    failed.close()


def test_an_error_of_a_break_carries_bucket_segment_function_and_line(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    with pytest.raises(ValueError, match="own error") as caught, segue.BreakableCapture(device=device, name="bucket 4"):
        fails(plus_one(x))
    note = " ".join(caught.value.__notes__)
    for part in ("bucket 4, after segment 1", "break fails", "test_transaction.py"):
        assert part in note


def test_the_garbage_collector_stays_off_if_it_was_off(device: Device) -> None:
    gc.disable()
    try:
        with segue.BreakableCapture(device=device):
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_captures_can_not_be_nested_and_the_outer_one_goes_on(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    outer = segue.BreakableCapture(device=device)
    with outer:
        y = x * 2
        with pytest.raises(segue.SegueError, match="can't be nested"), segue.BreakableCapture(device=device):
            pass
        out = y + 1
    x.fill_(2)
    outer.replay()
    assert out.tolist() == [5.0] * 4


def test_a_capture_records_once_and_a_closed_one_refuses_to_replay(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device, name="bucket 4")
    with pytest.raises(segue.SegueError, match="has recorded nothing yet"):
        capture.replay()
    with capture:
        x * 2
    with pytest.raises(segue.SegueError, match="records once"), capture:
        pass
    capture.close()
    capture.close()
    with pytest.raises(segue.SegueError, match="bucket 4 can't be replayed: it was closed"):
        capture.replay()


def test_memory_goes_back_when_the_last_capture_of_a_pool_is_closed(device: Device) -> None:
    pool = device.new_pool()
    x = torch.ones(1 << 20, device=device.torch_device)
    captures = []
    for _ in range(2):
        captures.append(segue.BreakableCapture(pool=pool))
        with captures[-1]:
            out = plus_one(x * 2) * 2
        del out
    assert pool.usage().reserved > 0
    captures[0].close()
    x.fill_(3)
    captures[1].replay()
    captures[1].close()
    assert pool.usage().reserved == 0


def test_a_dropped_capture_does_not_harm_one_that_shares_its_pool(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    outs = []
    for k in range(3):
        with segue.BreakableCapture(device=device) as capture:
            out = plus_one(x * k) * 2
        outs.append((capture, out))
        if k == 1:
            del outs[0], capture
            gc.collect()
    x.fill_(2)
    for capture, _ in outs:
        capture.replay()
    assert [out.tolist()[0] for _, out in outs] == [6.0, 10.0]


def test_grad_mode_with_something_that_requires_grad_is_refused(device: Device) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        w = torch.ones(4, device=device.torch_device, requires_grad=True)
        with pytest.raises(segue.SegueError, match="inference_mode"), segue.BreakableCapture(device=device):
            w * 2


def test_other_threads_wait_their_turn(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    results: list[float] = []

    def work(k: int) -> None:
        with torch.inference_mode():
            capture = segue.BreakableCapture(device=device)
            with capture:
                out = plus_one(x * k) * 2
            for _ in range(5):
                capture.replay()
            results.append(out.tolist()[0] - 2 * k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [2.0] * 6


def test_a_replay_inside_a_forward_of_the_same_pool_is_refused(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    inner = segue.BreakableCapture(device=device)
    with inner:
        x * 2

    @segue.break_point
    def calls_inner(y: Tensor) -> Tensor:
        inner.replay()
        return y

    with pytest.raises(segue.SegueError, match="pool of its own"), segue.BreakableCapture(device=device):
        calls_inner(x * 3)


def test_running_out_of_memory_names_the_bucket_and_the_bytes_and_earlier_captures_keep_working(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    earlier = segue.BreakableCapture(device=device)
    with earlier:
        out = plus_one(x * 2) * 1

    def too_much() -> Tensor:
        if device.traits.driver_memory:
            return torch.empty(1 << 50, device=device.torch_device)
        raise torch.OutOfMemoryError("tried to allocate 1.00 PiB")

    failed = segue.BreakableCapture(device=device, name="bucket 64")
    with pytest.raises(segue.SegueError, match=r"bucket 64: out of memory while recording segment 1.*MiB") as caught, failed:
        plus_one(x * 2)
        too_much()
    assert isinstance(caught.value, torch.OutOfMemoryError)
    x.fill_(5)
    earlier.replay()
    assert out.tolist() == [11.0] * 4


def test_an_interrupt_that_arrives_while_a_segment_ends_waits_until_it_has_ended(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)

    @segue.break_point
    def interrupted(y: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        return y

    for forward in (interrupted, _interrupt_at_commit):
        with pytest.raises(KeyboardInterrupt), segue.BreakableCapture(device=device):
            forward(x * 2)
        torch.rand(3, device=device.torch_device)
        capture = segue.BreakableCapture(device=device)
        with capture:
            out = plus_one(x) * 2
        capture.replay()
        assert out.tolist() == [4.0] * 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _interrupt_at_commit(y: Tensor) -> Tensor:
    capture = segue.BreakableCapture.current()
    assert capture is not None
    recording = capture._recorder.recording
    commit = recording.commit  # type: ignore[union-attr]

    def raise_then_commit() -> object:
        signal.raise_signal(signal.SIGINT)
        return commit()

    recording.commit = raise_then_commit  # type: ignore[method-assign, union-attr, assignment]
    return plus_one(y)


def test_a_capture_can_not_begin_inside_a_replay(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    inner = [lambda: None]
    capture = segue.BreakableCapture(device=device)
    with capture:
        plus_one(x)
        capture.add_eager(lambda: inner[0]())

    def begin() -> None:
        with segue.BreakableCapture(pool=device.new_pool()):
            pass

    inner[0] = begin
    with pytest.raises(segue.SegueError, match="in a break of a replay"):
        capture.replay()
    inner[0] = lambda: None
    capture.replay()


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_breaks_replay_in_the_mode_of_the_capture_and_an_error_leaves_the_callers(device: Device, mode: str) -> None:
    seen: list[bool] = []

    @segue.break_point
    def look(y: Tensor) -> Tensor:
        seen.append(torch.is_inference_mode_enabled() and not torch.is_grad_enabled())
        if len(seen) == 3:
            raise ValueError("in the break")
        return y

    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        look(x * 2)
    with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "grad"):
        capture.replay()
        with pytest.raises(ValueError, match="in the break") as error:
            capture.replay()
        assert torch.is_inference_mode_enabled() == (mode == "inference")
        assert torch.is_grad_enabled() == (mode == "grad")
        del error
    assert seen == [True] * 3


@pytest.mark.parametrize("step", ["begin", "commit"])
def test_an_error_when_a_segment_begins_or_ends_leaves_everything_as_it_was(
    device: Device, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(4, device=device.torch_device)
    earlier = segue.BreakableCapture(device=device)
    with earlier:
        out = plus_one(x * 2) * 1
    begin, begun = device.begin, []

    def broken_begin(pool: object, *how: bool) -> object:
        begun.append(pool)
        if step == "begin" and len(begun) == 2:
            raise RuntimeError("no more segments")
        recording = begin(pool, *how)
        if step == "commit" and len(begun) == 2:
            commit = recording.commit

            def broken_commit() -> None:
                commit()
                raise RuntimeError("no more segments")

            monkeypatch.setattr(recording, "commit", broken_commit)
        return recording

    monkeypatch.setattr(device, "begin", broken_begin)
    with pytest.raises(RuntimeError, match="no more segments"), segue.BreakableCapture(device=device):
        plus_one(x * 2) * 3
    monkeypatch.undo()
    torch.rand(3, device=device.torch_device)
    x.fill_(4)
    earlier.replay()
    assert out.tolist() == [9.0] * 4
    with segue.BreakableCapture(device=device) as again:
        new = plus_one(x * 3) * 1
    again.replay()
    assert new.tolist() == [13.0] * 4


@pytest.mark.cuda
def test_a_triton_kernel_that_would_tune_inside_a_capture_is_named() -> None:
    triton = pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    import triton.language as tl

    @triton.autotune(configs=[triton.Config({"BLOCK": b}) for b in (64, 128)], key=["n"])
    @triton.jit
    def add_one_kernel(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)

    def forward(x: Tensor) -> None:
        add_one_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, x.numel())

    x = torch.zeros(1000, device="cuda")
    with pytest.raises(segue.SegueError, match="add_one_kernel had to be tuned"), segue.BreakableCapture(device="cuda"):
        forward(x)
    torch.rand(3, device="cuda")
    forward(x)
    x.zero_()
    with segue.BreakableCapture(device="cuda") as capture:
        forward(x)
    capture.replay()
    assert (x == 2).all()


def test_an_interrupt_while_the_first_segment_begins_leaves_nothing_on(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, device=device.torch_device)
    begin = device.begin

    def interrupted(pool: object, *how: bool) -> object:
        recording = begin(pool, *how)
        signal.raise_signal(signal.SIGINT)
        return recording

    monkeypatch.setattr(device, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt), segue.BreakableCapture(device=device):
        x * 2
    monkeypatch.undo()
    assert segue.capture_phase() is None
    assert torch.zeros(2, device=device.torch_device).tolist() == [0.0, 0.0]
    with segue.BreakableCapture(device=device) as capture:
        out = plus_one(x) * 2
    capture.replay()
    assert out.tolist() == [4.0] * 4


def test_a_capture_closed_in_its_own_replay_ends_it_by_name_or_whole_and_frees_its_memory(device: Device) -> None:
    pool = device.new_pool()
    x = torch.ones(4, device=device.torch_device)
    close: list[object] = []
    capture = segue.BreakableCapture(pool=pool)
    with capture:
        y = x * 2
        capture.add_eager(lambda: capture.close() if close else None)
        out = y + 1
        del y
    capture.replay()
    assert out.tolist() == [3.0] * 4
    del out
    close.append(True)
    with contextlib.suppress(segue.SegueError):
        capture.replay()
    with pytest.raises(segue.SegueError, match="was closed"):
        capture.replay()
    assert pool.usage().reserved == 0


def test_a_replay_while_another_capture_records_a_segment_is_refused(device: Device) -> None:
    """The outer graph can't hold the launch, and would read what the inner one last left."""
    x = torch.ones(4, device=device.torch_device)
    inner = segue.BreakableCapture(pool=device.new_pool(), device=device, name="inner")
    with inner:
        y = x * 2
    outer = segue.BreakableCapture(pool=device.new_pool(), device=device)
    with pytest.raises(segue.SegueError, match="inner was replayed while a segment of another capture is recorded"), outer:
        inner.replay()
    x.fill_(3)
    inner.replay()
    assert y.tolist() == [6.0] * 4


@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_break_that_fails_inside_a_guard_of_the_forwards_leaves_torch_as_it_was(
    device: Device, guard: Callable[[], Any]
) -> None:
    x = torch.ones(4, 2, device=device.torch_device)
    with pytest.raises(ValueError, match="the break's own error"), segue.BreakableCapture(device=device):
        try:
            with guard():
                fails(x * 2)
        finally:
            assert (x + 1).eq(2).all()  # what cleans up may compute
    assert (torch.ones(2) + 1).eq(2).all()
