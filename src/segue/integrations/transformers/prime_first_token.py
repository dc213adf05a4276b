"""The first token of a fresh prompt as one graph: embedding, decoder, last-row gather and head, the cache filled beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from segue.devices import Device, Pool
from segue.integrations.transformers.decoder_calls import DecoderCall
from segue.integrations.transformers.prime_trunk import ModelTrunk
from segue.prime import PrimeGraph
from segue.prime.cuts import Pattern
from segue.runner.stats import Counters

_MEASURED = 3  # buckets of a ladder whose cuts are measured; the others take those of the nearest
_SAYS_NOTHING = ("labels", "inputs_embeds", "output_attentions", "output_hidden_states")  # when they are None or False
_LEFT_OUT = {*_SAYS_NOTHING, "logits_to_keep", "return_dict"}


class TokenTrunk(ModelTrunk):
    """A model's trunk whose rows are token ids [n, 1]: the embedding is in the graph too.

    All scratch caches are the first rows of one, which the graphs of a pool fill in turns.
    """

    def __init__(self, *args: Any, rows: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._largest = super().new_cache(rows)

    def embed(self, tokens: Tensor) -> Tensor:
        """Ids [n] to [n, 1], as they are."""
        return tokens.unsqueeze(1)

    def new_cache(self, rows: int, requests: int = 1) -> Any:
        """The first ``rows`` rows of the one scratch cache."""
        return self.part(self._largest, rows)

    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        """Ids [rows, 1] to [rows, D]."""
        return super().forward(super().embed(x.squeeze(1)), cu_seqlens, cache)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the one scratch cache."""
        return sum(rows.tensor.untyped_storage().nbytes() for rows in self.state(self._largest).values())


class FirstTokenGraphs:
    """Prime graphs from ids to one row of logits, one for each bucket, made at the second call of it or ahead.

    Args:
        trunk: of the model.
        buckets: ascending.
        counters: where captures and replays count.
    """

    def __init__(self, trunk: TokenTrunk, buckets: Sequence[int], device: Device, pool: Pool, counters: Counters) -> None:
        self._trunk, self._buckets = trunk, buckets
        self._device, self._pool, self._counters = device, pool, counters
        self._graphs: dict[int, PrimeGraph] = {}
        self._seen: set[int] = set()
        self._cuts: dict[int, Pattern] = {}  # measured, by bucket

    @property
    def captured(self) -> tuple[int, ...]:
        """Buckets that have a graph."""
        return tuple(sorted(self._graphs))

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch cache that all graphs fill."""
        return self._trunk.scratch_bytes

    def run(self, ids: Tensor, cache: Any, bucket: int) -> Tensor | None:
        """Logits [1, V] of a fresh prompt ``ids`` [n], whose keys and values are in ``cache`` then. None at the first call of a
        bucket, which others must serve: that is its warm-up.
        """
        graph = self._graphs.get(bucket)
        if graph is None:
            if bucket not in self._seen:
                self._seen.add(bucket)
                return None
            graph = self.capture(bucket)
            self._counters.served(bucket, ids.shape[0])
        else:
            count = self._counters.replays_of("prime", bucket)
            count.calls += 1
            count.tokens += ids.shape[0]
        return graph.run(ids, cache).logits

    def capture(self, bucket: int) -> PrimeGraph:
        """Capture a bucket, cut where the nearest measured one is quickest."""
        if bucket not in self._graphs:
            cuts = self._cuts_for(bucket)
            graph = PrimeGraph(self._trunk, bucket, cuts=cuts, device=self._device, pool=self._pool)
            if cuts is None:
                self._cuts[bucket] = graph.cuts
            self._graphs[bucket] = graph
            self._counters.captured += 1
            self._counters.seconds += graph.seconds
        return self._graphs[bucket]

    def order(self) -> list[int]:
        """In which order to capture the whole ladder: the largest first, then those to be measured, then the rest."""
        ladder = sorted(self._buckets, reverse=True)
        measured = [ladder[round(i * (len(ladder) - 1) / max(1, _MEASURED - 1))] for i in range(_MEASURED)]
        return list(dict.fromkeys([*measured, *ladder]))

    def close(self) -> None:
        """Drop every graph."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._seen.clear()
        self._cuts.clear()

    def _cuts_for(self, bucket: int) -> Pattern | None:
        if not self._device.traits.timing:
            return ()
        if len(self._cuts) < _MEASURED:
            return None
        return self._cuts[min(self._cuts, key=lambda b: abs(b - bucket))]


class ModelAround:
    """What stands around a decoder in a model: embedding and head, which a first token's graph holds too."""

    def __init__(self, model: Any, decoder: Any) -> None:
        self._model, self._decoder = model, decoder
        self._embedding, self._head = decoder.get_input_embeddings(), model.get_output_embeddings()
        self._hooks = [
            hooks for m in (decoder, self._embedding, self._head) for hooks in (m._forward_hooks, m._forward_pre_hooks)
        ]
        self._own = [vars(self._embedding), vars(self._head)]

    def unchanged(self) -> bool:
        """Whether embedding and head are those of the graphs, and nobody listens to them or to the decoder."""
        return (
            not any(self._hooks)
            and not any("forward" in own for own in self._own)
            and self._decoder.get_input_embeddings() is self._embedding
            and self._model.get_output_embeddings() is self._head
        )


def asks_for_one_row(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The decoder's arguments of a call of the outer model that asks for the last row of logits alone; else None."""
    if len(args) > 1 or type(keep := kwargs.get("logits_to_keep")) is not int or keep != 1:
        return None
    if kwargs.get("return_dict") is False or any(kwargs.get(name) not in (None, False) for name in _SAYS_NOTHING):
        return None
    given = {k: v for k, v in kwargs.items() if k not in _LEFT_OUT}
    return {"input_ids": args[0], **given} if args else given


def is_first_token(call: DecoderCall, cache_type: type[Any], layers: set[type]) -> bool:
    """Whether a call is one whole prompt of ids for an empty cache of growing layers, at its usual positions, nothing masked.

    Looking at a mask or at positions waits for the device, which has nothing to do yet.
    """
    cache, mask, positions = call.cache, call.attention_mask, call.position_ids
    if call.batch != 1 or call.input_ids is None or not call.use_cache or not call.return_dict:
        return False
    if cache is not None and (type(cache) is not cache_type or cache.get_seq_length() or {*map(type, cache.layers)} - layers):
        return False
    if mask is not None and not (
        isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == call.length and bool(mask.all())
    ):
        return False
    return positions is None or torch.equal(positions[0], torch.arange(call.length, device=positions.device))


def is_plain_head(model: Any, out: Any, hidden: Tensor, cache_name: str) -> bool:
    """Whether the outer model does no more with the last hidden state than a linear layer, and returns no more than its logits.

    ``out``: what the untouched model returned for ``logits_to_keep=1``; ``hidden`` [1, n, D]: its last hidden states.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or {k for k, v in out.items() if v is not None} != {"logits", cache_name}:
        return False
    return out.logits.shape[:2] == (1, 1) and torch.equal(head(hidden[:, -1:]), out.logits)
