"""Reads the arguments of a decoder's forward: what the call asks for, or why graphs can't serve it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue.integrations.transformers import names, reasons

HIDDEN_STATES = reasons.requested_output("output_hidden_states")


@dataclass(slots=True)
class DecoderCall:
    """A call of a decoder's forward that graphs can serve."""

    input_ids: Tensor | None  # [B, T]
    embeds: Tensor | None  # [B, T, D]; exactly one of the two is given
    attention_mask: Any
    position_ids: Tensor | None  # [1 or B, T]
    cache: Any
    use_cache: bool  # the caller wants the cache back
    return_dict: bool
    batch: int
    length: int
    hidden_states: bool = False  # the caller wants those of all layers too
    packed: Mapping[str, Any] | None = None  # what attention is given of sequences that lie one behind the other, its cache too

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch, padding included."""
        return self.batch * self.length

    def positions(self, cache: Any, device: torch.device) -> Tensor:
        """Position ids [1 or B, T]. Where the call gives none, they are made as the model makes them."""
        if self.position_ids is not None:
            return self.position_ids
        past = cache.get_seq_length() if cache is not None else 0
        return torch.arange(past, past + self.length, device=device).unsqueeze(0)


class DecoderCallReader:
    """Reads calls of ``forward``, a decoder's own. ``reads``: whether its code could read an extra argument of this name."""

    def __init__(self, config: Any, forward: Callable[..., Any], reads: Callable[[str], bool]) -> None:
        self._config, self._reads = config, reads
        self._signature = inspect.signature(forward)
        parameters = self._signature.parameters.values()
        self.named = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        self._open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.cache_name = names.cache_name(forward)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DecoderCall | str:
        """The call, or the reason why it runs untouched, one of :mod:`~segue.integrations.transformers.reasons`."""
        if "past_key_values" in kwargs:
            kwargs = {self.cache_name if k == "past_key_values" else k: v for k, v in kwargs.items()}
        try:
            given, rest = self._bound(args, kwargs)
        except TypeError:
            return reasons.ARGUMENTS
        ids, embeds = given.pop("input_ids", None), given.pop("inputs_embeds", None)
        mask, positions = given.pop("attention_mask", None), given.pop("position_ids", None)
        cache, use_cache = given.pop(self.cache_name, None), given.pop("use_cache", None)
        return_dict = rest.pop("return_dict", getattr(self._config, "return_dict", True))
        use_cache = bool(getattr(self._config, "use_cache", False) if use_cache is None else use_cache)
        if (ids is None) is (embeds is None):
            return reasons.INPUTS
        if not all(t is None or isinstance(t, Tensor) for t in (ids, embeds, positions)):
            return reasons.NO_TENSOR
        shape = ids.shape if ids is not None else embeds.shape[:-1]
        asked = requested_output({**given, **rest}, self._config)
        states = asked is HIDDEN_STATES
        cache, packed = _packed(cache, rest) if shape[:1] == (1,) and positions is not None else (cache, None)
        reason = (
            (None if states else asked)
            or (self._unknown({**given, **rest}) if packed is None else None)
            or _shapes(shape, positions)
            or self._mask(mask, shape[0])
            or self._cache(cache, use_cache)
        )
        return reason or DecoderCall(
            ids, embeds, mask, positions, cache, use_cache, return_dict is not False, int(shape[0]), int(shape[1]), states, packed
        )

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments that the forward names, and the others."""
        if not args and (self._open or kwargs.keys() <= self.named):  # the usual call; to bind it takes ten times as long
            named = self.named
            return {k: v for k, v in kwargs.items() if k in named}, {k: v for k, v in kwargs.items() if k not in named}
        given = self._signature.bind(*args, **kwargs).arguments
        return given, {**given.pop("kwargs", {})}

    def _unknown(self, rest: dict[str, Any]) -> str | None:
        if not rest:
            return None
        strange = [k for k, v in rest.items() if v is not None and not k.startswith("output_")]
        return next((reasons.unknown_argument(name) for name in strange if self._reads(name)), None)

    def _mask(self, mask: Any, batch: int) -> str | None:
        if isinstance(mask, dict):
            kinds = set(getattr(self._config, "layer_types", None) or ())
            return None if kinds and kinds <= set(mask) else reasons.MASK_KINDS
        if mask is None or (isinstance(mask, Tensor) and (mask.dim() == 4 or (mask.dim() == 2 and len(mask) == batch))):
            return None
        return reasons.MASK  # of one for another number of sequences each model makes something else

    def _cache(self, cache: Any, use_cache: bool) -> str | None:
        if cache is None:
            return None
        if not use_cache:
            return reasons.CACHE_UNUSED
        layers = getattr(cache, "layers", None)
        if layers is None or getattr(cache, "offloading", False):
            return reasons.cache_type(cache, offloaded=layers is not None)
        return None


def requested_output(kwargs: Mapping[str, Any], config: Any) -> str | None:
    """The reason why a call runs untouched that asks for what only the modules inside the decoder see; None if it doesn't.

    :data:`HIDDEN_STATES`, that very object, if it asks for all hidden states and nothing else: graphs may serve that.
    """
    if kwargs.get("output_attentions", getattr(config, "output_attentions", False)):
        return reasons.requested_output("output_attentions")
    states = kwargs.get("output_hidden_states", getattr(config, "output_hidden_states", False))
    asked = (k for k, v in kwargs.items() if k.startswith("output_") and v and k != "output_hidden_states")
    if (other := next(asked, None)) is not None:
        return reasons.requested_output(other)
    if states is True:
        return HIDDEN_STATES
    return reasons.requested_output("output_hidden_states") if states else None


def _packed(cache: Any, rest: dict[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """The cache that the layers are given, and what transformers' continuous batching gives attention; None for other calls."""
    paged = rest.get("cache") if cache is None else cache
    return (None, {**rest, "cache": paged}) if names.is_paged(paged) else (cache, None)


def _shapes(shape: torch.Size, positions: Any) -> str | None:
    if len(shape) != 2:
        return reasons.dimensions(len(shape))
    if 0 in shape:
        return reasons.NO_TOKENS
    if positions is not None and tuple(positions.shape) not in ((1, shape[1]), tuple(shape)):
        return reasons.POSITIONS
    if positions is not None and positions.is_floating_point():
        return reasons.FRACTIONS
    return None
