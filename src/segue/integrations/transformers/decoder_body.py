"""What is captured: a decoder from its embeddings to its last hidden states, over one row of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from segue.integrations.transformers.attention_name import AttentionName


class Body:
    """``(x [N, D], position_ids [N]) -> hidden states [N, D]``, by the decoder's own forward.

    That forward sees no mask and no cache: both are in the break, where they are live.
    """

    def __init__(self, decoder: nn.Module, forward: Callable[..., Any], implementation: AttentionName) -> None:
        self.decoder = decoder
        self._forward = forward
        self._implementation = implementation

    def __call__(self, x: Tensor, position_ids: Tensor) -> Tensor:
        with self._implementation.segue():
            out = self._forward(
                inputs_embeds=x[None],
                position_ids=position_ids[None],
                attention_mask=None,
                use_cache=False,
                return_dict=True,
            )
        return out.last_hidden_state[0]  # type: ignore[no-any-return]
