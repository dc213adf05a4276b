"""What an accelerated model ran, as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segue.integrations.transformers.handle import Accelerated


def report(handle: Accelerated) -> str:
    """Counts, padding, memory and the reasons for what ran untouched."""
    stats = handle.stats
    rows = [
        ("warm-ups (first call of a bucket)", str(stats.warmed)),
        ("captured (second call)", str(stats.captured)),
        ("replayed", str(stats.replayed)),
        ("untouched", str(stats.eager)),
        ("padded rows", f"{stats.padding_share:.1%}"),
        ("graph memory", f"{stats.pool_bytes / 2**20:.1f} MiB"),
    ]
    rows += [(f"untouched: {reason}", str(count)) for reason, count in sorted(stats.reasons.items())]
    name = type(handle.model).__name__
    return "\n".join([f"| {name} | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows)])
