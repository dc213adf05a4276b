"""The first token of a fresh prompt as one graph: embedding, decoder, last-row gather and head, the cache filled beside it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from segue import _torch
from segue.capture.isolation import warn_of_lazy_capture
from segue.capture.places import Places
from segue.devices import Device, Pool
from segue.errors import InputError, ReplayError, UsageError
from segue.integrations.transformers.decoder_calls import DecoderCall
from segue.integrations.transformers.prime_admission import are_usual, is_empty
from segue.integrations.transformers.prime_trunk import ModelTrunk
from segue.prime import PrimeGraph
from segue.prime.cuts import Pattern
from segue.prime.scratch_forward import places_of
from segue.runner.stats import Counters

log = logging.getLogger("segue")

_MEASURED = 3  # buckets of a ladder whose cuts are measured; the others take those of the nearest
_SAYS_NOTHING = ("labels", "inputs_embeds", "output_attentions", "output_hidden_states")  # when they are None or False
_LEFT_OUT = {*_SAYS_NOTHING, "logits_to_keep", "return_dict"}


class TokenTrunk(ModelTrunk):
    """A model's trunk whose rows are token ids [n, 1]: the embedding is in the graph too.

    All scratch caches are the first rows of one, which the graphs of a pool fill in turns. The first graph makes it.
    """

    def __init__(self, *args: Any, rows: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows, self._largest = rows, None

    @property
    def outside(self) -> tuple[nn.Module, ...]:
        """Model and decoder: embedding and head are in the graph."""
        return self.model, self._decoder

    def embed(self, tokens: Tensor) -> Tensor:
        """Ids [n] to [n, 1], as they are."""
        return tokens.unsqueeze(1)

    def new_cache(self, rows: int, requests: int = 1) -> Any:
        """The first ``rows`` rows of the one scratch cache."""
        if self._largest is None:
            self._largest = super().new_cache(self._rows)
        return self.part(self._largest, rows)

    def drop_cache(self) -> None:
        """Free the scratch cache, once no graph fills it any more."""
        self._largest = None

    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any, numbers: Tensor | None = None) -> Tensor:
        """Ids [rows, 1] to [rows, D]."""
        return super().forward(super().embed(x.squeeze(1)), cu_seqlens, cache, numbers)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the one scratch cache."""
        if self._largest is None:
            return 0
        return sum(rows.tensor.untyped_storage().nbytes() for rows in self.state(self._largest).values())


class _FirstTokenGraph(PrimeGraph):
    def __init__(self, trunk: TokenTrunk, places: Places, bucket: int, **options: Any) -> None:
        self._shared = places
        super().__init__(trunk, bucket, **options)

    @property
    def owner(self) -> str:
        return "handle of segue.accelerate"

    def _places(self) -> Places:
        return self._shared


