"""Caches seen from outside: every tensor in them, by path, whatever their trunk says its state is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue.capture.context_paths import children, is_plain

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors(cache: Any) -> dict[str, Tensor]:
    """Path to tensor, for each tensor that a cache holds: ``layers[1].k``."""
    found: dict[str, Tensor] = {}
    _walk(cache, "", found, {})
    return found


def _walk(value: Any, path: str, found: dict[str, Tensor], seen: dict[int, Any]) -> None:
    if isinstance(value, Tensor):
        found[path or "the cache"] = value
    elif not is_plain(value) and id(value) not in seen:
        seen[id(value)] = value
        for (kind, key), child in children(value):
            _walk(child, f"{path}.{key}".lstrip(".") if kind == "attr" else f"{path}[{key!r}]", found, seen)


@dataclass(frozen=True)
class Part:
    """How one tensor of a cache of all requests is found again in a session, told by shapes alone.

    ``dim``: the dimension along which it has rows (``rows``) or requests; None if the two are equal in shape.
    """

    dim: int | None
    rows: bool

    @staticmethod
    def of(cache: Tensor, session: Tensor, requests: int) -> Part | None:
        """None if the shapes don't tell."""
        if cache.shape == session.shape:
            return Part(None, False)
        if requests > 1 and cache.shape[1:] == session.shape:
            return Part(0, False)
        if cache.dim() != session.dim():
            return None
        unequal = [d for d in range(cache.dim()) if cache.shape[d] != session.shape[d]]
        if len(unequal) != 1:
            return None
        dim = unequal[0]
        return Part(dim, not (requests > 1 and cache.shape[dim] == requests and session.shape[dim] == 1))

    def cut(self, cache: Tensor, request: int, start: int, n: int) -> Tensor:
        """A request's share of a cache of all requests."""
        if self.dim is None:
            return cache
        return cache.narrow(self.dim, start, n) if self.rows else cache.narrow(self.dim, request, 1)

    def head(self, session: Tensor, n: int) -> Tensor:
        """The same in a session."""
        return session.narrow(self.dim, 0, n) if self.rows and self.dim is not None else session

    def past(self, session: Tensor, n: int) -> Tensor | None:
        """What lies beyond the prompt in a session; None where there is no such thing."""
        if not self.rows or self.dim is None:
            return None
        return session.narrow(self.dim, n, session.shape[self.dim] - n)


def poison(t: Tensor) -> None:
    """Every bit set: NaN in floats, -1 in integers."""
    with torch.inference_mode():
        bits(t).fill_(-1 if t.element_size() > 1 else 255)


def bits(t: Tensor) -> Tensor:
    """``t`` as integers of the same width."""
    return torch.view_as_real(t).view(torch.int64) if t.element_size() > 8 else t.view(_BITS[t.element_size()])


def difference(got: Tensor, want: Tensor) -> str | None:
    """How two tensors differ in their bits, or None."""
    if got.dtype is not want.dtype or (got.shape != want.shape and got.numel() != want.numel()):
        return f"{got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
    got, want = got.detach().reshape(want.shape), want.detach()
    unequal = bits(got.contiguous()) != bits(want.contiguous())
    count = int(unequal.sum())
    if not count:
        return None
    at = tuple(unequal.nonzero()[0].tolist())[: got.dim()]
    found, wanted = got[at].tolist(), want[at].tolist()
    return f"{count} of {unequal.numel()} values differ, first at {list(at)}: {found} instead of {wanted}"


def distance(got: Tensor, want: Tensor) -> float:
    """The largest difference over the largest size; for 8-bit integers, in steps of 127. NaN counts as infinite."""
    if not got.numel():
        return 0.0
    a, b = got.detach().reshape(want.shape).double(), want.detach().double()
    scale = 127.0 if not want.dtype.is_floating_point else max(float(b.abs().max()), 1e-6)
    off = float((a - b).abs().max()) / scale
    return off if off == off else float("inf")
