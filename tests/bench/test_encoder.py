"""``segue bench encoder`` in a size for tests: a row for each length and way, verdicts, and no time where none is meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from segue.devices import Device, resolve

pytest.importorskip("transformers")

from segue.bench import encoder


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # torch.compile's advice for fp32
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch records one to begin with
def test_every_length_and_way_has_a_row_and_replays_as_its_reference(device: Device) -> None:
    result = encoder.measure(device, encoder.SMALL_SHAPE, torch.float32, times=2, lengths=(5, 16), sentences=40)
    assert result.right and [row["tokens"] for row in result.rows] == [5, 16]
    timed = device.traits.timing
    assert ("no time is meant" in "".join(result.notes)) is not timed
    assert all((row["seconds"] is not None) is timed for row in result.startup)
    for row in result.rows:
        assert row["replay = reference"] == "bit for bit" and row["segue, largest difference to eager"] < 1e-4
        assert (row["segue ms"] is not None) is timed
    ways = [row["way"] for row in result.sentences]
    assert ways[:3] == ["eager", "segue", "segue compiled"]
    for row in result.sentences[1:3]:
        assert row["replay = reference"] == "bit for bit" and row["untouched"] == 0 and row["graphs"] > 0
        assert row["largest difference to eager"] < 1e-4 and (row["seconds"] is not None) is timed


def test_a_wrong_replay_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    own = encoder._run

    def wrong(way: Any, given: Any) -> Any:
        out = own(way, given)
        if hasattr(way, "reference"):
            out.last_hidden_state = out.last_hidden_state + torch.rand(())
        return out

    monkeypatch.setattr(encoder, "_run", wrong)
    result = encoder.measure(resolve("emulator"), lengths=(8,), sentences=8)
    assert not result.right and result.rows[0]["replay = reference"] == "NO"
