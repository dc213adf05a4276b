"""The trace of a forward: its ops and the memory that each uses, from which recordings on several streams are planned.

To find out beside what an op may run takes as long as the op itself takes to be recorded. So that is done once, ahead, in a loop
of its own; a recording then only sees that it meets the same ops on the same memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from segue.devices.aux_streams import COUNT, AuxStreams, Step, TracedOp


class Trace:
    """The ops of a forward, in order.

    ``marks``: before which op each place lies where the forward may be cut. ``size``: how much a recording of it holds; None
    once it counts for other forwards that do the same ops. ``externals``: what it used from elsewhere, in the order of its
    numbers, with where its memory begins and ends.
    """

    def __init__(self) -> None:
        self.ops: list[TracedOp] = []
        self.marks: list[int] = []
        self.size: int | None = None
        self.externals: list[tuple[Any, tuple[int, int]]] = []  # each has the object that was used as ``seen``
        self._plans: dict[int, tuple[int, list[Step | None]]] = {}  # by the op that a segment begins with: its end, and its steps

    def lend(self) -> Trace:
        """For a forward that probably does the same ops, with other kernels. It holds nothing any more."""
        self.size = None
        self.externals.clear()
        return self

    def plan(self, cuts: Iterable[int]) -> None:
        """Plan the segments ahead, for a forward that is cut after these marks, counted from 1."""
        starts = sorted({0, *(self.marks[c - 1] for c in cuts)})
        for start, end in itertools.pairwise([*starts, len(self.ops)]):
            self._plan(start, end)

    def steps(self, start: int) -> Iterator[Step | None]:
        """How to record the ops of a segment that begins with op number ``start``, in order. Views have no step."""
        if start not in self._plans:
            self._plan(start, len(self.ops))
        return iter(self._plans[start][1])

    def _plan(self, start: int, end: int) -> None:
        if start not in self._plans or self._plans[start][0] != end:
            aux = AuxStreams(COUNT, self.ops[start - 1].made if start else 0)
            self._plans[start] = end, _without_idle_marks([aux.place(op) for op in self.ops[start:end]])


def _without_idle_marks(steps: list[Step | None]) -> list[Step | None]:
    """The same without the marks that nothing waits for."""
    awaited = sorted({mark for step in steps if step for _, mark in step.before if mark >= 0})
    renamed = {mark: i for i, mark in enumerate(awaited)}
    numbers = itertools.count()
    found: list[Step | None] = []
    for step in steps:
        if step and step.before:
            before = [
                (stream, renamed[mark] if mark >= 0 else mark)
                for stream, mark in step.before
                if mark >= 0 or next(numbers) in renamed
            ]
            step = step._replace(before=tuple(before))
        found.append(step)
    return found
