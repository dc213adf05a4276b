"""What an accelerated model ran, as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from segue.runner.memory_budget import mib

if TYPE_CHECKING:
    from segue.integrations.transformers.base_handle import Handle


def report(handle: Handle) -> str:
    """Counts, strategies, buckets, padding, memory and the reasons for what ran untouched."""
    stats = handle.stats
    rows = [
        ("warm-ups (first call of a bucket)", str(stats.warmed)),
        ("captured (second call)", str(stats.captured)),
        ("replayed", str(stats.replayed)),
        *((f"replayed: {name}", str(count)) for name, count in sorted(stats.strategies.items())),
        ("untouched (eager)", str(stats.eager)),
        *((f"untouched: {reason}", str(count)) for reason, count in sorted(stats.reasons.items())),
        ("buckets with a graph", ", ".join(map(str, stats.buckets)) or "none"),
        ("padded rows", f"{stats.padding_share:.1%}"),
        ("graph memory", mib(stats.pool_bytes)),
        ("scratch caches of prime graphs", mib(handle.scratch_bytes)),
    ]
    name = type(handle.model).__name__
    return "\n".join([f"| {name} | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows)])
