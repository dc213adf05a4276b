"""What transformers calls things, release by release, found in its signatures rather than in its version number."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from transformers import cache_utils, masking_utils

_CACHE_NAMES = ("cache", "past_key_values")


def cache_name(function: Callable[..., Any]) -> str:
    """What ``function`` calls its KV cache: ``past_key_values`` up to 5.17, ``cache`` in 5.24."""
    parameters = inspect.signature(function).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), _CACHE_NAMES[0])


@functools.cache
def _mask_cache_name() -> str:
    return cache_name(masking_utils.create_masks_for_generate)


def make_masks(config: Any, embeds: Any, attention_mask: Any, cache: Any, position_ids: Any) -> Any:
    """The masks the model's own forward would make: one, or a dict by layer type; None where attention needs none."""
    return masking_utils.create_masks_for_generate(
        config=config,
        inputs_embeds=embeds,
        attention_mask=attention_mask,
        position_ids=position_ids,
        **{_mask_cache_name(): cache},
    )


def new_cache(config: Any) -> Any:
    """The cache that a model's forward makes for itself."""
    return cache_utils.DynamicCache(config=config)


def cache_type() -> type[Any]:
    """What :func:`new_cache` makes, and no subclass of it."""
    return cache_utils.DynamicCache  # type: ignore[no-any-return]


def growing_layers() -> tuple[type, ...]:
    """Cache layers that grow with every forward and keep copies of their own: the ones a break may feed."""
    return cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer


def attention_function(module: Any, implementation: str | None) -> Callable[..., Any]:
    """The attention function that ``module`` itself would look up under ``implementation``."""
    namespace = sys.modules[type(module).__module__]
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    table = getattr(namespace, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    found = table.get_interface(implementation, getattr(namespace, "eager_attention_forward", None))
    return found  # type: ignore[no-any-return]
