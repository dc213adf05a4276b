"""The eager run that a replay of a prime graph must equal, and the steps around the trunk that both share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue.errors import UsageError
from segue.prime.fixed_inputs import Inputs
from segue.prime.requests import Batch
from segue.prime.trunk import Trunk


def embed(trunk: Trunk, batch: Batch, name: str, like: Tensor | None = None) -> list[Tensor]:
    """The embedded tokens of each request [n, D], of the width, dtype and device of ``like`` where it is given.

    Raises:
        UsageError: the trunk's embedding gave another shape, dtype or device.
    """
    found = []
    for ids, n in zip(batch.ids, batch.lengths, strict=True):
        rows = trunk.embed(ids) if n else ids.new_empty(0)
        if n:
            _check_embedded(rows, n, name, like)
        found.append(rows)
    return found


def logits_and_hidden(trunk: Trunk, x: Tensor, cu_seqlens: Tensor, cache: Any, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [requests, V] and hidden states [requests, H] of the last real rows of prompts ``x`` [rows, D] on a fresh ``cache``,
    and the hidden states [rows, H] of all rows. Nothing here reads the host, so that a graph can hold it.

    Raises:
        UsageError: the trunk gave other shapes.
    """
    hidden = trunk.forward(x, cu_seqlens, cache)
    if not isinstance(hidden, Tensor) or hidden.dim() != 2 or hidden.shape[0] != x.shape[0]:
        raise UsageError(f"{name}: trunk.forward() gave {_shown(hidden)} for {x.shape[0]} rows; it must give [rows, H]")
    last = hidden.index_select(0, (cu_seqlens[1:] - 1).clamp(min=0))
    return logits_of(trunk, last, name), last, hidden


def logits_of(trunk: Trunk, hidden: Tensor, name: str) -> Tensor:
    """Logits [n, V] of hidden states [n, H].

    Raises:
        UsageError: the trunk's head gave another shape.
    """
    logits = trunk.head(hidden)
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != hidden.shape[0]:
        raise UsageError(f"{name}: trunk.head() gave {_shown(logits)} for {hidden.shape[0]} rows; it must give [requests, V]")
    return logits


@dataclass(frozen=True)
class Reference:
    """What a run must equal: logits [requests, V], hidden [requests, H], or both of all real rows, and the cache that the forward
    filled.

    ``offsets``: where each request's rows begin in the cache, and where the last one's end.
    """

    logits: Tensor
    hidden: Tensor
    cache: Any
    offsets: list[int]


def reference(
    trunk: Trunk, batch: Batch, rows: int, requests: int, name: str, tail: Tensor | None = None, every: bool = False
) -> Reference:
    """The trunk run eagerly at ``rows`` rows on a fresh cache: no graph, no reset, no copy.

    ``every``: logits and hidden states are those of all real rows, one prompt after the other, and not of each prompt's last.
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
        logits, last, hidden = logits_and_hidden(trunk, inputs.x, inputs.offsets.cu_seqlens, cache, name)
        if every:
            last = hidden[: batch.total].clone()
            logits = logits_of(trunk, last, name)
        return Reference(logits, last, cache, batch.offsets(requests))


def _check_embedded(rows: Any, n: int, name: str, like: Tensor | None) -> None:
    fits = isinstance(rows, Tensor) and rows.dim() >= 2 and rows.shape[0] == n
    if fits and (like is None or (rows.shape[1:], rows.dtype, rows.device) == (like.shape[1:], like.dtype, like.device)):
        return
    got = f"{rows.dtype} {tuple(rows.shape)} on {rows.device}" if isinstance(rows, Tensor) else type(rows).__qualname__
    was = ""
    if like is not None:
        was = f", like {like.dtype} [n, {', '.join(map(str, like.shape[1:]))}] on {like.device} at capture"
    raise UsageError(f"{name}: trunk.embed() of {n} tokens gave {got}; it must give one row a token [n, D]{was}")


def _shown(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__qualname__}"
