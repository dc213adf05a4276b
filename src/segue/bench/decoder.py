"""Models of Qwen3's shape with random weights: transformers' own, and a decoder's body in plain torch.

The body has Qwen3's ops, with attention as the break point of each layer, no embedding and no head: it is what the graphs
hold when a language model is served.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segue.capture import break_point


@dataclass(frozen=True)
class Shape:
    """The size of a model. The default is Qwen3-0.6B's, whose body has 309 parameters."""

    layers: int = 28
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 3072
    vocabulary: int = 151936  # of a language model; a body has none
    tied: bool = True  # a language model's head shares its weight with the embedding

    def small(self) -> Shape:
        """The same with one layer."""
        return dataclasses.replace(self, layers=1)

    def model(self, dtype: torch.dtype, device: torch.device) -> Any:
        """A transformers ``Qwen3ForCausalLM`` with seeded random weights, in eval mode."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            num_hidden_layers=self.layers, hidden_size=self.hidden, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, head_dim=self.head_dim, intermediate_size=self.intermediate,
            vocab_size=self.vocabulary, max_position_embeddings=40960, tie_word_embeddings=self.tied,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
        return model.to(dtype).eval()


# Qwen3's sizes by the names of its models.
SHAPES = {
    "0.6B": Shape(),
    "1.7B": Shape(hidden=2048, intermediate=6144),
    "8B": Shape(layers=36, hidden=4096, heads=32, intermediate=12288, tied=False),
}


@break_point(trim=("q", "k", "v"))
def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one prompt. ``q`` [T, heads, D], ``k`` and ``v`` [T, kv_heads, D] -> [T, heads * D]."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1).flatten(1)


class Norm(nn.Module):
    """Root mean square norm over the last dimension, in fp32, one op at a time as models are usually written."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same, in the dtype of ``x``."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed: Tensor = self.weight * wide.to(x.dtype)
        return normed


class Layer(nn.Module):
    """Attention and a gated MLP, each with a norm before it and a residual around it."""

    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(attend)

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.q = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.gate = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.up = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.down = nn.Linear(s.intermediate, s.hidden, bias=False)
        self.before_attention, self.before_mlp = Norm(s.hidden), Norm(s.hidden)
        self.q_norm, self.k_norm = Norm(s.head_dim), Norm(s.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` [T, hidden], ``cos`` and ``sin`` [T, 1, head_dim] -> [T, hidden]."""
        h, d = self.before_attention(x), self.shape.head_dim
        q = _rotated(self.q_norm(self.q(h).unflatten(-1, (-1, d))), cos, sin)
        k = _rotated(self.k_norm(self.k(h).unflatten(-1, (-1, d))), cos, sin)
        x = x + self.o(self.attend(q, k, self.v(h).unflatten(-1, (-1, d))))
        h = self.before_mlp(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Decoder(nn.Module):
    """The body: ``forward(x [T, hidden], positions [T] int64) -> [T, hidden]``."""

    frequencies: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)
        steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self.register_buffer("frequencies", 1.0 / 1e6**steps, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T, hidden] after the last norm."""
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder with seeded random weights that keep activations near 1, in eval mode."""
    torch.manual_seed(0)
    with torch.device(device):
        decoder = Decoder(shape)
    for p in decoder.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=1.0 / math.sqrt(p.shape[1]))
    frequencies = decoder.frequencies
    decoder = decoder.to(dtype)
    decoder.frequencies = frequencies
    return decoder.eval().requires_grad_(False)


def _rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = t.shape[-1] // 2
    turned = torch.cat((-t[..., half:], t[..., :half]), dim=-1)
    return t * cos + turned * sin
