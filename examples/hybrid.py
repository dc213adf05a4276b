"""A trunk in a page: gated delta-rule layers with a short convolution, attention layers, and a quantised KV cache.

The prime graph of it is compared with its eager form, then 8 tokens are generated. `segue check prime
examples.hybrid:build` runs the whole gate. Recurrences follow "Gated Delta Networks" (arXiv 2412.06464), chunked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import segue
from segue.prime import cut_here

CHUNK, WIDTH = 16, 4  # rows solved at once, rows that a convolution sees


@dataclass
class Packing:
    """Packed prompts as a batch and back. ``valid`` [R, T]: which of a prompt's T rows are real."""

    n: Tensor  # [R] tokens of each prompt
    valid: Tensor
    source: Tensor  # [R, T] the packed row of each batch row; any row where there is none
    request: Tensor  # [T] the prompt of each packed row
    place: Tensor  # [T] and its row there

    @staticmethod
    def of(cu: Tensor, rows: int) -> Packing:
        """``cu`` int32 [R + 1]: where each prompt begins among ``rows`` packed rows, and where the last one ends."""
        t, cu = torch.arange(rows, device=cu.device), cu.long()
        n = cu[1:] - cu[:-1]
        request = (t[:, None] >= cu[None, 1:-1]).sum(1)
        return Packing(n, t < n[:, None], (cu[:-1, None] + t).clamp(max=rows - 1), request, t - cu[request])

    def batch(self, x: Tensor) -> Tensor:
        """[T, ...] to [R, T, ...]."""
        return x[self.source]

    def packed(self, x: Tensor) -> Tensor:
        """[R, T, ...] to [T, ...]."""
        return x[self.request, self.place]


@dataclass
class DeltaCache:
    """What a delta layer keeps between forwards."""

    conv: Tensor  # [requests, WIDTH - 1, channels]: the last inputs of the convolution
    state: Tensor  # [requests, heads, size, size] float32


@dataclass
class AttentionCache:
    """Quantised keys and values of one attention layer, with a scale for each row and head."""

    k: Tensor  # [rows, heads, size] int8 or fp8
    v: Tensor
    k_scale: Tensor  # [rows, heads] float32
    v_scale: Tensor


@dataclass
class Cache:
    """A session's cache, or a scratch cache. ``length``: the tokens in it."""

    layers: list[DeltaCache | AttentionCache]
    length: int = 0


