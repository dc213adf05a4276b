"""Where a whole graph is cut into a few segments, so that the device starts while the rest is being submitted.

A graph of 1,500 nodes keeps the GPU idle for 0.5 to 1.2 ms while it is launched; each cut costs it about 10 us. A few
segments that grow are best, and which few depends on model, bucket and host. So does whether a graph with branches is quicker.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from segue.capture import BreakableCapture
from segue.devices import Device
from segue.devices.trace import Trace
from segue.errors import UnseenWorkError, UsageError

_RUNS, _WARM = 9, 3


class Pattern(NamedTuple):
    """How a whole forward is recorded: after which marks it is cut, and whether on auxiliary streams too."""

    cuts: tuple[int, ...] = ()
    aux_streams: bool = True

    def __str__(self) -> str:
        return f"{list(self.cuts)} on {'several streams' if self.aux_streams else 'one stream'}"


class Marks(threading.local):
    """The marks met in the forward that this thread runs for a prime graph."""

    met: int = 0
    chosen: frozenset[int] = frozenset()
    capture: BreakableCapture | None = None  # the one being recorded
    trace: Trace | None = None  # or the trace being filled

    def begin(
        self, capture: BreakableCapture | None = None, chosen: Iterable[int] = (), trace: Trace | None = None
    ) -> None:
        """Count from 0 and cut ``capture`` at the marks ``chosen``, or note in ``trace`` where all of them are."""
        self.met, self.chosen, self.capture, self.trace = 0, frozenset(chosen), capture, trace

    def end(self) -> int:
        """Stop cutting. Returns how many marks there were."""
        self.capture = self.trace = None
        return self.met


marks = Marks()


def cut_here() -> None:
    """Mark a place where a prime graph may be cut: between two layers. Does nothing outside a prime capture."""
    marks.met += 1
    if marks.trace is not None:
        marks.trace.marks.append(len(marks.trace.ops))
    capture = marks.capture
    if capture is not None and capture is BreakableCapture.current() and marks.met in marks.chosen:
        capture.cut()


def pinned(cuts: Sequence[int], marked: int) -> tuple[int, ...]:
    """``cuts`` as a pattern for a forward with ``marked`` marks.

    Raises:
        UsageError: one is no mark of this forward.
    """
    wrong = [c for c in cuts if isinstance(c, bool) or not isinstance(c, int) or not 1 <= c <= marked]
    if wrong:
        raise UsageError(
            f"cuts={list(cuts)}: {wrong[0]!r} is no mark of this trunk, whose forward calls segue.prime.cut_here() "
            f"{marked} times. Give numbers from 1 to {marked}, [] for one whole graph, or leave cuts= out to have them "
            "measured."
        )
    return tuple(sorted(set(cuts)))


def patterns(marked: int) -> list[tuple[int, ...]]:
    """The patterns worth measuring for a forward with ``marked`` marks: none, and a few that grow."""
    found = [(), (1, 2, 4, 8, 16), (2, 10), (1, 4, 14)]
    return list(dict.fromkeys(tuple(c for c in pattern if c < marked) for pattern in found))


def quickest(
    cuts: Sequence[tuple[int, ...]],
    aux_streams: Sequence[bool],
    record: Callable[[Pattern], BreakableCapture],
    device: Device,
) -> tuple[Pattern, BreakableCapture, dict[Pattern, float]]:
    """Record and measure each way of cutting, from an idle device to an idle device, and keep the quickest.

    The first cuts decide between several streams and one. Returns the pattern, its capture, and the seconds of each that was
    tried. The others are closed.

    Raises:
        UnseenWorkError: nothing but ``True`` was left for ``aux_streams``, and the forward can't be recorded so.
    """
    captures: dict[Pattern, BreakableCapture] = {}
    seconds: dict[Pattern, float] = {}

    def try_out(candidates: Iterable[Pattern]) -> None:
        for candidate in candidates:
            try:
                captures[candidate] = record(candidate)
            except UnseenWorkError:
                if len(aux_streams) == 1:
                    raise
        for candidate, capture in captures.items():
            if candidate not in seconds:
                seconds[candidate] = _median(capture, device)

    try:
        try_out(Pattern(cuts[0], aux) for aux in aux_streams)
        aux = min(seconds, key=lambda c: seconds[c]).aux_streams
        try_out(Pattern(c, aux) for c in cuts[1:])
    except BaseException:
        for capture in captures.values():
            capture.close()
        raise
    best = min(seconds, key=lambda c: seconds[c])
    for candidate, capture in captures.items():
        if candidate != best:
            capture.close()
    return best, captures[best], seconds


def _median(capture: BreakableCapture, device: Device) -> float:
    taken = []
    for i in range(_WARM + _RUNS):
        device.synchronize()
        start = time.perf_counter()
        capture.replay()
        device.synchronize()
        if i >= _WARM:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)
