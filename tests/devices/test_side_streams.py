"""When torch's stream functions are replaced to be observed, and when they are themselves again. It needs no GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from segue.devices.cuda import raw, side_streams
from segue.devices.cuda.device import CudaDevice
from segue.devices.cuda.side_streams import StreamEdges, observing, ordered


class Stream:
    """Stands for a stream; notes what it waits for."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class Torch:
    """Stands for ``torch.cuda``: an event type and a current stream."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = Stream(1)
        calls = self.calls

        class Event:
            def record(self, stream: Any = None) -> None:
                calls.append("record")

            def wait(self, stream: Any = None) -> None:
                calls.append("wait")

        def set_stream(stream: Any) -> None:
            self.current = stream

        self.Event, self.set_stream = Event, set_stream

    def now(self) -> tuple[Any, Any, Any]:
        return self.Event.record, self.Event.wait, torch.cuda.set_stream


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    fake = Torch()
    monkeypatch.setattr(torch.cuda, "Event", fake.Event)
    monkeypatch.setattr(torch.cuda, "set_stream", fake.set_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: fake.current)
    monkeypatch.setattr(raw, "stream_is_capturing", lambda stream: stream.cuda_stream == 1)
    return fake


def test_torchs_functions_are_its_own_once_nothing_is_recorded(fake: Torch) -> None:
    originals, edges = fake.now(), StreamEdges()
    side, event, other = Stream(2), fake.Event(), fake.Event()
    with side_streams.event_patches:
        with observing(edges):
            event.record()
            other.record(side)
            event.wait()
            other.wait()
        other.record(side)
        other.wait()
        assert fake.Event.record is not originals[0], "the capture goes on"
    assert fake.now() == originals
    assert fake.calls == ["record", "record", "wait", "record", "wait"] and edges.records == [event] and len(edges.waits) == 1
    edges.waits[0]()
    assert fake.current.waited == [side]


def test_streams_that_wait_for_work_of_a_segment_are_joined_to_it_once_they_are_captured(fake: Torch) -> None:
    edges, main, side, idle = StreamEdges(), fake.current, Stream(1), Stream(2)
    event, other = fake.Event(), fake.Event()
    with observing(edges):
        event.record()
        event.wait(side)
        other.record(idle)
        other.wait(idle)
        assert edges.forked == [side] and not edges.waits
    origin: Any = Stream(5)
    side_streams.join([*edges.forked, idle, origin], origin)
    assert origin.waited == [side], "the other stream is not captured"
    side_streams.fork([side, idle])
    assert side.waited == idle.waited == [main]

    def broken(other: Any) -> None:
        raise RuntimeError("the capture is broken")

    origin.wait_stream = broken
    side_streams.join([side], origin)


def test_a_recording_that_fails_takes_its_patches_back(fake: Torch) -> None:
    originals = fake.now()
    with pytest.raises(ZeroDivisionError), side_streams.event_patches, observing(StreamEdges()):
        _ = 1 // 0
    with pytest.raises(ZeroDivisionError):
        ordered(lambda: 1 // 0)
    assert fake.now() == originals


def test_a_break_is_ordered_after_each_run_and_leaves_no_patch(fake: Torch) -> None:
    originals, main, side = fake.now(), fake.current, Stream(2)

    def careless() -> str:
        torch.cuda.set_stream(side)
        torch.cuda.set_stream(main)
        return "result"

    for run in range(3):
        assert ordered(careless) == ("result", True)
        assert main.waited == [side] * (run + 1) and fake.now() == originals
    assert ordered(lambda: torch.cuda.set_stream(main)) == (None, False)


def test_patches_stay_while_another_threads_capture_needs_them_and_do_not_observe_it(fake: Torch) -> None:
    originals, edges = fake.now(), StreamEdges()
    begun, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with observing(StreamEdges()):
            begun.set()
            may_end.wait()

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    with observing(edges):
        thread2 = threading.Thread(target=lambda: fake.Event().record())
        thread2.start()
        thread2.join()
    assert fake.now() != originals and not edges.records and not edges.waits
    may_end.set()
    thread.join()
    assert fake.now() == originals


def _theirs(below: Any, seen: list[str]) -> Callable[..., None]:
    def record(self: Any, stream: Any = None) -> None:
        seen.append("theirs")
        below(self, stream)

    record.__dict__.update(below.__dict__)  # as functools.wraps does
    return record


def test_a_patch_that_somebody_else_put_over_ours_goes_on_working(fake: Torch) -> None:
    original = fake.Event.record
    seen: list[str] = []
    with observing(StreamEdges()):
        ours = fake.Event.record
        theirs: Any = _theirs(ours, seen)
        fake.Event.record = theirs  # type: ignore[method-assign]
    assert fake.Event.record is theirs, "it isn't ours to take away"
    fake.Event().record()
    assert (seen, fake.calls) == (["theirs"], ["record"])
    edges, event = StreamEdges(), fake.Event()
    for _ in range(3):
        with observing(edges):
            event.record()
        assert fake.Event.record is theirs
    assert seen == ["theirs"] * 4 and fake.calls == ["record"] * 4 and edges.records == [event]
    fake.Event.record = ours  # type: ignore[method-assign]  # they take theirs back, and put there what they had found
    with observing(StreamEdges()):
        pass
    assert fake.Event.record is original


def test_a_patch_that_somebody_else_took_back_under_ours_stays_away(fake: Torch) -> None:
    original = fake.Event.record
    with observing(StreamEdges()):
        fake.Event.record = original  # type: ignore[method-assign]
    assert fake.Event.record is original


def test_a_capture_holds_the_patches_from_its_beginning_to_its_end(fake: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that changes at each segment would lose Python's cache of its look-ups."""
    monkeypatch.setattr(raw, "require_torch", lambda: None)
    monkeypatch.setattr(raw, "settle_attention_order", lambda place: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: side_streams.stream_patches)  # any context will do
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: side_streams.stream_patches)
    monkeypatch.setattr(CudaDevice, "_make_blas_workspace", lambda self: None)
    originals, device = fake.now(), CudaDevice(0)
    pool: Any = SimpleNamespace()
    stream: Any = Stream(3)
    pool.side_streams = {2: Stream(2)}
    with device.on_capture_stream(pool, stream):
        during = fake.Event.record
        with observing(StreamEdges()):
            assert fake.Event.record is during is not originals[0]
        assert fake.Event.record is during and pool.side_streams
    assert not pool.side_streams, "the streams that the capture forked are its own"
    assert fake.now() == originals