class FirstTokenGraphs:
    """Prime graphs from ids to one row of logits, one for each bucket, made at the second call of it or ahead.

    Args:
        trunk: of the model.
        buckets: ascending.
        counters: where captures and replays count.
        retry: a bucket whose capture fails is left to others, which is logged once; otherwise the error reaches the caller.
    """

    def __init__(
        self, trunk: TokenTrunk, buckets: Sequence[int], device: Device, pool: Pool, counters: Counters, retry: bool
    ) -> None:
        self.trunk, self._buckets = trunk, buckets
        self._device, self._pool, self._counters = device, pool, counters
        self._graphs: dict[int, PrimeGraph] = {}
        self._seen: set[int] = set()
        self._retry, self._failed = retry, set[int]()
        self._cuts: dict[int, Pattern] = {}  # measured, by bucket
        self._places: Places | None = None  # what the trunk reaches: one walk for all buckets

    def holds(self, bucket: int) -> bool:
        """Whether a bucket has a graph."""
        return bucket in self._graphs

    @property
    def captured(self) -> tuple[int, ...]:
        """Buckets that have a graph."""
        return tuple(sorted(self._graphs))

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch cache that all graphs fill."""
        return self.trunk.scratch_bytes

    def run(self, ids: Tensor, cache: Any, bucket: int) -> Tensor | None:
        """Logits [1, V] of a fresh prompt ``ids`` [n], whose keys and values are in ``cache`` then. None at the first call of a
        bucket, which others must serve, as that is its warm-up; and for a bucket whose capture failed.
        """
        graph = self._graphs.get(bucket)
        if graph is None:
            if bucket not in self._seen:
                self._seen.add(bucket)
                return None
            warn_of_lazy_capture(self._device)
            graph = self.capture(bucket)
            if graph is None:
                return None
            self._counters.served(bucket, ids.shape[0])
            return graph.run(ids, cache).logits
        logits = graph.run(ids, cache).logits
        count = self._counters.replays_of("prime", bucket)
        count.calls += 1
        count.tokens += ids.shape[0]
        return logits

    def capture(self, bucket: int) -> PrimeGraph | None:
        """Capture a bucket, cut where the nearest measured one is quickest. None if that failed, and others can serve it."""
        if bucket in self._graphs or bucket in self._failed:
            return self._graphs.get(bucket)
        cuts = self._cuts_for(bucket)
        if self._places is None or self._places.decisions.changed() is not None:
            self._places = places_of(self.trunk)
        try:
            graph = _FirstTokenGraph(self.trunk, self._places, bucket, cuts=cuts, device=self._device, pool=self._pool)
        except Exception as e:
            if not self._retry or isinstance(e, UsageError | InputError | ReplayError) or _torch.device_is_lost(e):
                raise
            self._failed.add(bucket)
            if isinstance(e, torch.OutOfMemoryError):
                raise
            log.warning("segue: first tokens of bucket %d have no graph of their own: %s: %s", bucket, type(e).__name__, e)
            return None
        if cuts is None:
            self._cuts[bucket] = graph.cuts
        self._graphs[bucket] = graph
        self._counters.captured += 1
        self._counters.seconds += graph.seconds
        return graph

    def order(self) -> list[int]:
        """In which order to capture the whole ladder: the largest first, then those to be measured, then the rest."""
        ladder = sorted(self._buckets, reverse=True)
        measured = [ladder[round(i * (len(ladder) - 1) / max(1, _MEASURED - 1))] for i in range(_MEASURED)]
        return list(dict.fromkeys([*measured, *ladder]))

    def close(self) -> None:
        """Drop every graph and the scratch cache."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._seen.clear()
        self._cuts.clear()
        self.trunk.drop_cache()

    def _cuts_for(self, bucket: int) -> Pattern | None:
        if not self._device.traits.timing:
            return ()
        if len(self._cuts) < _MEASURED:
            return None
        return self._cuts[min(self._cuts, key=lambda b: abs(b - bucket))]


class ModelAround:
    """What stands around a decoder in a model, as the graphs of first tokens hold it or leave it out.

    They hold embedding and head. They leave out whatever else runs between the model's forward and the decoder's.
    ``patch``: the decoder's forward as long as nobody wraps it.
    """

    def __init__(self, model: Any, decoder: Any, patch: Any) -> None:
        self._decoder, self._patch = vars(decoder), patch
        self._model, self._forward = model, type(model).forward
        ends = decoder.get_input_embeddings(), model.get_output_embeddings()
        self._ends = tuple(end for end in ends if end is not None)  # a bare decoder has no head
        self._names = {id(m): name for name, m in model.named_modules() if m in self._ends}
        self._as_captured = [_computes(end) for end in self._ends]
        between = [m for m in model.modules() if m is not model and m is not decoder and any(c is decoder for c in m.modules())]
        path = {id(m) for m in (*between, decoder, *self._ends)}
        self._slots = [(m._modules, k, c) for m in model.modules() for k, c in m._modules.items() if id(c) in path]
        self._without_forward = [vars(m) for m in (*between, *self._ends)]
        self._hooks = [hooks for m in (*between, decoder, *self._ends) for hooks in (m._forward_hooks, m._forward_pre_hooks)]

    def unchanged(self) -> bool:
        """Whether embedding and head are those of the graphs, and nobody listens or stands in between."""
        return (
            not any(self._hooks)
            and type(self._model).forward is self._forward
            and not any("forward" in own for own in self._without_forward)
            and self._decoder.get("forward") is self._patch
            and all(table.get(name) is child for table, name, child in self._slots)
            and all(map(_same, map(_computes, self._ends), self._as_captured))
        )

    def other_weights(self) -> str | None:
        """The name of a parameter of embedding or head that is another one than in the graphs."""
        for end, then in zip(self._ends, self._as_captured, strict=True):
            for (name, now), before in zip(end._parameters.items(), then[1:], strict=False):
                if now is not before:
                    return f"{self._names[id(end)]}.{name}"
        return None


