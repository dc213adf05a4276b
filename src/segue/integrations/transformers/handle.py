"""The handle of an accelerated model. It takes the decoder's forward over, serves its calls, and gives it back."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from segue import _torch, _torch_modes
from segue.capture.isolation import collected_once
from segue.capture.modes import CallerModes, modes_now
from segue.capture.thread_state import active_forward, reference_frame
from segue.devices import resolve
from segue.errors import StateChangedError, UsageError
from segue.integrations.transformers import checks, names, prime_admission, reasons
from segue.integrations.transformers.argument_names import ArgumentNames
from segue.integrations.transformers.attention import NAME, PAGED, AttentionName, LiveContext, attention_forward
from segue.integrations.transformers.compiled_layers import CompiledLayers
from segue.integrations.transformers.counted_captures import CountedBreakable
from segue.integrations.transformers.decode_server import DecodeServer
from segue.integrations.transformers.decoder_calls import DecoderCall, DecoderCallReader
from segue.integrations.transformers.decoder_forward import Body, ForwardPatch, UncompiledCalls, own_forward
from segue.integrations.transformers.decoder_parts import DecoderParts
from segue.integrations.transformers.default_buckets import buckets_or_default
from segue.integrations.transformers.hidden_states import NAME as HIDDEN_STATES
from segue.integrations.transformers.layer_calls import NotSeen
from segue.integrations.transformers.module_breaks import ModuleBreaks
from segue.integrations.transformers.one_row_handle import OneRowHandle
from segue.integrations.transformers.plain_head import PlainHead
from segue.integrations.transformers.prime_admission import FreshBatch
from segue.integrations.transformers.prime_first_token import has_own_forward, is_step
from segue.integrations.transformers.prime_ladder import capture_primes
from segue.integrations.transformers.prime_trunk import not_causal
from segue.integrations.transformers.probe import check_whole_forward
from segue.integrations.transformers.serving_handle import RunsUntouched
from segue.integrations.transformers.training_modes import TrainingModes
from segue.integrations.transformers.weights import Weights
from segue.prime.prime_strategy import PrimeStrategy
from segue.runner import Decision, GraphRunner, Input, Ladder
from segue.runner.progress import CaptureSummary, Progress
from segue.runner.reasons import DISABLED, Reason, remedy_of

if TYPE_CHECKING:
    from segue.devices import Device
    from segue.runner import Stats


class Accelerated(OneRowHandle):
    """The handle of a model whose decoder is captured. :func:`segue.accelerate` says what its arguments are.

    A call of the decoder goes to :meth:`_serve_alone`, which reads it, asks the runner for a bucket, and runs the untouched
    forward with a reason where graphs can't serve it. What graphs serve goes to :meth:`_graphed`.
    """

    def __init__(self, module: Any, model: Any, parts: DecoderParts, **options: Any) -> None:
        self._decoder = decoder = parts.decoder
        self._forward, self._model_forward = own_forward(decoder), own_forward(model)
        self._begin_with(module, model, options)
        self._patches = [ForwardPatch(decoder, self._serve)]
        self._may_serve_model = model is not decoder and has_own_forward(model)
        self._set_up(**options)
        self._take_over()
        self._uncompiled = UncompiledCalls(model)

    def restore(self) -> None:
        """Give the model its own forward back and free the graphs. May be called again."""
        super().restore()
        self._uncompiled.undo()

    def _set_up(
        self,
        *,
        max_tokens: int,
        strategy: str,
        compile: bool,
        buckets: Ladder | Iterable[int] | None,
        on_failure: Literal["raise", "eager"],
        device: str | Device | None,
        max_context: int | None,
        memory_budget: int | None,
    ) -> None:
        from transformers import AttentionInterface

        model, decoder = self._model, self._decoder
        checks.check_mode(model, decoder)
        checks.check_hooks(model, decoder)
        self._parts = parts = checks.parts_now(model, decoder)
        self._device = checks.device_of(decoder)
        self._weights = Weights(decoder, self._device, live=(decoder.get_input_embeddings(),))
        self._modes = TrainingModes(decoder)
        self._implementation = AttentionName(m.config for m in decoder.modules() if hasattr(m, "config"))
        norm = [m for name, m in decoder.named_children() if name == "norm"]
        self._compiled = CompiledLayers(decoder, [*parts.layers, *norm], on_failure) if compile else None
        self._breaks = ModuleBreaks()
        self._attention_module = parts.mixers[0].module
        self._layers = len(parts.layers)
        self._depth_name = names.of_config(decoder.config, "num_hidden_layers")
        self._retry = on_failure == "eager"
        AttentionInterface.register(NAME, attention_forward)
        self._why_not: dict[str, str] = {}  # strategies that this model can't have
        self._primes: list[PrimeStrategy] = []  # for single prompts, and then for batches
        self._batches: set[Decision] = set()  # by which batches of fresh prompts were served
        self._decode: DecodeServer | None = None
        self._head: PlainHead | None = None
        self._asked_device = self._device if device is None else device
        self._refuse_elsewhere(resolve(self._asked_device).torch_device, self._device)
        self._find_out()
        self._accept_caller_modes()
        self._strategy = CountedBreakable({})
        self._states = None
        ladder = buckets_or_default(buckets, max_tokens, self._compiled is not None)
        self._primes = self._prime_strategies(strategy, ladder.max)
        runner = GraphRunner(
            self._body,
            inputs=self._inputs(),
            buckets=ladder,
            capture_ctx=self._capture_context,
            on_failure=on_failure,
            device=self._asked_device,
            strategies=[*self._primes, self._strategy],
            max_variants=max(4, 1 + len(self._primes)),
        )
        self._run_by(runner, self._device)
        self._head = self._plain_head()
        if self._head is not None and strategy != "breakable" and len(self._patches) == 1:
            self._patches = [*self._patches, ForwardPatch(model, self._serve_model)]
        self._first_tokens = self._first_token_server(runner)
        self._decode = self._decode_server(strategy, runner, max_context=max_context, budget=memory_budget)

    @property
    def stats(self) -> Stats:
        """The runner's counts, with the forwards that ran untouched under ``eager`` and ``reasons``, and all graphs' buckets."""
        stats = self._runner.stats
        buckets, driver = {*stats.buckets}, stats.driver_bytes
        if self._first_tokens is not None:
            buckets.update(self._first_tokens.graphs.captured)
        if self._states is not None:
            buckets.update(self._states.graphs.captured)
            driver += self._states.runner.stats.driver_bytes
        return dataclasses.replace(stats, buckets=tuple(sorted(buckets)), driver_bytes=driver)

    @property
    def strategies(self) -> Mapping[str, str]:
        """How forwards are served, by name of the strategy: empty where it is used, otherwise why this model can't have it.

        Whether hidden states of all layers are is found out when they are first asked for.
        """
        full = {} if self._decode is None else {"full": self._decode.why_not}
        asked = {} if self._states is None else {HIDDEN_STATES: ""}
        return {"breakable": "", "prime": "", "first token": "", **full, **asked, **self._why_not}

    @property
    def boundaries(self) -> tuple[str, ...]:
        """What runs live before, between and after the graphs, in words."""
        head = () if self._model is self._decoder else ("head",)
        return ("embedding", *self._live_modules(), *head)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch caches that prime graphs fill, beside the graphs' own memory."""
        first = None if self._first_tokens is None else self._first_tokens.graphs
        primes = max((prime.scratch_bytes for prime in self._primes), default=0)  # they fill the same one
        return primes + (0 if first is None else first.scratch_bytes)

    @property
    def resident_bytes(self) -> int:
        """Bytes of keys and values in which caches lie while they decode by full graphs."""
        return 0 if self._decode is None else self._decode.resident_bytes

    def capture(self) -> CaptureSummary:
        """Capture the whole ladder now, largest bucket first, instead of each bucket at its second call.

        Returns what was captured, and the seconds that it took, of which ``compile_seconds`` for compiling the layers.

        Raises:
            UsageError: the handle was restored, the model is in training mode or on another device, or something was done to
                its modules that no graph would run.
        """
        self._refuse_restored()
        self._refuse_as_it_is()
        self._captured_ahead = True
        with self._one_at_a_time, torch.inference_mode(), collected_once():
            inputs, ctx = self._example(1)
            start, compiled = time.perf_counter(), self._compile_seconds
            self._compile()
            summary = self._runner.capture(*inputs, ctx=ctx)
            more = [text for text in (self._capture_primes(inputs[0]), self._capture_steps()) if text is not None]
            seconds, compiling = time.perf_counter() - start, self._compile_seconds - compiled
            if self._compiled is not None:
                more.append(f"in all {seconds:.1f} s, of which {compiling:.1f} s compiling")
            if more:
                Progress(0, self._runner.progress).close("; ".join(more))
            return dataclasses.replace(summary, seconds=seconds, compile_seconds=compiling)

    def graphs_of(self, tokens: int) -> tuple[int | None, int, int]:
        """The bucket of a forward of ``tokens`` tokens, its segments and its breaks; 0 and 0 before its capture."""
        bucket = self._runner.admit(tokens).bucket
        return bucket, *self._strategy.captured.get(bucket or 0, (0, 0))

    def _live_modules(self) -> list[str]:
        """The modules that are breaks, whole or but for their projections, by class."""
        whole = {id(each.module) for each in self._breaks}
        kept = Counter(type(mixer.module).__name__ for mixer in self._parts.mixers if id(mixer.module) not in whole)
        found = [f"attention and cache in {count} {name}" for name, count in kept.items()]
        return found + [f"{count} {name}" for name, count in Counter(type(each.module).__name__ for each in self._breaks).items()]

    def _owners(self) -> Sequence[Any]:
        first = None if self._first_tokens is None else self._first_tokens.graphs
        states = None if self._states is None else self._states.runner
        return [owner for owner in (self._decode, first, states, self._runner) if owner is not None]

    def _reference(self) -> Callable[..., Any]:
        return self._by_reference

    def _by_reference(self, *args: Any, **kwargs: Any) -> Any:
        return self._runner.reference(*args, **kwargs)  # of the runner that there is by then, after a recapture too

    def _refuse_as_it_is(self) -> None:
        """Raise UsageError if no graph could serve the model as it is now."""
        reason = self._unservable()
        if reason is not None and reason is not DISABLED:
            raise UsageError(f"nothing is captured: {reason}. {remedy_of(reason)}.")
        reason = self._other_mode()
        if reason is None and ((reason := self._changed()) is None or self._takes_in(reason)):
            return
        raise UsageError(f"nothing is captured, as no graph would run {reason}. {remedy_of(reason)}.")

    def _changed(self) -> Reason | None:
        """Why graphs would not do what the modules do now; None while they would."""
        change = self._body.places.decisions.changed()
        return self._weights.replaced() if change is None else reasons.changed(change, self._decoder)

    def _accept_caller_modes(self) -> None:
        """Take the caller's modes as they are now for those of all captures. Calls under others run untouched."""
        kind, read = self._device.type, {_torch_modes.DEFAULT_DTYPE.name}
        self._caller_modes = CallerModes(kind, modes_now(kind), read)
        self._attention = prime_admission.HeldAttention(self._attention_module, self._implementation)

    def _any_captured(self) -> bool:
        first = self._first_tokens and self._first_tokens.graphs
        parts = (self._strategy, *self._primes, self._decode, first, self._states and self._states.graphs)
        return any(part and part.captured for part in parts)

    def _serve_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._reader.read(args, kwargs)
        if not isinstance(call, str):
            with nullcontext() if call.packed is None else self._implementation.unprefixed():
                out = self._answer(call)
            if not isinstance(out, str):
                return out
            call = out
        return self._untouched_forward(call, args, kwargs)

    def _answer(self, call: DecoderCall) -> Any:
        """The decoder's output for a call, out of graphs; or the reason why it must run untouched."""
        if self._needs_gradients(call.embeds, cache=call.cache):
            return reasons.GRADIENTS
        if (layers := self._layers_to_run()) != self._layers:
            return reasons.other_depth(layers, self._layers)
        if (other := self._other_mode()) is not None:
            return other
        step = self._decode is not None and is_step(call)
        if step and self._head is None and (hidden := self._hidden_of_step(call)) is not None:
            if isinstance(hidden, Reason):
                return hidden
            return self._output(last_hidden_state=hidden[:, None], **{self._reader.cache_name: call.cache})
        decision = self._runner.admit(call.tokens)
        if decision.bucket is None:
            return decision.reason
        run, recorded = self._here.run, self._states
        graphs = self._strategy if not call.hidden_states else None if recorded is None else recorded.graphs
        replays = run is None and graphs is not None and decision.bucket in graphs.captured
        if not replays and (changed := self._changed()) is not None:
            return self._answer(call) if self._takes_in(changed) else changed
        if step and run is None and not self._here.breakable_only:
            self._counters.declined[self._here.declined or reasons.FULL_OUTPUT] += 1
        self._here.declined = None
        self._compile()
        if call.hidden_states:
            states = self._hidden_states()
            if isinstance(states, Reason):
                return states
            if run is not None and run != self._reference():
                return reasons.requested_output("output_hidden_states")
            run = states.run if run is None else states.reference
        try:
            return self._graphed(call, run, decision)
        except StateChangedError as e:  # found while the first segment ran, which has left nothing
            return self._changed() or reasons.changed(e.change, self._decoder)
        except RunsUntouched as e:
            return e.reason
        except NotSeen as e:  # before any layer ran
            return reasons.layers_called(str(e))

    def _hidden_of_step(self, call: DecoderCall) -> Tensor | Reason | None:
        """What :meth:`_step` gives, where attention is what it was."""
        if self._attention.unchanged():
            return self._step(call)
        self._here.declined = reasons.ATTENTION
        return None

    def _graphed(
        self, call: DecoderCall, run: Callable[..., Tensor] | None, decision: Decision | None, reached: list[int] | None = None
    ) -> Any:
        """One forward of the decoder with ``run`` in the place of its body; the rest is what the decoder's own forward does.

        ``run``: None for the runner, in the bucket of ``decision``, by prime where the prompt is fresh.
        """
        decoder = self._decoder
        embeds = call.embeds if call.embeds is not None else decoder.get_input_embeddings()(call.input_ids)
        cache = names.new_cache(decoder.config) if call.use_cache and call.cache is None else call.cache
        positions = call.positions(cache, embeds.device)
        batch, fresh = call.batch, self._fresh_batch(call, cache)
        if fresh is not None:
            call, embeds, positions = fresh.filled(call, embeds, positions)
        ctx = self._context(call, embeds, cache, positions, reached)
        if fresh is not None:
            fresh.mark(ctx, positions, call.attention_mask)
        x = embeds.reshape(call.tokens, embeds.shape[-1])
        self._refuse_gradients(x)
        flat = positions.expand(call.batch, call.length).reshape(call.tokens).long()
        if run is None:
            assert decision is not None
            if ctx.prime is not None:
                decision = Decision(decision.bucket, ctx.prime, decision.reason) if fresh is None else fresh.decision
                self._refuse_changes(decision)
            hidden = self._runner(x, flat, ctx=ctx, decision=decision)
        else:
            hidden = run(x, flat, ctx=ctx)
        more: dict[str, Any] = {}
        if call.hidden_states:
            *states, hidden = (t.view(call.batch, call.length, -1) for t in hidden)
            more["hidden_states"] = (*states, hidden) if self._tied else tuple(states)
        else:
            hidden = hidden.view(call.batch, call.length, -1)
        if call.batch > batch:
            hidden = hidden[:batch]
            prime_admission.drop_sequences(cache, batch)
        out = self._output(last_hidden_state=hidden, **{self._reader.cache_name: cache if call.use_cache else None}, **more)
        return out if call.return_dict else out.to_tuple()

    def _context(
        self, call: DecoderCall, embeds: Tensor, cache: Any, positions: Tensor, reached: list[int] | None = None
    ) -> LiveContext:
        def make_masks() -> list[Any]:
            masks, config = call.attention_mask, self._decoder.config
            if not isinstance(masks, dict) and call.packed is None:
                masks = names.make_masks(config, embeds, masks, cache, positions)
            types = getattr(config, "layer_types", None)
            return [masks[kind] for kind in types or ()] if isinstance(masks, dict) else [masks] * self._layers

        name, packed = self._implementation.name, call.packed
        if packed is not None and not names.layers_update_paged():
            name = f"{PAGED}{name}"
        function = names.attention_function(self._attention_module, name)
        live = {"position_ids": positions, "use_cache": call.use_cache}
        masked = call.attention_mask is not None
        kept = self._implementation
        ctx = LiveContext(call.batch, call.length, cache, make_masks, masked, function, kept, live, reached=reached)
        ctx.packed = packed
        prime = call.batch == 1 and bool(self._primes) and not self._here.breakable_only and not call.hidden_states
        if prime and self._attention.unchanged(function) and prime_admission.is_fresh(ctx, call.position_ids, self._parts):
            ctx.prime = PrimeStrategy.name
        return ctx

    def _refuse_changes(self, decision: Decision) -> None:
        """Raise RunsUntouched if a prime graph is to be made of what has changed since the breakable ones were."""
        captured = any(p.name == decision.strategy and decision.bucket in p.captured for p in self._primes)
        if not captured and (changed := self._changed()) is not None:
            raise RunsUntouched(changed)

    def _fresh_batch(self, call: DecoderCall, cache: Any) -> FreshBatch | None:
        """How prime takes a call that is a batch of fresh prompts; None if it takes no such call."""
        if call.batch == 1 or len(self._primes) < 2 or self._here.breakable_only or call.hidden_states:
            return None
        if not prime_admission.is_empty(cache, self._layers):  # most calls are steps of decoding, and end here
            return None
        if not self._attention.unchanged() or self._implementation.name != "sdpa" or not_causal(self._parts) is not None:
            return None
        return FreshBatch.of(call, self._runner, self._batches)

    def _compile(self) -> None:
        """Compile the layers, if that is due."""
        if self._compiled is not None and not self._compiled.enabled:
            self._compiled.enabled = True
            self._compile_by(self._compiled, self._body)

    def _compile_by(self, layers: CompiledLayers, body: Callable[..., Any]) -> None:
        """Compile the layers as ``body`` calls them, by a forward of their own. It has no cache, so it leaves nothing."""
        n = layers.tokens_to_compile_at
        with torch.inference_mode(False), torch.no_grad():  # graphs' inputs are no inference tensors either
            x = self._rows(n).clone()
            positions = torch.arange(n, device=self._device)
        ctx = self._capture_context(n)
        with torch.inference_mode(), active_forward(ctx), reference_frame(n, n):
            for _ in range(2):  # the second layer's inputs are what the first has made
                body(x, positions)

    @property
    def _compile_seconds(self) -> float:
        return 0.0 if self._compiled is None else self._compiled.seconds

    def _capture_primes(self, x: Tensor) -> str | None:
        """The ladder once more, for fresh prompts; ``x`` [1, D]. Returns what was done, as text.

        Where the model's own forward is served too, its graphs are captured, from ids to one row of logits. Those of the decoder
        alone then wait for somebody who asks for more rows.
        """
        first, primes, runner = self._first_tokens, self._primes, self._runner
        if runner.disabled:
            return None
        if first is not None:
            graphs = first.graphs
            return capture_primes(graphs, runner, graphs.order(), graphs.capture, self._device)
        if primes:
            buckets = sorted(runner.ladder, reverse=True)
            return capture_primes(
                primes[0], runner, buckets, lambda bucket: self._capture_prime(primes[0], bucket, x), self._device
            )
        return None

    def _capture_prime(self, prime: PrimeStrategy, bucket: int, x: Tensor) -> None:
        """Warm up and capture one bucket on a prompt of rows ``x`` [1, D] for a throwaway cache.

        A model that prime can't serve as it is now has no fresh prompts, and nothing is captured.
        """
        for _ in range(2):
            ctx = self._capture_context(bucket, names.new_cache(self._decoder.config))
            if bucket in prime.captured or not prime.fits(ctx, bucket):
                return
            self._runner(x.expand(bucket, -1), torch.arange(bucket, device=self._device), ctx=ctx)

    def _capture_context(self, bucket: int, cache: Any = None) -> LiveContext:
        """A context for a bucket's explicit capture: one sequence that fills it."""
        call = DecoderCall(None, None, None, None, cache, cache is not None, True, 1, bucket)
        positions = call.positions(cache, self._device)
        return self._context(call, self._rows(bucket)[None], cache, positions)

    def _rows(self, n: int) -> Tensor:
        """Hidden states [n, D] like those of ``n`` tokens."""
        weight: Tensor = self._decoder.get_input_embeddings().weight
        if _torch.is_wrapper(weight):  # split between ranks
            return torch.zeros(n, weight.shape[1], dtype=weight.dtype, device=self._device)
        return weight.detach()[:1].expand(n, -1)

    def _prime_strategies(self, strategy: str, rows: int) -> list[PrimeStrategy]:
        """The strategies for fresh prompts; none where none was asked for, or ``"auto"`` meets a model without prime graphs."""
        if strategy == "breakable":
            self._why_not["prime"] = 'strategy="breakable" was asked for'
            return []
        if self._breaks.modules and strategy == "auto":
            self._why_not["prime"] = f"a prime graph has no breaks, and {type(self._breaks.modules[0]).__name__} is one"
            return []
        try:
            found, without_batches = prime_admission.strategies(self._model, self._parts, self._forward, rows, self._compiled)
        except UsageError as e:
            if strategy == "prime":
                raise
            self._why_not["prime"] = str(e)
            return []
        if without_batches is not None:
            self._why_not["prime, batches"] = without_batches
        return found

    def _find_out(self) -> None:
        """Set up how this decoder is run, and prove it.

        Raises:
            UsageError: it isn't what the untouched model does.
        """
        self._reader = DecoderCallReader(self._decoder.config, self._forward, ArgumentNames(self._decoder).__contains__)
        self._body = Body(self._decoder, self._forward, self._implementation, self._breaks, self._compiled)
        check_whole_forward(self._decoder, self._forward, self._reader.named)
        self._probe()
        self._break_what_no_graph_holds()

    def _inputs(self) -> dict[str, Any]:
        """The inputs of the body."""
        return {"x": Input(token_dim=0, pad=0.0), "position_ids": Input(token_dim=0, pad=0)}

    def _example(self, tokens: int) -> tuple[tuple[Any, ...], LiveContext]:
        """Inputs of the body for one sequence of ``tokens``, and the live context of that forward."""
        ids = torch.zeros(1, tokens, dtype=torch.long, device=self._device)
        with torch.inference_mode():
            x = self._decoder.get_input_embeddings()(ids)[0]
            return (x, ids[0]), self._capture_context(tokens)
