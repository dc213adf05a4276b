"""Random numbers advance as in eager, and a new seed counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import segue
from segue.devices import Device

pytestmark = pytest.mark.usefixtures("inference")


@segue.break_point
def noisy_break(y: Tensor) -> Tensor:
    return y + torch.rand_like(y)


def _forward(x: Tensor) -> Tensor:
    y = torch.nn.functional.dropout(x, 0.5, training=True) + torch.randn_like(x)
    return noisy_break(y) * torch.rand(x.shape, device=x.device)


def test_capture_and_replays_draw_what_eager_draws(device: Device) -> None:
    x = torch.ones(64, device=device.torch_device)
    torch.manual_seed(7)
    expected = [_forward(x) for _ in range(4)]
    torch.manual_seed(7)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = _forward(x)
    got = [out.clone()]
    for _ in range(3):
        capture.replay()
        got.append(out.clone())
    for want, have in zip(expected, got, strict=True):
        assert torch.equal(want, have)
    torch.manual_seed(11)
    fresh = _forward(x)
    torch.manual_seed(11)
    capture.replay()
    assert torch.equal(out, fresh)
