"""Why a forward of an accelerated model runs untouched, in the words that its handle's ``stats.reasons`` counts, and what to
change about each.

The runner's own reasons are in :mod:`segue.runner.reasons`.
"""

from __future__ import annotations

from typing import Any

from segue import _source_lines
from segue.capture.comparisons import Change
from segue.runner.reasons import Reason

_TAKES_IN = "recapture() takes it in"
_RECAPTURE = "Call handle.recapture(), or undo the change"
_AS_THE_MODEL = "Call the model as its documentation says; this is its own answer or error"

# The call.
ARGUMENTS = Reason("arguments that the model's forward doesn't take", _AS_THE_MODEL)
INPUTS = Reason("not exactly one of input_ids and inputs_embeds", _AS_THE_MODEL)
NO_TENSOR = Reason("input_ids, inputs_embeds or position_ids that are no tensor", "Give tensors, as return_tensors='pt' does")
NO_TOKENS = Reason("no tokens", _AS_THE_MODEL)
POSITIONS = Reason("position_ids that are not [1 or batch, tokens]", "Leave out position_ids, or give one number a token")
FRACTIONS = Reason("position_ids that are no whole numbers", "Give position_ids.long(), where they are whole")
MASK = Reason(
    "an attention_mask that is neither [batch, tokens], nor 4-dimensional, nor a dict of masks",
    "Give a mask [batch, tokens], as tokenizers make it",
)
MASK_KINDS = Reason(
    "a dict of masks without one for each kind of layer", "Give a mask for each of config.layer_types, or one [batch, tokens]"
)
CACHE_UNUSED = Reason("a cache given with use_cache=False", "Leave out the cache, or use_cache=False")
AUTOCAST = Reason("autocast is on", "Load the model in the dtype that you want, model.bfloat16() say, and leave out autocast")
GRADIENTS = Reason(
    "gradients are required", "Call it under torch.inference_mode() or torch.no_grad(), as generate() does, if you need none"
)

RECORDED = Reason(
    "recorded into a graph that is not segue's",
    "Leave the graphs to one of the two, as by use_cuda_graph=False in continuous batching",
)

# A step of one token, which the breakable graphs serve then.
FULL_BATCH = Reason("a larger batch than full graphs have", "Decode fewer sequences together")
FULL_MASK = Reason("a mask of more than padding at the left", "Give a mask [batch, tokens], as tokenizers make it, padded left")
FULL_CACHE = Reason(
    "a cache that can't lie in resident memory", "Give the DynamicCache that the model makes for itself, or a larger StaticCache"
)
FULL_CONTEXT = Reason("a sequence of more than max_context tokens", "Raise max_context=")
FULL_OUTPUT = Reason(
    "a step that asks for something else than one row of logits",
    "Call the whole model, with return_dict=True and logits_to_keep=1 or none",
)
FULL_MEMORY = Reason("no room in resident memory", "Raise memory_budget=, or let go of caches that are no longer used")


def no_full_graph(why: str) -> Reason:
    """This model has no full graphs."""
    return Reason(f"no full graphs: {why}", "Breakable graphs serve it; nothing needs to be done")


# The modules.
ATTENTION = Reason(f"another attention function or backend than at the start: {_TAKES_IN}", _RECAPTURE)
AROUND = Reason("something else runs around the decoder, or listens there", "Remove the hook or wrapper: no graph calls it")
GLOBAL_HOOK = Reason("a forward hook on all modules of torch", "Remove the hook: no graph calls it")


def training(who: str) -> Reason:
    """A module that computes something else in training mode is in it."""
    return Reason(f"{who} is in training mode", "Call model.eval() before inference; training itself needs no graphs")


def moved(who: str, now: str, before: str) -> Reason:
    """The model's weights are on another device, or of another dtype."""
    return Reason(f"{who} is in {now}, and was in {before} before: {_TAKES_IN}", _RECAPTURE)


def other_memory(name: str) -> Reason:
    """A parameter or buffer is another tensor, or was given other memory."""
    return Reason(f"another tensor at {name}: {_TAKES_IN}", _RECAPTURE)


def requested_output(argument: str) -> Reason:
    """The caller wants what only the modules inside the decoder see, such as ``output_attentions``."""
    return Reason(f"{argument} was asked for", f"Leave out {argument}, also in the config, where you don't need it")


