"""What a benchmark measures, on sizes small enough for a test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from segue import environment
from segue.bench import timing
from segue.devices import Device, resolve
from segue.prime import PrimeGraph

pytest.importorskip("transformers")

from segue.bench import prime_latency, ttft

SHAPE = ttft.Shape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48, vocabulary=61)


def test_a_prime_graph_unlike_its_reference_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = PrimeGraph.reference

    def other(self: Any, *args: Any) -> Any:
        want = reference(self, *args)
        return SimpleNamespace(logits=want.logits + 1, hidden=want.hidden)

    monkeypatch.setattr(PrimeGraph, "reference", other)
    result = prime_latency.measure(resolve("emulator"), SHAPE, torch.float32, lengths=(3,), times=1)
    assert not result.right and result.rows[0]["prime = reference"] != "bit for bit"


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_replay_of_either_strategy_unlike_its_reference_is_called_wrong(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare, breakable_only = ttft._compare, []

    def other(graphed: Any, ids: Any) -> Any:
        primes = graphed.stats.strategies.get("prime", 0)
        same = compare(graphed, ids)
        breakable_only.append(graphed.stats.strategies.get("prime", 0) == primes)
        return same and len(breakable_only) - 1 != wrong

    monkeypatch.setattr(ttft, "_compare", other)
    result = ttft.measure(resolve("emulator"), SHAPE, torch.float32, lengths=(3,), times=1)
    assert breakable_only == [False, True] and not result.right and result.rows[0]["replay = reference"] == "NO"


def test_time_to_first_token_is_measured_beside_its_correctness(device: Device) -> None:
    result = ttft.measure(device, SHAPE, torch.float32, lengths=(3, 16), times=2)
    assert result.right
    assert [row["tokens"] for row in result.rows] == [3, 16]
    for row in result.rows:
        assert row["replay = reference"] == "bit for bit" and row["untouched"] == 0
        assert row["largest difference to eager"] < 1e-4
        assert row["eager ms"] > 0 and row["segue ms"] > 0
        assert (row["kernel sum ms"] is not None) is device.traits.timing
    assert result.captures[0]["buckets"] >= 5 and result.captures[0]["seconds"] > 0
    assert all(row["host us"] > 0 for row in result.breaks)


def test_runs_are_taken_in_turns() -> None:
    seen: list[str] = []
    runs = {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}
    assert set(timing.wall_in_turns(runs, times=3, warm_up=1)) == {"a", "b"}
    assert seen == ["a", "b"] * 4


def test_a_result_says_where_it_comes_from() -> None:
    text = environment.provenance()
    assert all(f"* {what}: " in text for what in ("torch", "device", "date", "commit", "command"))
