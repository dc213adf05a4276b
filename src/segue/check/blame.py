"""The line at which a replay first differs from the reference: that of an op, or else of a segment or break."""

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
from segue.check.compare import RowCounts, real_difference
from segue.check.oplog import LoggedOp, OpLog
from segue.check.origin import Origin, origin
from segue.check.outcome import PaddedWrites, differing
from segue.check.sandbox import Sandbox
from segue.check.trial_calls import TrialCall


@dataclass(frozen=True)
class BlamedLine:
    """``where``: file and line. ``text``: what differs there, as the second half of a sentence."""

    where: str
    text: str


def first_op(
    sandbox: Sandbox, order: Sequence[TrialCall], trial: TrialCall, specs: Sequence[BreakSpec]
) -> BlamedLine | None:
    """Capture again while keeping all memory, and compare every op's results with the reference's.

    None: nothing differs now. Then the difference comes from memory that was used twice, or begins in a break.

    Args:
        sandbox: a fresh one.
        order: the calls to capture, in this order.
        trial: the one of them whose replay differs.
        specs: the break points that it meets.
    """
    log, journal, calls = OpLog(), BreakJournal(), list[BreakCall]()
    with journal.wrapping(specs):
        for other in order:
            if (other.bucket, other.variant) != (trial.bucket, trial.variant):
                sandbox.capture(other)
                continue
            with journal.noting() as calls:
                log = sandbox.capture(trial, "memory").log
    breaks = sandbox.breaks(trial)
    _add_breaks(log, breaks, calls[len(calls) - len(breaks) :])
    outcome, reference = sandbox.replay(trial, perturbed=False), OpLog("memory")
    want = sandbox.reference(trial, reference)
    wrong, _ = differing(want, outcome, True, PaddedWrites((), trial.bucket, trial.tokens))
    rows = _all_rows(trial)
    found = origin(log, reference, wrong.values(), rows, recorded=True) if wrong else None
    return None if found is None else _line_of(found, breaks, log, rows)


def first_break(
    sandbox: Sandbox, order: Sequence[TrialCall], trial: TrialCall, specs: Sequence[BreakSpec]
) -> BlamedLine | None:
    """Capture again, and compare what every break is given and returns in a replay and in the reference.

    The arguments are those of :func:`first_op`. None: the forward has no break.
    """
    journal = BreakJournal()
    with journal.wrapping(specs):
        for other in order:
            sandbox.capture(other)
        with journal.noting() as mine:
            sandbox.replay(trial, perturbed=False)
        with journal.noting() as theirs:
            sandbox.reference(trial, OpLog())
    rows = _all_rows(trial)
    breaks = sandbox.breaks(trial)
    for k, (step, x, y) in enumerate(zip(breaks, mine, theirs, strict=False)):
        if text := _first_difference(x.given, y.given, rows):
            what = f"segment {k}, which ends at the break {step.spec.label}, is the first to differ"
            return BlamedLine(step.called_at, f"{what}: what it hands over {text}")
        if text := _first_difference(x.returned, y.returned, rows):
            what = f"the break {step.spec.label} is the first to differ: it got the same, and its result {text}"
            return BlamedLine(step.called_at, what)
    if not breaks:
        return None
    last = breaks[-1]
    return BlamedLine(last.called_at, f"the last segment, after the break {last.spec.label}, is the first to differ")


@dataclass(frozen=True)
class BreakCall:
    """Copies of the tensors that a break was ``given`` and ``returned``. ``reads``: the storage addresses of the given ones."""

    given: list[Tensor]
    returned: list[Tensor]
    reads: tuple[int, ...]


class BreakJournal:
    """Notes the calls of some breaks by the thread that made it, in order."""

    def __init__(self) -> None:
        self._calls: list[BreakCall] = []
        self._thread = threading.get_ident()

    @contextmanager
    def noting(self) -> Iterator[list[BreakCall]]:
        """Give a list to which the calls within this block are added."""
        calls = self._calls = list[BreakCall]()
        try:
            yield calls
        finally:
            self._calls = []

    @contextmanager
    def wrapping(self, specs: Sequence[BreakSpec]) -> Iterator[None]:
        """Wrap the functions of these break points: references and captures within this block call the wrappers."""
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


def _all_rows(trial: TrialCall) -> RowCounts:
    return RowCounts(trial.bucket, trial.bucket, trial.tokens, exact=True)


def _line_of(found: Origin, breaks: Sequence[Break], log: OpLog, rows: RowCounts) -> BlamedLine:
    op = found.op
    if found.one_sided:
        what = f"{op.name} was recorded in segment {op.segment}, and the reference runs something else there"
        return BlamedLine(op.where, what)
    before = breaks[op.segment - 1] if 0 < op.segment <= len(breaks) else None
    made = {address for earlier in log.ops if not earlier.inside for address in earlier.writes}
    if found.other is not None and _operands_differ(op, found.other, made, rows):
        what = f"{op.name} in segment {op.segment} reads what differs already"
        if before is None:
            return BlamedLine(op.where, f"{what}: a tensor from outside")
        return BlamedLine(before.called_at, f"{what}: the result of the break {before.spec.label}, called here")
    sources = f", which reads what {'; '.join(found.sources)} made" if found.sources else ""
    what = f"{op.name} in segment {op.segment}{sources}, is the first to differ: its result {found.how}"
    return BlamedLine(op.where, what)


def _operands_differ(op: LoggedOp, other: LoggedOp, made: set[int], rows: RowCounts) -> bool:
    """Whether an operand that no segment made differs already."""
    return any(
        real_difference(x, y, rows)
        for x, y, address in zip(op.operands, other.operands, op.reads, strict=False)
        if address not in made
    )


def _first_difference(mine: list[Tensor], theirs: list[Tensor], rows: RowCounts) -> str | None:
    return next((text for x, y in zip(mine, theirs, strict=False) if (text := real_difference(x, y, rows))), None)


def _tensors(values: list[Any]) -> list[Tensor]:
    return [v.detach() for v in leaves(values) if isinstance(v, Tensor) and v.layout is torch.strided]


def _add_breaks(log: OpLog, breaks: Sequence[Break], calls: Sequence[BreakCall]) -> None:
    """Insert the breaks between the ops of a capture, as ops that read arguments and write hand-offs."""
    segments = [[op for op in log.ops if op.segment == k] for k in range(len(breaks) + 1)]
    for k, (step, call) in enumerate(zip(breaks, calls, strict=False)):
        writes = tuple(_torch.storage_span(h.buffer)[0] for h in step.handoffs)
        segments[k].append(
            LoggedOp(step.spec.label, step.called_at, {}, (), call.reads, writes, inside=True, ours=True, segment=k)
        )
    log.ops = [op for ops in segments for op in ops]
