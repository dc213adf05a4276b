"""The fixed inputs of a prime graph hold what the call asks for, also where filling them is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from segue import _torch
from segue.devices import Device
from segue.prime.fixed_inputs import Inputs, Offsets
from segue.prime.requests import Batch


def test_offsets_are_copied_when_they_change_or_somebody_wrote_them(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    foreach_copy = _torch.foreach_copy

    def counted(destinations: Sequence[Any], sources: Sequence[Any]) -> None:
        copied.append(len(destinations))
        foreach_copy(destinations, sources)

    monkeypatch.setattr(_torch, "foreach_copy", counted)
    offsets = Offsets(16, 2, device.torch_device)
    given = [0, 4, 13]
    for wanted in ([0, 0, 0], given, given, [0, 9, 13], given):
        offsets.fill(wanted)
        assert offsets.cu_seqlens.tolist() == wanted
    assert len(copied) == 3
    given[1] = 5  # the caller's list, which was only read
    offsets.fill(given)
    offsets.cu_seqlens.zero_()
    offsets.fill(given)
    assert offsets.cu_seqlens.tolist() == [0, 5, 13] and len(copied) == 5


def test_a_fill_that_failed_half_way_leaves_no_rows_past_the_next_prompt(device: Device) -> None:
    inputs = Inputs(torch.zeros(1, 2, device=device.torch_device), bucket=8, requests=2)
    rows = [torch.ones(n, width, device=device.torch_device) for n, width in ((3, 2), (2, 5))]
    with pytest.raises(RuntimeError):
        inputs.fill(rows, Batch([], [3, 2], []))
    inputs.fill([rows[0][:1]], Batch([], [1], []))
    assert inputs.x.tolist() == [[1.0, 1.0]] + [[0.0, 0.0]] * 7
