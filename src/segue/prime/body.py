"""What a prime graph holds, as a function, and the fixed inputs it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture import BreakableCapture
from segue.errors import UsageError
from segue.prime.requests import Batch
from segue.prime.trunk import Trunk


class Offsets:
    """``cu_seqlens``, int32 [requests + 1], at a fixed address."""

    def __init__(self, bucket: int, requests: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.cu_seqlens = torch.zeros(requests + 1, dtype=torch.int32, device=device)
            # Offsets are copied from here: a number from the host would have to travel through pinned memory.
            numbers = torch.arange(bucket + 1, dtype=torch.int32, device=device)
            self._numbers = list(numbers.split(1))
            self._slots = list(self.cu_seqlens.split(1))[1:]
        self._version, self._offsets = 0, [0] * (requests + 1)

    def fill(self, offsets: Sequence[int]) -> None:
        """Take where each request begins, and where the last one ends; the first number is 0."""
        if offsets == self._offsets and self.cu_seqlens._version == self._version:
            return
        _torch.foreach_copy(self._slots, [self._numbers[at] for at in offsets[1:]])
        self._version, self._offsets = self.cu_seqlens._version, list(offsets)

    def check(self, name: str) -> None:
        """Raise UsageError if a forward has written them since. ``name``: of the graph."""
        if self.cu_seqlens._version != self._version:
            raise UsageError(f"{name}: the trunk's forward writes cu_seqlens, which other layers read. Let it work on a copy")


class Inputs:
    """At fixed addresses: the embedded tokens ``x`` [bucket, D], zero past the real rows, and their offsets."""

    def __init__(self, like: Tensor, bucket: int, requests: int) -> None:
        with torch.inference_mode(False):
            self.x = torch.zeros(bucket, *like.shape[1:], dtype=like.dtype, device=like.device)
        self.offsets = Offsets(bucket, requests, like.device)
        self._bucket, self._requests = bucket, requests
        self._dirty = 0  # rows from here on are zero
        self._written = False  # the graph writes x, so that its tail is never known to be zero

    def fill(self, rows: Sequence[Tensor], batch: Batch) -> list[int]:
        """Take the embedded tokens of each request [n, D]. Returns the offsets."""
        offsets = batch.offsets(self._requests)
        total, start = offsets[-1], 0
        dirty = self._bucket if self._written else self._dirty
        self._dirty = max(dirty, total)
        for part, n in zip(rows, batch.lengths, strict=True):
            if n:
                self.x.narrow(0, start, n).copy_(part)
                start += n
        if dirty > total:
            self.x.narrow(0, total, dirty - total).zero_()
        self._dirty = total
        self.offsets.fill(offsets)
        return offsets

    def look_at(self, capture: BreakableCapture) -> None:
        """Learn from a capture whether its graphs write ``x``."""
        x = _torch.storage_key(self.x)
        self._written = any(e.written and _torch.storage_key(e.tensor) == x for e in capture.externals)


def embed(trunk: Trunk, batch: Batch, name: str, like: Tensor | None = None) -> list[Tensor]:
    """The tokens of each request as rows [n, D]; of the dtype and width of ``like``.

    Raises:
        UsageError: the trunk's embedding has another shape, dtype or device.
    """
    found = []
    for ids, n in zip(batch.ids, batch.lengths, strict=True):
        rows = trunk.embed(ids) if n else ids.new_empty(0)
        if n:
            fits = isinstance(rows, Tensor) and rows.dim() >= 2 and rows.shape[0] == n
            if not fits or (
                like is not None
                and (rows.shape[1:], rows.dtype, rows.device) != (like.shape[1:], like.dtype, like.device)
            ):
                got = (
                    f"{rows.dtype} {tuple(rows.shape)} on {rows.device}"
                    if isinstance(rows, Tensor)
                    else type(rows).__qualname__
                )
                was = (
                    f", like {like.dtype} [n, {', '.join(map(str, like.shape[1:]))}] on {like.device} at capture"
                    if like is not None
                    else ""
                )
                raise UsageError(
                    f"{name}: trunk.embed() of {n} tokens gave {got}; it must give one row a token [n, D]{was}"
                )
        found.append(rows)
    return found


def body(trunk: Trunk, x: Tensor, cu_seqlens: Tensor, cache: Any, name: str) -> tuple[Tensor, Tensor]:
    """Logits [requests, V] and the last hidden states [requests, H] of prompts on a fresh ``cache``. On the device
    alone.

    Raises:
        UsageError: the trunk gives other shapes.
    """
    hidden = trunk.forward(x, cu_seqlens, cache)
    if not isinstance(hidden, Tensor) or hidden.dim() != 2 or hidden.shape[0] != x.shape[0]:
        raise UsageError(f"{name}: trunk.forward() gave {_shown(hidden)} for {x.shape[0]} rows; it must give [rows, H]")
    last = hidden.index_select(0, (cu_seqlens[1:] - 1).clamp(min=0))
    logits = trunk.head(last)
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != last.shape[0]:
        raise UsageError(
            f"{name}: trunk.head() gave {_shown(logits)} for {last.shape[0]} rows; it must give [requests, V]"
        )
    return logits, last


@dataclass(frozen=True)
class Reference:
    """What a run must equal: logits [requests, V], hidden [requests, H], and the cache that the forward filled.

    ``offsets``: where each request's rows begin in the cache, and where the last ones end.
    """

    logits: Tensor
    hidden: Tensor
    cache: Any
    offsets: list[int]


def reference(trunk: Trunk, batch: Batch, rows: int, requests: int, name: str, tail: Tensor | None = None) -> Reference:
    """The trunk run eagerly at ``rows`` rows on a fresh cache: no graph, no reset, no copy.

    ``tail``: what stands in the padded rows [rows - total, D] instead of zeros; it must change nothing.
    """
    with torch.inference_mode():
        parts = embed(trunk, batch, name)
        like = next(part for part, n in zip(parts, batch.lengths, strict=True) if n)
        inputs = Inputs(like, rows, requests)
        inputs.fill(parts, batch)
        if tail is not None:
            inputs.x[batch.total :].copy_(tail)
        with torch.inference_mode(False):
            cache = trunk.new_cache(rows, requests)
        logits, hidden = body(trunk, inputs.x, inputs.offsets.cu_seqlens, cache, name)
        return Reference(logits, hidden, cache, batch.offsets(requests))


def _shown(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__qualname__}"
