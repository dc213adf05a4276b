"""Prompts for the tests."""

from __future__ import annotations

import torch

from segue.devices import Device


def prompt(n: int, device: Device, seed: int = 0) -> torch.Tensor:
    """``n`` token ids that both vocabularies have."""
    draw = torch.Generator().manual_seed(100 * seed + n)
    return torch.randint(0, 50, (n,), generator=draw).to(device.torch_device)
