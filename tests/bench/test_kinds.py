"""``segue bench kinds`` in a size for tests: every kind is served and right."""

from __future__ import annotations

import pytest
import torch

from segue.bench import kinds
from segue.devices import resolve


@pytest.mark.parametrize("place", ["emulator", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_every_kind_is_served_and_replays_what_its_reference_gives(place: str) -> None:
    if place == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = resolve(place)
    small = kinds.KindSizes(layers=4 if device.traits.timing else 2, hidden=64, vocabulary=61)  # every fourth attends
    which = tuple(kinds.KINDS) if device.traits.timing else ("dense", "latent attention")
    result = kinds.measure(
        device, small, torch.float32, times=1, lengths=(16,), progress=lambda _: None, kinds=which
    )
    served = [row for row in result.rows if row["way"] == kinds.SEGUE]
    assert result.right and [row["kind"] for row in served] == list(which)
    assert all(row["replayed"] > 0 for row in served)
    assert all(row["tokens as eager's"] == "32 of 32" for row in result.steps)
    assert not any(row["eager calls"] for row in result.steps)
