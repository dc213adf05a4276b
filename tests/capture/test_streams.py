"""Streams, on CUDA only: the emulator has none."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import segue
from segue import devices
from segue.devices import Device

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("inference")]
RUNS = 50


@pytest.fixture
def cuda() -> Device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return devices.resolve("cuda")


def _slow() -> None:
    """Keep the current stream busy for long enough that a missing edge shows."""
    torch.cuda._sleep(2_000_000)


def test_a_side_stream_that_is_forked_and_joined_in_a_segment_is_part_of_it(cuda: Device) -> None:
    side = torch.cuda.Stream()
    x = torch.ones(1024, device="cuda")
    capture = segue.BreakableCapture(device=cuda)
    with capture:
        y = x + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _slow()
            z = y * 2
        torch.cuda.current_stream().wait_stream(side)
        out = segue.break_here(lambda t: t + 1, torch.empty_like(z), z) + y
    for k in range(RUNS):
        x.fill_(k)
        capture.replay()
        assert out[7].item() == 2 * (k + 1) + 1 + k + 1


@pytest.mark.parametrize("joined", ["after the break", "at the next fork", "never"])
def test_a_side_stream_that_is_open_at_a_break_is_joined_and_goes_on_after_it(cuda: Device, joined: str) -> None:
    side, x = torch.cuda.Stream(), torch.ones(1024, device="cuda")
    capture = segue.BreakableCapture(device=cuda, pool=cuda.new_pool())
    with capture:
        main = torch.cuda.current_stream()
        y = x + 1
        side.wait_stream(main)
        with torch.cuda.stream(side):
            _slow()
            z = y * 2
        broken = segue.break_here(lambda t: t + 1, torch.empty_like(z), z)
        if joined == "at the next fork":
            side.wait_stream(main)
        with torch.cuda.stream(side):
            _slow()
            w = z * 3
        if joined != "never":
            main.wait_stream(side)
            w = w + 1
        total = segue.break_here(lambda a, b: a + b, torch.empty_like(z), broken, w)
        out = total * 2
    for k in range(RUNS):
        x.fill_(k)
        capture.replay()
        z_now = 2 * (k + 1)
        assert out[7].item() == 2 * (z_now + 1 + 3 * z_now + (joined != "never"))
    assert not capture.pool.side_streams
    capture.close()


def test_an_event_of_a_side_stream_that_is_open_at_a_break_may_be_waited_for_after_it(cuda: Device) -> None:
    side, event, x = torch.cuda.Stream(), torch.cuda.Event(), torch.ones(1024, device="cuda")
    capture = segue.BreakableCapture(device=cuda, pool=cuda.new_pool())
    with capture:
        y = x + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _slow()
            z = y * 2
            event.record()
        broken = segue.break_here(lambda t: t + 1, torch.empty_like(y), y)
        event.wait()
        out = broken + z
    for k in range(RUNS):
        x.fill_(k)
        capture.replay()
        assert out[7].item() == k + 2 + 2 * (k + 1)


def test_events_of_a_capture_that_failed_leave_nothing_for_a_collection_to_trip_over(cuda: Device) -> None:
    """A weak reference to a torch event dangles once that is gone, and the collection that meets it crashes the process."""
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    failures = []
    for _ in range(10):
        with pytest.raises(ValueError, match="on purpose") as failed, segue.BreakableCapture(pool=cuda.new_pool()):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x * 2
            raise ValueError("on purpose")
        failures.append(failed.value)
    del failed
    failures.clear()
    gc.collect()


def test_waiting_for_a_stream_that_is_not_captured_is_honoured_at_capture_and_replay(cuda: Device) -> None:
    producer = torch.cuda.Stream()
    x = torch.zeros(1024, device="cuda")

    def produce(value: float) -> None:
        with torch.cuda.stream(producer):
            _slow()
            x.fill_(value)

    produce(1)
    capture = segue.BreakableCapture(device=cuda)
    with capture:
        torch.cuda.current_stream().wait_stream(producer)
        out = x * 2
    assert out[3].item() == 2
    for k in range(RUNS):
        produce(k)
        capture.replay()
        assert out[3].item() == 2 * k
        torch.cuda.synchronize()


def test_work_that_a_break_leaves_on_a_side_stream_is_done_before_the_next_segment(cuda: Device) -> None:
    x = torch.ones(1024, device="cuda")

    @segue.break_point
    def careless(y: Tensor) -> Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _slow()
            return y * 2

    capture = segue.BreakableCapture(device=cuda)
    with capture:
        out = careless(x + 1) + 1
    assert out[5].item() == 5
    for k in range(RUNS):
        x.fill_(k)
        capture.replay()
        assert out[5].item() == 2 * (k + 1) + 1


def test_a_break_may_wait_for_an_event_that_a_segment_recorded(cuda: Device) -> None:
    x = torch.ones(1024, device="cuda")
    event, side = torch.cuda.Event(), torch.cuda.Stream()

    @segue.break_point
    def waits(y: Tensor) -> Tensor:
        with torch.cuda.stream(side):
            side.wait_event(event)
            return y * 2

    capture = segue.BreakableCapture(device=cuda)
    with capture:
        _slow()
        y = x + 1
        event.record()
        out = waits(y) + 1
    for k in range(RUNS):
        x.fill_(k)
        capture.replay()
        assert out[5].item() == 2 * (k + 1) + 1


def test_replays_of_one_pool_from_two_streams_are_ordered(cuda: Device) -> None:
    x, y = torch.ones(1 << 22, device="cuda"), torch.ones(1 << 22, device="cuda")
    first, second = segue.BreakableCapture(device=cuda), segue.BreakableCapture(device=cuda)
    with first:
        _slow()
        out = segue.weak_ref_tensor(x * 2 + 1)
    with second:
        other = segue.weak_ref_tensor(y * 5 + 1)
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    a.wait_stream(torch.cuda.current_stream())
    for _ in range(RUNS):
        with torch.cuda.stream(a), first.pool.turn():
            first.replay()
            got = out.clone()
        with torch.cuda.stream(b), second.pool.turn():
            second.replay()
            got2 = other.clone()
        torch.cuda.synchronize()
        assert (got == 3).all() and (got2 == 6).all()


def test_the_capture_stream_is_never_handed_to_users(cuda: Device) -> None:
    mine = cuda.default_stream().cuda_stream
    assert all(torch.cuda.Stream().cuda_stream != mine for _ in range(100))


def test_the_legacy_stream_is_refused_by_name(cuda: Device) -> None:
    capture = segue.BreakableCapture(device=cuda, stream=torch.cuda.default_stream())
    with pytest.raises(segue.SegueError, match="legacy default stream"), capture:
        pass


def test_replays_run_on_the_callers_stream_and_on_the_captures_device(cuda: Device) -> None:
    x = torch.ones(4, device="cuda")
    used = []
    capture = segue.BreakableCapture(device=cuda)
    with capture:
        capture.add_eager(lambda: used.append(torch.cuda.current_stream()))
        out = x * 2
    mine = torch.cuda.Stream()
    mine.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(mine):
        capture.replay()
    mine.synchronize()
    assert used[1] == mine and used[0] != mine
    assert out.tolist() == [2.0] * 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_two_devices_in_one_process_keep_to_themselves() -> None:
    runs = []
    for index in (0, 1):
        x = torch.full((4,), float(index), device=f"cuda:{index}")
        capture = segue.BreakableCapture(device=f"cuda:{index}")
        with capture:
            out = segue.break_here(lambda t: t + 1, torch.empty_like(x), x * 2) * 1
        runs.append((capture, x, out))
    for current in (0, 1):
        with torch.cuda.device(current):
            for index, (capture, x, out) in enumerate(runs):
                x.fill_(10 + index)
                torch.cuda.synchronize(index)
                capture.replay()
                assert torch.cuda.current_device() == current
                assert out.tolist() == [2.0 * (10 + index) + 1] * 4


def test_torchs_stream_functions_are_its_own_after_captures_and_replays(cuda: Device) -> None:
    originals = torch.cuda.Event.record, torch.cuda.Event.wait, torch.cuda.set_stream
    x, side = torch.ones(1024, device="cuda"), torch.cuda.Stream()

    @segue.break_point
    def careless(y: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _slow()
            return y * 2

    capture = segue.BreakableCapture(device=cuda)
    with capture:
        out = careless(x + 1) + 1
        assert torch.cuda.Event.record is not originals[0]
    assert (torch.cuda.Event.record, torch.cuda.Event.wait, torch.cuda.set_stream) == originals
    for k in range(RUNS):
        x.fill_(k)
        capture.replay()
        assert out[5].item() == 2 * (k + 1) + 1
    assert (torch.cuda.Event.record, torch.cuda.Event.wait, torch.cuda.set_stream) == originals