def no_hidden_states(why: str) -> Reason:
    """Graphs that give the hidden states of all layers were tried, and don't give the untouched model's."""
    remedy = "Leave out output_hidden_states, also in the config, where you don't need it"
    return Reason(f"output_hidden_states, which graphs can't serve: {why}", remedy)


def unknown_argument(argument: str) -> Reason:
    """The reader doesn't know what the argument would change."""
    return Reason(f"the argument {argument}", f"Leave out {argument}, if the answer is the same without it")


def dimensions(count: int) -> Reason:
    """The inputs have ``count`` dimensions, without the embeddings' own, where two are needed."""
    return Reason(f"inputs of {count} dimensions instead of [batch, tokens]", "Give ids [batch, tokens], as ids[None]")


def cache_type(cache: object, offloaded: bool) -> Reason:
    """The cache has no layers of its own, or keeps them in the host's memory."""
    kind = type(cache).__name__
    if offloaded:
        return Reason(f"a cache of type {kind} that is offloaded", "Leave out cache_implementation='offloaded'")
    return Reason(f"a cache of type {kind}", "Give a DynamicCache, or none")


def layers_called(otherwise: str) -> Reason:
    """The decoder's forward doesn't give its layers what it gave when the model was accelerated."""
    return Reason(otherwise, "Leave out what this call asks for beside tokens, mask and cache")


def changed(change: Change, decoder: Any) -> Reason:
    """Something that the decoder's code decides by is another thing than in the graphs."""
    path = change.path
    for holder in (f"{type(decoder).__qualname__}.", "Prime.trunk.model.", "Prime.trunk._decoder."):
        path = path.removeprefix(holder)
    match change.kind:
        case "global hook":
            return GLOBAL_HOOK
        case "hook":
            return hook(path, _source_lines.of(change.value))
        case "forward":
            return other_forward(path)
        case "module":
            return other_module(path, change)
        case "memory":
            return other_memory(path)
    if path.endswith("config.is_causal"):
        return other_causality(change.after, change.before)
    return Reason(f"{path}: {change.before} -> {change.after}: {_TAKES_IN}", _RECAPTURE)


def hook(module: str, where: str) -> Reason:
    """A forward hook was registered on ``module``; ``where`` is its name and line."""
    return Reason(f"a forward hook on {module}: {where}", "Remove the hook: no graph calls it. The decoder itself calls its own")


def other_forward(module: str) -> Reason:
    """The forward of ``module`` was replaced."""
    return Reason(f"another forward on {module}: {_TAKES_IN}", _RECAPTURE)


def other_module(path: str, change: Change) -> Reason:
    """The module at ``path`` was replaced."""
    return Reason(f"another module at {path}: {_TAKES_IN} ({change.before} -> {change.after})", _RECAPTURE)


def other_causality(now: object, before: object) -> Reason:
    """``config.is_causal`` was changed."""
    return Reason(f"config.is_causal={now}, and {before} before: {_TAKES_IN}", _RECAPTURE)


def other_depth(now: object, before: int) -> Reason:
    """``config.num_hidden_layers`` was changed: the model runs another number of its layers."""
    return Reason(
        f"config.num_hidden_layers={now}, and {before} when the model was accelerated",
        "Leave out assistant_early_exit; for a model that stays so, recapture()",
    )


def other_mode(name: str, now: str, before: str) -> Reason:
    """The caller's mode ``name`` is not what it was at the capture."""
    return Reason(f"{name} {now}, and {before} before: {_TAKES_IN}", "Call it under the same modes always, or handle.recapture()")


# Encoders.
SHAPES = Reason("inputs of more shapes than get graphs", "Resize images or features to a few sizes before")
DEVICES = Reason("inputs on another device than the graphs", "Move the inputs to the model's device")


def not_a_tensor(argument: str) -> Reason:
    """The argument is something else than a tensor."""
    return Reason(f"{argument} that is no tensor", "Give tensors, as return_tensors='pt' does")


def without(argument: str) -> Reason:
    """The call doesn't give the main input."""
    return Reason(f"no {argument}", f"Give {argument}")


def shape(argument: str) -> Reason:
    """The argument has another shape than the tokens."""
    return Reason(f"{argument} that is not [batch, tokens]", f"Give {argument} as tokenizers make it")
