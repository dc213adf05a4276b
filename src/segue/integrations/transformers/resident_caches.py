"""Which caches can lie in resident memory while they decode, and what of them lies there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from segue.integrations.transformers import names
from segue.integrations.transformers.resident_memory import LayerShape, room_for
from segue.integrations.transformers.static_residence import FULL, SLIDING


class NoDecode(Exception):
    """A model's steps can't be full graphs. The text says why."""


@dataclass(frozen=True, slots=True)
class CacheContents:
    """What a cache holds: ``length`` tokens, of which each layer keeps the ``shapes``.

    ``sizes``: how many rows the layers of a static cache show, by kind, those that keep every token first; None: the cache grows.
    ``rows``: how many tokens it can hold; 0: any number.
    """

    shapes: tuple[LayerShape, ...]
    length: int
    sizes: Mapping[str, int] | None = None
    rows: int = 0

    def room(self, most: int | None) -> int | None:
        """How many rows to give a sequence, so that it can go on; None if that would be more than ``most``."""
        room = self.rows or max(room_for(self.length + 1, most), *(self.sizes or {}).values(), 0)
        return None if most is not None and room > most else room


def windows_of(config: Any, layers: int) -> list[int]:
    """How many tokens the attention of each of a decoder's ``layers`` sees; 0 for all.

    Raises:
        NoDecode: there are layers that no resident memory can hold.
    """
    kinds = getattr(config, "layer_types", None) or ()
    if strange := next((kind for kind in kinds if kind not in (FULL, SLIDING)), None):
        raise NoDecode(f"it has layers of {strange}")
    made = names.new_cache(config).layers or [names.full_cache_layer()()] * layers
    if len(made) != layers:
        raise NoDecode(f"its cache has {len(made)} layers, and it has {layers}")
    known = names.full_cache_layer(), names.sliding_cache_layer()
    if strange := next((layer for layer in made if type(layer) not in known), None):
        raise NoDecode(f"its cache has layers of type {type(strange).__name__}")
    return [getattr(layer, "sliding_window", 0) for layer in made]


def contents_of(cache: Any, batch: int, windows: list[int], dtype: torch.dtype, device: str) -> CacheContents | None:
    """What a cache of ``batch`` sequences holds; None if it can't lie in resident memory. ``device``: its type."""
    static = type(cache) is names.static_cache_type()
    layers: Any = cache.layers if static or type(cache) is names.cache_type() else ()
    if len(layers) != len(windows) or len({*map(id, layers)}) != len(layers) or not all(layer.is_initialized for layer in layers):
        return None
    length = _length(layers)
    if length is None:
        return None
    shapes, sizes, ends = [], dict[str, int](), set[int]()
    for layer, window in zip(layers, windows, strict=True):
        if vars(layer).get("kind", type(layer)) is not _expected(static, window):
            return None
        keys, values = layer.keys, layer.values
        heads = keys.shape[1] if keys.dim() == 4 else 0
        if static:
            kept = layer.max_cache_len
            if sizes.setdefault(SLIDING if window else FULL, kept) != kept or kept > window > 0:
                return None
            if kept != window:  # beyond these a window as small as the cache would see less than the model's
                ends.add(kept)
        else:
            kept = min(length, window - 1) if window else length
            if window and (layer.sliding_window != window or getattr(layer, "record_past", False)):
                return None
        both = ([batch, heads, kept], dtype, device)
        if not kept or any((list(t.shape)[:3], t.dtype, t.device.type) != both for t in (keys, values)):
            return None
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            return None
        shapes.append(LayerShape(heads, keys.shape[3], values.shape[3], window))
    rows = max(ends, default=0)
    if len(ends) > 1 or length >= rows > 0:
        return None
    return CacheContents(tuple(shapes), length, dict(sorted(sizes.items())) if static else None, rows)


def _expected(static: bool, window: int) -> type[Any]:
    if static:
        return names.static_sliding_cache_layer() if window else names.static_cache_layer()
    return names.sliding_cache_layer() if window else names.full_cache_layer()


def _length(layers: Any) -> int | None:
    """How many tokens all layers hold; None if they differ. It waits for the device where a layer counts there, once for all."""
    found = [layer.get_seq_length() for layer in layers]
    counted = [n for n in found if isinstance(n, torch.Tensor)]
    lengths = {n for n in found if not isinstance(n, torch.Tensor)}
    if counted:
        lengths.update(torch.stack(counted).tolist())
    return lengths.pop() if len(lengths) == 1 and min(lengths) >= 0 else None
