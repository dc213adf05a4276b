"""A handle in one line, and its report in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from segue.runner import Stats
from segue.runner.memory_budget import mib
from segue.runner.reasons import remedy_of


class Serving(Protocol):
    """What a report says of a handle, which has these."""

    @property
    def module(self) -> Any: ...
    @property
    def stats(self) -> Stats: ...
    @property
    def strategies(self) -> Mapping[str, str]: ...
    @property
    def boundaries(self) -> tuple[str, ...]: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...


def line(handle: Serving) -> str:
    """What a handle serves: the model's class, strategies, boundaries, captured buckets and the share that was replayed."""
    used = [name for name, why_not in handle.strategies.items() if not why_not]
    parts = (
        f"strategies: {', '.join(used) or 'none'}",
        f"live: {', '.join(handle.boundaries) or 'everything'}",
        f"captured buckets: {_buckets(handle.stats)}",
        _share(handle.stats),
    )
    return f"<segue handle of {type(handle.module).__name__}; {'; '.join(parts)}>"


def report(handle: Serving) -> str:
    """Counts, buckets, boundaries, memory; each reason why forwards ran eager, with what to change; and each strategy that this
    model can't have, with why not.
    """
    stats, strategies = handle.stats, handle.strategies
    counts = [
        ("warm-ups (first call of a bucket)", stats.warmed),
        ("captured (second call)", stats.captured),
        ("replayed", stats.replayed),
        *((f"replayed: {name}", count) for name, count in sorted(stats.strategies.items())),
        ("untouched (eager)", stats.eager),
        ("strategies", ", ".join(name for name, why_not in strategies.items() if not why_not) or "none"),
        ("live, outside the graphs", ", ".join(handle.boundaries) or "everything"),
        ("buckets with a graph", _buckets(stats)),
        ("padded rows", f"{stats.padding_share:.1%}"),
        ("graph memory", mib(stats.pool_bytes)),
        ("scratch caches of prime graphs", mib(handle.scratch_bytes)),
        ("resident keys and values", mib(handle.resident_bytes)),
    ]
    parts = [f"# {type(handle.module).__name__}, accelerated", f"{_share(stats)}.", _table(("", ""), counts)]
    if stats.reasons:
        by_count = sorted(stats.reasons.items(), key=lambda item: -item[1])
        rows = [(reason, count, remedy_of(reason)) for reason, count in by_count]
        parts.append(_table(("ran eager because of", "forwards", "what to change"), rows))
    if stats.declined:
        by_count = sorted(stats.declined.items(), key=lambda item: -item[1])
        rows = [(reason, count, remedy_of(reason)) for reason, count in by_count]
        parts.append(_table(("left to breakable graphs because of", "forwards", "what to change"), rows))
    if missing := [(name, why_not) for name, why_not in strategies.items() if why_not]:
        parts.append(_table(("without", "because"), missing))
    return "\n\n".join(parts)


def _share(stats: Stats) -> str:
    forwards = stats.warmed + stats.captured + stats.replayed + stats.eager
    return f"{stats.replayed / forwards:.1%} of {forwards} forwards were replayed" if forwards else "no forward yet"


def _buckets(stats: Stats) -> str:
    return ", ".join(map(str, stats.buckets)) or "none"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines)
