"""Which module of a model is its decoder, which list holds its layers, and which modules of a layer mix tokens.

Signatures tell. A KV cache, or a recurrent state, is handed down from the decoder to each layer and on to the modules that read
and write it. Those that keep their state themselves ask whether to (``use_cache``). These are the only ones in which a token
meets another.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from segue.errors import UsageError
from segue.integrations.transformers import names


@dataclass(frozen=True)
class Mixer:
    """A module of layer ``layer`` that takes the cache itself, or has a state. ``kind``: its path in the layer."""

    module: Any
    layer: int
    kind: str


@dataclass(frozen=True)
class DecoderParts:
    """A decoder and its layers. ``path``: where the model has it, empty for the model itself."""

    decoder: Any
    path: str
    layers: nn.ModuleList
    mixers: tuple[Mixer, ...]


def parts_of(model: Any) -> DecoderParts | None:
    """The decoder of ``model`` and its parts; None if no module of it hands a cache to a list of layers.

    Raises:
        UsageError: there are several decoders, and the model doesn't say which of them is the one.
    """
    found = [parts for path, module in model.named_modules() if (parts := _decoder(path, module)) is not None]
    if len(found) > 1:
        own = _own_decoder(model)
        paths = ", ".join(f"model.{parts.path}" if parts.path else "model" for parts in found)
        found = [parts for parts in found if parts.decoder is own]
        if not found:
            raise UsageError(
                f"{type(model).__name__} has several decoders with a cache ({paths}), and graphs serve one. "
                "Accelerate one of them alone."
            )
    return found[0] if found else None


def takes_cache(module: Any) -> bool:
    """Whether a module's forward has an argument for a KV cache or a recurrent state."""
    return any(name in names.CACHE_NAMES for name in inspect.signature(module.forward).parameters)


def _has_state(module: Any) -> bool:
    return takes_cache(module) or "use_cache" in inspect.signature(module.forward).parameters


def _takes_tokens(module: Any) -> bool:
    return {"input_ids", "inputs_embeds"} <= inspect.signature(module.forward).parameters.keys()


def _decoder(path: str, module: Any) -> DecoderParts | None:
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or not takes_cache(module) or not _takes_tokens(module):
        return None
    for layers in module.children():
        if isinstance(layers, nn.ModuleList) and len(layers) and all(map(takes_cache, layers)):
            mixers = [mixer for i, layer in enumerate(layers) for mixer in _mixers(i, layer)]
            return DecoderParts(module, path, layers, tuple(mixers))
    return None


def _mixers(at: int, layer: Any) -> list[Mixer]:
    """The modules of a layer that take the cache, or have a state, and hand it to no module of theirs."""
    taking = {path: module for path, module in layer.named_modules() if path and _has_state(module)}
    return [
        Mixer(module, at, path)
        for path, module in taking.items()
        if not any(other.startswith(f"{path}.") for other in taking)
    ]


def _own_decoder(model: Any) -> Any:
    try:
        return model.get_decoder()
    except (AttributeError, NotImplementedError):
        return None
