"""Captures that a report of a handle counts."""

from __future__ import annotations

from segue.runner import Breakable, CapturedForward, Job


class CountedBreakable(Breakable):
    """Notes the segments and breaks of each bucket.

    Args:
        captured: where, by bucket.
        whole: the forwards have no breaks on purpose.
        name: under which replays are counted.
    """

    def __init__(self, captured: dict[int, tuple[int, int]], whole: bool = False, name: str = Breakable.name) -> None:
        self.captured, self.whole, self.name = captured, whole, name

    def capture(self, job: Job) -> CapturedForward:
        """Run the forward once for real while recording it, as :class:`Breakable` does."""
        program = super().capture(job)
        self.captured[job.tokens] = program.graphs, program.breaks
        return program
