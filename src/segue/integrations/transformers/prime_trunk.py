"""A decoder-only transformers model as the trunk of a prime graph. Sessions are the caches that the model makes itself."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture import current_forward_ctx
from segue.errors import InputError, UsageError
from segue.integrations.transformers import checks, names
from segue.integrations.transformers.attention import NAME, AttentionName, attention_forward, attention_goes_to, batched
from segue.integrations.transformers.compiled_layers import CompiledLayers
from segue.integrations.transformers.decoder_parts import DecoderParts
from segue.prime import Rows, cut_here

_TOGETHER = 8  # keys and values of so many layers are kept in one fused copy: each copy alone takes the device 2 us
_OWN = ("sdpa", "eager")


class _Running:
    """What attention needs of the forward that is running. ``kv``: keys and values of each layer [2 * layers, Hkv, rows, D].
    ``sequences``: as a batch of how many the tokens meet."""

    def __init__(self, kv: Tensor, attention: Callable[..., Any], mask: Tensor | None, sequences: int) -> None:
        self.attention, self.mask, self._kv, self._sequences = attention, mask, kv, sequences
        self._to: list[Tensor] = []
        self._kept: list[Tensor] = []

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Have keys and values [1, Hkv, N, D] in the cache, by the end of the forward."""
        for at, t in ((2 * layer, key), (2 * layer + 1, value)):
            self._to.append(self._kv[at, :, : t.shape[2]])
            self._kept.append(t[0])
        if len(self._to) >= 2 * _TOGETHER:
            self.flush()

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        """Keep keys and values [1, Hkv, N, D], then the model's own attention of ``query`` [1, H, N, D]: [1, N, H, D]."""
        layer: Any = module.layer_idx
        if layer:
            cut_here()
        self.keep(layer, key, value)
        count, tokens = self._sequences, query.shape[2]
        if count > 1:
            query, key, value = (batched(t, count, tokens // count) for t in (query, key, value))
        out: Tensor = self.attention(module, query, key, value, self.mask, **options)[0]
        return out.reshape(1, tokens, *out.shape[2:]), None

    def flush(self) -> None:
        """Do the copies that are due."""
        if self._to:
            _torch.foreach_copy(self._to, self._kept)
        self._to, self._kept = [], []


class ModelTrunk:
    """A trunk for the families that :func:`segue.accelerate` serves, with full attention in every layer.

    A session is a fresh ``DynamicCache``. After a run its keys and values of all layers lie in one block [2 * layers, B, Hkv,
    T, D], filled by one copy, which goes when the cache has grown. ``B`` is 1, but for the trunks of :meth:`for_batches`.

    Args:
        model: a ``PreTrainedModel`` with a language-model head, in eval mode, on one device.
        parts: its decoder and layers, where ``model`` is accelerated already; ``forward`` is the decoder's own then.
        layers: the decoder's layers, to run compiled.

    ``resident``: gives an empty cache rows of resident memory with keys and values [B, Hkv, n, D] of each layer, where it can.

    Raises:
        UsageError: the model can't be served; says which and why.
    """

    min_tokens = 1
    resident: Callable[[Any, Sequence[tuple[Tensor, Tensor]], int], bool] | None = None

    def __init__(
        self,
        model: Any,
        *,
        parts: DecoderParts | None = None,
        forward: Callable[..., Any] | None = None,
        layers: CompiledLayers | None = None,
    ) -> None:
        from transformers import AttentionInterface

        self.model, self._layers = model, layers
        self._sequences, self._padded = 1, False
        self._accelerated = parts is not None
        if parts is None:
            parts = checks.parts_of(model)
            checks.check_mode(model, parts.decoder)
            checks.check_hooks(model, parts.decoder)
        self._decoder = parts.decoder
        self._forward: Callable[..., Any] = self._decoder.forward if forward is None else forward
        self._config = self._decoder.config
        self._implementation = AttentionName(m.config for m in self._decoder.modules() if hasattr(m, "config"))
        self._device = checks.device_of(self._decoder)
        self._parts = parts
        self._attention = parts.mixers[0].module
        self._cache_name = names.cache_name(self._forward)
        self._blocks: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
        self._check_layers()
        self._check_causal()
        self._shape = self._shape_of_cache()
        if model.get_output_embeddings() is None:
            raise UsageError(f"{type(model).__name__} has no language-model head, and a prime graph ends in logits")
        AttentionInterface.register(NAME, attention_forward)

    @property
    def outside(self) -> tuple[torch.nn.Module, ...]:
        """Modules whose calls no graph holds: whoever listens to them is heard at a replay too."""
        ends = (self._decoder.get_input_embeddings(), *((self.model.get_output_embeddings(),) if self._accelerated else ()))
        return (self.model, self._decoder, *ends)

    def for_batches(self, sequences: int, padded: bool) -> ModelTrunk:
        """A trunk of the same model for batches of so many prompts of one length, whose forward has a fourth argument. Its
        scratch caches may be parts of this one's.

        One request is a batch [B, T], one row after the other, and its session the cache of all. ``padded``: of some tokens the
        numbers say that they are padding, which nobody attends to.
        """
        other = copy.copy(self)
        other._sequences, other._padded = sequences, padded
        return other

    def embed(self, tokens: Tensor) -> Tensor:
        """Ids [n] to [n, D].

        Raises:
            UsageError: attention is not causal any more.
        """
        if not self._accelerated:  # the handle has looked, before the graph
            self._check_causal()
        return self._decoder.get_input_embeddings()(tokens)  # type: ignore[no-any-return]

    def new_cache(self, rows: int, requests: int = 1) -> Any:
        """A cache with room for ``rows`` tokens: a scratch cache. The prompts of all requests lie in one row of tokens."""
        cache = names.new_cache(self._config)
        # One token after the other, as the projections give them, for then they can be kept in fused copies.
        self._blocks[cache] = self._block(rows, tokens_first=True).zero_()
        self._attach(cache, self._blocks[cache])
        return cache

    def part(self, cache: Any, rows: int) -> Any:
        """The first ``rows`` rows of a scratch cache, as one."""
        part = names.new_cache(self._config)
        self._blocks[part] = self._blocks[cache].narrow(2, 0, rows)
        self._attach(part, self._blocks[part])
        return part

    def new_session(self, rows: int) -> Any:
        """A fresh session; it grows, so ``rows`` doesn't matter."""
        return names.new_cache(self._config)

    def reset(self, cache: Any) -> None:
        """Nothing: the forward reads no row that it hasn't written."""

    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any, numbers: Tensor | None = None) -> Tensor:
        """[rows, D] to [rows, D] by the decoder's own forward, keys and values into ``cache``.

        Args:
            numbers: of a batch: what :func:`place_numbers` made of the tokens' positions, [rows].

        Raises:
            UsageError: attention is not causal, and padded rows would reach real ones.
        """
        self._check_causal()
        rows = torch.arange(x.shape[0], device=x.device)
        if numbers is not None:
            return self._forward_batch(x, rows, cu_seqlens, cache, numbers)
        if cu_seqlens.shape[0] == 2:
            positions, mask = rows, None
        else:
            request = (rows[:, None] >= cu_seqlens[1:]).sum(1)
            positions = rows - cu_seqlens[request]
            mask = (rows[:, None] >= rows) & (request[:, None] == request)
        return self._run(x, positions, None if mask is None else mask[None, None], cache)

    def _forward_batch(self, x: Tensor, rows: Tensor, cu_seqlens: Tensor, cache: Any, numbers: Tensor) -> Tensor:
        """The same for a batch [B, T] of which nothing but ``B`` is known to the graph.

        In the graph the batch is [B, steps], as many as the rows allow. So each sequence has padding behind it, which causal
        attention keeps from its tokens; and without a mask the quickest kernels serve.
        """
        count = self._sequences
        steps, length = len(rows) // count, (cu_seqlens[-1] // count).clamp(min=1)
        at = rows[: count * steps]
        from_row = (at // steps * length + at % steps).clamp(max=len(rows) - 1)
        to_row = (rows // length).clamp(max=count - 1) * steps + (rows % length).clamp(max=steps - 1)
        numbers = numbers[from_row]
        mask = None
        if self._padded:
            mask = (at[:steps, None] >= at[:steps]) & (numbers & 1).bool().view(count, 1, 1, steps)
        return self._run(x[from_row], numbers >> 1, mask, cache)[to_row]

    def _run(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        with self._running(self._blocks[cache], mask, x):
            out = self._forward(
                inputs_embeds=x[None],
                position_ids=positions[None],
                attention_mask=None,
                use_cache=False,
                return_dict=True,
            )
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def head(self, last: Tensor) -> Tensor:
        """[requests, D] to [requests, V]."""
        return self.model.get_output_embeddings()(last)  # type: ignore[no-any-return]

    def state(self, cache: Any) -> Mapping[str, Rows]:
        """Keys and values of all layers [2 * layers, B, Hkv, T, D]."""
        block, count = self._blocks[cache], self._sequences
        if block.dim() == 4:  # a scratch cache, of any number of sequences
            steps = block.shape[2] // count
            block = block.narrow(2, 0, count * steps).unflatten(2, (count, steps)).transpose(1, 2)
        return {"keys and values": Rows(block, dim=3, tokens=count)}

    def receive(self, session: Any, cache: Any, n: int) -> bool:
        """Have a fresh session lie in resident memory with the ``n`` tokens that a scratch cache holds. Returns whether it does.

        Of a batch it gets those sequences that the caller gave.
        """
        if self.resident is None:
            return False
        (kept,) = self.state(cache).values()
        length = n // self._sequences
        rows = kept.tensor.narrow(kept.dim, 0, length)
        if self._sequences > 1:
            rows = rows.narrow(1, 0, current_forward_ctx().given)
        each = rows.unbind()
        return self.resident(session, [*zip(each[::2], each[1::2], strict=True)], length)

    def reserve(self, session: Any, n: int) -> None:
        """Memory for ``n`` tokens, kept beside the session until :meth:`set_length`.

        Raises:
            InputError: the session is no cache of this model.
        """
        strange = next(iter({*map(type, session.layers)} - {names.full_cache_layer()}), None)
        if strange is not None or len(session.layers) not in (0, len(self._parts.layers)):
            what = f"{len(session.layers)} layers" if strange is None else f"layers of type {strange.__name__}"
            raise InputError(
                f"a session with {what} is of another model: {type(self.model).__name__} has {len(self._parts.layers)} "
                "layers of full attention. Give a fresh DynamicCache(config=model.config)"
            )
        self._blocks[session] = self._block(n // self._sequences)

    def get_length(self, session: Any) -> int:
        """Tokens in the cache."""
        return session.get_seq_length()  # type: ignore[no-any-return]

    def set_length(self, session: Any, n: int) -> None:
        """Give the session the ``n`` tokens that were copied into its reserved memory."""
        self._attach(session, self._blocks.pop(session))

    def step(self, token: Tensor, session: Any) -> Tensor:
        """One token [1] to logits [1, V] by the model itself, extending the session."""
        out = self._forward(input_ids=token[None], use_cache=True, return_dict=True, **{self._cache_name: session})
        return self.head(out.last_hidden_state[:, -1])

    def _block(self, rows: int, tokens_first: bool = False) -> Tensor:
        count, heads, size = self._shape
        dtype = self._decoder.get_input_embeddings().weight.dtype
        shape = (count, rows, heads, size) if tokens_first else (count, self._sequences, heads, rows, size)
        block = torch.empty(shape, dtype=dtype, device=self._device)
        return block.transpose(1, 2) if tokens_first else block

    def _attach(self, cache: Any, block: Tensor) -> None:
        # As in an eager cache these are no views to autograd, each has a version of its own; and views take longer.
        each = block.shape[1] if block.dim() == 5 else 1
        parts = block.flatten(0, -4).unsafe_split_with_sizes([each] * len(block))
        layers, dtype, device = cache.layers, block.dtype, block.device
        while 2 * len(layers) < len(parts):
            layers.append(names.full_cache_layer()())
        for layer, keys, values in zip(layers, parts[::2], parts[1::2], strict=True):
            layer.keys, layer.values, layer.dtype, layer.device, layer.is_initialized = keys, values, dtype, device, True

    @contextmanager
    def _running(self, kv: Tensor, mask: Tensor | None, x: Tensor) -> Iterator[None]:
        """Attention goes to :meth:`_Running.attend` and finds the cache, while the decoder's forward runs on ``x``.

        ``mask``: which keys each query sees, [1 or B, 1, T, T]; None: all before it.
        """
        own = self._implementation.name
        if own not in _OWN:
            raise UsageError(
                f"{type(self.model).__name__} computes attention by {own!r}, which a prime graph can't give packed or "
                f"causal rows without reading the host. Use one of {_OWN}: model.set_attn_implementation('sdpa')"
            )
        if own == "eager":
            if mask is None:
                mask = x.new_ones(1, 1, *[len(x) // self._sequences] * 2, dtype=torch.bool).tril()
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)
        running = _Running(kv, names.attention_function(self._attention, own), mask, self._sequences)
        layers = nullcontext() if self._layers is None else self._layers.active()
        with self._implementation.segue(), layers, attention_goes_to(running.attend):
            yield
            running.flush()

    def _check_causal(self) -> None:
        where = not_causal(self._parts)
        if where is not None:
            raise UsageError(
                f"{type(self.model).__name__}: {where} is False, and a prime graph relies on causal attention to keep its "
                'padded rows from the real ones. Use strategy="breakable"'
            )

    def _shape_of_cache(self) -> tuple[int, int, int]:
        """Keys and values of all layers, heads, and the size of each, as an untouched forward of one token leaves them."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        with torch.no_grad():
            out = self._forward(input_ids=ids, use_cache=True, return_dict=True)
        kept = [t for layer in getattr(out, self._cache_name).layers for t in (layer.keys, layer.values)]
        shapes = {tuple(t.shape) for t in kept}
        if len(shapes) != 1 or len(kept) != 2 * len(self._parts.layers):
            raise UsageError(
                f"{type(self.model).__name__} keeps {len(kept)} tensors of shapes {sorted(shapes)} for its "
                f"{len(self._parts.layers)} layers, and a prime graph fills a cache of equal ones. Use strategy=\"breakable\""
            )
        _, heads, _, size = shapes.pop()
        return len(kept), heads, size

    def _check_layers(self) -> None:
        growing = names.full_cache_layer()
        strange = next((layer for layer in names.new_cache(self._config).layers if type(layer) is not growing), None)
        if strange is not None:
            raise UsageError(
                f"{type(self.model).__name__} has layers whose cache is a {type(strange).__name__}: it forgets tokens, and a "
                'prime graph fills caches that keep them all. Use strategy="breakable"'
            )


def place_numbers(positions: Tensor, real: Tensor | None) -> Tensor:
    """One number for each token of a batch: its position, and whether it is real. ``positions`` and ``real`` are [B, T]."""
    return (positions.long() * 2 + (1 if real is None else real.long())).reshape(-1)


def not_causal(parts: DecoderParts) -> str | None:
    """What says that attention isn't causal; None where all of it is."""
    if not getattr(parts.decoder.config, "is_causal", True):
        return "config.is_causal"
    for mixer in parts.mixers:  # the device waits for this before each fresh prompt
        if not vars(mixer.module).get("is_causal", True):
            return f"layers.{mixer.layer}.{mixer.kind}.is_causal"
    return None
