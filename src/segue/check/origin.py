"""The first op where a difference between two forwards shows, found by following it back from what came out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from segue.check.compare import Rows, difference
from segue.check.oplog import EMPTY, Op, OpLog

_AHEAD = 64  # ops looked at to find where two forwards meet again


@dataclass(frozen=True)
class Origin:
    """``op``: where it begins. ``other``: the same op of the other forward, None where that one doesn't run it.

    ``how``: its results differ. ``from_``: who wrote what it read. ``allocated``: who made uninitialised memory that it
    depends on.
    """

    op: Op
    other: Op | None
    how: str
    from_: tuple[str, ...]
    allocated: str = ""

    @property
    def path(self) -> bool:
        """The two forwards don't run the same ops there."""
        return self.other is None


def align(a: list[Op], b: list[Op]) -> list[tuple[Op | None, Op | None]]:
    """The ops of two forwards side by side, by name and line; those that one of them lacks stand alone."""
    pairs: list[tuple[Op | None, Op | None]] = []
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


def origin(a: OpLog, b: OpLog, wrong: Iterable[int], rows: Rows, *, recorded: bool = False) -> Origin | None:
    """Where a difference between two forwards begins, which kept ``"values"`` or ``"memory"``.

    Args:
        wrong: storages of ``a`` that came out different, by address.
        recorded: ``a`` is of a capture, so it has no ops of breaks; and what both kept is memory as it is after
            everything ran, which only the last op that wrote it answers for.
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
        if op.name in EMPTY:
            allocated = allocated or ("" if op.ours else f"{op.name} at {op.where}")
        elif op.ours or stale:
            need.update(op.reads)
        elif other is None:
            need.update(op.reads)
            found = Origin(op, None, "is run by one of the two only", _sources(op, a.ops[:i]))
        elif how := _differ(op, other, rows):
            need.update(op.reads)
            found = Origin(op, other, how, _sources(op, a.ops[:i]))
    return found and replace(found, allocated=allocated)


def _differ(op: Op, other: Op, rows: Rows) -> str:
    mine, theirs = op.values or op.results, other.values or other.results
    return next((text for x, y in zip(mine, theirs, strict=False) if (text := difference(x, y, rows))), "")


def _sources(op: Op, before: list[Op]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for key in op.reads:
        for earlier in reversed(before):
            if key in earlier.writes:
                found[f"{earlier.name} at {earlier.where}" + (" (a break)" if earlier.inside else "")] = None
                break
    return tuple(found)


def _meeting(a: list[Op], i: int, b: list[Op], j: int) -> tuple[int, int]:
    """How many ops to leave out of each, at least one in all, so that the two go on with the same op."""
    for total in range(1, _AHEAD):
        for skip_a in range(total + 1):
            x, y = i + skip_a, j + total - skip_a
            if x < len(a) and y < len(b) and a[x].key == b[y].key:
                return skip_a, total - skip_a
    return len(a) - i, len(b) - j
