"""Checks whether segue can serve a model, or a call of it, and refuses by name what it can't."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from segue import _source_lines
from segue.capture.decisions import acting_hooks
from segue.capture.module_checks import mode_matters
from segue.errors import UsageError
from segue.integrations.transformers import decoder_parts
from segue.integrations.transformers.decoder_forward import ForwardPatch
from segue.integrations.transformers.decoder_parts import DecoderParts


def parts_of(model: Any) -> DecoderParts:
    """The decoder of ``model`` that segue takes over, and its parts.

    Raises:
        UsageError: the model can't be served; says which and why.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        parts_of_it = ", ".join(type(m).__name__ for m in model.children()) if isinstance(model, nn.Module) else ""
        if parts_of_it:
            raise UsageError(
                f"{type(model).__qualname__} holds no transformers model that could be captured, only {parts_of_it}. "
                "segue.accelerate() takes a transformers PreTrainedModel, or a module that holds one; for any other function "
                "over tensors use segue.GraphRunner with a segue.break_point."
            )
        raise UsageError(
            f"segue.accelerate() takes a transformers PreTrainedModel, not a {type(model).__qualname__}. "
            "For any other function over tensors use segue.GraphRunner with a segue.break_point."
        )
    parts = decoder_parts.parts_of(model)
    if parts is None:
        raise UsageError(
            f"{describe(model)}: no module of it hands a KV cache or recurrent state to a list of layers, so it has no decoder. "
            "Capture its forward with segue.GraphRunner and mark what is not token-wise with segue.break_point."
        )
    if isinstance(parts.decoder.__dict__.get("forward"), ForwardPatch):
        raise UsageError(f"{describe(model)} is accelerated already: call restore() on the handle of the first time")
    return parts


def parts_now(model: Any, decoder: Any) -> DecoderParts:
    """The parts of ``decoder``, that of ``model``, as it is now.

    Raises:
        UsageError: it can't be captured as it is; says why.
    """
    check_mode(model, decoder)
    check_hooks(model, decoder)
    parts = decoder_parts.parts_of(decoder)
    if parts is None or parts.decoder is not decoder:
        raise UsageError(f"{describe(model)}: {type(decoder).__name__} has no layers that take a cache any more")
    return parts


def device_of(decoder: nn.Module) -> torch.device:
    """The one device of the decoder's parameters.

    Raises:
        UsageError: they are on several, or on one that has no memory.
    """
    devices = sorted({str(p.device) for p in decoder.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise UsageError(
            f"{type(decoder).__name__} lies on {' and '.join(devices)}: a captured graph belongs to one device. "
            "Load the model without device_map, or move it to one device first."
        )
    return torch.device(devices[0])





def check_mode(model: nn.Module, decoder: nn.Module) -> None:
    """Raise UsageError if the model is in training mode, or a module of its decoder that then computes something else."""
    if model.training:
        raise _in_training(type(model).__name__)
    named = [(name, m) for name, m in decoder.named_modules() if m.training]
    if any(m is decoder or mode_matters(m) for _, m in named):
        name = next(name for name, m in named if m._modules or mode_matters(m))
        raise _in_training(f"{type(decoder).__name__}'s {name}" if name else type(decoder).__name__)


def _in_training(who: str) -> UsageError:
    return UsageError(
        f"{who} is in training mode: a graph would replay the dropout of its capture. "
        "Call model.eval(), or restore() to train it."
    )


def check_hooks(model: Any, decoder: Any) -> None:
    """Raise UsageError if a forward hook is registered inside the decoder: replays run no Python.

    Its own hooks and those of its embedding are called live, and transformers' recorders act on untouched calls only.
    """
    for name, module in decoder.named_modules():
        if module is decoder or module is decoder.get_input_embeddings():
            continue
        for hook in acting_hooks(module):
            raise UsageError(
                f"{describe(model)}: a forward hook, {_source_lines.of(hook)}, is registered on {name}. Replays run no Python, "
                "so it would be called while capturing and never again. Remove it, or make what it does a break point."
            )


def describe(model: Any) -> str:
    """A model's class and family, for errors."""
    return f"{type(model).__name__} ({getattr(model.config, 'model_type', 'unknown family')})"
