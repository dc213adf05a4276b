"""A model whose head is a linear layer over the last hidden state and no more, so that a graph may end in its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from segue.integrations.transformers import names, reasons
from segue.integrations.transformers.argument_names import ArgumentNames
from segue.integrations.transformers.decoder_calls import DecoderCall, DecoderCallReader
from segue.integrations.transformers.decoder_forward import ForwardPatch
from segue.integrations.transformers.prime_first_token import ModelAround, is_plain_head
from segue.runner.reasons import Reason


class NoPlainHead(Exception):
    """A model does more for a row of logits than a graph would. The text says what."""


class PlainHead:
    """Calls of a whole model, and its answers, where graphs hold its head.

    Args:
        model: the whole model. ``model_forward``: its untouched forward.
        decoder: of it. ``forward``: the decoder's untouched forward; ``patch``: what stands in for that.

    Raises:
        NoPlainHead: the model's head is no such one.
    """

    def __init__(
        self, model: Any, model_forward: Callable[..., Any], decoder: Any, forward: Callable[..., Any], patch: ForwardPatch
    ) -> None:
        self._cache_name = names.cache_name(model_forward)
        self._output = self._output_of(model, model_forward, decoder, forward)
        # The outer model reads more than its decoder does: images, say.
        self._reader = DecoderCallReader(decoder.config, forward, ArgumentNames(model).__contains__)
        self._around = ModelAround(model, decoder, patch)

    def read(self, given: dict[str, Any]) -> DecoderCall | str:
        """The call of a decoder with the arguments ``given``, or why graphs can't serve it."""
        return self._reader.read((), given)

    def unchanged(self) -> bool:
        """Whether embedding and head are those of the graphs, and nobody listens or stands between model and decoder."""
        return self._around.unchanged()

    def other_weights(self) -> Reason | None:
        """The reason that names a parameter of embedding or head which is another one than in the graphs."""
        other = self._around.other_weights()
        return None if other is None else reasons.other_memory(other)

    def output(self, logits: Tensor, cache: Any) -> Any:
        """The model's output with one row of logits [B, V]."""
        return self._output(logits=logits[:, None], **{self._cache_name: cache})

    def _output_of(self, model: Any, model_forward: Callable[..., Any], decoder: Any, forward: Callable[..., Any]) -> Any:
        """The type of the model's output. The caller has the model run untouched meanwhile."""
        embedding = decoder.get_input_embeddings()
        ids = torch.tensor([[0, min(1, embedding.num_embeddings - 1)]], device=embedding.weight.device)
        try:
            with torch.no_grad():
                out = model_forward(input_ids=ids, use_cache=True, logits_to_keep=1)
                hidden = forward(input_ids=ids, use_cache=True).last_hidden_state
        except (TypeError, ValueError):
            raise NoPlainHead(f"the forward of {type(model).__name__} doesn't take logits_to_keep=1") from None
        except Exception as e:  # whatever it needs beside ids, or does with them
            raise NoPlainHead(f"the forward of {type(model).__name__} fails for ids alone: {type(e).__name__}: {e}") from None
        if not is_plain_head(model, out, hidden, self._cache_name):
            raise NoPlainHead("its head does more with the last hidden state than a linear layer")
        return type(out)
