"""The ways in which people use a model of a family, as functions from a model to what they see of it.

Each flow returns tensors by name. Run on the untouched model and on the accelerated one it must return the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from integrations.families import Family, Kind
from segue.integrations.transformers.resident_layers import attributes

Seen = dict[str, Tensor]
Flow = Callable[[Any], Seen]

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96)
_FILLING = (16, 32)  # lengths that are buckets
_PADDED = (13, 27)  # lengths that are none
_GREEDY = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
_FIRST_ID, _LAST_ID = 10, 240  # of ordinary tokens
_IMAGE_ID, _IMAGE_STARTS, _IMAGE_ENDS = 250, 252, 253
_GENERATED = 12


def flows_of(family: Family) -> dict[str, Flow]:
    """The flows that make sense for a family, by the column of the table that they fill."""
    return _KINDS[family.kind](family)


def ids(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids [batch, length], none of them special."""
    draw = torch.Generator().manual_seed(1000 * seed + 10 * length + batch)
    return torch.randint(_FIRST_ID, _LAST_ID, (batch, length), generator=draw)


def cache_name(out: Any) -> str:
    """The key of an output that holds the cache, which is also the argument that takes it; empty if it has none."""
    known = ("past_key_values", "cache", "cache_params", "state")
    return next((name for name in known if out.get(name) is not None), "")


def cache_parts(cache: Any) -> Seen:
    """Every tensor and number in a cache, by its place: keys, values, convolution and recurrent states, lengths."""
    return dict(_parts(cache, "cache", set()))


