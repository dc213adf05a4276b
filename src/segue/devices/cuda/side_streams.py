"""Streams other than the current one: what a segment waits for, what waits for a segment, and what a break leaves behind.

A stream capture bakes none of this. Waiting for a stream that isn't being captured is an error or is dropped; an event recorded
in a segment never happens again; work that a break leaves on a side stream is ordered with nothing. So torch's own
``Event.record``, ``Event.wait`` and ``set_stream`` are observed, by this thread only while it records a segment or runs a
break, and the graph's edges are drawn again around each launch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from segue.devices.cuda import raw


class Seen:
    """What one segment or break did with events and streams.

    It holds the events: torch 2.11 leaves a weak reference to one dangling when that dies (pytorch#183403), and the next garbage
    collection crashes.
    """

    def __init__(self) -> None:
        self.recorded: dict[int, Any] = {}  # events recorded on a stream under capture, by identity
        self.foreign: dict[int, tuple[Any, torch.cuda.Stream]] = {}  # on any other stream
        self.waits: list[Callable[[], None]] = []  # to be done before each launch
        self.entered: dict[int, torch.cuda.Stream] = {}  # streams made current, by handle

    def on_record(self, event: Any, stream: Any) -> None:
        if _capturing(stream):
            self.recorded[id(event)] = event
        else:
            self.foreign[id(event)] = event, stream

    def on_wait(self, event: Any, stream: Any) -> bool:
        """Whether this wait was put off until the launch."""
        if id(event) in self.recorded or not _capturing(stream):
            return False
        source = self.foreign.get(id(event))
        self.waits.append(_wait_for_stream(source[1]) if source is not None else _wait_for_event(event))
        return True

    @property
    def records(self) -> list[Any]:
        """Events that somebody else still holds: to be recorded again after each launch, for who waits outside the graph."""
        return [event for event, count in _counted(self.recorded) if count > _counted({0: object()})[0][1]]


def _counted(held: dict[int, Any]) -> list[tuple[Any, int]]:
    """Each object with how many references there are to it."""
    return [(held[key], sys.getrefcount(held[key])) for key in held]


class _Observer(threading.local):
    segment: Seen | None = None
    entered: Seen | None = None


_observer = _Observer()
_install = threading.Lock()
_installed = False


@contextmanager
def observing(seen: Seen) -> Iterator[None]:
    """Observe what this thread does with events, while it records a segment."""
    _install_once()
    before, _observer.segment = _observer.segment, seen
    try:
        yield
    finally:
        _observer.segment = before


def ordered(fn: Callable[[], Any]) -> tuple[Any, bool]:
    """Run ``fn`` and make the current stream wait for every other stream that it made current. Whether there was any."""
    _install_once()
    seen = Seen()
    before, _observer.entered = _observer.entered, seen
    try:
        result = fn()
    finally:
        _observer.entered = before
    current = torch.cuda.current_stream()
    others = [s for handle, s in seen.entered.items() if handle != current.cuda_stream]
    for stream in others:
        current.wait_stream(stream)
    return result, bool(others)


def _wait_for_stream(stream: torch.cuda.Stream) -> Callable[[], None]:
    return lambda: torch.cuda.current_stream().wait_stream(stream)


def _wait_for_event(event: Any) -> Callable[[], None]:
    return lambda: torch.cuda.current_stream().wait_event(event)


def _capturing(stream: Any) -> bool:
    return raw.stream_is_capturing(torch.cuda.current_stream() if stream is None else stream)


def _install_once() -> None:
    global _installed
    with _install:
        if not _installed:
            _installed = True
            _observe(torch.cuda.Event)


def _observe(event_type: Any) -> None:
    record, wait, set_stream = event_type.record, event_type.wait, torch.cuda.set_stream

    def observed_record(self: Any, stream: Any = None) -> None:
        if _observer.segment is not None:
            _observer.segment.on_record(self, torch.cuda.current_stream() if stream is None else stream)
        record(self, stream)

    def observed_wait(self: Any, stream: Any = None) -> None:
        if _observer.segment is None or not _observer.segment.on_wait(self, stream):
            wait(self, stream)

    def observed_set_stream(stream: Any) -> None:
        if _observer.entered is not None and stream is not None:
            _observer.entered.entered[stream.cuda_stream] = stream
        set_stream(stream)

    event_type.record, event_type.wait, torch.cuda.set_stream = observed_record, observed_wait, observed_set_stream
