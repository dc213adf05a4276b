"""Faults that random programs found, each in its smallest form."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue import _torch
from segue.capture import reference_frame
from segue.capture.allocations import Allocations
from segue.devices import Device
from segue.runner import GraphRunner, Input

pytestmark = pytest.mark.usefixtures("inference")


@segue.break_point(trim=("y",))
def give_back(y: Tensor) -> Tensor:
    return y


@segue.break_point
def give_back_cut(y: Tensor) -> Tensor:
    return y[: segue.current_valid_rows()]


@pytest.mark.parametrize("captured", [4, 2])
@pytest.mark.parametrize("fn", [give_back, give_back_cut])
def test_a_cut_argument_that_is_returned_keeps_its_tail(device: Device, fn: Any, captured: int) -> None:
    """Captured with all rows valid, the result was the argument itself, and so was the tail that is cleared."""
    x = torch.ones(4, 2, device=device.torch_device)
    state = torch.ones(4, 2, device=device.torch_device)

    def forward() -> tuple[Tensor, Tensor]:
        y = x * 3
        return fn(y) + y.sum(), fn(state) * 1

    capture = segue.BreakableCapture(rows=4, valid_rows=captured, device=device)
    with capture:
        outs = forward()
    for n in (1, 4, 0, 3):
        with reference_frame(rows=4, valid_rows=n):
            want = forward()
        capture.pool.poison()
        capture.replay(valid_rows=n)
        assert all(torch.equal(a, b) for a, b in zip(outs, want, strict=True))
        assert outs[0][:, 0].tolist() == [27.0] * n + [24.0] * (4 - n)
        assert state.tolist() == [[1.0, 1.0]] * 4


def test_a_result_that_was_its_argument_and_is_other_memory_now_is_refused(device: Device) -> None:
    """Taking it would overwrite the argument, which later segments read as such."""
    swapped = [False]

    @segue.break_point
    def pair(y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return (z, y) if swapped[0] else (y, z)

    x = torch.ones(4, 2, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, device=device)
    with capture:
        a, b = pair(x * 5, x * 2)
        out = a - b
    swapped[0] = True
    with pytest.raises(segue.SegueError, match=r"result\[0\] was memory of an argument at capture and is other memory now"):
        capture.replay()
    swapped[0] = False
    capture.replay()
    assert out.tolist() == [[3.0, 3.0]] * 4


def test_a_tensor_of_the_context_that_a_break_returns_does_not_overwrite_the_captured_context(device: Device) -> None:
    """The first context's tensor was taken for the hand-off, so every replay wrote the live one's values into it."""

    def context(value: float) -> Any:
        return SimpleNamespace(shift=torch.full((3,), value, device=device.torch_device))

    @segue.break_point
    def pick(y: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        return y + 1, shift

    x, first = torch.ones(4, 3, device=device.torch_device), context(1.0)
    capture = segue.BreakableCapture(rows=4, device=device)
    with segue.active_forward(first), capture:
        y, shift = pick(x * 1, first.shift)
        out = y + shift
    with segue.active_forward(context(5.0)):
        capture.replay()
    assert out[0].tolist() == [7.0] * 3
    assert first.shift.tolist() == [1.0] * 3


def test_a_view_into_a_tensor_of_the_context_may_begin_anywhere(device: Device) -> None:
    """The view's address was compared with the whole tensor's, so that every replay was refused."""
    cache = torch.zeros(6, 3, device=device.torch_device)
    add = segue.break_point(lambda y, c: y + c.sum(0))
    x = torch.ones(4, 3, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, device=device)
    with segue.active_forward(SimpleNamespace(cache=cache)), capture:
        out = add(x * 1, cache[2:]) * 1
    cache[3] = 5
    with segue.active_forward(SimpleNamespace(cache=cache)):
        capture.replay()
    assert out[0].tolist() == [6.0] * 3
    other = segue.active_forward(SimpleNamespace(cache=cache.clone()))
    with pytest.raises(segue.SegueError, match=r"ctx\.cache is another tensor than at capture"), other:
        capture.replay()


def test_a_field_is_found_by_its_short_path_even_if_a_longer_one_is_met_first(device: Device) -> None:
    """``ctx.a.meta`` used up the depth at which ``ctx.meta.shift`` lies, and the tensor stayed that of the capture."""

    def context(value: float) -> Any:
        meta = SimpleNamespace(shift=torch.full((3,), value, device=device.torch_device))
        return SimpleNamespace(a=SimpleNamespace(meta=meta), meta=meta)

    add = segue.break_point(lambda y, c: y + c)
    x, first = torch.ones(4, 3, device=device.torch_device), context(1.0)
    capture = segue.BreakableCapture(rows=4, device=device)
    with segue.active_forward(first), capture:
        out = add(x * 1, first.meta.shift) * 1
    with segue.active_forward(context(5.0)):
        capture.replay()
    assert out[0].tolist() == [6.0] * 3


def test_a_field_that_was_two_at_capture_and_differs_now_is_refused(device: Device) -> None:
    """``ctx.q`` and ``ctx.k`` are one tensor in a fresh prompt and two later: which is meant can't be told."""

    def lengths(value: float) -> Tensor:
        return torch.full((3,), value, device=device.torch_device)

    add = segue.break_point(lambda y, c: y + c)
    x, one = torch.ones(4, 3, device=device.torch_device), lengths(1.0)
    first = SimpleNamespace(q=one, k=one)
    capture = segue.BreakableCapture(rows=4, device=device)
    with segue.active_forward(first), capture:
        out = add(x * 1, first.k) * 1
    both = lengths(5.0)
    with segue.active_forward(SimpleNamespace(q=both, k=both)):
        capture.replay()
    assert out[0].tolist() == [6.0] * 3
    two = segue.active_forward(SimpleNamespace(q=lengths(1.0), k=lengths(5.0)))
    with pytest.raises(segue.SegueError, match=r"'c' was both ctx\.q and ctx\.k at capture"), two:
        capture.replay()


