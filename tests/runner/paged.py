"""A small decoder on paged keys and values, as an engine has one: its attention is one break point for every kind of batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from segue import break_point, current_forward_ctx

HEADS, SIZE, PAGE, PAGES = 2, 8, 4, 16
WIDTH = HEADS * SIZE


@dataclass
class Batch:
    """What an engine hands on beside the inputs."""

    scale: float = 0.3
    label: str = ""
    bias: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)


class Paged(torch.nn.Module):
    """``(x [N, W], lengths [N], table [N, P]) -> [N, W]``: each row is the token after ``lengths - 1`` others of its request.

    The last row of the pages is what padded requests, of length 0, write to and read.
    """

    def __init__(self, device: torch.device, layers: int = 2) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).mul_(0.2).to(device)

        self.qkv = torch.nn.ParameterList([weight(WIDTH, 3 * WIDTH) for _ in range(layers)])
        self.out = torch.nn.ParameterList([weight(WIDTH, WIDTH) for _ in range(layers)])
        self.requires_grad_(False).eval()
        rows = PAGES * PAGE + 1
        self.keys = [torch.zeros(rows, HEADS, SIZE, device=device) for _ in range(layers)]
        self.values = [torch.zeros(rows, HEADS, SIZE, device=device) for _ in range(layers)]

    def forward(self, x: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        for at, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = (x @ qkv).chunk(3, -1)
            x = x + self.attend(q, k, v, at, lengths, table) @ out
        return x

    @break_point
    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: int, lengths: Tensor, table: Tensor) -> Tensor:
        n = q.shape[0]
        batch = current_forward_ctx()
        scale, bias = (None, None) if batch is None else (batch.scale, batch.bias)
        last = lengths.long().clamp(min=1) - 1
        slot = table.long().gather(1, (last // PAGE)[:, None])[:, 0] * PAGE + last % PAGE
        slot = torch.where(lengths > 0, slot, PAGES * PAGE)
        self.keys[at].index_copy_(0, slot, k.reshape(n, HEADS, SIZE))
        self.values[at].index_copy_(0, slot, v.reshape(n, HEADS, SIZE))
        rows = (table.long()[:, :, None] * PAGE + torch.arange(PAGE, device=q.device)).flatten(1)
        rows = torch.where((lengths > 0)[:, None], rows, PAGES * PAGE)
        seen = torch.arange(rows.shape[1], device=q.device)[None] < lengths.clamp(min=1)[:, None]
        keys, values = (t[rows].transpose(1, 2) for t in (self.keys[at], self.values[at]))
        out = F.scaled_dot_product_attention(
            q.reshape(n, HEADS, 1, SIZE), keys, values, attn_mask=seen[:, None, None], scale=scale
        ).reshape(n, WIDTH)
        return out if bias is None else out + bias

    def pages(self) -> list[Tensor]:
        """Keys and values of all pages, copied, without the row of padded requests."""
        return [t[:-1].clone() for t in (*self.keys, *self.values)]


def batch(device: torch.device, n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of ``n`` requests of random lengths, each with two pages of its own."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, WIDTH, generator=draw)
    lengths = torch.randint(1, 2 * PAGE + 1, (n,), generator=draw, dtype=torch.int32)
    table = torch.randperm(PAGES, generator=draw)[: 2 * n].view(n, 2).int()
    return x.to(device), lengths.to(device), table.to(device)
