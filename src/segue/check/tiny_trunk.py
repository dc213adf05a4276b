"""A tiny dense decoder as a trunk, which ``segue check prime`` runs unless another trunk is named."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segue.prime import Rows, cut_here


@dataclass
class DenseCache:
    """``kv``: keys and values of all layers, [layers, 2, heads, rows, size]. ``length``: tokens held."""

    kv: Tensor
    length: int = 0


class Dense(nn.Module):
    """A decoder of attention and MLP layers with learned positions.

    D is ``width``, V is ``vocabulary``, and ``longest`` is the most tokens of a prompt.
    """

    min_tokens = 1

    def __init__(
        self, width: int = 32, heads: int = 2, layers: int = 2, vocabulary: int = 53, longest: int = 1024
    ) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.merge = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(layers)
        )
        self.norm, self.vocabulary = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [n] to embeddings [n, D]."""
        return self.tokens(tokens)  # type: ignore[no-any-return]

    def new_cache(self, rows: int, requests: int = 1) -> DenseCache:
        """A cache of zeros for ``rows`` tokens of all requests together."""
        weight = self.tokens.weight
        return DenseCache(weight.detach().new_zeros(len(self.qkv), 2, self.heads, rows, self.size))

    def reset(self, cache: DenseCache) -> None:
        """Do nothing, because the forward reads no row that it hasn't written."""

    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: DenseCache) -> Tensor:
        """Embeddings [rows, D] to hidden states [rows, D]; ``cu_seqlens`` [requests + 1] holds the requests' first rows."""
        rows = torch.arange(x.shape[0], device=x.device)
        request = (rows[:, None] >= cu_seqlens[1:]).sum(1)
        mine = (request[:, None] == request) & (rows[:, None] >= rows)
        x = x + self.positions(rows - cu_seqlens[request])
        for i in range(len(self.qkv)):
            q, k, v = self._heads(i, x)
            cache.kv[i, 0, :, : x.shape[0]].copy_(k)
            cache.kv[i, 1, :, : x.shape[0]].copy_(v)
            x = self._layer(i, x, F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mine))
            cut_here()
        return self.norm(x)  # type: ignore[no-any-return]

    def head(self, last: Tensor) -> Tensor:
        """Last hidden states [requests, D] to logits [requests, V]."""
        return self.vocabulary(last)  # type: ignore[no-any-return]

    def state(self, cache: DenseCache) -> dict[str, Rows]:
        """All keys and values, with one row a token along dimension 3."""
        return {"keys and values": Rows(cache.kv, dim=3)}

    def get_length(self, session: DenseCache) -> int:
        """How many tokens the session holds."""
        return session.length

    def set_length(self, session: DenseCache, n: int) -> None:
        """Record that the session holds ``n`` tokens now."""
        session.length = n

    def step(self, token: Tensor, session: DenseCache) -> Tensor:
        """One token id [1] to logits [1, V]; the session grows by the token."""
        at = session.length
        x = self.embed(token) + self.positions.weight[at : at + 1]
        for i in range(len(self.qkv)):
            q, k, v = self._heads(i, x)
            session.kv[i, 0, :, at : at + 1].copy_(k)
            session.kv[i, 1, :, at : at + 1].copy_(v)
            keys, values = session.kv[i, :, :, : at + 1]
            x = self._layer(i, x, F.scaled_dot_product_attention(q[None], keys[None], values[None]))
        session.length += 1
        return self.head(self.norm(x))

    def _heads(self, i: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [heads, rows, size]."""
        q, k, v = self.qkv[i](x).view(x.shape[0], 3, self.heads, self.size).permute(1, 2, 0, 3)
        return q, k, v

    def _layer(self, i: int, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.merge[i](attended[0].transpose(0, 1).flatten(1))
        return x + self.mlp[i](x)  # type: ignore[no-any-return]


def build(device: str = "cuda" if torch.cuda.is_available() else "cpu") -> Dense:
    """The trunk with random weights, which are the same at each call."""
    torch.manual_seed(0)
    return Dense().to(device).eval().requires_grad_(False)
