"""What a runner has done, as numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Stats:
    """A snapshot. Forwards are ``warmed`` (once a bucket and variant), ``captured``, ``replayed`` or ``eager``.

    ``reasons``: eager calls by reason. ``padding_share``: padded rows among all rows of the calls a bucket served.
    ``pool_bytes``: the graph pool, shared with others that use it. ``driver_bytes``: what the driver took for this
    runner's graphs. ``strategies``: replays by strategy. ``capture_seconds``: spent capturing, without warm-up.
    ``buckets``: those that have a graph.
    """

    warmed: int
    captured: int
    replayed: int
    eager: int
    reasons: Mapping[str, int]
    padding_share: float
    pool_bytes: int
    driver_bytes: int
    strategies: Mapping[str, int] = field(default_factory=dict)
    capture_seconds: float = 0.0
    buckets: tuple[int, ...] = ()


class Tally:
    """The counters behind the snapshots. Several threads may lose a count, never a call."""

    __slots__ = (
        "captured",
        "eager",
        "padded",
        "reasons",
        "replayed",
        "rows",
        "seconds",
        "strategies",
        "warmed",
    )

    def __init__(self) -> None:
        self.warmed = self.captured = self.replayed = self.eager = 0
        self.rows = self.padded = 0
        self.seconds = 0.0
        self.reasons: Counter[str] = Counter()
        self.strategies: Counter[str] = Counter()

    def served(self, bucket: int, tokens: int) -> None:
        """A bucket has served a call."""
        self.rows += bucket
        self.padded += bucket - tokens

    def fell_back(self, reason: str) -> None:
        self.eager += 1
        self.reasons[reason] += 1

    def snapshot(self, pool_bytes: int, driver_bytes: int, buckets: tuple[int, ...]) -> Stats:
        return Stats(
            warmed=self.warmed,
            captured=self.captured,
            replayed=self.replayed,
            eager=self.eager,
            reasons=MappingProxyType(dict(self.reasons)),
            padding_share=self.padded / self.rows if self.rows else 0.0,
            pool_bytes=pool_bytes,
            driver_bytes=driver_bytes,
            strategies=MappingProxyType(dict(self.strategies)),
            capture_seconds=self.seconds,
            buckets=buckets,
        )
