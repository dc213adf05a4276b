"""A collector of runners' numbers for Prometheus. It needs the extra ``segue-graphs[prometheus]``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from segue.errors import UsageError
from segue.runner.runner import GraphRunner


class RunnerCollector:
    """Collects runners' numbers for a ``prometheus_client`` registry: ``REGISTRY.register(RunnerCollector(prefill=runner))``.

    Args:
        runners: by the value of their ``runner`` label.

    Raises:
        UsageError: ``prometheus-client`` isn't installed.
    """

    def __init__(self, **runners: GraphRunner) -> None:
        try:
            core = importlib.import_module("prometheus_client.core")
        except ImportError as e:
            raise UsageError(f"RunnerCollector needs prometheus-client ({e}): pip install 'segue-graphs[prometheus]'") from e
        self._core: Any = core
        self._runners = runners

    def collect(self) -> Iterator[Any]:
        """One sample of each number a runner has."""
        stats = {name: runner.stats for name, runner in self._runners.items()}
        counter, gauge = self._core.CounterMetricFamily, self._core.GaugeMetricFamily
        calls = counter("segue_calls", "Calls by how they were answered", labels=["runner", "way"])
        eager = counter("segue_eager_calls", "Eager calls by reason", labels=["runner", "reason"])
        padding = gauge(
            "segue_padding_share", "Padded rows among all rows of calls that a bucket served", labels=["runner"]
        )
        seconds = counter("segue_capture_seconds", "Time spent capturing", labels=["runner"])
        memory = gauge("segue_graph_bytes", "Memory of graphs", labels=["runner", "kind"])
        buckets = gauge("segue_buckets", "Buckets that have a graph", labels=["runner"])
        for name, s in stats.items():
            for way in ("warmed", "captured", "replayed"):
                calls.add_metric([name, way], getattr(s, way))
            for reason, count in s.reasons.items():
                eager.add_metric([name, reason], count)
            padding.add_metric([name], s.padding_share)
            seconds.add_metric([name], s.capture_seconds)
            memory.add_metric([name, "pool"], s.pool_bytes)
            memory.add_metric([name, "driver"], s.driver_bytes)
            buckets.add_metric([name], len(s.buckets))
        yield from (calls, eager, padding, seconds, memory, buckets)
