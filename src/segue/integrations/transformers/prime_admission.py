"""Fresh prompts of an accelerated model: which forwards a prime graph may serve, and the strategy that serves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from segue.integrations.transformers import names
from segue.integrations.transformers.attention import LiveContext
from segue.integrations.transformers.compiled_layers import CompiledLayers
from segue.integrations.transformers.prime_trunk import ModelTrunk, not_causal
from segue.prime.prime_strategy import PrimeStrategy


def strategy(
    model: Any, decoder: Any, forward: Callable[..., Any], rows: int, layers: CompiledLayers | None = None
) -> PrimeStrategy:
    """Prime for the decoder of ``model``, whose own forward is ``forward``, in buckets of up to ``rows`` rows.

    Raises:
        UsageError: the model has no prime graphs.
    """
    return PrimeStrategy(ModelTrunk(model, decoder=decoder, forward=forward, layers=layers), _prompts, most_rows=rows)


def is_fresh(ctx: LiveContext, positions: Tensor | None, decoder: Any) -> bool:
    """Whether a forward is one whole prompt for an empty cache of growing layers, at its usual positions.

    A cache of a subclass may do something of its own in ``update()``, which a copy-out doesn't call. And without causal
    attention padded rows would reach real ones.

    ``positions``: [1, n] as the caller gave them. Looking at them waits for the device, which has nothing to do yet.
    """
    if ctx.batch != 1 or not is_empty(ctx.cache, len(decoder.layers)) or ctx.implementation.name != "sdpa":
        return False
    if not_causal(decoder) is not None:
        return False
    # Without a mask of the caller's, full attention at the usual positions has none but the causal one.
    if ctx.masked and {*map(type, ctx.masks)} - {type(None)}:
        return False
    return are_usual(positions, ctx.length)


def is_empty(cache: Any, layers: int) -> bool:
    """Whether a cache has no tokens, and as yet no layers or ``layers`` ones that keep every token."""
    if type(cache) is not names.cache_type() or cache.get_seq_length():
        return False
    return len(cache.layers) in (0, layers) and not {*map(type, cache.layers)} - {names.full_cache_layer()}


def are_usual(positions: Tensor | None, n: int) -> bool:
    """Whether ``positions`` [1, n] are those that a prompt of ``n`` tokens has without any being given."""
    return positions is None or torch.equal(positions[0], torch.arange(n, device=positions.device))


def _prompts(ctx: Any) -> list[tuple[int, Any]] | None:
    """The one prompt of a forward that was found fresh when its context was made, which is once for each call."""
    return [(ctx.length, ctx.cache)] if isinstance(ctx, LiveContext) and ctx.fresh else None
