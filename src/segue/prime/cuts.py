"""Where a whole graph is cut into a few segments, so that the device starts while the rest is being submitted.

While a graph of 1,500 nodes is launched, the GPU is idle for 0.5 to 1.2 ms. Each cut costs the GPU about 10 us. A few segments
that grow in length are best, and model, bucket and host decide which few.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from segue.capture import BreakableCapture
from segue.devices import Device
from segue.errors import UsageError

_RUNS, _WARM = 9, 3  # replays that are timed, and those before them that are not
Pattern = tuple[int, ...]  # the marks after which a forward is cut, counted from 1


class Marks(threading.local):
    """The marks met in the forward that this thread runs for a prime graph."""

    met: int = 0
    chosen: frozenset[int] = frozenset()
    capture: BreakableCapture | None = None  # the one being recorded

    def begin(self, capture: BreakableCapture | None = None, chosen: Iterable[int] = ()) -> None:
        """Count marks from the start of a forward, and cut ``capture`` at those in ``chosen``."""
        self.met, self.chosen, self.capture = 0, frozenset(chosen), capture

    def end(self) -> int:
        """Stop cutting. Returns the number of marks that the forward met."""
        self.capture = None
        return self.met


marks = Marks()


def cut_here() -> None:
    """Mark a place where a prime graph may be cut: between two layers. Does nothing outside a prime capture."""
    marks.met += 1
    capture = marks.capture
    if capture is not None and capture is BreakableCapture.current() and marks.met in marks.chosen:
        capture.cut()


def pinned(cuts: Sequence[int], marked: int) -> Pattern:
    """The pattern that ``cuts`` asks for: sorted, each mark once. ``marked``: how many marks the forward has.

    Raises:
        UsageError: a number in ``cuts`` is no mark of this forward.
    """
    wrong = [c for c in cuts if isinstance(c, bool) or not isinstance(c, int) or not 1 <= c <= marked]
    if wrong:
        raise UsageError(
            f"cuts={list(cuts)}: {wrong[0]!r} is no mark of this trunk, whose forward calls segue.prime.cut_here() "
            f"{marked} times. Give numbers from 1 to {marked}, [] for one whole graph, or leave cuts= out to have them "
            "measured."
        )
    return tuple(sorted(set(cuts)))


def patterns(marked: int) -> list[Pattern]:
    """The patterns worth measuring for a forward with ``marked`` marks: no cut, and a few whose segments grow."""
    found = [(), (1, 2, 4, 8, 16), (2, 10), (1, 4, 14)]
    return list(dict.fromkeys(tuple(c for c in pattern if c < marked) for pattern in found))


def quickest(
    patterns: Sequence[Pattern], record: Callable[[Pattern], BreakableCapture], device: Device
) -> tuple[Pattern, BreakableCapture, dict[Pattern, float]]:
    """Record and measure each pattern of cuts, and keep the quickest. The median time of a replay counts, from an idle device
    to an idle device.

    Returns the pattern, its capture, and the seconds of each pattern. The other captures are closed.
    """
    captures: dict[Pattern, BreakableCapture] = {}
    try:
        for pattern in patterns:
            captures[pattern] = record(pattern)
        seconds = {pattern: _median(capture, device) for pattern, capture in captures.items()}
    except BaseException:
        for capture in captures.values():
            capture.close()
        raise
    best = min(seconds, key=lambda pattern: seconds[pattern])
    for pattern, capture in captures.items():
        if pattern != best:
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
