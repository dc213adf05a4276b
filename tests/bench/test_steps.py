"""The benchmark of decoding steps, in a small size: its verdicts, its rows, and what it says of a wrong replay."""

from __future__ import annotations

import dataclasses

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


def test_what_was_measured_before_an_error_is_kept(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(steps, "_errors", fail)
    kept: list[steps.Steps] = []
    model = load(steps.SMALL, torch.float32, device.torch_device)
    with pytest.raises(RuntimeError, match="no memory"):
        steps.measure(
            model, device, places=((1, 5), (2, 9)), compile=False, rivals=(), generations=1, progress=print, keep=kept.append
        )
    assert [{(row["batch"], row["context"]) for row in each.rows} for each in kept[:2]] == [{(1, 5)}, {(1, 5), (2, 9)}]


def test_a_wrong_replay_is_said(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_verdict", lambda way, ids, tokens: None if way.handle is None else "NO")
    assert not _measure(device).right


def test_errors_are_those_of_the_models_own_dtype(device: Device) -> None:
    model = load(steps.SMALL, torch.bfloat16, device.torch_device)
    (row,) = steps._errors(model, [steps._Way("eager", model, device)], forced=4)
    assert model.dtype is torch.bfloat16 and row["at most"] > 1e-4


def test_a_reference_that_gives_other_tokens_each_time_is_no_wrong_replay(device: Device) -> None:
    class Unsteady(steps._Way):
        seen = 0

        def generate(self, ids: torch.Tensor, new: int = steps.NEW_TOKENS) -> tuple[float, torch.Tensor]:
            seconds, tokens = super().generate(ids, new)
            self.seen += 1
            return seconds, tokens + (self.seen if self.name == "segue" else 0)

    model = load(steps.SMALL, torch.float32, device.torch_device)
    ways, _ = steps._ways(model, device, 32, False, (), lambda line: None)
    ids = torch.ones(1, 9, dtype=torch.long, device=device.torch_device)
    way = Unsteady("segue", model, device, ways[1].handle)
    assert steps._verdict(way, ids, way.generate(ids)[1]) == steps.UNSTEADY
    assert steps._verdict(ways[1], ids, ways[1].generate(ids)[1] + 1) == "NO"
    ways[1].handle.restore()


def test_a_static_cache_has_a_call_and_a_text_of_its_own(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(steps.SMALL, torch.float32, device.torch_device)
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *args: True)
    monkeypatch.setattr(type(device), "traits", dataclasses.replace(device.traits, timing=True))
    way = steps._Way(steps.STATIC, model, device)
    ids = torch.ones(2, 5, dtype=torch.long, device=device.torch_device)
    seconds = way.call(ids, 3)
    assert seconds is not None and 0 < seconds < way.generate(ids)[0] * 10
    assert way.generate(ids, steps._TEXT[1])[1].shape == (2, steps._TEXT[1])
    assert "get_compiled_call" not in vars(model)
