"""The fixed inputs of a prime graph hold what the call asks for, also where filling them is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from segue import _torch
from segue.devices import Device
from segue.prime.body import Offsets


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
