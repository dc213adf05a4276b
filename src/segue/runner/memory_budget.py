"""The memory budget: what further buckets will cost, predicted from what the first ones cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cost:
    """Bytes, cumulative: in the graph pool, and taken by the driver for the graphs themselves. ``inputs``: of the input buffers,
    where they are counted.
    """

    pool: int
    driver: int
    inputs: int = 0

    @property
    def total(self) -> int:
        """Bytes of all together."""
        return self.pool + self.driver + self.inputs

    def __str__(self) -> str:
        inputs = f", {mib(self.inputs)} inputs" if self.inputs else ""
        return f"{mib(self.total)} ({mib(self.pool)} pool, {mib(self.driver)} driver{inputs})"


@dataclass
class MemoryBudget:
    """A limit in bytes, and predictions.

    All buckets share one pool, whose size is what the largest bucket takes, and that is about linear in its rows. The driver
    takes a share of its own for each graph.
    """

    limit: int
    seen: list[tuple[int, Cost]] = field(default_factory=list)  # (bucket, cost of all captured so far)

    def observe(self, bucket: int, cost: Cost) -> None:
        """Note what everything takes now that ``bucket`` is captured."""
        self.seen.append((bucket, cost))

    def predict(self, bucket: int, now: Cost, graphs_now: int, graphs_then: int) -> Cost:
        """Predict the cost once ``bucket`` is one of ``graphs_then`` graphs. ``now``: the cost of the present ``graphs_now``."""
        pool = now.pool
        if self.seen:
            small, large = min(self.seen, key=lambda s: s[0]), max(self.seen, key=lambda s: s[0])
            rows = large[0] - small[0]
            slope = (large[1].pool - small[1].pool) / rows if rows else large[1].pool / large[0]
            if bucket > large[0]:
                pool = max(pool, round(large[1].pool + slope * (bucket - large[0])))
        return Cost(pool, round(now.driver * graphs_then / graphs_now) if graphs_now else now.driver)

    def split(self, buckets: Sequence[int], now: Cost, graphs_now: int) -> tuple[list[int], dict[int, Cost]]:
        """The buckets that fit by the prediction, and the predicted cost of the others. Small buckets come first, as they are
        cheap.
        """
        fitting: list[int] = []
        left_out: dict[int, Cost] = {}
        for count, bucket in enumerate(sorted(buckets), 1):
            cost = self.predict(bucket, now, graphs_now, max(count, graphs_now))
            if cost.total <= self.limit:
                fitting.append(bucket)
            else:
                left_out[bucket] = cost
        return fitting, left_out


def mib(n: int) -> str:
    """``n`` bytes as text, as in ``12.5 MiB``."""
    return f"{n / 2**20:.1f} MiB"
