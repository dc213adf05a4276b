"""The handle of a model whose decoder's layers are captured, while the rest of its forward runs live."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue.errors import UsageError
from segue.integrations.transformers import names, reasons
from segue.integrations.transformers.argument_names import ArgumentNames
from segue.integrations.transformers.attention import LiveContext
from segue.integrations.transformers.decoder_calls import HIDDEN_STATES, requested_output
from segue.integrations.transformers.handle import Accelerated
from segue.integrations.transformers.layer_calls import (
    LayerArguments,
    LayerStubs,
    Named,
    NotSeen,
    ReturnLayout,
    Seen,
    from_rows,
    to_rows,
)
from segue.integrations.transformers.layers_body import LayersBody, pad_of
from segue.integrations.transformers.module_breaks import MixerBreak, Recorder
from segue.integrations.transformers.probe import PROMPT, encoder_states, prompt
from segue.prime.prime_strategy import PrimeStrategy
from segue.runner import Decision, Input

log = logging.getLogger("segue")


class _Seen(Exception):
    """What a forward gives its layers is known, and no layer shall run."""


@dataclass(slots=True)
class LayersCall:
    """A call of a decoder's forward, as it was given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    embeds: Tensor | None  # [B, T, D]
    batch: int
    length: int
    hidden_states: bool  # the caller wants those of all layers too
    cache: Any
    packed: None = None  # such calls run untouched

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch, padding included."""
        return self.batch * self.length


class LayersCallReader:
    """Reads calls of ``forward``, a decoder's own: how many tokens they have. All arguments go to that forward as they are."""

    def __init__(self, config: Any, forward: Callable[..., Any]) -> None:
        self._config, self._signature = config, inspect.signature(forward)
        self.cache_name = names.cache_name(forward)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayersCall | str:
        """The call, or the reason why it runs untouched, one of :mod:`~segue.integrations.transformers.reasons`."""
        try:
            given = self._signature.bind(*args, **kwargs).arguments if args else kwargs
        except TypeError:
            return reasons.ARGUMENTS
        if names.is_paged(paged := given.get(self.cache_name) or given.get("cache")):
            return reasons.cache_type(paged, offloaded=False)
        asked = requested_output(given, self._config)
        states = asked is HIDDEN_STATES and given.get("return_dict", getattr(self._config, "return_dict", True)) is not False
        if asked is not None and not states:
            return asked
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        tokens = ids if embeds is None else embeds
        if not isinstance(tokens, Tensor) or (ids is not None and embeds is not None):
            return reasons.INPUTS
        shape = tokens.shape if embeds is None else tokens.shape[:-1]
        if len(shape) != 2:
            return reasons.dimensions(len(shape))
        if 0 in shape:
            return reasons.NO_TOKENS
        return LayersCall(args, kwargs, embeds, int(shape[0]), int(shape[1]), states, given.get(self.cache_name))


def _filled_in(recorded: tuple[Tensor, ...], outputs: list[Tensor]) -> tuple[Tensor, ...]:
    """The hidden states of a forward around stubs. All but the last have returned ``outputs[0]``, what the first layer got.

    A family that records no more than results of layers has it once less.
    """
    given = outputs[0]
    shift = len(outputs) - 1 - sum(t is given for t in recorded)
    return tuple(outputs[at + shift] if t is given else t for at, t in enumerate(recorded))


_CHUNK = 3, 4  # batch, and tokens after a prompt; none of them is a number of the prompt's


def _seen(recorded: Recorder, layers: list[Any], batch: int, length: int) -> Seen:
    first = recorded.first(layers[0])
    calls = [{k: v for k, v in recorded.arguments[m].items() if k != recorded.first(m)} for m in layers]
    return Seen(recorded.arguments[layers[0]][first], calls, batch, length)