class Delta(nn.Module):
    """Gated delta rule: S = a (1 - b k k') S + b k v', read by q. A pad has a = 1 and b = 0, which leaves S alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.inner = nn.Linear(width, 3 * width, bias=False)
        self.conv = nn.Parameter(torch.randn(WIDTH, 3 * width) / WIDTH)
        self.gates = nn.Linear(width, 2 * heads)
        self.outer = nn.Linear(width, width, bias=False)

    def new_cache(self, rows: int, requests: int, device: torch.device) -> DeltaCache:
        """Zeros: the state before the first token."""
        h, d = self.heads, self.size
        conv = torch.zeros(requests, WIDTH - 1, 3 * h * d, dtype=self.conv.dtype, device=device)
        return DeltaCache(conv, torch.zeros(requests, h, d, d, device=device))

    def forward(self, x: Tensor, packing: Packing, cache: DeltaCache) -> Tensor:
        """[T, D] to [T, D], with the cache brought to the end of each prompt."""
        x = packing.batch(x)
        inner = torch.cat((cache.conv, self.inner(x)), 1)  # [R, WIDTH - 1 + T, 3 D]
        cache.conv.copy_(self.window(inner, packing.n))
        q, k, v = self._convolved(inner, x.shape[1])
        gate, beta = self._gates(x)
        gate, beta = self.mask_pads(gate, beta, packing.valid)
        out, state = _chunked(q, k, v, gate, beta, cache.state)
        cache.state.copy_(state)
        return packing.packed(self._merged(out, x))

    def window(self, inner: Tensor, n: Tensor) -> Tensor:
        """The last inputs before row n, where the prompt ends, not where the bucket does."""
        at = n[:, None] + torch.arange(WIDTH - 1, device=n.device)
        return inner.gather(1, at[..., None].expand(-1, -1, inner.shape[2]))

    def mask_pads(self, gate: Tensor, beta: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Gates [R, H, T] that are 0 in padded rows: log a = 0 means a = 1."""
        keep = valid[:, None].to(gate.dtype)
        return gate * keep, beta * keep

    def step(self, x: Tensor, cache: DeltaCache) -> Tensor:
        """One token [1, D]."""
        inner = torch.cat((cache.conv, self.inner(x)[None]), 1)
        cache.conv.copy_(inner[:, 1:])
        q, k, v = (t[:, :, 0] for t in self._convolved(inner, 1))
        gate, beta = (t[..., 0] for t in self._gates(x[None]))
        state = gate.exp()[..., None, None] * cache.state
        update = beta[..., None] * (v - (k[..., None, :] @ state)[..., 0, :])
        cache.state.copy_(state + k[..., :, None] * update[..., None, :])
        return self._merged(q[..., None, :] @ cache.state, x[None])[0]

    def _convolved(self, inner: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [R, H, T, d] in float32."""
        mixed = F.silu(sum(inner[:, i : i + rows] * self.conv[i] for i in range(WIDTH)))
        q, k, v = mixed.float().view(*mixed.shape[:2], 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """log a, which is negative, and b in (0, 1), each [R, H, T]."""
        a, b = self.gates(x).float().transpose(1, 2).chunk(2, 1)
        return -F.softplus(a), b.sigmoid()

    def _merged(self, out: Tensor, x: Tensor) -> Tensor:
        return self.outer(out.transpose(1, 2).flatten(2).to(x.dtype))


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over T rows, CHUNK at a time. Returns what q read [R, H, T, d], and the state after the last
    row."""
    rows = q.shape[2]
    more = -rows % CHUNK
    q, k, v = (F.pad(t, (0, 0, 0, more)).unflatten(2, (-1, CHUNK)) for t in (q, k, v))
    g, beta = (F.pad(t, (0, more)).unflatten(2, (-1, CHUNK)) for t in (g, beta))
    total = g.cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    power = -(beta[..., None] * decay * (k @ k.mT)).tril(-1)
    solve = torch.eye(CHUNK, device=q.device) + power  # the inverse of 1 - power: power is nilpotent, so this ends
    for _ in range(CHUNK.bit_length() - 2):
        power = power @ power
        solve = solve + solve @ power
    attend, ends = decay * (q @ k.mT), (total[..., -1:] - total).exp()
    outs = []
    for c in range(q.shape[2]):
        from_state = total[:, :, c, :, None].exp() * (k[:, :, c] @ state)
        update = solve[:, :, c] @ (beta[:, :, c, :, None] * (v[:, :, c] - from_state))
        outs.append(total[:, :, c, :, None].exp() * (q[:, :, c] @ state) + attend[:, :, c] @ update)
        state = total[:, :, c, -1, None, None].exp() * state + (k[:, :, c] * ends[:, :, c, :, None]).mT @ update
    return torch.cat(outs, 2)[:, :, :rows], state


class Attention(nn.Module):
    """Causal attention that reads keys and values as the cache keeps them."""

    def __init__(self, width: int, heads: int, kept: torch.dtype) -> None:
        super().__init__()
        self.heads, self.size, self.kept = heads, width // heads, kept
        self.inner, self.outer = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def new_cache(self, rows: int, requests: int, device: torch.device) -> AttentionCache:
        """Room for ``rows`` tokens."""
        k, v = (torch.zeros(rows, self.heads, self.size, dtype=self.kept, device=device) for _ in range(2))
        return AttentionCache(k, v, *(torch.zeros(rows, self.heads, device=device) for _ in range(2)))

    def forward(self, x: Tensor, packing: Packing, cache: AttentionCache, rotary: Tensor) -> Tensor:
        """[T, D] to [T, D], with keys and values kept in the first T rows of the cache."""
        q, k, v = self._heads(x, rotary[packing.place])
        self._keep(cache, k, v, 0)
        k, v = self._kept(cache, x.shape[0], x.dtype)
        q, k, v = (packing.batch(t).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # so no row sees the pads after it
        return self.outer(packing.packed(out.transpose(1, 2)).flatten(1))

    def step(self, x: Tensor, cache: AttentionCache, length: int, rotary: Tensor) -> Tensor:
        """One token [1, D] after ``length`` others."""
        q, k, v = self._heads(x, rotary[length : length + 1])
        self._keep(cache, k, v, length)
        k, v = self._kept(cache, length + 1, x.dtype)
        out = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)))
        return self.outer(out[0].transpose(0, 1).flatten(1))

    def _heads(self, x: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.inner(x).view(x.shape[0], 3, self.heads, self.size).unbind(1)
        return _rotated(q, rotary), _rotated(k, rotary), v

    def _keep(self, cache: AttentionCache, k: Tensor, v: Tensor, at: int) -> None:
        most = torch.iinfo(self.kept).max if self.kept is torch.int8 else torch.finfo(self.kept).max
        for t, kept, scales in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
            scale = t.float().abs().amax(-1).clamp(min=1e-6) / most
            whole = t.float() / scale[..., None]
            kept[at : at + t.shape[0]].copy_(whole.round() if self.kept is torch.int8 else whole)
            scales[at : at + t.shape[0]].copy_(scale)

    def _kept(self, cache: AttentionCache, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k = cache.k[:rows].float() * cache.k_scale[:rows, :, None]
        return k.to(dtype), (cache.v[:rows].float() * cache.v_scale[:rows, :, None]).to(dtype)


def _rotated(x: Tensor, rotary: Tensor) -> Tensor:
    even, odd = x.float().chunk(2, -1)
    cos, sin = rotary[:, None].chunk(2, -1)
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), -1).to(x.dtype)


