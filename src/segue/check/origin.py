"""The first op whose results differ between two forwards, found by following a difference back from the outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from segue.check.compare import RowCounts, real_difference
from segue.check.oplog import EMPTY_OPS, LoggedOp, OpLog

_LOOK_AHEAD = 64  # ops skipped at most to find where two forwards meet again


@dataclass(frozen=True)
class Origin:
    """Where a difference between two forwards begins.

    ``op``: the first op that differs. ``other``: the matching op of the other forward; None where that forward doesn't run
    it. ``how``: the difference in words. ``sources``: the ops that wrote what ``op`` read, in words. ``allocated``: the op
    that allocated the uninitialised memory from which the difference comes, in words; empty where none did.
    """

    op: LoggedOp
    other: LoggedOp | None
    how: str
    sources: tuple[str, ...]
    allocated: str = ""

    @property
    def one_sided(self) -> bool:
        """Only one of the two forwards runs the op."""
        return self.other is None


def align(a: list[LoggedOp], b: list[LoggedOp]) -> list[tuple[LoggedOp | None, LoggedOp | None]]:
    """Pair the ops of two forwards, in order, by name and line. An op that one of them lacks is paired with None."""
    pairs: list[tuple[LoggedOp | None, LoggedOp | None]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i].key == b[j].key:
            pairs.append((a[i], b[j]))
            i, j = i + 1, j + 1
            continue
        skip_a, skip_b = _meeting(a, i, b, j)
        pairs += [(op, None) for op in a[i : i + skip_a]] + [(None, op) for op in b[j : j + skip_b]]
        i, j = i + skip_a, j + skip_b
    return pairs + [(op, None) for op in a[i:]] + [(None, op) for op in b[j:]]


def origin(a: OpLog, b: OpLog, wrong: Iterable[int], rows: RowCounts, *, recorded: bool = False) -> Origin | None:
    """Where a difference between two forwards begins, or None if no op that leads to it shows one.

    Args:
        a, b: logs that kept ``"values"`` or ``"memory"``.
        wrong: addresses of the storages of ``a`` that came out different.
        rows: the row counts of ``a`` and ``b``.
        recorded: ``a`` is the log of a capture. Such a log has no ops of breaks, and both logs show memory as it is after
            everything has run, so that only the last op that wrote a storage can be blamed for what it holds.
    """
    ours = [[o for o in log.ops if not o.ours and not (recorded and o.inside)] for log in (a, b)]
    partner = {id(x): y for x, y in align(*ours) if x is not None}
    need, overwritten = set(wrong), set[int]()
    found: Origin | None = None
    allocated = ""
    for i in range(len(a.ops) - 1, -1, -1):
        op = a.ops[i]
        stale = recorded and not overwritten.isdisjoint(op.writes)
        overwritten.update(op.writes)
        if not need.intersection(op.writes):
            continue
        other = partner.get(id(op))
        if op.name in EMPTY_OPS:
            allocated = allocated or ("" if op.ours else f"{op.name} at {op.where}")
        elif op.ours or stale:
            need.update(op.reads)
        elif other is None:
            need.update(op.reads)
            found = Origin(op, None, "is run by one of the two only", _sources(op, a.ops[:i]))
        elif how := _results_differ(op, other, rows):
            need.update(op.reads)
            found = Origin(op, other, how, _sources(op, a.ops[:i]))
    return found and replace(found, allocated=allocated)


def _results_differ(op: LoggedOp, other: LoggedOp, rows: RowCounts) -> str | None:
    mine, theirs = op.values or op.results, other.values or other.results
    return next((text for x, y in zip(mine, theirs, strict=False) if (text := real_difference(x, y, rows))), None)


def _sources(op: LoggedOp, before: list[LoggedOp]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for key in op.reads:
        for earlier in reversed(before):
            if key in earlier.writes:
                found[f"{earlier.name} at {earlier.where}" + (" (a break)" if earlier.inside else "")] = None
                break
    return tuple(found)


def _meeting(a: list[LoggedOp], i: int, b: list[LoggedOp], j: int) -> tuple[int, int]:
    """How many ops to skip of each forward, at least one in all, so that both go on with the same op."""
    for total in range(1, _LOOK_AHEAD):
        for skip_a in range(total + 1):
            x, y = i + skip_a, j + total - skip_a
            if x < len(a) and y < len(b) and a[x].key == b[y].key:
                return skip_a, total - skip_a
    return len(a) - i, len(b) - j