def _computes(module: Any) -> tuple[Any, ...]:
    """What decides what a module without submodules computes, save the values in its parameters."""
    return (type(module), *module._parameters.values())


def _same(now: tuple[Any, ...], then: tuple[Any, ...]) -> bool:
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


def _says_something(value: Any) -> bool:
    return value is not None and value is not False


def asks_for_one_row(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The decoder's arguments of a call of the outer model that asks for the last row of logits alone; else None."""
    if len(args) > 1 or (args and "input_ids" in kwargs):
        return None
    keep, ids = kwargs.get("logits_to_keep", 0), args[0] if args else kwargs.get("input_ids")
    if type(keep) is not int or keep not in (0, 1) or (keep == 0 and not _is_one_token(ids)):
        return None
    if kwargs.get("return_dict") is False or any(_says_something(kwargs.get(name)) for name in _SAYS_NOTHING):
        return None
    given = {k: v for k, v in kwargs.items() if k not in _LEFT_OUT}
    return {"input_ids": args[0], **given} if args else given


def _is_one_token(ids: Any) -> bool:
    return isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] == 1


def is_step(call: DecoderCall) -> bool:
    """Whether a call of a decoder is of one token for each sequence of a cache that holds some."""
    if call.length != 1 or call.hidden_states or call.input_ids is None or call.cache is None:
        return False
    if call.input_ids.dtype not in (torch.int64, torch.int32):
        return False
    layers: Any = getattr(call.cache, "layers", None)
    return call.use_cache and call.return_dict and bool(layers) and bool(getattr(layers[0], "is_initialized", False))


def is_first_token(call: DecoderCall, layers: int) -> bool:
    """Whether a call of a decoder of ``layers`` layers is one whole prompt of ids for an empty cache, with nothing masked.

    Looking at a mask or at positions waits for the device, which has nothing to do yet.
    """
    if call.batch != 1 or call.hidden_states or call.input_ids is None or call.input_ids.dtype is not torch.int64:
        return False
    if not call.use_cache or not call.return_dict or not (call.cache is None or is_empty(call.cache, layers)):
        return False
    mask = call.attention_mask
    if mask is not None and not (
        isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == call.length and bool(mask.all())
    ):
        return False
    return are_usual(call.position_ids, call.length)


def has_own_forward(model: Any) -> bool:
    """Whether a model's forward is transformers' own. What another one does besides the logits, no look at them tells."""
    return "forward" not in vars(model) and type(model).forward.__module__.partition(".")[0] == "transformers"


def is_plain_head(model: Any, out: Any, hidden: Tensor, cache_name: str) -> bool:
    """Whether the outer model does no more with the last hidden state than a linear layer, and returns no more than its logits.

    ``out``: what the untouched model returned for ``logits_to_keep=1``; ``hidden`` [1, n, D]: its last hidden states.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or {k for k, v in out.items() if v is not None} != {"logits", cache_name}:
        return False
    return out.logits.shape[:2] == (1, 1) and torch.equal(head(hidden[:, -1:]), out.logits)