class Hybrid(nn.Module):
    """The trunk. ``kinds``: one letter a layer, d for delta, a for attention."""

    min_tokens = 1
    delta, attention = Delta, Attention

    def __init__(self, width: int = 32, heads: int = 2, kinds: str = "dad", vocabulary: int = 61,
                 longest: int = 1024, kept: torch.dtype = torch.int8) -> None:  # fmt: skip
        super().__init__()
        self.kinds = kinds
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            self.delta(width, heads) if kind == "d" else self.attention(width, heads, kept) for kind in kinds
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(len(kinds) + 1))
        self.vocabulary = nn.Linear(width, vocabulary, bias=False)
        angles = torch.arange(longest)[:, None] / 10000 ** (torch.arange(0, width // heads, 2) * heads / width)
        self.register_buffer("rotary", torch.cat((angles.cos(), angles.sin()), -1))

    def embed(self, tokens: Tensor) -> Tensor:
        """Ids [n] to [n, D]."""
        return self.tokens(tokens)

    def new_cache(self, rows: int, requests: int = 1) -> Cache:
        """A cache with room for ``rows`` tokens of all requests together."""
        return Cache([layer.new_cache(rows, requests, self.rotary.device) for layer in self.layers])

    def reset(self, cache: Cache) -> None:
        """Zero the recurrent states. Keys and values are written before they are read."""
        for layer in cache.layers:
            if isinstance(layer, DeltaCache):
                layer.conv.zero_()
                layer.state.zero_()

    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Cache) -> Tensor:
        """[rows, D] to [rows, D], all layers, into ``cache``."""
        packing = Packing.of(cu_seqlens, x.shape[0])
        for layer, norm, kept in zip(self.layers, self.norms, cache.layers, strict=False):
            also = (self.rotary,) if isinstance(kept, AttentionCache) else ()
            x = x + layer(norm(x), packing, kept, *also)
            cut_here()
        return self.norms[-1](x)

    def head(self, last: Tensor) -> Tensor:
        """[requests, D] to logits [requests, V]."""
        return self.vocabulary(last)

    def state(self, cache: Cache) -> dict[str, segue.Rows | segue.Whole]:
        """What is copied out: the rows of attention caches, and delta states whole."""
        found: dict[str, segue.Rows | segue.Whole] = {}
        for i, layer in enumerate(cache.layers):
            of_rows = isinstance(layer, AttentionCache)
            found |= {f"{i}.{k}": segue.Rows(t) if of_rows else segue.Whole(t) for k, t in vars(layer).items()}
        return found

    def get_length(self, session: Cache) -> int:
        """Tokens in the session."""
        return session.length

    def set_length(self, session: Cache, n: int) -> None:
        """Say that the session holds ``n`` tokens."""
        session.length = n

    def step(self, token: Tensor, session: Cache) -> Tensor:
        """One token [1] to logits [1, V], extending the session."""
        x = self.embed(token)
        for layer, norm, kept in zip(self.layers, self.norms, session.layers, strict=False):
            also = (session.length, self.rotary) if isinstance(kept, AttentionCache) else ()
            x = x + layer.step(norm(x), kept, *also)
        session.length += 1
        return self.head(self.norms[-1](x))


def build(device: str = "cuda" if torch.cuda.is_available() else "cpu") -> Hybrid:
    """The trunk with random weights, the same ones each time."""
    torch.manual_seed(0)
    return Hybrid().to(device).eval().requires_grad_(False)


def main() -> None:
    """Compare a prime graph with its reference, and generate from the sessions that it filled."""
    trunk = build()
    device = trunk.rotary.device.type
    prime = segue.PrimeGraph(trunk, bucket=64, device="emulator" if device == "cpu" else device)
    for n in (5, 64, 23):
        prompt, session = torch.arange(n, device=device) % 61, trunk.new_cache(rows=128)
        result = prime.run(prompt, session)
        same = torch.equal(result.logits, prime.reference(prompt).logits)
        text, logits = [], result.logits
        for _ in range(8):
            text.append(int(logits.argmax(-1)))
            with torch.inference_mode():
                logits = trunk.step(torch.tensor(text[-1:], device=device), session)
        print(f"{n} tokens of {prime.bucket}: equals the eager trunk: {same}; goes on {text}")


if __name__ == "__main__":
    main()