def test_a_lazily_negated_argument_of_a_break_stays_negated(device: Device) -> None:
    """A weak view is made from a pointer, which doesn't carry torch's lazy negation."""
    double = segue.break_point(lambda y: y * 2)
    x = torch.ones(4, 3, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, device=device)
    with capture:
        out = double(torch.complex(x, x * 3).conj().imag) * 1
    capture.replay()
    assert out.tolist() == [[-6.0] * 3] * 4


def test_the_answer_of_a_lazy_capture_is_taken_before_its_memory_is_free(device: Device) -> None:
    """The outputs' blocks went back to the pool before the caller's copy was made."""
    pool: Any = device.new_pool()
    if hasattr(pool, "poison_freed"):
        pool.poison_freed = True
    x = torch.ones(3, 2, device=device.torch_device)
    options: dict[str, Any] = {"pool": pool, "device": device, "progress": False}
    with GraphRunner(lambda x: x * 2, {"x": Input(0, 0.0)}, [4], **options) as runner:
        for _ in range(3):
            assert runner(x).tolist() == [[2.0, 2.0]] * 3
        assert runner.stats.replayed == 1


@pytest.mark.parametrize("returns", [None, "the tensor", "the context"])
def test_a_closed_capture_gives_its_memory_back_without_the_garbage_collector(device: Device, returns: Any) -> None:
    """Program and break each held themselves by a closure, and with them what the break's function holds."""
    pool, ctx = device.new_pool(), SimpleNamespace()
    x = torch.ones(4, 3, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, pool=pool, device=device)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with segue.active_forward(ctx), capture:
            y = x + 1
            value = {None: None, "the tensor": y, "the context": ctx}[returns]
            capture.add_eager(lambda kept=y, value=value: value)
            del y, value
        with segue.active_forward(ctx):
            capture.replay()
        capture.close()
        assert pool.usage().live == 0
    finally:
        if collecting:
            gc.enable()


def test_memory_of_the_forwards_that_is_free_again_counts_as_made_no_more(device: Device) -> None:
    """The reference went by address alone, and took what a break allocated there for memory of the forward's own."""
    x = torch.ones(4, 64, device=device.torch_device)
    with Allocations() as made:
        kept, gone = x * 2, x * 3
    assert made.has(kept) and made.has(kept[1:]) and made.has(gone) and not made.has(x)
    address, size = _torch.storage_span(gone)
    del gone
    again = _torch.tensor_at(address, size, x.dtype, x.shape, x.stride(), 0, x.device)  # as if a break had been given it
    assert not made.has(again) and made.has(kept)


def test_an_input_that_a_break_returns_is_no_memory_of_the_forwards_in_the_reference_either(device: Device) -> None:
    """The reference made its padded inputs where it notes what the forward makes, and shared them where a replay copies. In eager
    the write below arrives in the caller's tensor, so both refuse it.
    """

    @segue.break_point
    def give(y: Tensor) -> tuple[Tensor]:
        return (y,)

    def forward(x: Tensor) -> Tensor:
        (y,) = give(x)
        y[:, :1].zero_()
        return x + y

    runner = GraphRunner(forward, {"x": Input(token_dim=0, pad=0.0)}, [2], device=device, pool=device.new_pool(), progress=False)
    x = torch.ones(2, 3, device=device.torch_device)
    for run in (runner.reference, runner):
        with pytest.raises(segue.CaptureError, match=r"writes what a break returned.*result\[0\] is memory that lives on"):
            run(x)
    assert (x == 1).all()
    runner.close()
