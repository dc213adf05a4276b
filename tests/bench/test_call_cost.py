"""``segue bench runner`` in a size for tests."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from segue.bench import call_cost
from segue.bench.timing import Spread
from segue.devices import Device, resolve


def test_every_way_gives_the_reference(device: Device) -> None:
    result = call_cost.measure(device, tokens=5, bucket=8, width=4, times=3, progress=lambda line: None)
    assert result.right
    assert [row["call"] for row in result.rows][:3] == ["bare replay", "runner", "7 in-place adds"]
    assert result.rows[1]["output = reference"] == "bit for bit"
    assert (result.added is None) == (not device.traits.timing)


def test_the_added_cost_is_held_against_adds_measured_in_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = resolve("emulator")
    monkeypatch.setattr(type(emulator), "traits", dataclasses.replace(emulator.traits, timing=True))
    known = {"bare replay": 10e-6, "runner": 50e-6, "7 in-place adds": 60e-6}
    spreads = {name: Spread(seconds, 0.0, 1.0) for name, seconds in known.items()}
    monkeypatch.setattr(call_cost.timing, "host_in_turns", lambda runs, times: {name: spreads[name] for name in runs})
    result = call_cost.measure(emulator, tokens=5, bucket=8, width=4, times=5, progress=lambda line: None)
    assert result.added == pytest.approx(40e-6) and result.allowed == 60e-6
    assert "Over the bare replay: 40.0 us; 7 in-place adds: 60.0 us." in result.notes


def test_a_wrong_output_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cost.GraphRunner, "reference", lambda self, *args: torch.full((5, 4), 1e3))
    result = call_cost.measure(resolve("emulator"), tokens=5, bucket=8, width=4, times=1, progress=lambda line: None)
    assert not result.right and "differs by up to" in result.rows[1]["output = reference"]
