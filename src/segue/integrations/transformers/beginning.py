"""What a cache layer does at its first use, done once: it makes two empty tensors, which takes longer than attention needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from segue.integrations.transformers import names

_begun: dict[tuple[torch.dtype, torch.dtype, torch.device], dict[str, Any]] = {}


def begin_layer(cache: Any, at: int, key: Tensor, value: Tensor) -> None:
    """Give a layer that has held nothing yet the attributes that its own ``lazy_initialization`` gives it.

    Only layers that grow by making new tensors, so that they can share the empty ones. Others begin by themselves.
    """
    kind: Any = names.growing_layers()[0]
    layer: Any = cache.layers[at] if at < len(cache.layers) else None
    if type(layer) is not kind or layer.is_initialized:
        return
    place = key.dtype, value.dtype, key.device
    begun = _begun.get(place)
    if begun is None:
        begun = _begun[place] = _first_attributes(kind, key, value)
    vars(layer).update(begun)


def _first_attributes(kind: Any, key: Tensor, value: Tensor) -> dict[str, Any]:
    layer = kind()
    before = dict(vars(layer))
    with torch.inference_mode(False):
        layer.lazy_initialization(key, value)
    return {name: now for name, now in vars(layer).items() if name not in before or before[name] is not now}