def _parts(value: Any, place: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.numel():
            yield place, value.clone()
    elif isinstance(value, bool | int | float):
        yield place, torch.tensor(value)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _parts(item, f"{place}[{i}]", seen)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _parts(item, f"{place}[{key!r}]", seen)
    elif _is_of_a_cache(value) and id(value) not in seen:
        seen.add(id(value))
        for name, item in attributes(value).items():
            yield from _parts(item, f"{place}.{name}", seen)


def _is_of_a_cache(value: Any) -> bool:
    kind = type(value)
    home = kind.__module__.startswith("transformers") or kind.__module__.endswith(".resident_layers")
    return home and hasattr(value, "__dict__") and not kind.__name__.endswith("Config")


def _generated(out: Any) -> Seen:
    seen = {"tokens": out.sequences}
    if getattr(out, "logits", None) is not None:
        seen["logits"] = torch.stack(out.logits)
    if getattr(out, "sequences_scores", None) is not None:
        seen["scores"] = out.sequences_scores
    return seen


def _named(prefix: str, seen: Seen) -> Seen:
    return {f"{prefix}: {name}": t for name, t in seen.items()}


def _tensors(out: Any) -> Seen:
    """The tensors of an output."""
    return {name: value for name, value in out.items() if isinstance(value, Tensor)}


class _Decoding:
    """Flows of models that generate. Subclasses say what a prompt is."""

    def __init__(self, family: Family) -> None:
        self.family = family

    def prompt(self, batch: int, length: int) -> dict[str, Any]:
        """The arguments of a call and of ``generate`` for ``batch`` prompts of ``length`` tokens without padding."""
        return {"input_ids": ids(batch, length)}

    def padded_prompts(self) -> dict[str, Any]:
        """The same for a batch whose prompts are of different lengths, 32 tokens in all."""
        tokens, mask = ids(4, 8), torch.ones(4, 8, dtype=torch.long)
        for row, n in enumerate((8, 5, 3, 7)):
            mask[row, : 8 - n] = 0
        return {"input_ids": tokens * mask, "attention_mask": mask}

    def forward(self, model: Any, length: int) -> Seen:
        """Every tensor of the output for one prompt, and the cache."""
        out = model(**self.prompt(1, length), use_cache=True)
        return _tensors(out) | cache_parts(out.get(cache_name(out)))

    def prefill(self, model: Any) -> Seen:
        return self.lengths(model, _FILLING)

    def padded(self, model: Any) -> Seen:
        return self.lengths(model, _PADDED)

    def lengths(self, model: Any, lengths: tuple[int, ...]) -> Seen:
        seen: Seen = {}
        for n in lengths:
            seen |= _named(f"{n} tokens", self.forward(model, n))
        return seen

    def chunks(self, model: Any) -> Iterator[Any]:
        """Outputs of a prompt of 16 tokens, of 8 more on its cache, and of one more."""
        tokens = ids(1, 25)
        out = model(input_ids=tokens[:, :16], use_cache=True)
        yield out
        for part in (tokens[:, 16:24], tokens[:, 24:]):
            name = cache_name(out)
            assert name, "the model returns no cache"
            out = model(input_ids=part, use_cache=True, **{name: out[name]})
            yield out

    def chunk(self, model: Any) -> Seen:
        return {f"logits of chunk {i}": out.logits for i, out in enumerate(self.chunks(model))}

    def decode(self, model: Any) -> Seen:
        return _generated(model.generate(**self.prompt(1, 16), max_new_tokens=_GENERATED, **_GREEDY))

    def batch(self, model: Any) -> Seen:
        prompts = self.padded_prompts()
        real = prompts["attention_mask"].bool()
        seen = {"logits of the real rows": model(**prompts).logits[real]}
        return seen | _generated(model.generate(**prompts, max_new_tokens=8, **_GREEDY))

    def beams(self, model: Any) -> Seen:
        given = {**_GREEDY, "output_logits": False, "output_scores": True}
        return _generated(model.generate(**self.prompt(1, 16), max_new_tokens=8, num_beams=3, **given))

    def cache(self, model: Any) -> Seen:
        *_, last = self.chunks(model)
        name = cache_name(last)
        return _named("in chunks", cache_parts(last[name])) | _named("a padded batch", self.padded_states(model, name))

    def padded_states(self, model: Any, name: Any) -> Seen:
        """What a padded batch leaves in the cache, save keys and values, of which nobody reads the padding's."""
        parts = cache_parts(model(**self.padded_prompts(), use_cache=True)[name])
        return {place: t for place, t in parts.items() if not place.endswith((".keys", ".values"))}

    def first_token(self, model: Any) -> Seen:
        """What a prime graph may serve: fresh prompts, for one row of logits and for all, and a batch of them."""
        seen = self.lengths(model, (_FILLING[0], _PADDED[0])) | _named("batch", self.batch(model))
        return seen | _generated(model.generate(**self.prompt(1, _PADDED[1]), max_new_tokens=4, **_GREEDY))

    def steps(self, model: Any) -> Seen:
        """What full graphs may serve: steps of one token, alone, in a padded batch, in beams, and what they leave behind."""
        chunks = _named("in chunks", cache_parts((last := [*self.chunks(model)][-1])[cache_name(last)]))
        return self.decode(model) | _named("batch", self.batch(model)) | _named("beams", self.beams(model)) | chunks

    def all(self) -> dict[str, Flow]:
        columns = ("prefill", "padded", "chunk", "decode", "batch", "beams", "cache")
        return {column: getattr(self, column) for column in columns} | {"prime": self.first_token, "steps": self.steps}


class _ImagePrompts(_Decoding):
    """Prompts with an image in them, at the front."""

    def prompt(self, batch: int, length: int) -> dict[str, Any]:
        n = self.family.image_tokens
        tokens = ids(batch, length)
        tokens[:, 1 : 1 + n] = _IMAGE_ID
        tokens[:, 0], tokens[:, 1 + n] = _IMAGE_STARTS, _IMAGE_ENDS
        given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **self.family.images(batch)}
        return given | ({"mm_token_type_ids": (tokens == _IMAGE_ID).int()} if self.family.numbers else {})

    def all(self) -> dict[str, Flow]:
        return {column: flow for column, flow in super().all().items() if column in ("prefill", "padded", "decode", "beams")}


