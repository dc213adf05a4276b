"""The trace of a forward: its ops and the memory that each uses, from which recordings on several streams are planned.

To find out beside what an op may run takes as long as the op itself takes to be recorded. So that is done once, ahead, in a loop
of its own; a recording then only sees that it meets the same ops on the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from segue.devices.aux_streams import COUNT, AuxStreams, Step, TracedOp

_AT_ONCE = 64  # in a loop of its own the interpreter takes half of the time that it takes between a forward's ops


class Trace:
    """The ops of a forward, in order.

    ``size``: how much a recording of it holds; None once it counts for other forwards that do the same ops. ``externals``: what
    it used from elsewhere, in the order of its numbers, with where its memory begins and ends.
    """

    def __init__(self) -> None:
        self.ops: list[TracedOp] = []
        self.size: int | None = None
        self.externals: list[tuple[Any, tuple[int, int]]] = []  # each has the object that was used as ``seen``
        self._plans: dict[int, tuple[AuxStreams, list[Step | None]]] = {}  # by the op that a segment begins with

    def lend(self) -> Trace:
        """For a forward that probably does the same ops, with other kernels. It holds nothing any more."""
        self.size = None
        self.externals.clear()
        return self

    def steps(self, start: int) -> Iterator[Step | None]:
        """How to record the ops of a segment that begins with op number ``start``, in order. Views have no step."""
        if start not in self._plans:
            self._plans[start] = AuxStreams(COUNT, self.ops[start - 1].made if start else 0), []
        aux, steps = self._plans[start]
        i = 0
        while True:
            if i == len(steps):
                steps.extend(map(aux.place, self.ops[start + i : start + i + _AT_ONCE]))
            yield steps[i]
            i += 1
