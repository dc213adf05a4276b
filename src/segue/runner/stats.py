"""What a runner has done, as numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stats:
    """A snapshot. Forwards are ``warmed`` (once a bucket and variant), ``captured``, ``replayed`` or ``eager``.

    ``reasons``: eager calls by reason. ``padding_share``: padded rows among all rows of the calls a bucket served.
    ``pool_bytes``: the graph pool, shared with others that use it. ``driver_bytes``: what the driver took for this
    runner's graphs. ``strategies``: replays by strategy. ``capture_seconds``: spent capturing, without warm-up.
    ``buckets``: those that have a graph. ``declined``: calls that a preferred strategy left to those after it, by reason.
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
    declined: Mapping[str, int] = field(default_factory=dict)


class Replays:
    """Counts the replays of one bucket by one strategy, and the real rows in all of them. A replay makes two additions here."""

    __slots__ = ("calls", "tokens")

    def __init__(self) -> None:
        self.calls = self.tokens = 0


class Counters:
    """The counters behind the snapshots. Several threads may lose a count, never a call."""

    __slots__ = (
        "captured",
        "declined",
        "eager",
        "padded",
        "reasons",
        "replays",
        "rows",
        "seconds",
        "warmed",
    )

    def __init__(self) -> None:
        self.warmed = self.captured = self.eager = 0
        self.rows = self.padded = 0  # of calls that were warmed or captured
        self.seconds = 0.0
        self.reasons: Counter[str] = Counter()
        self.declined: Counter[str] = Counter()
        self.replays: dict[tuple[str, int], Replays] = {}

    def replays_of(self, strategy: str, bucket: int) -> Replays:
        """The counter of a bucket's replays by a strategy."""
        return self.replays.setdefault((strategy, bucket), Replays())

    def go_on_from(self, earlier: Counters) -> None:
        """Take the counts of ``earlier``, which isn't counted in any more."""
        for name in Counters.__slots__:
            setattr(self, name, getattr(earlier, name))

    def served(self, bucket: int, tokens: int) -> None:
        """Count a call of ``tokens`` tokens that a bucket served by a warm-up or capture."""
        self.rows += bucket
        self.padded += bucket - tokens

    def fell_back(self, reason: str) -> None:
        """Count a call that ran eager."""
        self.eager += 1
        self.reasons[reason] += 1

    def snapshot(self, pool_bytes: int, driver_bytes: int, buckets: tuple[int, ...]) -> Stats:
        """The counts as they are now. The arguments go into the :class:`Stats` as they are."""
        rows, padded = self.rows, self.padded
        strategies: Counter[str] = Counter()
        for (strategy, bucket), replays in list(self.replays.items()):
            if replays.calls:
                strategies[strategy] += replays.calls
                rows += replays.calls * bucket
                padded += replays.calls * bucket - replays.tokens
        return Stats(
            warmed=self.warmed,
            captured=self.captured,
            replayed=strategies.total(),
            eager=self.eager,
            reasons=dict(self.reasons),
            padding_share=padded / rows if rows else 0.0,
            pool_bytes=pool_bytes,
            driver_bytes=driver_bytes,
            strategies=dict(strategies),
            capture_seconds=self.seconds,
            buckets=buckets,
            declined=dict(self.declined),
        )
