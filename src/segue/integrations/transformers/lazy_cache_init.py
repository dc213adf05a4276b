"""What a cache layer does at its first use, done once: it makes two empty tensors, which takes longer than attention needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from segue.integrations.transformers import names

# None: what a layer gets there is its own, or of the shape of its keys.
_begun: dict[tuple[torch.dtype, torch.dtype, torch.device, Any], dict[str, Any] | None] = {}


def init_layer(cache: Any, at: int, key: Tensor, value: Tensor) -> None:
    """Give a layer that has held nothing yet the attributes that its own ``lazy_initialization`` gives it.

    Only layers that grow by making new tensors, so that they can share the empty ones. Others begin by themselves, and so do
    those of a cache of a subclass, whose ``update()`` may ask whether they have begun.
    """
    kind: Any = names.growing_layers()[0]
    layer: Any = cache.layers[at] if at < len(cache.layers) else None
    if type(layer) is not kind or layer.is_initialized or type(cache) is not names.cache_type():
        return
    place = key.dtype, value.dtype, key.device, kind.lazy_initialization
    if place not in _begun:
        _begun[place] = _first_attributes(kind, key, value)
    vars(layer).update(_begun[place] or {})


def _first_attributes(kind: Any, key: Tensor, value: Tensor) -> dict[str, Any] | None:
    layer = kind()
    before = dict(vars(layer))
    with torch.inference_mode(False):
        layer.lazy_initialization(key, value)
    found = {name: now for name, now in vars(layer).items() if name not in before or before[name] is not now}
    return found if all(map(_can_be_shared, found.values())) else None


def _can_be_shared(value: Any) -> bool:
    return not value.numel() if isinstance(value, Tensor) else isinstance(value, bool | torch.dtype | torch.device)
