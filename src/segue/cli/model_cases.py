"""The calls that a model is checked by, each of which gives tensors to compare."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from segue.check.compare import tensors_in
from segue.cli import handles
from segue.cli.model_inputs import ModelInputs

_STEPS = 4  # of decoding
_NEW = 8  # tokens of generate()


@dataclass
class CallResult:
    """What a call gave: tensors by name, without what stands in padded places.

    ``outputs``: hidden states, logits and the like. ``caches``: the cache's tensors. ``tokens``: greedy tokens, int64.
    ``generated``: the tokens [B, new] of ``generate()``; the ``outputs`` are then the logits [B, V] of each.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    caches: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)
    generated: Tensor | None = None

    def add(self, output: Any, mask: Tensor | None = None, step: str = "") -> None:
        """Note the tensors of a model's output. ``mask`` [B, T]: 0 where tokens are padding. ``step``: begins their names."""
        for name, value in handles.parts_of(output).items():
            if isinstance(value, Tensor):
                self.outputs[step + name] = real = _real(value, mask)
                if name == "logits" and real.dim() > 1:
                    self.tokens[step + "tokens"] = real.argmax(-1)

    def add_cache(self, output: Any, mask: Tensor | None = None) -> None:
        """Note the tensors of the cache in a model's output."""
        _, cache = handles.cache_in(output) or ("", None)
        self.caches.update({path: _cached(path, t, mask).clone() for path, t in tensors_in(cache).items()})


@dataclass(frozen=True)
class Case:
    """A call, or a few that follow each other on one cache. ``run`` makes them on the model and gives what came out."""

    name: str
    run: Callable[[Any], CallResult]


def everyday_case(handle: Any, call: Any, tokens: int) -> tuple[Case, list[str]]:
    """What a model mostly does, and what its calls are called: a prompt of ``tokens`` tokens and a step after it, an encoder's
    forward, or the example ``call``.

    Raises:
        UsageError: it isn't known what such a model takes.
    """
    model = handles.model_of(handle)
    if call is not None:
        return _example(call.args, call.kwargs or {}), ["the example call"]
    if sentences := _of_sentences(model):
        return sentences[-1], [sentences[-1].name]
    inputs = ModelInputs(model)
    tokens = min(tokens, handles.most_tokens(handle), inputs.longest)
    if _is_encoder_decoder(model):
        return _generation("", inputs.one(tokens)), [f"generate after {_tokens(tokens)}"]
    if not keeps_cache(handle):
        return _forward("", inputs.one(tokens)), [f"forward of {_tokens(tokens)}" if inputs.of_text else "forward"]
    text = {**inputs.one(tokens + 1), **_known(model, logits_to_keep=1)}
    return _continued(model, "", text, [tokens, 1]), [f"prompt of {_tokens(tokens)}", "step"]


