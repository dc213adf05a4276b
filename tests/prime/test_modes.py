"""A prime graph runs under the modes of its capture only, takes others in by a recapture, and draws from any generator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import segue
from prime.prompts import prompt
from segue.check.compare import difference
from segue.devices import Device


@contextlib.contextmanager
def _high_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("under", "name"),
    [
        (_high_precision, "float32 matmul precision"),
        (lambda: sdpa_kernel(SDPBackend.MATH), "backends of scaled_dot_product_attention"),
    ],
)
def test_another_mode_than_the_captures_is_refused_until_it_is_recaptured(
    device: Device, dense_trunk: Any, under: Callable[[], AbstractContextManager[None]], name: str
) -> None:
    tokens = prompt(9, device)
    with torch.inference_mode(), segue.PrimeGraph(dense_trunk, 32, device=device) as prime:
        with under():
            session = dense_trunk.new_cache(16)
            with pytest.raises(segue.SegueError, match=rf"prime graph of 32 rows was captured under {name}.*recapture\(\)"):
                prime.run(tokens, session)
            assert dense_trunk.get_length(session) == 0
        assert difference(prime.run(tokens, session).logits, prime.reference(tokens).logits) is None
        with under():
            prime.recapture()
            got = prime.run(tokens, dense_trunk.new_cache(16))
            assert difference(got.logits, prime.reference(tokens).logits) is None
        with pytest.raises(segue.SegueError, match=name):
            prime.run(tokens, dense_trunk.new_cache(16))
        with torch.device(tokens.device):
            prime.recapture()
        with torch.device(tokens.device):
            prime.run(tokens, dense_trunk.new_cache(16))


def test_a_trunk_may_draw_from_a_generator_of_its_own(device: Device, dense_trunk: Any) -> None:
    own, tokens, head = torch.Generator(device.torch_device), prompt(9, device), dense_trunk.head
    dense_trunk.head = lambda last: head(last) + torch.rand(last.shape[:1], generator=own, device=last.device)[:, None]
    with segue.PrimeGraph(dense_trunk, 32, device=device) as prime:
        for seed in (3, 4, 3):
            own.manual_seed(seed)
            got = prime.run(tokens, dense_trunk.new_cache(16)).logits
            own.manual_seed(seed)
            assert difference(got, prime.reference(tokens).logits) is None
