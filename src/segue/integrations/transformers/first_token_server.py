"""Serves calls of a whole model that ask for the first token of a fresh prompt, one row of logits, out of one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.errors import StateChangedError
from segue.integrations.transformers import names, reasons
from segue.integrations.transformers.compiled_layers import CompiledLayers
from segue.integrations.transformers.decoder_calls import DecoderCall
from segue.integrations.transformers.decoder_parts import DecoderParts
from segue.integrations.transformers.plain_head import PlainHead
from segue.integrations.transformers.prime_first_token import FirstTokenGraphs, TokenTrunk
from segue.prime.prime_strategy import PrimeStrategy
from segue.runner import GraphRunner
from segue.runner.reasons import Reason


class FirstTokenServer:
    """First tokens of a model, by graphs that share the memory and the buckets of the runner of its decoder.

    Args:
        model: the whole model. ``head``: its head.
        parts: of its decoder. ``forward``: the decoder's untouched forward.
        layers: run compiled.
        retry: as for :class:`FirstTokenGraphs`.
    """

    def __init__(
        self,
        model: Any,
        head: PlainHead,
        parts: DecoderParts,
        forward: Callable[..., Any],
        runner: GraphRunner,
        layers: CompiledLayers | None,
        retry: bool,
    ) -> None:
        self._decoder, self._head, self._runner = parts.decoder, head, runner
        recorder = runner.prepare().recorder
        trunk = TokenTrunk(model, parts=parts, forward=forward, layers=layers, rows=runner.ladder.max)
        self.graphs = FirstTokenGraphs(trunk, runner.ladder, recorder.device, recorder.pool, recorder.counters, retry)

    def answer(self, call: DecoderCall, changed: Callable[[], Reason | None], compile: Callable[[], None]) -> Any:
        """The model's output for a fresh prompt. None where no graph can serve it, and the decoder's graphs may. A reason where
        the model must run untouched.

        ``changed``: why graphs would not do what the decoder does now. ``compile``: compiles its layers, if that is due.
        """
        assert call.input_ids is not None
        if not self._head.unchanged():
            return self._head.other_weights() if self.graphs.captured else None
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
        return None if logits is None else self._head.output(logits, cache)
