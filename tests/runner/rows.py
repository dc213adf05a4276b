"""A small forward whose rows mix, and how to compare with it."""

from __future__ import annotations

import torch

import segue

WIDTH = 4


@segue.break_point(trim=("x",))
def mix(x: torch.Tensor) -> torch.Tensor:
    """Attention's stand-in: every row sees all real rows, and no other."""
    return x + x.mean(0) if len(x) else x


class Model:
    """``relu(linear) -> mix -> scale``, on one device. A call with ``bias`` is another variant."""

    def __init__(self, device: torch.device) -> None:
        g = torch.Generator().manual_seed(0)
        self.weight = torch.randn(WIDTH, WIDTH, generator=g).to(device)
        self.device = device

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.relu(x @ self.weight)
        if bias is not None:
            y = y + bias
        return mix(y) * 2

    def x(self, n: int, seed: int = 0) -> torch.Tensor:
        g = torch.Generator().manual_seed(1000 * seed + n)
        return torch.randn(n, WIDTH, generator=g).to(self.device)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the rounding that another number of rows may cause."""
    return a.shape == b.shape and torch.allclose(a, b, atol=1e-5, rtol=1e-5)
