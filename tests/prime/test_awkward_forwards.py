"""Forwards that are awkward to record: what is wrong is said, and the device is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from prime.prompts import prompt
from segue.check import tiny_trunk
from segue.devices import Device
from segue.errors import GraphMemoryError, UsageError

BUCKET = 16


class Followed(tiny_trunk.Dense):
    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        return self.after(super().forward(x, cu_seqlens, cache))

    def after(self, y: Tensor) -> Tensor:
        return y


class BreaksAndReads(Followed):
    def after(self, y: Tensor) -> Tensor:
        result: Tensor = segue.break_point(lambda y: y + y.sum().item())(y)
        return result


class OutOfMemory(Followed):
    def after(self, y: Tensor) -> Tensor:
        if segue.is_breakable_capture_active():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return y


class FillsOut(Followed):
    def after(self, y: Tensor) -> Tensor:
        out = torch.empty(0, device=y.device)
        torch.add(y, 1, out=out)
        return out * 2


def _trunk(kind: type[Followed], device: Device) -> Followed:
    torch.manual_seed(1)
    return kind().to(device.torch_device).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (BreaksAndReads, UsageError, "the trunk's forward met 1 break points"),
        (OutOfMemory, GraphMemoryError, r"out of memory while recording segment 0, .* The graph pool holds"),
    ],
)
def test_a_forward_that_can_not_be_recorded_says_why(
    device: Device, kind: type[Followed], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        segue.PrimeGraph(_trunk(kind, device), BUCKET, cuts=[], device=device)
    trunk = _trunk(Followed, device)
    with segue.PrimeGraph(trunk, BUCKET, device=device) as prime:
        tokens = prompt(9, device)
        assert torch.equal(prime.run(tokens, trunk.new_cache(16)).logits, prime.reference(tokens).logits)


def test_an_op_that_gives_what_it_writes_other_memory_is_followed(device: Device) -> None:
    trunk = _trunk(FillsOut, device)
    with segue.PrimeGraph(trunk, BUCKET, cuts=[], device=device) as prime:
        for n in (9, 16, 4):
            tokens = prompt(n, device)
            assert torch.equal(prime.run(tokens, trunk.new_cache(16)).logits, prime.reference(tokens).logits)
