"""Forwards that are awkward to trace: they run on one stream, or the error is the one that a capture gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from prime.prompts import prompt
from segue import _torch
from segue.check import dense
from segue.devices import Device
from segue.errors import GraphMemoryError, UnseenWorkError, UsageError

BUCKET = 16


class Counting(dense.Dense):
    calls = 0

    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        self.calls += 1
        return self.after(super().forward(x, cu_seqlens, cache))

    def after(self, y: Tensor) -> Tensor:
        return y


class BreaksAndReads(Counting):
    def after(self, y: Tensor) -> Tensor:
        result: Tensor = segue.break_point(lambda y: y + y.sum().item())(y)
        return result


class OutOfMemory(Counting):
    def after(self, y: Tensor) -> Tensor:
        if self.calls > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return y


class Alternates(Counting):
    def after(self, y: Tensor) -> Tensor:
        return y if self.calls % 2 else y * 1


class Overlaps(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("base", torch.zeros(64), persistent=False)

    def after(self, y: Tensor) -> Tensor:
        if self.calls == 1:  # in the warm-up
            base: Any = self.base
            self.over = [
                _torch.tensor_at(base.data_ptr() + at, 128, base.dtype, (32,), (1,), 0, base.device) for at in (0, 64)
            ]
        return y + self.over[0] + self.over[1]


class FillsOut(Counting):
    def after(self, y: Tensor) -> Tensor:
        out = torch.empty(0, device=y.device)
        torch.add(y, 1, out=out)
        return out * 2


def _trunk(kind: type[Counting], device: Device) -> Counting:
    torch.manual_seed(1)
    return kind().to(device.torch_device).eval().requires_grad_(False)


@pytest.mark.parametrize("aux_streams", [None, True])
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (BreaksAndReads, UsageError, "the trunk's forward met 1 break points"),
        (OutOfMemory, GraphMemoryError, r"out of memory while recording segment 0, .* The graph pool holds"),
    ],
)
def test_what_can_not_be_traced_says_why_as_a_capture_does(
    device: Device, kind: type[Counting], error: type[Exception], message: str, aux_streams: bool | None
) -> None:
    with pytest.raises(error, match=message):
        segue.PrimeGraph(_trunk(kind, device), BUCKET, cuts=[], aux_streams=aux_streams, device=device)
    trunk = _trunk(Counting, device)
    with segue.PrimeGraph(trunk, BUCKET, device=device) as prime:
        tokens = prompt(9, device)
        assert torch.equal(prime.run(tokens, trunk.new_cache(16)).logits, prime.reference(tokens).logits)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Alternates, "prime graph of 16 rows: .* is not what the forward did there"), (Overlaps, "overlap in memory")],
)
def test_a_forward_whose_order_can_not_be_told_goes_on_one_stream_unless_several_were_asked_for(
    device: Device, kind: type[Counting], message: str
) -> None:
    trunk = _trunk(kind, device)
    with segue.PrimeGraph(trunk, BUCKET, cuts=[], device=device) as prime:
        tokens = prompt(9, device)
        assert not prime.aux_streams
        assert torch.equal(prime.run(tokens, trunk.new_cache(16)).logits, prime.reference(tokens).logits)
    with pytest.raises(UnseenWorkError, match=message) as raised:
        segue.PrimeGraph(_trunk(kind, device), BUCKET, cuts=[], aux_streams=True, device=device)
    assert str(raised.value).count("prime graph of 16 rows") == 1


def test_an_op_that_gives_what_it_writes_other_memory_is_followed(device: Device) -> None:
    trunk = _trunk(FillsOut, device)
    with segue.PrimeGraph(trunk, BUCKET, cuts=[], aux_streams=True, device=device) as prime:
        for n in (9, 16, 4):
            tokens = prompt(n, device)
            assert torch.equal(prime.run(tokens, trunk.new_cache(16)).logits, prime.reference(tokens).logits)