def cases_of(handle: Any, call: Any = None, max_tokens: int | None = None) -> list[Case]:
    """The example call of an accelerated model, or calls of each kind that it takes.

    Those are several lengths, chunks, steps, padded batches, and ``generate()``. ``call``: the example call, an object with
    ``args`` and ``kwargs``. ``max_tokens``: the most tokens of one forward, if not those of the largest bucket.

    Raises:
        UsageError: it isn't known what such a model takes.
    """
    if call is not None:
        return [_example(call.args, call.kwargs or {})]
    model, most = handles.model_of(handle), handles.most_tokens(handle)
    if sentences := _of_sentences(model):
        return sentences
    inputs = ModelInputs(model)
    if not inputs.of_text and not _is_encoder_decoder(model):
        return [_forward(f"batch of {n}", inputs.one(8, n)) for n in (1, 2, 3)]
    most = min(most, inputs.longest, max_tokens or most)
    lengths = sorted({n for n in (1, 5, 17, most // 2 + 1, most) if n <= most})
    if _is_encoder_decoder(model):
        return [_generation(f"generate after {_tokens(n)}", inputs.one(n)) for n in (lengths if inputs.of_text else [8])]
    batch = sorted({max(1, most // 9), max(1, most // 6), max(1, most // 4)})
    if not keeps_cache(handle):
        sides = [_forward(f"batch, padded {'left' if left else 'right'}", inputs.padded(batch, left)) for left in (False, True)]
        return [*(_forward(_tokens(n), inputs.one(n)) for n in lengths), *sides]
    return [*_of_a_cache(model, inputs, lengths, batch), *_of_generate(model, inputs, lengths, batch)]


def keeps_cache(handle: Any) -> bool:
    """Whether a forward gives a cache that the next one continues from."""
    model = handles.model_of(handle)
    if _of_sentences(model) or not (inputs := ModelInputs(model)).of_text or _is_encoder_decoder(model):
        return False
    with torch.inference_mode(), handle.untouched():
        return handles.cache_in(model(**inputs.one(1), **_known(model, use_cache=True))) is not None


def _example(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Case:
    def run(model: Any) -> CallResult:
        found = CallResult()
        output = model(*args, **kwargs)
        found.add(output)
        found.add_cache(output)
        return found

    return Case("the example call", run)


def _of_sentences(model: Any) -> list[Case]:
    """Sentences alone and together, for a model that takes text and tokenizes it itself; empty for any other."""
    name = next((name for name in ("encode", "predict") if callable(getattr(model, name, None))), None)
    if name is None or hasattr(model, "main_input_name"):
        return []
    sentences = [" ".join(["the quick brown fox jumps over the lazy dog"] * n) for n in (1, 2, 5)]
    texts = [(a, sentences[0]) for a in sentences] if name == "predict" else sentences  # a cross encoder takes pairs

    def case(what: str, given: list[Any]) -> Case:
        def run(model: Any) -> CallResult:
            found = CallResult()
            found.add(getattr(model, name)(given, convert_to_tensor=True, show_progress_bar=False))
            return found

        return Case(what, run)

    return [*(case(f"{name}, text {i + 1} alone", [text]) for i, text in enumerate(texts)), case(f"{name}, all texts", texts)]


def _of_a_cache(model: Any, inputs: ModelInputs, lengths: list[int], batch: list[int]) -> list[Case]:
    """Prefills, one of them as ``generate()`` makes it, and what continues from a cache."""
    middle = lengths[-1] // 2 + 1
    first, text = middle - middle // 3, inputs.one(middle + _STEPS, seed=2)
    second = min(lengths[-1], middle + _STEPS - first)
    found = [_continued(model, f"prefill, {_tokens(n)}", inputs.one(n), [n]) for n in lengths]
    if one_row := _known(model, logits_to_keep=1):
        found.append(_forward(f"prefill, {_tokens(middle)}, logits of the last", {**inputs.one(middle), **one_row}))
    return [
        *found,
        _continued(model, f"chunks of {first} and {_tokens(second)}", text, [first, second]),
        _continued(model, f"{_STEPS} steps after {_tokens(middle)}", text, [middle] + [1] * _STEPS),
        _continued(model, "batch padded left, and a step", inputs.padded([n + 1 for n in batch], left=True), [max(batch), 1]),
    ]


def _of_generate(model: Any, inputs: ModelInputs, lengths: list[int], batch: list[int]) -> list[Case]:
    if not (hasattr(model, "generate") and model.can_generate()):
        return []
    n = lengths[-1] // 2 + 1
    alone, padded = inputs.one(n, seed=3), inputs.padded(batch, left=True)
    return [_generation(f"generate after {_tokens(n)}", alone), _generation("generate, batch padded left", padded)]


def _forward(name: str, given: dict[str, Any]) -> Case:
    def run(model: Any) -> CallResult:
        found = CallResult()
        output = model(**given)
        found.add(output, given.get("attention_mask"))
        found.add_cache(output, given.get("attention_mask"))
        return found

    return Case(name, run)


def _continued(model: Any, name: str, given: dict[str, Any], sizes: list[int]) -> Case:
    """Forwards of so many tokens each, every one on the cache of those before. ``given``: ids, and maybe a mask, [B, sum], and
    other arguments of each.
    """
    keeping = _known(model, use_cache=True)

    def run(model: Any) -> CallResult:
        found, start = CallResult(), 0
        cache: dict[str, Any] = {}
        mask = given.get("attention_mask")
        for i, size in enumerate(sizes):
            end = start + size
            ids = {key: t[:, start:end] if isinstance(t, Tensor) else t for key, t in given.items() if key != "attention_mask"}
            masked = {} if mask is None else {"attention_mask": mask[:, :end]}
            output = model(**ids, **masked, **cache, **keeping)
            found.add(output, None if mask is None else mask[:, start:end], f"forward {i + 1}: " if len(sizes) > 1 else "")
            cache, start = dict([handles.cache_in(output) or ("", None)]), end
        found.add_cache(output, mask)
        return found

    return Case(name, run)


def _generation(name: str, given: dict[str, Tensor]) -> Case:
    """Greedy tokens, with the logits of each."""

    def run(model: Any) -> CallResult:
        out = model.generate(**given, max_new_tokens=_NEW, do_sample=False, return_dict_in_generate=True, output_logits=True)
        steps = {f"token {i + 1}: logits": logits.clone() for i, logits in enumerate(out.logits)}
        new = out.sequences[:, -len(steps) :].clone()
        return CallResult(steps, {}, {f"token {i + 1}": new[:, i] for i in range(len(steps))}, new)

    return Case(name, run)


def _tokens(n: int) -> str:
    return f"{n} token{'s' if n > 1 else ''}"


def _known(model: Any, **options: Any) -> dict[str, Any]:
    """Those of the options that the model's forward names."""
    parameters = inspect.signature(type(model).forward).parameters
    return {key: value for key, value in options.items() if key in parameters}


def _is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _real(t: Tensor, mask: Tensor | None) -> Tensor:
    """The entries of real tokens, in a copy; all of them where ``t`` has no dimension of tokens."""
    return t[mask.bool()] if mask is not None and t.shape[:2] == mask.shape else t.clone()


def _cached(path: str, t: Tensor, mask: Tensor | None) -> Tensor:
    """The keys or values [B, H, S, D] of real tokens, of which a sliding window holds the last S; other state as it is."""
    if mask is None or not path.endswith(("keys", "values")) or t.dim() != 4 or t.shape[2] > mask.shape[1]:
        return t
    return t.transpose(1, 2)[mask[:, -t.shape[2] :].bool()]
