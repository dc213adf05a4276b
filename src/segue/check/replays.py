"""Where a replay first differs from the reference: the op, or else the segment or break."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from segue.capture.breaks import Break, BreakSpec
from segue.capture.structure import leaves
from segue.check.cases import Case
from segue.check.compare import Rows, difference
from segue.check.lab import Lab
from segue.check.locate import Origin, origin
from segue.check.oplog import Op, OpLog
from segue.check.outcome import Padded, differing


@dataclass(frozen=True)
class Place:
    """``where``: file and line. ``text``: what differs there, for a sentence that goes on from the call's label."""

    where: str
    text: str


def first_op(lab: Lab, order: Sequence[Case], case: Case) -> Place | None:
    """Capture again, this time keeping all memory, and compare every op's results with the reference's.

    None: the difference doesn't show then, as it may be one of memory that was used twice.
    """
    log = OpLog()
    for other in order:
        same = (other.bucket, other.variant) == (case.bucket, case.variant)
        recorded = lab.capture(other, "memory" if same else "nothing")
        log = recorded.log if same else log
    outcome, reference = lab.replay(case, perturbed=False), OpLog("memory")
    wrong, _ = differing(lab.reference(case, reference), outcome, True, Padded((), case.bucket, case.tokens))
    rows = Rows(case.bucket, case.bucket, case.tokens, exact=True)
    found = origin(log, reference, wrong.values(), rows, recorded=True) if wrong else None
    if found is None:
        return None
    return _of_op(found, lab.breaks(case), log, rows)


def first_break(lab: Lab, order: Sequence[Case], case: Case, specs: Sequence[BreakSpec]) -> Place | None:
    """Capture again, and compare what every break gets and gives in a replay and in the reference."""
    journal = Journal()
    with journal.of(specs):
        for other in order:
            lab.capture(other)
        mine = journal.during(lambda: lab.replay(case, perturbed=False))
        theirs = journal.during(lambda: lab.reference(case, OpLog()))
    rows = Rows(case.bucket, case.bucket, case.tokens, exact=True)
    breaks = lab.breaks(case)
    for k, (step, x, y) in enumerate(zip(breaks, mine, theirs, strict=False)):
        if text := _first_of(x.given, y.given, rows):
            what = f"segment {k}, which ends at the break {step.spec.label}, is the first to differ"
            return Place(_called(step), f"{what}: what it hands over {text}")
        if text := _first_of(x.returned, y.returned, rows):
            what = f"the break {step.spec.label} is the first to differ: it got the same, and its result {text}"
            return Place(_called(step), what)
    if not breaks:
        return None
    return Place(
        _called(breaks[-1]), f"the last segment, after the break {breaks[-1].spec.label}, is the first to differ"
    )


@dataclass(frozen=True)
class BreakCall:
    """Copies of the tensors that a break got and gave."""

    given: list[Tensor]
    returned: list[Tensor]


class Journal:
    """Every call of some breaks by this thread, in order."""

    def __init__(self) -> None:
        self._calls: list[BreakCall] = []
        self._thread = threading.get_ident()

    def during(self, run: Callable[[], object]) -> list[BreakCall]:
        """The calls that ``run`` makes."""
        self._calls = []
        run()
        return self._calls

    @contextmanager
    def of(self, specs: Sequence[BreakSpec]) -> Iterator[None]:
        """Note the calls of references, and of what is captured, within this block."""
        unique = list({id(spec): spec for spec in specs}.values())
        before = [spec.fn for spec in unique]
        try:
            for spec in unique:
                spec.fn = self._noting(spec.fn)
            yield
        finally:
            for spec, fn in zip(unique, before, strict=True):
                spec.fn = fn

    def _noting(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return fn(*args, **kwargs)
            given = _copies([*args, *kwargs.values()])
            result = fn(*args, **kwargs)
            self._calls.append(BreakCall(given, _copies([result])))
            return result

        return noted


def _of_op(found: Origin, breaks: Sequence[Break], log: OpLog, rows: Rows) -> Place:
    op = found.op
    if found.path:
        return Place(
            op.where, f"{op.name} was recorded in segment {op.segment}, and the reference runs something else there"
        )
    before = breaks[op.segment - 1] if 0 < op.segment <= len(breaks) else None
    made = {address for earlier in log.ops for address in earlier.writes}
    if found.other is not None and _differs_already(op, found.other, made, rows):
        source = f"the result of the break {before.spec.label}" if before is not None else "a tensor made before"
        return Place(op.where, f"{op.name} in segment {op.segment} reads what differs already: {source}")
    sources = f", which reads what {'; '.join(found.from_)} made" if found.from_ else ""
    return Place(
        op.where, f"{op.name} in segment {op.segment}{sources}, is the first to differ: its result {found.how}"
    )


def _differs_already(op: Op, other: Op, made: set[int], rows: Rows) -> bool:
    return any(
        difference(x, y, rows)
        for x, y, address in zip(op.operands, other.operands, op.reads, strict=False)
        if address not in made
    )


def _called(step: Break) -> str:
    return step.where.rpartition(" called at ")[2]


def _first_of(mine: list[Tensor], theirs: list[Tensor], rows: Rows) -> str:
    return next((text for x, y in zip(mine, theirs, strict=False) if (text := difference(x, y, rows))), "")


def _copies(values: list[Any]) -> list[Tensor]:
    return [v.detach().clone() for v in leaves(values) if isinstance(v, Tensor)]
