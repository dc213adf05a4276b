"""Where a replay first differs from the reference: the op, or else the segment or break."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.break_points import Break, BreakSpec
from segue.capture.nested import leaves
from segue.check.breaks import called_at, handoffs
from segue.check.compare import Rows, difference
from segue.check.oplog import Op, OpLog
from segue.check.origin import Origin, origin
from segue.check.outcome import Padded, differing
from segue.check.sandbox import Sandbox
from segue.check.trial_calls import Case


@dataclass(frozen=True)
class Place:
    """``where``: file and line. ``text``: what differs there, for a sentence that goes on from the call's label."""

    where: str
    text: str


def first_op(lab: Sandbox, order: Sequence[Case], case: Case, specs: Sequence[BreakSpec]) -> Place | None:
    """Capture again, this time keeping all memory, and compare every op's results with the reference's.

    None: the difference doesn't show then, as it may be one of memory that was used twice, or begins in a break.
    """
    log, journal, calls = OpLog(), Journal(), list[BreakCall]()
    with journal.of(specs):
        for other in order:
            if (other.bucket, other.variant) != (case.bucket, case.variant):
                lab.capture(other)
                continue
            with journal.noting() as calls:
                log = lab.capture(case, "memory").log
    breaks = lab.breaks(case)
    _add_breaks(log, breaks, calls[len(calls) - len(breaks) :])
    outcome, reference = lab.replay(case, perturbed=False), OpLog("memory")
    wrong, _ = differing(lab.reference(case, reference), outcome, True, Padded((), case.bucket, case.tokens))
    rows = Rows(case.bucket, case.bucket, case.tokens, exact=True)
    found = origin(log, reference, wrong.values(), rows, recorded=True) if wrong else None
    return None if found is None else _of_op(found, breaks, log, rows)


def first_break(lab: Sandbox, order: Sequence[Case], case: Case, specs: Sequence[BreakSpec]) -> Place | None:
    """Capture again, and compare what every break gets and gives in a replay and in the reference."""
    journal = Journal()
    with journal.of(specs):
        for other in order:
            lab.capture(other)
        with journal.noting() as mine:
            lab.replay(case, perturbed=False)
        with journal.noting() as theirs:
            lab.reference(case, OpLog())
    rows = Rows(case.bucket, case.bucket, case.tokens, exact=True)
    breaks = lab.breaks(case)
    for k, (step, x, y) in enumerate(zip(breaks, mine, theirs, strict=False)):
        if text := _first_of(x.given, y.given, rows):
            what = f"segment {k}, which ends at the break {step.spec.label}, is the first to differ"
            return Place(called_at(step), f"{what}: what it hands over {text}")
        if text := _first_of(x.returned, y.returned, rows):
            what = f"the break {step.spec.label} is the first to differ: it got the same, and its result {text}"
            return Place(called_at(step), what)
    if not breaks:
        return None
    return Place(
        called_at(breaks[-1]), f"the last segment, after the break {breaks[-1].spec.label}, is the first to differ"
    )


@dataclass(frozen=True)
class BreakCall:
    """Copies of the tensors that a break got and gave, and the storages of the former, by address."""

    given: list[Tensor]
    returned: list[Tensor]
    reads: tuple[int, ...]


class Journal:
    """Every call of some breaks by this thread, in order."""

    def __init__(self) -> None:
        self._calls: list[BreakCall] = []
        self._thread = threading.get_ident()

    @contextmanager
    def noting(self) -> Iterator[list[BreakCall]]:
        """The calls within this block."""
        calls = self._calls = list[BreakCall]()
        try:
            yield calls
        finally:
            self._calls = []

    @contextmanager
    def of(self, specs: Sequence[BreakSpec]) -> Iterator[None]:
        """Note the calls of references, and of what is captured, within this block."""
        unique = list({id(spec): spec for spec in specs}.values())
        before = [spec.fn for spec in unique]
        try:
            for spec in unique:
                spec.fn = self._wrapped(spec.fn)
            yield
        finally:
            for spec, fn in zip(unique, before, strict=True):
                spec.fn = fn

    def _wrapped(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return fn(*args, **kwargs)
            tensors = _tensors([*args, *kwargs.values()])
            given, reads = [t.clone() for t in tensors], tuple(_torch.storage_span(t)[0] for t in tensors)
            result = fn(*args, **kwargs)
            self._calls.append(BreakCall(given, [t.clone() for t in _tensors([result])], reads))
            return result

        return noted


def _of_op(found: Origin, breaks: Sequence[Break], log: OpLog, rows: Rows) -> Place:
    op = found.op
    if found.path:
        return Place(
            op.where, f"{op.name} was recorded in segment {op.segment}, and the reference runs something else there"
        )
    before = breaks[op.segment - 1] if 0 < op.segment <= len(breaks) else None
    made = {address for earlier in log.ops if not earlier.inside for address in earlier.writes}
    if found.other is not None and _differs_already(op, found.other, made, rows):
        what = f"{op.name} in segment {op.segment} reads what differs already"
        if before is None:
            return Place(op.where, f"{what}: a tensor from outside")
        return Place(called_at(before), f"{what}: the result of the break {before.spec.label}, called here")
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


def _first_of(mine: list[Tensor], theirs: list[Tensor], rows: Rows) -> str:
    return next((text for x, y in zip(mine, theirs, strict=False) if (text := difference(x, y, rows))), "")


def _tensors(values: list[Any]) -> list[Tensor]:
    return [v.detach() for v in leaves(values) if isinstance(v, Tensor) and v.layout is torch.strided]


def _add_breaks(log: OpLog, breaks: Sequence[Break], calls: Sequence[BreakCall]) -> None:
    """Put the breaks among the ops of a capture, as something that reads arguments and writes hand-offs."""
    segments = [[op for op in log.ops if op.segment == k] for k in range(len(breaks) + 1)]
    for k, (step, call) in enumerate(zip(breaks, calls, strict=False)):
        writes = tuple(_torch.storage_span(h.buffer)[0] for h in handoffs(step))
        segments[k].append(
            Op(step.spec.label, called_at(step), {}, (), call.reads, writes, inside=True, ours=True, segment=k)
        )
    log.ops = [op for ops in segments for op in ops]
