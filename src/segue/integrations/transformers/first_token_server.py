"""Serves calls of a whole model that ask for the first token of a fresh prompt, one row of logits, out of one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from segue.errors import StateChangedError
from segue.integrations.transformers import names, reasons
from segue.integrations.transformers.argument_names import ArgumentNames
from segue.integrations.transformers.compiled_layers import CompiledLayers
from segue.integrations.transformers.decoder_calls import DecoderCall, DecoderCallReader
from segue.integrations.transformers.decoder_forward import ForwardPatch
from segue.integrations.transformers.decoder_parts import DecoderParts
from segue.integrations.transformers.prime_first_token import (
    FirstTokenGraphs,
    ModelAround,
    TokenTrunk,
    is_first_token,
    is_plain_head,
)
from segue.prime.prime_strategy import PrimeStrategy
from segue.runner import GraphRunner
from segue.runner.reasons import Reason


class NoFirstToken(Exception):
    """A model's first tokens can't be served. The text says why."""


class FirstTokenServer:
    """First tokens of a model, by graphs that share the memory and the buckets of the runner of its decoder.

    Args:
        model: the whole model. ``model_forward``: its untouched forward.
        parts: of its decoder. ``forward``: the decoder's untouched forward; ``patch``: what stands in for that.
        layers: run compiled.
        retry: as for :class:`FirstTokenGraphs`.

    Raises:
        NoFirstToken: the model does more for a row of logits than the graphs would.
    """

    def __init__(
        self,
        model: Any,
        model_forward: Callable[..., Any],
        parts: DecoderParts,
        forward: Callable[..., Any],
        patch: ForwardPatch,
        runner: GraphRunner,
        layers: CompiledLayers | None,
        retry: bool,
    ) -> None:
        decoder = parts.decoder
        self._decoder, self._depth, self._runner = decoder, len(parts.layers), runner
        self._cache_name = names.cache_name(model_forward)
        self._output = self._output_of(model, model_forward, decoder, forward)
        # The outer model reads more than its decoder does: images, say.
        self._reader = DecoderCallReader(decoder.config, forward, ArgumentNames(model).__contains__)
        recorder = runner.prepare().recorder
        trunk = TokenTrunk(model, parts=parts, forward=forward, layers=layers, rows=runner.ladder.max)
        self.graphs = FirstTokenGraphs(trunk, runner.ladder, recorder.device, recorder.pool, recorder.counters, retry)
        self._around = ModelAround(model, decoder, patch)

    def read(self, given: dict[str, Any]) -> DecoderCall | None:
        """The call of a decoder with the arguments ``given``, if it is a fresh prompt."""
        call = self._reader.read((), given)
        return None if isinstance(call, str) or not is_first_token(call, self._depth) else call

    def answer(self, call: DecoderCall, changed: Callable[[], Reason | None], compile: Callable[[], None]) -> Any:
        """The model's output for a fresh prompt. None where no graph can serve it, and the decoder's graphs may. A reason where
        the model must run untouched.

        ``changed``: why graphs would not do what the decoder does now. ``compile``: compiles its layers, if that is due.
        """
        assert call.input_ids is not None
        if not self._around.unchanged():
            other = self._around.other_weights() if self.graphs.captured else None
            return None if other is None else reasons.other_memory(other)
        bucket = self._runner.admit(call.tokens, strategy=PrimeStrategy.name).bucket
        if bucket is None:
            return None
        cache = names.new_cache(self._decoder.config) if call.cache is None else call.cache
        if not self.graphs.holds(bucket) and changed() is not None:
            return None
        compile()
        try:
            logits = self.graphs.run(call.input_ids[0], cache, bucket)
        except StateChangedError as e:
            return changed() or reasons.changed(e.change, self._decoder)
        return None if logits is None else self._output(logits=logits[:, None], **{self._cache_name: cache})

    def _output_of(self, model: Any, model_forward: Callable[..., Any], decoder: Any, forward: Callable[..., Any]) -> Any:
        """The type of the model's output. The caller has the model run untouched meanwhile."""
        embedding = decoder.get_input_embeddings()
        ids = torch.tensor([[0, min(1, embedding.num_embeddings - 1)]], device=embedding.weight.device)
        try:
            with torch.no_grad():
                out = model_forward(input_ids=ids, use_cache=True, logits_to_keep=1)
                hidden = forward(input_ids=ids, use_cache=True).last_hidden_state
        except (TypeError, ValueError):
            raise NoFirstToken(f"the forward of {type(model).__name__} doesn't take logits_to_keep=1") from None
        if not is_plain_head(model, out, hidden, self._cache_name):
            raise NoFirstToken("its head does more with the last hidden state than a linear layer")
        return type(out)
