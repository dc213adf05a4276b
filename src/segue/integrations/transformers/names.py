"""The calls into transformers whose names change from release to release. They are told by signature, not by version number."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import cache_utils, masking_utils

CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "cache_params", "layer_past")  # the cache, or a recurrent state


def cache_name(function: Callable[..., Any]) -> str:
    """The name of the argument of ``function`` that is the KV cache: ``past_key_values`` up to 5.17, ``cache`` in 5.24."""
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])


@functools.cache
def _mask_cache_name() -> str:
    return cache_name(masking_utils.create_masks_for_generate)


def make_masks(config: Any, embeds: Any, attention_mask: Any, cache: Any, position_ids: Any) -> Any:
    """The masks that the model's own forward would make: one, or a dict by layer type; None where attention needs none.

    ``embeds`` [B, T, D], ``position_ids`` [1 or B, T]; ``attention_mask`` and ``cache`` as the caller gave them.
    """
    return masking_utils.create_masks_for_generate(
        config=config,
        inputs_embeds=embeds,
        attention_mask=attention_mask,
        position_ids=position_ids,
        **{_mask_cache_name(): cache},
    )


@contextmanager
def unrecorded() -> Iterator[None]:
    """Within this block, in this thread, transformers records nothing for the forward around it, which was asked for what its
    modules return.
    """
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    if collector is None:
        yield
        return
    token = collector.set(None)
    try:
        yield
    finally:
        collector.reset(token)


def of_config(config: Any, name: str) -> str:
    """The attribute in which a config of this family keeps what all call ``name``."""
    return getattr(config, "attribute_map", {}).get(name, name)  # type: ignore[no-any-return]


def new_cache(config: Any) -> Any:
    """An empty cache of the kind that a model's forward makes for itself."""
    return cache_utils.DynamicCache(config=config)


def cache_type() -> type[Any]:
    """The exact type of :func:`new_cache`'s caches."""
    return cache_utils.DynamicCache  # type: ignore[no-any-return]


@functools.cache
def copying_cache_layers() -> frozenset[type]:
    """The types of cache layers that are known to keep copies of what they are given."""
    known = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
    return frozenset(getattr(cache_utils, name) for name in known if hasattr(cache_utils, name))


def full_cache_layer() -> type[Any]:
    """The exact type of the cache layers that keep every token."""
    return cache_utils.DynamicLayer  # type: ignore[no-any-return]


def sliding_cache_layer() -> type[Any]:
    """The exact type of the cache layers that keep the tokens of a window."""
    return cache_utils.DynamicSlidingWindowLayer  # type: ignore[no-any-return]


def static_cache_type() -> type[Any]:
    """The exact type of the caches whose layers have a fixed number of rows."""
    return cache_utils.StaticCache  # type: ignore[no-any-return]


def static_cache_layer() -> type[Any]:
    """The exact type of a static cache's layers that keep every token."""
    return cache_utils.StaticLayer  # type: ignore[no-any-return]


def static_sliding_cache_layer() -> type[Any]:
    """The exact type of a static cache's layers that keep the tokens of a window; a subclass of :func:`static_cache_layer`."""
    return cache_utils.StaticSlidingWindowLayer  # type: ignore[no-any-return]


def is_paged(cache: Any) -> bool:
    """Whether a cache is that of transformers' continuous batching, whose calls are of packed sequences."""
    module = sys.modules.get("transformers.generation.continuous_batching.cache")
    return module is not None and isinstance(cache, module.PagedAttentionCache)


@functools.cache
def layers_update_paged() -> bool:
    """Whether a model's layers put keys and values in a paged cache, and not its attention functions, as in older releases."""
    paged = sys.modules["transformers.generation.continuous_batching.cache"].PagedAttentionCache
    return "kwargs" in inspect.signature(paged.update).parameters


def attention_function(module: Any, implementation: str | None) -> Callable[..., Any]:
    """The attention function that ``module`` itself would look up under ``implementation``."""
    namespace = sys.modules[type(module).__module__]
    table: Any = getattr(namespace, "ALL_ATTENTION_FUNCTIONS", None)
    if table is None:
        table = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS  # an import would take microseconds
    found = table.get_interface(implementation, getattr(namespace, "eager_attention_forward", None))
    return found  # type: ignore[no-any-return]
