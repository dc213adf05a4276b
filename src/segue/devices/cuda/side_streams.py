"""Streams other than the current one: what a segment waits for, what waits for a segment, and what a break leaves behind.

A graph holds no edge to work outside its capture. Waiting for a stream that isn't being captured is an error or is dropped; an
event recorded in a segment is not recorded again by a replay; work that a break leaves on a side stream is ordered with nothing.
A side stream that a segment has forked must be joined before the segment ends, and a forward may do that after the next break.
So torch's own ``Event.record``, ``Event.wait`` and ``set_stream`` are replaced while somebody needs to observe them: the first
two while a capture is under way, the third while a break runs that may use side streams. The replacements observe only the
thread that records a segment or runs such a break. What a segment was seen to do is repeated around each launch.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from segue.devices.cuda import raw


class StreamEdges:
    """The edges between one segment and other streams.

    ``forked``: the streams that have waited for work of the segment, and so became part of it.
    ``waits``: to be called before each launch. The events are held by strong references, because torch 2.11 leaves a weak
    reference to an event dangling when the event dies (pytorch#183403), and the next garbage collection crashes.
    """

    def __init__(self) -> None:
        self.waits: list[Callable[[], None]] = []
        self.forked: list[torch.cuda.Stream] = []
        self._captured: dict[int, Any] = {}  # by id, events that were recorded on a stream under capture
        self._foreign: dict[int, tuple[Any, torch.cuda.Stream]] = {}  # by id, events that were recorded on any other stream

    def on_record(self, event: Any, stream: Any) -> None:
        """Note that ``event`` is recorded on ``stream``."""
        if _capturing(stream):
            self._captured[id(event)] = event
        else:
            self._foreign[id(event)] = event, stream

    def on_wait(self, event: Any, stream: Any) -> bool:
        """Note that ``stream`` (None: the current one) waits for ``event``. Returns whether that is put off until the launch."""
        if id(event) in self._captured:
            self.forked.append(torch.cuda.current_stream() if stream is None else stream)
            return False
        if not _capturing(stream):
            return False
        source = self._foreign.get(id(event))
        self.waits.append(_wait_for_stream(source[1]) if source is not None else _wait_for_event(event))
        return True

    @property
    def records(self) -> list[Any]:
        """The events to record again after each launch: those that the segment recorded and that somebody else still holds."""
        unshared = _counted({0: object()})[0][1]
        return [event for event, count in _counted(self._captured) if count > unshared]


def _counted(held: dict[int, Any]) -> list[tuple[Any, int]]:
    """Each object with the number of references to it. An object that only ``held`` refers to has the same number each time."""
    return [(held[key], sys.getrefcount(held[key])) for key in held]


class _Observer(threading.local):
    """What this thread observes now."""

    edges: StreamEdges | None = None  # of the segment that it records
    entered: dict[int, torch.cuda.Stream] | None = None  # streams that its break made current, by handle


_observer = _Observer()


class Patches:
    """Replaces functions of torch's while at least one thread is inside this context.

    ``places``: the owner and name of each function. ``replacing``: makes the replacement of a function. If somebody else replaces
    one of them meanwhile, theirs stays when ours are taken back.
    """

    def __init__(self, places: Callable[[], list[tuple[Any, str]]], replacing: dict[str, Callable[[Any], Any]]) -> None:
        self._places, self._replacing = places, replacing
        self._lock = threading.RLock()
        self._users = 0
        self._placed: list[tuple[Any, str, Any, Any]] = []  # owner, name, the function found there, its replacement
        self._ours: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # every replacement, and what it replaced

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._put()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._take_back()

    def _put(self) -> None:
        for owner, name in self._places():
            found = getattr(owner, name)
            found = self._ours.get(found, found)  # somebody may have put a replacement of ours back after we took it away
            replacement = self._replacing[name](found)
            self._ours[replacement] = found
            setattr(owner, name, replacement)
            self._placed.append((owner, name, found, replacement))

    def _take_back(self) -> None:
        while self._placed:
            owner, name, found, replacement = self._placed.pop()
            if getattr(owner, name) is replacement:
                setattr(owner, name, found)


def _observed_record(record: Any) -> Any:
    def observed(self: Any, stream: Any = None) -> None:
        if _observer.edges is not None:
            _observer.edges.on_record(self, torch.cuda.current_stream() if stream is None else stream)
        record(self, stream)

    return observed


def _observed_wait(wait: Any) -> Any:
    def observed(self: Any, stream: Any = None) -> None:
        if _observer.edges is None or not _observer.edges.on_wait(self, stream):
            wait(self, stream)

    return observed


def _observed_set_stream(set_stream: Any) -> Any:
    def observed(stream: Any) -> None:
        if _observer.entered is not None and stream is not None:
            _observer.entered[stream.cuda_stream] = stream
        set_stream(stream)

    return observed


# Only captures change the class, and a break that runs at every replay changes the module: Python stops caching look-ups in a
# class that changes often.
event_patches = Patches(
    lambda: [(torch.cuda.Event, "record"), (torch.cuda.Event, "wait")], {"record": _observed_record, "wait": _observed_wait}
)
stream_patches = Patches(lambda: [(torch.cuda, "set_stream")], {"set_stream": _observed_set_stream})


@contextmanager
def observing(edges: StreamEdges) -> Iterator[None]:
    """Context: what this thread does with events while it records a segment is noted in ``edges``."""
    with event_patches:
        before, _observer.edges = _observer.edges, edges
        try:
            yield
        finally:
            _observer.edges = before


def ordered(fn: Callable[[], Any]) -> tuple[Any, bool]:
    """Run ``fn``, and make the current stream wait for every other stream that ``fn`` made current.

    Returns what ``fn`` returns, and whether there was such a stream.
    """
    entered: dict[int, torch.cuda.Stream] = {}
    with stream_patches:
        before, _observer.entered = _observer.entered, entered
        try:
            result = fn()
        finally:
            _observer.entered = before
    current = torch.cuda.current_stream()
    others = [stream for handle, stream in entered.items() if handle != current.cuda_stream]
    for stream in others:
        current.wait_stream(stream)
    return result, bool(others)


def fork(streams: Iterable[torch.cuda.Stream]) -> None:
    """Make ``streams`` part of the stream capture on the current stream, which has just begun."""
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())


def join(streams: Iterable[torch.cuda.Stream], origin: torch.cuda.Stream) -> None:
    """Join those of ``streams`` that are being captured to ``origin``, on which the capture is about to end.

    It raises nothing: if the capture is broken, its end says so.
    """
    with suppress(RuntimeError):
        for stream in streams:
            if stream.cuda_stream != origin.cuda_stream and _capturing(stream):
                origin.wait_stream(stream)


def _wait_for_stream(stream: torch.cuda.Stream) -> Callable[[], None]:
    return lambda: torch.cuda.current_stream().wait_stream(stream)


def _wait_for_event(event: Any) -> Callable[[], None]:
    return lambda: torch.cuda.current_stream().wait_event(event)


def _capturing(stream: Any) -> bool:
    return raw.stream_is_capturing(torch.cuda.current_stream() if stream is None else stream)
