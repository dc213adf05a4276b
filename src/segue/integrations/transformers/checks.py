"""Checks whether segue can serve a model, or a call of it, and refuses by name what it can't."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from segue import _source_lines
from segue.capture.decisions import acting_hooks
from segue.capture.module_checks import mode_matters
from segue.errors import UsageError
from segue.integrations.transformers.decoder_forward import ForwardPatch

# Tested families: a decoder of identical layers, token-wise but for attention, which goes through AttentionInterface.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

_HOST_ROPE = ("dynamic", "longrope")
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8, torch.float16: 2e-2, torch.bfloat16: 6e-2}


def decoder_of(model: Any) -> Any:
    """The decoder of ``model`` whose forward segue takes over.

    Raises:
        UsageError: the model can't be served; says which and why.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"segue.accelerate() takes a transformers PreTrainedModel, not a {type(model).__qualname__}. "
            "For any other function over tensors use segue.GraphRunner with a segue.break_point."
        )
    decoder: Any = model.base_model
    _check_family(model, decoder)
    check_mode(model, decoder)
    _check_rope(model, decoder.config)
    check_hooks(model, decoder)
    if isinstance(decoder.__dict__.get("forward"), ForwardPatch):
        raise UsageError(f"{_name(model)} is accelerated already: call restore() on the handle of the first time")
    return decoder


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


def check_probe(
    model: Any, reached: list[int], layers: int, ours: dict[str, Tensor], untouched: dict[str, Tensor]
) -> None:
    """Raise UsageError unless every layer's attention reached the break once, and the results are the untouched model's.

    ``reached``: the layers whose attention reached the break, in order. ``ours``, ``untouched``: results to compare, by name.
    """
    if sorted(reached) != list(range(layers)):
        raise UsageError(
            f"{_name(model)}: in a probe forward of {layers} layers, attention reached segue's break "
            f"{len(reached)} times (layers {sorted(set(reached))}). A layer that computes attention by itself would be "
            "frozen into the graph, with its cache and mask. Let its attention go through transformers' "
            "AttentionInterface, or run the model untouched."
        )
    for name, want in untouched.items():
        got = ours.get(name)
        difference = _difference(got, want)
        if difference is not None:
            raise UsageError(
                f"{_name(model)}: in a probe forward, {name} differs from the untouched model's ({difference}), so its "
                "decoder does something with tokens that segue doesn't know of. Run it untouched, and please report it."
            )


def results(out: Any, mask: Tensor, cache_name: str) -> dict[str, Tensor]:
    """What a probe compares, of the real tokens in ``mask`` [B, T]: the last hidden states, and each layer's keys and values."""
    real = mask.bool()
    found = {"the last hidden state": out.last_hidden_state[real]}
    for i, layer in enumerate(getattr(out, cache_name).layers):
        for part in ("keys", "values"):
            kept = getattr(layer, part)
            if kept is not None:
                found[f"the cache's {part} of layer {i}"] = kept.transpose(1, 2)[real]
    return found


def _difference(got: Tensor | None, want: Tensor) -> str | None:
    if got is None or got.shape != want.shape:
        return f"shape {None if got is None else list(got.shape)} instead of {list(want.shape)}"
    off = (got.double() - want.double()).abs().max().item()
    scale = max(want.double().abs().max().item(), 1e-6)
    return None if off <= _TOLERANCE.get(want.dtype, 1e-1) * scale else f"by up to {off:.3g} at a size of {scale:.3g}"


def _check_family(model: Any, decoder: Any) -> None:
    config = getattr(decoder, "config", None)
    family = getattr(config, "model_type", type(decoder).__name__)
    if family in FAMILIES and hasattr(decoder, "layers"):
        return
    raise UsageError(
        f"{_name(model)}: segue.accelerate() doesn't serve the family {family!r}{_kind(config)}. It serves "
        f"{', '.join(FAMILIES)}, whose attention is known to reach the break between two graphs. Run this model "
        "untouched, or capture its forward with segue.GraphRunner and mark what is not token-wise with "
        "segue.break_point."
    )


def _kind(config: Any) -> str:
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return " (a mixture of experts: which experts run is decided per token)"
    if getattr(config, "kv_lora_rank", None):
        return " (multi-head latent attention: its cache holds latents, expanded after the update)"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return f" (a hybrid with layers of kind {', '.join(sorted(kinds))}: recurrent state would see the padding)"
    return ""


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


def _check_rope(model: Any, config: Any) -> None:
    found = set(_rope_types(getattr(config, "rope_parameters", None) or {})) & set(_HOST_ROPE)
    if found:
        raise UsageError(
            f"{_name(model)}: rotary embeddings of type {found.pop()!r} choose their frequencies by the longest "
            "position of a call, which a graph would freeze. Use a fixed type ('default', 'linear', 'llama3', 'yarn')."
        )


def _rope_types(parameters: dict[str, Any]) -> list[str]:
    nested = [t for value in parameters.values() if isinstance(value, dict) for t in _rope_types(value)]
    return [*nested, *([parameters["rope_type"]] if isinstance(parameters.get("rope_type"), str) else [])]


def check_hooks(model: Any, decoder: Any) -> None:
    """Raise UsageError if a forward hook is registered inside the decoder: replays run no Python.

    Its own hooks and those of its embedding are called live, and transformers' recorders act on untouched calls only.
    """
    for name, module in decoder.named_modules():
        if module is decoder or module is decoder.get_input_embeddings():
            continue
        for hook in acting_hooks(module):
            raise UsageError(
                f"{_name(model)}: a forward hook, {_source_lines.of(hook)}, is registered on {name}. Replays run no Python, "
                "so it would be called while capturing and never again. Remove it, or make what it does a break point."
            )


def _name(model: Any) -> str:
    return f"{type(model).__name__} ({getattr(model.config, 'model_type', 'unknown family')})"
