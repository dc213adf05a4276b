"""``segue bench memory`` in a size for tests."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from segue.bench import decoder, ladder_memory
from segue.capture import BreakableCapture
from segue.devices import Device, resolve

SHAPE = decoder.Shape(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48)
BUCKETS = (4, 16, 8)


def test_buckets_are_captured_largest_first_and_replay_as_the_reference(device: Device) -> None:
    result = ladder_memory.measure(device, SHAPE, BUCKETS, torch.float32, times=1)
    assert result.right
    assert [row["buckets"] for row in result.memory] == ["16", "16 + 8", "16 + 8 + 4"]
    assert [row["graphs"] for row in result.memory] == [3, 6, 9]
    assert result.memory[0]["pool against the largest"] == "1.000x"
    assert all(float(row["pool MiB"]) >= float(row["of these live MiB"]) for row in result.memory)
    assert [row["bucket"] for row in result.recording] == [16, 8, 4]
    assert all((row["by torch alone ms"] is not None) is device.traits.driver_memory for row in result.recording)


def test_on_the_emulator_no_time_is_given() -> None:
    result = ladder_memory.measure(resolve("emulator"), SHAPE, BUCKETS, torch.float32, times=1)
    assert all(row["recording ms"] is None for row in result.recording)
    assert "no time is meant" in "".join(result.notes)


def test_recording_is_given_against_an_eager_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = resolve("emulator")
    monkeypatch.setattr(type(emulator), "traits", dataclasses.replace(emulator.traits, timing=True))
    result = ladder_memory.measure(emulator, SHAPE, BUCKETS, torch.float32, times=2)
    for row in result.recording:
        assert row["recording / eager"] == f"{row['recording ms'] / row['eager ms']:.2f}x"


def test_a_replay_that_is_not_the_reference_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BreakableCapture, "replay", lambda self, valid_rows=None: None)
    result = ladder_memory.measure(resolve("emulator"), SHAPE, BUCKETS, torch.float32, times=1)
    assert not result.right
    assert all(row["replay = reference"].startswith("NO: off by") for row in result.memory)


def test_the_decoder_has_as_many_parameters_as_the_model_it_stands_for() -> None:
    with torch.device("meta"):
        assert len(list(decoder.Decoder(decoder.Shape()).parameters())) == 28 * 11 + 1
