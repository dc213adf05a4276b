"""Everything outside a forward that it can read and write: external tensors, and the live context."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

WIDTH, SLOTS, MOST_ROWS = 3, 6, 16


@dataclass
class Context:
    """One forward's context. New for every call, but for ``cache``, which is the world's."""

    scale: float
    shift: Tensor  # [3]
    cache: Tensor  # [SLOTS, 3]
    meta: dict[str, Any]  # "slots" int64 [SLOTS], a permutation; "none"; "deep" [3]
    none: None = None

    def tensors(self) -> list[Tensor]:
        return [self.shift, self.meta["slots"], self.meta["deep"]]


@dataclass
class World:
    """The external tensors. ``ctx`` is set for each forward, and is what the forward passes to its breaks."""

    weight: Tensor  # [3, 3]
    vec: Tensor  # [3]
    rows: Tensor  # [MOST_ROWS, 3]
    cache: Tensor  # [SLOTS, 3]
    count: Tensor  # []
    ctx: Any = None

    @classmethod
    def make(cls, device: torch.device, seed: int) -> World:
        def values(*shape: int) -> Tensor:
            return (torch.randint(-8, 9, shape, generator=g) / 8.0).to(device)

        g = torch.Generator().manual_seed(seed)
        return cls(
            values(WIDTH, WIDTH),
            values(WIDTH),
            values(MOST_ROWS, WIDTH),
            values(SLOTS, WIDTH),
            torch.zeros((), device=device),
        )

    def tensors(self) -> list[Tensor]:
        return [getattr(self, f.name) for f in fields(self) if f.name != "ctx"]

    def clone(self) -> World:
        """An independent world of the same values."""
        return World(*(t.clone() for t in self.tensors()))

    def restore(self, other: World) -> None:
        """Take over the values of another world, in place."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)

    def context(self, seed: int) -> Context:
        """The context of a forward, the same for the same seed. It is this world's from now on."""
        g, device = torch.Generator().manual_seed(seed), self.cache.device
        slots = torch.randperm(SLOTS, generator=g).to(device)
        deep, shift = ((torch.randint(-8, 9, (WIDTH,), generator=g) / 8.0).to(device) for _ in range(2))
        scale = (seed % 5 - 2) / 2.0
        self.ctx = Context(scale, shift, self.cache, {"slots": slots, "none": None, "deep": deep})
        return self.ctx


def differs(a: Tensor, b: Tensor) -> bool:
    """Whether any bit differs, a NaN being equal to any NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    a, b = a.detach().resolve_neg().contiguous(), b.detach().resolve_neg().contiguous()
    if not a.is_floating_point():
        return not torch.equal(a, b)
    same = a.view(_BITS[a.element_size()]) == b.view(_BITS[b.element_size()]) if a.dim() else a == b
    return not bool((same | (a.isnan() & b.isnan())).all())


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
