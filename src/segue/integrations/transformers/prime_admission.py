"""Fresh prompts of an accelerated model: which forwards a prime graph may serve, and the strategy that serves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segue import _torch_modes
from segue.errors import UsageError
from segue.integrations.transformers import names
from segue.integrations.transformers.attention import AttentionName, LiveContext
from segue.integrations.transformers.compiled_layers import CompiledLayers
from segue.integrations.transformers.decoder_parts import DecoderParts
from segue.integrations.transformers.prime_trunk import ModelTrunk, not_causal
from segue.integrations.transformers.probe import exact_products, first_difference, jittered, results
from segue.prime.prime_strategy import PrimeStrategy

_PROVEN, _PADDING = 7, 3  # tokens, and rows behind them


def strategy(
    model: Any, parts: DecoderParts, forward: Callable[..., Any], rows: int, layers: CompiledLayers | None = None
) -> PrimeStrategy:
    """Prime for the decoder of ``model``, whose own forward is ``forward``, in buckets of up to ``rows`` rows.

    Raises:
        UsageError: the model has no prime graphs.
    """
    trunk = ModelTrunk(model, parts=parts, forward=forward, layers=layers)
    _prove(trunk, parts, forward)
    return PrimeStrategy(trunk, _prompts, most_rows=rows)


def _prove(trunk: ModelTrunk, parts: DecoderParts, forward: Callable[..., Any]) -> None:
    """Run a short prompt through the trunk and through the untouched decoder.

    Raises:
        UsageError: they differ.
    """
    weight = parts.decoder.get_input_embeddings().weight
    ids = torch.randint(len(weight), (_PROVEN,), generator=torch.Generator().manual_seed(2), device="cpu").to(weight.device)
    rows = _PROVEN + (_PADDING if weight.dtype in (torch.float32, torch.float64) else 0)  # else rounding shows like a fault
    offsets = torch.tensor([0, _PROVEN], device=weight.device)
    with torch.no_grad(), jittered(parts.decoder), exact_products():
        scratch = trunk.new_cache(rows)
        x = torch.zeros(rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
        x[:_PROVEN] = trunk.embed(ids)
        hidden = trunk.forward(x, offsets, scratch)[None, :_PROVEN]
        cache = trunk.part(scratch, _PROVEN)
        out = forward(input_ids=ids[None], use_cache=True, return_dict=True)
        real = torch.ones(1, _PROVEN, dtype=torch.bool, device="cpu")
        want = results(out, getattr(out, names.cache_name(forward)), real, _PROVEN)
        got = results(type(out)(last_hidden_state=hidden), cache, real, _PROVEN)
    where = first_difference(want, got)
    if where is not None:
        raise UsageError(
            f"{type(trunk.model).__name__}: in a prompt of {_PROVEN} tokens by a trunk {where}, so prime graphs can't serve it. "
            'Use strategy="breakable"'
        )


class HeldAttention:
    """What prime graphs hold of the attention of ``module``, and breaks use live, as it is when this is made."""

    def __init__(self, module: Any, implementation: AttentionName) -> None:
        self._module, self._implementation = module, implementation
        self._backends, self._kernel = _torch_modes.ATTENTION.read(), F.scaled_dot_product_attention
        self._function = self._function_now()

    def unchanged(self, function: Any = None) -> bool:
        """Whether it is that still. ``function``: the model's own, if it is known."""
        same = (function or self._function_now()) is self._function and self._kernel is F.scaled_dot_product_attention
        return same and _torch_modes.ATTENTION.read() == self._backends

    def _function_now(self) -> Any:
        return names.attention_function(self._module, self._implementation.name)


def is_fresh(ctx: LiveContext, positions: Tensor | None, parts: DecoderParts) -> bool:
    """Whether a forward is one whole prompt for an empty cache of growing layers, at its usual positions.

    A cache of a subclass may do something of its own in ``update()``, which a copy-out doesn't call. And without causal
    attention padded rows would reach real ones.

    ``positions``: [1, n] as the caller gave them. Looking at them waits for the device, which has nothing to do yet.
    """
    if ctx.batch != 1 or not is_empty(ctx.cache, len(parts.layers)) or ctx.implementation.name != "sdpa":
        return False
    if not_causal(parts) is not None:
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
