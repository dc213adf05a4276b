"""Why a forward of an accelerated model runs untouched, in the words that its handle's ``stats.reasons`` counts.

The runner's own reasons are in :mod:`segue.runner.admission`; ``SEGUE=off`` is in :mod:`segue.environment`.
"""

from __future__ import annotations

from typing import Any

from segue import _source_lines
from segue.capture.comparisons import Change

# The call.
ARGUMENTS = "arguments that the model's forward doesn't take"
INPUTS = "not exactly one of input_ids and inputs_embeds"
NO_TENSOR = "input_ids, inputs_embeds or position_ids that are no tensor"
NO_TOKENS = "no tokens"
POSITIONS = "position_ids that are not [1 or batch, tokens]"
MASK = "an attention_mask that is neither [batch, tokens], nor 4-dimensional, nor a dict of masks"
MASK_KINDS = "a dict of masks without one for each kind of layer"
CACHE_UNUSED = "a cache given with use_cache=False"
AUTOCAST = "autocast is on"

# The modules.
GLOBAL_HOOK = "a forward hook on all modules of torch"
_RECAPTURE = "recapture() takes it in"


def requested_output(argument: str) -> str:
    """The caller wants what only the modules inside the decoder see, such as ``output_attentions``."""
    return f"{argument} was asked for"


def unknown_argument(argument: str) -> str:
    """The reader doesn't know what the argument would change."""
    return f"the argument {argument}"


def dimensions(count: int) -> str:
    """The inputs have ``count`` dimensions, without the embeddings' own, where two are needed."""
    return f"inputs of {count} dimensions instead of [batch, tokens]"


def cache_type(cache: object, offloaded: bool) -> str:
    """The cache has no layers of its own, or keeps them in the host's memory."""
    return f"a cache of type {type(cache).__name__}" + (" that is offloaded" if offloaded else "")


def cache_layers(layer: object) -> str:
    """The cache has a layer of a kind that breaks can't feed."""
    return f"a cache whose layers are {type(layer).__name__}"


def changed(change: Change, decoder: Any) -> str:
    """Something that the decoder's code decides by is another thing than in the graphs."""
    path = change.path.removeprefix(f"{type(decoder).__qualname__}.")
    match change.kind:
        case "global hook":
            return GLOBAL_HOOK
        case "hook":
            return hook(path, _source_lines.of(change.value))
        case "forward":
            return other_forward(path)
        case "module":
            return other_module(path, change)
    if path.endswith("config.is_causal"):
        return other_causality(change.after, change.before)
    return f"{path}: {change.before} -> {change.after}: {_RECAPTURE}"


def hook(module: str, where: str) -> str:
    """A forward hook was registered on ``module``; ``where`` is its name and line."""
    return f"a forward hook on {module}: {where}"


def other_forward(module: str) -> str:
    """The forward of ``module`` was replaced."""
    return f"another forward on {module}: {_RECAPTURE}"


def other_module(path: str, change: Change) -> str:
    """The module at ``path`` was replaced."""
    return f"another module at {path}: {_RECAPTURE} ({change.before} -> {change.after})"


def other_causality(now: object, before: object) -> str:
    """``config.is_causal`` was changed."""
    return f"config.is_causal={now}, and {before} before: {_RECAPTURE}"


def other_depth(now: object, before: int) -> str:
    """``config.num_hidden_layers`` was changed: the model runs another number of its layers."""
    return f"config.num_hidden_layers={now}, and {before} when the model was accelerated"


def other_mode(name: str, now: str, before: str) -> str:
    """The caller's mode ``name`` is not what it was at the capture."""
    return f"{name} {now}, and {before} before: {_RECAPTURE}"


# Encoders.
TRAINING = "the model is in training mode"
GRADIENTS = "gradients are to be recorded"
DEVICES = "inputs or weights on another device than the graphs"
SHAPES = "inputs of more shapes than get graphs"
WEIGHTS = "weights lie elsewhere than when they were captured: recapture() takes them in"


def not_a_tensor(argument: str) -> str:
    """The argument is something else than a tensor."""
    return f"{argument} that is no tensor"


def without(argument: str) -> str:
    """The call doesn't give the main input."""
    return f"no {argument}"


def shape(argument: str) -> str:
    """The argument has another shape than the tokens."""
    return f"{argument} that is not [batch, tokens]"
