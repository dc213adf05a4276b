"""The benchmark of decoding steps, in a small size: its verdicts, its rows, and what it says of a wrong replay."""

from __future__ import annotations

import pytest
import torch

from segue.bench import steps
from segue.bench.models import load
from segue.devices import Device


def _measure(device: Device) -> steps.Steps:
    model = load(steps.SMALL, torch.float32, device.torch_device)
    return steps.measure(
        model, device, places=((2, 9),), compile=False, rivals=(), generations=1, forced=4, progress=lambda line: None
    )


def test_steps_are_measured_and_equal_their_reference(device: Device) -> None:
    result = _measure(device)
    rows = {row["way"]: row for row in result.rows}
    assert result.right and rows.keys() == {"eager", "segue", "segue, breakable"}
    assert rows["segue"]["full"] == 31 and rows["segue, breakable"]["full"] == 0
    assert rows["segue"]["replay = reference"] == "bit for bit" and rows["segue"]["tokens as eager's"] == "32 of 32"
    assert {row["way"]: row["at most"] for row in result.errors}["segue"] < 1e-5


def test_a_wrong_replay_is_said(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_verdict", lambda way, ids, tokens: None if way.handle is None else "NO")
    assert not _measure(device).right


def test_errors_are_those_of_the_models_own_dtype(device: Device) -> None:
    model = load(steps.SMALL, torch.bfloat16, device.torch_device)
    (row,) = steps._errors(model, [steps._Way("eager", None, model)], forced=4)
    assert model.dtype is torch.bfloat16 and row["at most"] > 1e-4
