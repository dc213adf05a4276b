"""What a benchmark measures, on sizes small enough for a test."""

from __future__ import annotations

import pytest
import torch

from segue.bench import clock, provenance
from segue.devices import Device

pytest.importorskip("transformers")


def test_time_to_first_token_is_measured_beside_its_correctness(device: Device) -> None:
    from segue.bench import ttft

    shape = ttft.Shape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48, vocabulary=61)
    result = ttft.measure(device, shape, torch.float32, lengths=(3, 16), times=2)
    assert result.right
    assert [row["tokens"] for row in result.rows] == [3, 16]
    for row in result.rows:
        assert row["replay = reference"] == "bit for bit" and row["untouched"] == 0
        assert row["largest difference to eager"] < 1e-4
        assert row["eager ms"] > 0 and row["segue ms"] > 0
        assert (row["kernel sum ms"] is not None) is torch.cuda.is_available()
    assert result.capture["buckets"] >= 5 and result.capture["seconds"] > 0
    assert all(row["host us"] > 0 for row in result.breaks)


def test_runs_are_taken_in_turns() -> None:
    seen: list[str] = []
    runs = {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}
    assert set(clock.interleaved(runs, times=3, warm_up=1)) == {"a", "b"}
    assert seen == ["a", "b"] * 4


def test_a_result_says_where_it_comes_from() -> None:
    text = provenance.provenance()
    assert all(f"* {what}: " in text for what in ("torch", "device", "date", "commit", "command"))
