"""Devices agree on what a graph can hold."""

from __future__ import annotations

import pytest
import torch

from segue.errors import CaptureError

from .conftest import Sandbox
from .snippets import ALLOWED, REFUSED


def _operands(lab: Sandbox) -> tuple[torch.Tensor, ...]:
    where = lab.device.torch_device
    x = torch.tensor([1.0, -2.0, 3.0, -4.0], device=where)
    m = torch.arange(12.0, device=where).reshape(3, 4) / 7
    return x, m, x > 0, torch.tensor([1, 0, 2], device=where)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_is_refused(lab: Sandbox, name: str) -> None:
    operands = _operands(lab)
    with pytest.raises((RuntimeError, TypeError)) as caught:
        lab.record(lambda: REFUSED[name][0](*operands))
    if lab.device.name == "emulator":
        assert isinstance(caught.value, CaptureError)
        text = str(caught.value)
        assert REFUSED[name][1] in text and "snippets.py:" in text and "CUDA" in text
    segment, y = lab.record(lambda: operands[0] + 1)
    operands[0].fill_(1)
    lab.launch(segment)
    assert torch.equal(y, torch.full_like(y, 2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_graph_can_hold_replays_as_eager(lab: Sandbox, name: str, mode: type) -> None:
    snippet = ALLOWED[name]
    with torch.inference_mode(False), mode():
        x, m, mask, i = operands = _operands(lab)
        snippet(*operands)
        segment, y = lab.record(lambda: snippet(*operands))
        assert torch.equal(y, snippet(*operands))
        x.copy_(x.flip(0) * 1.5)
        m.mul_(-1.25)
        mask.logical_not_()
        i.copy_(i.flip(0))
        lab.pool.poison()
        lab.launch(segment)
        expected = snippet(*operands)
        assert y.dtype == expected.dtype and y.stride() == expected.stride()
        assert torch.equal(y, expected)
