"""The handle of a model whose head may be in graphs too: what asks for one row of logits is served from ids to logits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.errors import StateChangedError
from segue.integrations.transformers import reasons
from segue.integrations.transformers.attention import AttentionName
from segue.integrations.transformers.compiled_layers import CompiledLayers
from segue.integrations.transformers.decode_server import DecodeServer
from segue.integrations.transformers.decoder_calls import DecoderCall
from segue.integrations.transformers.first_token_server import FirstTokenServer
from segue.integrations.transformers.plain_head import NoPlainHead, PlainHead
from segue.integrations.transformers.prime_admission import HeldAttention
from segue.integrations.transformers.prime_first_token import asks_for_one_row, is_first_token, is_step
from segue.integrations.transformers.prime_trunk import not_causal
from segue.integrations.transformers.proven_handle import ProvenHandle
from segue.integrations.transformers.resident_caches import NoDecode
from segue.prime.prime_strategy import PrimeStrategy
from segue.runner import GraphRunner
from segue.runner.reasons import Reason


class OneRowHandle(ProvenHandle):
    """A handle that serves the first token of a fresh prompt, and steps of one token, by graphs of whole forwards."""

    _model_forward: Callable[..., Any]  # the untouched one
    _may_serve_model: bool  # it is transformers' own
    _implementation: AttentionName
    _attention: HeldAttention
    _compiled: CompiledLayers | None
    _compile: Callable[[], None]  # the layers, if that is due
    _changed: Callable[[], Reason | None]  # why graphs would not do what the modules do now
    _depth_name: str  # where the config says how many layers there are
    _retry: bool
    _primes: Sequence[PrimeStrategy]
    _why_not: dict[str, str]  # strategies that this model can't have
    _head: PlainHead | None  # where graphs may end in its logits
    _first_tokens: FirstTokenServer | None
    _decode: DecodeServer | None

    @abstractmethod
    def _reference(self) -> Callable[..., Any]:
        """What replays of the runner must equal."""

    def _serve_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the whole model: the first token of a fresh prompt, or a step of one token, by one graph; everything else by
        the model's own forward, whose decoder is served by :meth:`_serve`."""
        given = asks_for_one_row(args, kwargs)
        if given is not None and not torch.compiler.is_compiling() and not _torch.is_tracing():
            with self._one_at_a_time:
                out = self._one_row(given)
            if isinstance(out, Reason):
                self._counters.fell_back(out)
                with self.untouched():
                    return self._model_forward(*args, **kwargs)
            if out is not None:
                return out
        try:
            return self._model_forward(*args, **kwargs)
        finally:
            self._here.declined = None  # whoever served the decoder has counted it

    def _one_row(self, given: dict[str, Any]) -> Any:
        """The model's output for a fresh prompt or a step, out of one graph; None where that can't serve it, and the decoder's
        graphs may. A reason where the model must run untouched.
        """
        here, head = self._here, self._head
        if here.untouched or head is None or self._unservable() is not None:
            return None
        call = head.read(given)
        if isinstance(call, str):
            here.declined = call
            return None
        if is_step(call):
            if (unlike := self._unlike_whole()) is None and not head.unchanged():
                if self._any_captured() and (other := head.other_weights()) is not None:
                    return other
                unlike = reasons.AROUND
            if unlike is not None:
                here.declined = unlike
                return None
            logits = self._step(call)
            return head.output(logits, call.cache) if isinstance(logits, Tensor) else logits
        first = self._first_tokens
        if here.breakable_only or here.run is not None or first is None or not is_first_token(call, self._layers):
            return None
        if self._unlike_whole() is not None or self._implementation.name != "sdpa" or not_causal(self._parts) is not None:
            return None
        return first.answer(call, self._changed, self._compile)

    def _unlike_whole(self) -> Reason | None:
        """Why a graph that holds a whole forward, attention too, would not do what the modules do now; None where it would."""
        if torch.is_grad_enabled() and any(p.requires_grad for p in self._model.parameters()):
            return reasons.GRADIENTS
        if (other := self._other_mode()) is not None:
            return other
        if not self._attention.unchanged():
            return reasons.ATTENTION
        layers = self._layers_to_run()
        return None if layers == self._layers else reasons.other_depth(layers, self._layers)

    def _step(self, call: DecoderCall) -> Tensor | Reason | None:
        """Logits [B, V], or hidden states [B, D] where no graph holds the head, of a step of one token by a full graph. None
        where the breakable graphs may serve it, which is counted; a reason where the model must run untouched.
        """
        decode, run = self._decode, self._here.run
        if decode is None or self._here.breakable_only or (run is not None and run != self._reference()):
            return None
        if not decode.captured and (changed := self._changed()) is not None:
            self._here.declined = changed
            return None
        self._compile()
        try:
            out = decode.step(call, reference=run is not None)
        except StateChangedError as e:
            return self._changed() or reasons.changed(e.change, self._decoder)
        if isinstance(out, Reason):
            self._here.declined = out
            return None
        return out

    def _plain_head(self) -> PlainHead | None:
        """The model's head, where graphs may end in its logits."""
        if not self._may_serve_model:
            self._why_not["first token"] = "it takes prime graphs, and transformers' own forward around the decoder"
            return None
        try:
            with self.untouched():
                return PlainHead(self._model, self._model_forward, self._decoder, self._forward, self._patches[0])
        except NoPlainHead as e:
            self._why_not["first token"] = str(e)
            return None

    def _first_token_server(self, runner: GraphRunner) -> FirstTokenServer | None:
        """Where prime serves the model and its head is plain: from ids to logits."""
        if not self._primes and self._head is not None:
            self._why_not["first token"] = "it takes prime graphs, and transformers' own forward around the decoder"
        if not self._primes or self._head is None:
            return None
        return FirstTokenServer(self._model, self._head, self._parts, self._forward, runner, self._compiled, self._retry)

    def _decode_server(self, strategy: str, runner: GraphRunner, **limits: int | None) -> DecodeServer | None:
        """Steps of one token by full graphs."""
        if strategy == "breakable":
            self._why_not["full"] = 'strategy="breakable" was asked for'
            return None
        if self._breaks.modules:
            self._why_not["full"] = f"a full graph has no breaks, and {type(self._breaks.modules[0]).__name__} is one"
            return None
        try:
            server = DecodeServer(
                self._body,
                None if self._head is None else self._model,
                self._parts,
                self._forward,
                self._implementation,
                runner,
                read=self._reader.read,
                run_plain=lambda given: self._graphed(self._reader.read((), given), partial(self._plain, self._body), None, []),
                compiled=self._compiled is not None,
                **limits,
            )
        except NoDecode as e:
            self._why_not["full"] = str(e)
            return None
        trunks: list[Any] = [prime.trunk for prime in self._primes]
        if self._first_tokens is not None:
            trunks.append(self._first_tokens.graphs.trunk)
        for trunk in trunks:
            trunk.resident = server.receive
        return server

    def _capture_steps(self) -> str | None:
        """Capture the full graphs of small batches. Returns what was done, as text."""
        if self._decode is None or self._runner.disabled:
            return None
        ids = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        cache = getattr(self._forward(input_ids=ids, use_cache=True, return_dict=True), self._reader.cache_name)
        return self._decode.capture(cache, self._runner.ladder.max)

    def _layers_to_run(self) -> Any:
        """How many layers a forward of the model runs now. ``generate(assistant_early_exit=...)`` drafts with the first few."""
        return vars(self._decoder.config).get(self._depth_name)