class AcceleratedLayers(Accelerated):
    """As :class:`Accelerated`, for decoders whose forward is not captured whole.

    The decoder's own forward runs for every call: it embeds, numbers, masks and norms as it always does. Where it calls its
    layers, the graphs run all of them. A module that mixes tokens is a break as a whole, or where its attention function is
    called, if that gives the same.
    """

    def _find_out(self) -> None:
        if self._compiled is not None:
            self._compiled = None
            self._why_not["compiled layers"] = "its forward runs live around its layers, whose breaks take the time"
            log.warning("segue: %s runs unfused: %s", type(self._model).__name__, self._why_not["compiled layers"])
        self._reader = LayersCallReader(self._decoder.config, self._forward)
        self._names = ArgumentNames(self._decoder)
        layers, mixers = list(self._parts.layers), {mixer.module: mixer for mixer in self._parts.mixers}
        if len(mixers) != len(self._parts.mixers):
            raise UsageError("layers share a module that takes the cache")
        heard = [*layers, *mixers]
        recorded, after = Recorder(heard), Recorder(layers)
        with torch.no_grad(), recorded.listening():
            self._forward(**prompt(self._decoder))
        if missing := [m for m in heard if m not in recorded.results]:
            raise UsageError(f"its forward didn't call {type(missing[0]).__name__}")
        with torch.no_grad(), after.listening():
            out = self._forward(**prompt(self._decoder, _CHUNK[0]))
            chunk = {**prompt(self._decoder, *_CHUNK), self._reader.cache_name: getattr(out, self._reader.cache_name, None)}
            del chunk["attention_mask"]
            self._forward(**chunk)
        try:
            self._arguments = LayerArguments(_seen(recorded, layers, *PROMPT), _seen(after, layers, *_CHUNK))
            self._stubs = LayerStubs(layers, [ReturnLayout.of(recorded.results[m]) for m in layers])
            breaks: list[MixerBreak] = []
            for mixer in mixers.values():
                breaks.append(MixerBreak(mixer, layers[mixer.layer], recorded, tuple(breaks), *PROMPT))
            self._breaks.put(breaks)
            self._body = LayersBody(self._parts, self._forward, self._implementation, self._arguments, self._breaks)
            self._probe()
        except NotSeen as e:
            raise UsageError(str(e)) from None
        for kind in sorted({(type(m), mixer.kind) for m, mixer in mixers.items()}, key=str):
            self._let_attention_break(kind, mixers)
        self._break_what_no_graph_holds()

    def _let_attention_break(self, kind: tuple[type, str], mixers: Any) -> None:
        """Capture modules of one kind too, but for their attention function, if that gives the same."""
        before = list(self._breaks)
        alike = [m for m, mixer in mixers.items() if (type(m), mixer.kind) == kind]
        self._breaks.put([each for each in before if each.module not in alike])
        self._body.look()
        try:
            self._probe()
        except Exception:  # whatever it is that this module doesn't do without its cache
            self._breaks.put(before)
            self._body.look()
        else:
            self._attention_module = alike[0]

    def _expected_reach(self) -> list[int]:
        return sorted(mixer.layer for mixer in self._parts.mixers)

    def _inputs(self) -> dict[str, Any]:
        inputs: dict[str, Any] = {"x": Input(token_dim=0, pad=0.0)}
        if self._arguments.dtypes:
            inputs["rows"] = [Input(token_dim=0, pad=pad_of(dtype)) for dtype in self._arguments.dtypes]
        return inputs

    @property
    def boundaries(self) -> tuple[str, ...]:
        """What runs live before, between and after the graphs, in words."""
        return ("the forward around the layers", *self._live_modules())

    def _prime_strategies(self, strategy: str, rows: int) -> list[PrimeStrategy]:
        self._why_not["prime"] = "its forward runs live around its layers, and a prime graph holds a whole one"
        return []

    def _plain_head(self) -> None:
        self._why_not["first token"] = "its forward runs live around its layers, and a graph of first tokens holds a whole one"

    def _decode_server(self, strategy: str, runner: Any, **limits: int | None) -> None:
        self._why_not["full"] = "its forward runs live around its layers, and a full graph holds a whole one"

    def _layers_to_run(self) -> int:
        return self._layers  # a forward that calls fewer is found out by its stubs

    def _graphed(
        self, call: Any, run: Callable[..., Tensor] | None, decision: Decision | None, reached: list[int] | None = None
    ) -> Any:
        outputs: list[Tensor] = []  # of the layers, where all are asked for; before them what the first one gets

        def finish(x: Tensor, calls: list[Named]) -> Tensor:
            self._refuse_gradients(x)
            for given in calls if call.hidden_states else ():
                given.pop("output_hidden_states", None)  # which is for what records them around the layers
            inputs, ctx = self._seen(x, calls, call.batch, call.length, reached)
            hidden = self._runner(*inputs, ctx=ctx, decision=decision) if run is None else run(*inputs, ctx=ctx)
            if not call.hidden_states:
                return from_rows(hidden, self._arguments.axis, call.batch)
            outputs.extend([x, *(from_rows(t, self._arguments.axis, call.batch) for t in hidden)])
            return outputs[-1]

        with self._stubs.placed(finish):
            out = self._forward(*call.args, **call.kwargs)
            if not self._stubs.finished:
                raise NotSeen("the forward doesn't call all of its layers")
        if call.hidden_states:
            out["hidden_states"] = _filled_in(out.hidden_states, outputs)
        return out

    def _seen(
        self, x: Tensor, calls: list[Named], batch: int, length: int, reached: list[int] | None = None
    ) -> tuple[tuple[Any, ...], LiveContext]:
        """Inputs of the body and the live context, from what the decoder's forward gives its layers."""
        if (other := self._arguments.differs(calls, self._names)) is not None:
            raise NotSeen(other)
        first, kept = calls[0], self._implementation
        live: Named = {name: first[name] for name in ("position_ids", "use_cache") if name in first}
        cache = next((first[name] for name in names.CACHE_NAMES if first.get(name) is not None), None)
        function = names.attention_function(self._attention_module, kept.name)
        masks = [call.get("attention_mask") for call in calls]
        ctx = LiveContext(batch, length, cache, lambda: masks, True, function, kept, live, reached=reached, calls=calls)
        rows = self._arguments.rows(calls, batch, length)
        flat = to_rows(x, self._arguments.axis, batch, length)
        return ((flat, rows) if rows else (flat,)), ctx

    def _example(self, tokens: int) -> tuple[tuple[Any, ...], LiveContext]:
        found: list[tuple[tuple[Any, ...], LiveContext]] = []

        def finish(x: Tensor, calls: list[Named]) -> Tensor:
            found.append(self._seen(x, calls, 1, tokens))
            raise _Seen

        ids = torch.zeros(1, tokens, dtype=torch.long, device=self._device)
        with torch.inference_mode(), self._stubs.placed(finish), contextlib.suppress(_Seen):
            self._forward(input_ids=ids, use_cache=False, **encoder_states(self._decoder, 1))
        return found[0]

    def _capture_context(self, bucket: int, cache: Any = None) -> LiveContext:
        return self._example(bucket)[1]