class _EncoderDecoder(_Decoding):
    """Prompts are what the encoder reads. The flows that aren't ``generate`` give the decoder tokens too."""

    def prompt(self, batch: int, length: int) -> dict[str, Any]:
        return {"input_ids": ids(batch, length)}

    def padded_prompts(self) -> dict[str, Any]:
        return {name: t.flip(1) for name, t in super().padded_prompts().items()}  # encoders are padded on the right

    def forward(self, model: Any, length: int) -> Seen:
        out = model(**self.prompt(1, length), decoder_input_ids=ids(1, length // 2))
        return _tensors(out) | cache_parts(out.get(cache_name(out)))

    def chunks(self, model: Any) -> Iterator[Any]:
        tokens, prompt = ids(1, 25), self.prompt(1, 16)
        encoded = model.get_encoder()(**prompt)
        out = model(encoder_outputs=encoded, decoder_input_ids=tokens[:, :16], use_cache=True)
        yield out
        for part in (tokens[:, 16:24], tokens[:, 24:]):
            name = cache_name(out)
            assert name, "the model returns no cache"
            out = model(encoder_outputs=encoded, decoder_input_ids=part, use_cache=True, **{name: out[name]})
            yield out

    def batch(self, model: Any) -> Seen:
        prompts = self.padded_prompts()
        seen = {"logits": model(**prompts, decoder_input_ids=ids(4, 4)).logits}
        return seen | _generated(model.generate(**prompts, max_new_tokens=8, **_GREEDY))

    def cache(self, model: Any) -> Seen:
        *_, last = self.chunks(model)
        return cache_parts(last[cache_name(last)])

    def all(self) -> dict[str, Flow]:
        return {column: flow for column, flow in super().all().items() if column != "prime"}


class _SpeechToText(_EncoderDecoder):
    """Prompts are spectra of fixed length for some families, of any length for others."""

    def prompt(self, batch: int, length: int) -> dict[str, Any]:
        return {"input_features": self.family.sound(batch, length)}

    def padded_prompts(self) -> dict[str, Any]:
        return self.prompt(4, 32)


class _Encoder:
    """Flows of models that encode tokens."""

    def __init__(self, family: Family) -> None:
        self.family = family

    def prefill(self, model: Any) -> Seen:
        return self.lengths(model, _FILLING)

    def padded(self, model: Any) -> Seen:
        return self.lengths(model, _PADDED)

    def lengths(self, model: Any, lengths: tuple[int, ...]) -> Seen:
        seen: Seen = {}
        for n in lengths:
            seen |= _named(f"{n} tokens", _tensors(model(input_ids=ids(1, n))))
        return seen

    def batch(self, model: Any) -> Seen:
        """Padded on the right and on the left: the states of the real tokens, and what is pooled of them."""
        prompts = _Decoding(self.family).padded_prompts()
        seen: Seen = {}
        for side in ("left", "right"):
            given = prompts if side == "left" else {name: t.flip(1) for name, t in prompts.items()}
            found = _tensors(model(**given))
            real = given["attention_mask"].bool()
            found = {name: t[real] if t.dim() == 3 else t for name, t in found.items() if side == "right" or t.dim() == 3}
            seen |= _named(f"padded on the {side}", found)
        return seen

    def all(self) -> dict[str, Flow]:
        return {column: getattr(self, column) for column in ("prefill", "padded", "batch")}


class _ImageEncoder(_Encoder):
    """One image and several. A bucket counts images."""

    def prefill(self, model: Any) -> Seen:
        return self.images(model, 1)

    def padded(self, model: Any) -> Seen:
        return self.images(model, 3)

    def batch(self, model: Any) -> Seen:
        return self.images(model, 2) | self.images(model, 4)

    def images(self, model: Any, batch: int) -> Seen:
        return _named(f"{batch} images", _tensors(model(pixel_values=self.family.pixels(batch))))


class _SpeechEncoder(_Encoder):
    """Waves of several lengths."""

    def lengths(self, model: Any, lengths: tuple[int, ...]) -> Seen:
        seen: Seen = {}
        for n in lengths:
            seen |= _named(f"{n} frames", _tensors(model(input_values=self.wave(1, n))))
        return seen

    def batch(self, model: Any) -> Seen:
        mask = torch.ones(3, self.samples(16), dtype=torch.long)
        mask[1, self.samples(9) :] = 0
        return _tensors(model(input_values=self.wave(3, 16) * mask, attention_mask=mask))

    def samples(self, frames: int) -> int:
        return 10 * frames + 15

    def wave(self, batch: int, frames: int) -> Tensor:
        draw = torch.Generator().manual_seed(frames)
        return torch.randn(batch, self.samples(frames), generator=draw)


_KINDS: dict[Kind, Callable[[Family], dict[str, Flow]]] = {
    "decoder": lambda family: _Decoding(family).all(),
    "image and text": lambda family: _Decoding(family).all(),
    "image prompt": lambda family: _ImagePrompts(family).all(),
    "encoder-decoder": lambda family: _EncoderDecoder(family).all(),
    "speech to text": lambda family: _SpeechToText(family).all(),
    "encoder": lambda family: _Encoder(family).all(),
    "image encoder": lambda family: _ImageEncoder(family).all(),
    "speech encoder": lambda family: _SpeechEncoder(family).all(),
}
