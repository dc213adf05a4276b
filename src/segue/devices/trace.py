"""The trace of a forward: its ops and the memory that each uses, from which recordings on several streams are planned.

To find out beside what an op may run takes as long as the op itself takes to be recorded. So that is done once, ahead, in a loop
of its own; a recording then only sees that it meets the same ops on the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from segue import _where
from segue.devices.aux_streams import COUNT, AuxStreams, Step, TracedOp
from segue.errors import UnseenWorkError

_AT_ONCE = 64  # in a loop of its own the interpreter takes half of the time that it takes between a forward's ops


class Trace:
    """The ops of a forward, in order.

    ``externals``: what it used from elsewhere, in the order of its numbers, with where its memory begins and ends.
    """

    def __init__(self) -> None:
        self.ops: list[TracedOp] = []
        self.externals: list[tuple[Any, tuple[int, int]]] = []  # each has the object that was used as ``seen``
        self._plans: dict[int, tuple[AuxStreams, list[Step | None]]] = {}  # by the op that a segment begins with

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


class Following:
    """The way of one capture along a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._ops, self._at = trace, trace.ops, 0
        self._steps: Iterator[Step | None] = iter(())

    def begin(self) -> None:
        """A segment begins."""
        self._steps = self._trace.steps(self._at)

    def step(self, func: Any, operands: list[int]) -> Step | None:
        """How to record the next op; None for a view.

        Raises:
            UnseenWorkError: it isn't the one that was traced, or not on the same memory.
        """
        at = self._at
        if at == len(self._ops) or self._ops[at].func is not func or self._ops[at].operands != operands:
            raise self._lost(func)
        self._at = at + 1
        return next(self._steps)

    def twin(self, number: int, used: Any, span: tuple[int, int]) -> Any:
        """What the trace knows of ``used``, which is number ``number`` of what came from elsewhere; None if that was another."""
        externals = self._trace.externals
        if number < len(externals) and externals[number][0].seen is used and externals[number][1] == span:
            return externals[number][0]
        return None

    def made(self, blocks: int) -> None:
        """The op has run, and the forward has made so many blocks by now.

        Raises:
            UnseenWorkError: then it had made more or fewer.
        """
        if blocks != self._ops[self._at - 1].made:
            raise self._lost(self._ops[self._at - 1].func)

    def _lost(self, func: Any) -> UnseenWorkError:
        return UnseenWorkError(
            f"{func} at {_where.caller()} is not what the forward did there, or not on that memory, when it was traced for "
            "auxiliary streams: it runs otherwise each time. Record with aux_streams=False."
        )
