"""The layers of a decoder, one after the other, as what is captured. All around them runs live, by the decoder's forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from segue.capture.places import Places
from segue.integrations.transformers.attention import AttentionName
from segue.integrations.transformers.decoder_forward import Body
from segue.integrations.transformers.decoder_parts import DecoderParts
from segue.integrations.transformers.layer_calls import LayerArguments, first_of, from_rows, to_rows
from segue.integrations.transformers.module_breaks import ModuleBreaks


class LayersBody(Body):
    """``(x [N, ...], rows: each [N, ...]) -> hidden states [N, ...]``: what goes into the first layer to what the last returns.

    ``rows``: those arguments of the layers that have one row a token, such as rotary tables.
    """

    def __init__(
        self,
        parts: DecoderParts,
        forward: Callable[..., Any],
        implementation: AttentionName,
        arguments: LayerArguments,
        breaks: ModuleBreaks,
    ) -> None:
        self._parts, self._arguments = parts, arguments
        super().__init__(parts.decoder, forward, implementation, breaks)

    def look(self) -> None:
        """Take what the layers' code decides by now for what is captured. Modules that run live are looked at by nobody."""
        layers = set(self._parts.layers.modules())
        around: list[nn.Module] = [m for m in self.decoder.modules() if m not in layers]
        outside = [*around, *(m for live in self._breaks.modules for m in live.modules())]
        self.places = Places(self.decoder, outside=tuple(outside), also=("is_causal",), once=True)

    def __call__(self, x: Tensor, rows: Sequence[Tensor] = ()) -> Tensor:  # type: ignore[override]
        hidden = deque(self._each(x, rows), maxlen=1).pop()  # which holds no other layer's meanwhile
        return to_rows(hidden, self._arguments.axis, 1, x.shape[0])

    def states(self, x: Tensor, rows: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:  # type: ignore[override]
        """What each layer returns, [N, ...]."""
        return tuple(to_rows(hidden, self._arguments.axis, 1, x.shape[0]) for hidden in self._each(x, rows))

    def _each(self, x: Tensor, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        hidden = from_rows(x, self._arguments.axis)
        with self._implementation.segue(), self._breaks.active():
            for at, layer in enumerate(self._parts.layers):
                hidden = first_of(layer(hidden, **self._arguments.given(at, rows)))
                yield hidden


def pad_of(dtype: torch.dtype) -> float | int:
    """What rows past the real ones hold."""
    return 0.0 if dtype.is_floating_point else 0
