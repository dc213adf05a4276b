"""Numbers for Prometheus."""

from __future__ import annotations

import sys

import pytest

from segue.errors import UsageError
from segue.runner.metrics import RunnerCollector


def test_a_collector_gives_every_number_of_a_runner(make, model):
    prometheus_client = pytest.importorskip("prometheus_client")
    runner = make(model)
    for n in (5, 5, 5, 5, 17):
        runner(model.x(n))
    registry = prometheus_client.CollectorRegistry()
    registry.register(RunnerCollector(prefill=runner))

    def value(name, **labels):
        return registry.get_sample_value(name, {"runner": "prefill", **labels})

    assert value("segue_calls_total", way="replayed") == 2 and value("segue_calls_total", way="warmed") == 1
    assert value("segue_eager_calls_total", reason="no bucket fits") == 1
    assert value("segue_padding_share") == runner.stats.padding_share == 3 / 8
    assert value("segue_graph_bytes", kind="pool") == runner.stats.pool_bytes > 0
    assert value("segue_buckets") == 1 and value("segue_capture_seconds_total") > 0


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(UsageError, match=r"segue-graphs\[prometheus\]"):
        RunnerCollector()
