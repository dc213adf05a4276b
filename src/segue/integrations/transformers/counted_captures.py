"""Captures that a report of a handle counts."""

from __future__ import annotations

from segue.runner import Breakable, CapturedForward, Job


class CountedBreakable(Breakable):
    """Notes the segments and breaks of each bucket.

    Args:
        captured: where, by bucket.
        whole: the forwards have no breaks on purpose.
    """

    def __init__(self, captured: dict[int, tuple[int, int]], whole: bool = False) -> None:
        self.captured, self.whole = captured, whole

    def capture(self, job: Job) -> CapturedForward:
        """Run the forward once for real while recording it, as :class:`Breakable` does."""
        program = super().capture(job)
        self.captured[job.tokens] = program.graphs, program.breaks
        return program
