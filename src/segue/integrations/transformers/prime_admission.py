"""Fresh prompts of an accelerated model: which forwards a prime graph may serve, and the strategies that serve them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segue import _torch_modes
from segue.errors import UsageError
from segue.integrations.transformers import names
from segue.integrations.transformers.attention import AttentionName, LiveContext
from segue.integrations.transformers.compiled_layers import CompiledLayers
from segue.integrations.transformers.decoder_calls import DecoderCall
from segue.integrations.transformers.decoder_parts import DecoderParts
from segue.integrations.transformers.prime_trunk import ModelTrunk, not_causal, place_numbers
from segue.integrations.transformers.probe import exact_products, first_difference, jittered, results
from segue.prime.prime_strategy import PrimeStrategy
from segue.runner import Decision, GraphRunner

_PROVEN, _PADDING = 7, 3  # tokens, and rows behind them
_SEQUENCES = (2, 4, 8, 16, 32)  # of a batch in a graph
_FREE = 128  # rows: up to here the device waits for the weights, whatever the model's size, so padding takes no time
_MOST = 64  # graphs of batches, each of which takes some MiB of the driver's memory


def strategies(
    model: Any, parts: DecoderParts, forward: Callable[..., Any], rows: int, layers: CompiledLayers | None = None
) -> tuple[list[PrimeStrategy], str | None]:
    """Prime for the decoder of ``model``, whose own forward is ``forward``, in buckets of up to ``rows`` rows: for single
    prompts, and then for batches. All fill one scratch cache. Also why there are none for batches, if there are none.

    Raises:
        UsageError: the model has no prime graphs.
    """
    trunk = ModelTrunk(model, parts=parts, forward=forward, layers=layers)
    _prove(trunk, parts, forward, 1, None)
    single = PrimeStrategy(trunk, _taker(PrimeStrategy.name), most_rows=rows)
    found = [single]
    for padded in (False, True):
        mask = torch.ones(2, _PROVEN, dtype=torch.bool, device="cpu")
        mask[0, :2] = not padded
        try:
            _prove(trunk.for_batches(2, padded), parts, forward, 2, mask)
        except UsageError as e:
            return [single], str(e)
        for count in (c for c in _SEQUENCES if c <= rows):
            name = _name(count, padded)
            batches = trunk.for_batches(count, padded)
            found.append(PrimeStrategy(batches, _taker(name), name=name, numbers=_numbers, beside=single))
    return found, None


def _prove(
    trunk: ModelTrunk, parts: DecoderParts, forward: Callable[..., Any], batch: int, mask: Tensor | None
) -> None:
    """Run short prompts through the trunk and through the untouched decoder. ``mask``: bool [batch, T], of a batch.

    Raises:
        UsageError: they differ.
    """
    weight, tokens = parts.decoder.get_input_embeddings().weight, batch * _PROVEN
    ids = torch.randint(len(weight), (batch, _PROVEN), generator=torch.Generator().manual_seed(2), device="cpu")
    ids = ids.to(weight.device)
    rows = tokens + (_PADDING if weight.dtype in (torch.float32, torch.float64) else 0)  # else rounding shows like a fault
    offsets = torch.tensor([0, tokens], device=weight.device)
    given: dict[str, Tensor] = {}
    numbers: Tensor | None = None
    if mask is not None:
        given["attention_mask"] = mask.long().to(weight.device)
        given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
        numbers = F.pad(place_numbers(given["position_ids"], given["attention_mask"]), (0, rows - tokens))
    real = torch.ones(batch, _PROVEN, dtype=torch.bool, device="cpu") if mask is None else mask
    with torch.no_grad(), jittered(parts.decoder), exact_products():
        scratch, cache = trunk.new_cache(rows), trunk.new_session(_PROVEN)
        x = F.pad(trunk.embed(ids.view(-1)), (0, 0, 0, rows - tokens))
        hidden = trunk.forward(x, offsets, scratch, numbers)[:tokens].view(batch, _PROVEN, -1)
        trunk.reserve(cache, tokens)
        (to,), (kept,) = trunk.state(cache).values(), trunk.state(scratch).values()
        to.tensor.copy_(kept.tensor.narrow(kept.dim, 0, _PROVEN))
        trunk.set_length(cache, tokens)
        out = forward(input_ids=ids, use_cache=True, return_dict=True, **given)
        want = results(out, getattr(out, names.cache_name(forward)), real, _PROVEN)
        got = results(type(out)(last_hidden_state=hidden), cache, real, _PROVEN)
    where = first_difference(want, got)
    if where is not None:
        what = f"a prompt of {_PROVEN} tokens" if batch == 1 else f"{batch} prompts of {_PROVEN} tokens"
        raise UsageError(
            f"{type(trunk.model).__name__}: in {what} by a trunk {where}, so prime graphs can't serve it. "
            'Use strategy="breakable"'
        )


@dataclass(frozen=True)
class FreshBatch:
    """A batch of fresh prompts, as the graphs of ``decision.strategy`` take it: ``given`` ones, filled up to ``sequences``.

    Prompts that are padded on the left leave in cache and hidden states what the model's own attention makes of their padding,
    as in an untouched forward. What is behind the last sequence is dropped.
    """

    decision: Decision
    given: int
    sequences: int
    padded: bool

    @staticmethod
    def of(call: DecoderCall, runner: GraphRunner, known: set[Decision]) -> FreshBatch | None:
        """How the prime strategies of ``runner`` take a batch whose cache is empty; None if they don't: the mask isn't [B, T], to
        fill it up to a graph's number of sequences takes longer than breaks, or there are graphs enough. ``known``: those that
        there are, or will be.

        Looking at the mask waits for the device, which has nothing to do yet.
        """
        mask = call.attention_mask
        if mask is not None and not (isinstance(mask, Tensor) and tuple(mask.shape) == (call.batch, call.length)):
            return None
        sequences = next((count for count in _SEQUENCES if count >= call.batch), None)
        own = runner.admit(call.tokens)
        if sequences is None or own.bucket is None or sequences > runner.ladder.max:
            return None
        padded = mask is not None and not bool(mask.all())
        rows = sequences * call.length
        if rows <= _FREE:
            rows = 1 << (rows - 1).bit_length()  # so that fewer graphs serve
        decision = runner.admit(rows, strategy=_name(sequences, padded))
        if decision.bucket is None or decision.bucket > max(own.bucket, _FREE):
            return None
        if decision not in known:
            if len(known) >= _MOST:
                return None
            known.add(decision)
        return FreshBatch(decision, call.batch, sequences, padded)

    def filled(self, call: DecoderCall, embeds: Tensor, positions: Tensor) -> tuple[DecoderCall, Tensor, Tensor]:
        """The call, its embedded tokens [B, T, D] and positions [1 or B, T], with further sequences behind its own."""
        more = self.sequences - call.batch
        positions = positions.expand(call.batch, call.length)
        if not more:
            return call, embeds, positions
        mask = None if call.attention_mask is None else F.pad(call.attention_mask, (0, 0, 0, more), value=1)
        call = dataclasses.replace(call, batch=self.sequences, attention_mask=mask)
        return call, F.pad(embeds, (0, 0, 0, 0, 0, more)), F.pad(positions, (0, 0, 0, more))

    def mark(self, ctx: LiveContext, positions: Tensor, mask: Tensor | None) -> None:
        """Have the graphs' strategy take ``ctx``. ``positions`` and ``mask`` [B, T]: of the filled batch."""
        ctx.prime, ctx.given = self.decision.strategy, self.given
        ctx.numbers = place_numbers(positions, mask != 0 if self.padded and mask is not None else None)


def drop_sequences(cache: Any, batch: int) -> None:
    """Leave the first ``batch`` sequences of a cache whose layers keep every token."""
    for layer in cache.layers:
        parts = [batch, layer.keys.shape[0] - batch]
        if not parts[1]:
            return
        layer.keys, layer.values = (t.unsafe_split_with_sizes(parts)[0] for t in (layer.keys, layer.values))


class HeldAttention:
    """What prime graphs hold of the attention of ``module``, and breaks use live, as it is when this is made."""

    def __init__(self, module: Any, implementation: AttentionName) -> None:
        self._module, self._implementation = module, implementation
        self._backends, self._kernel = _torch_modes.ATTENTION.read(), F.scaled_dot_product_attention
        self._function = self._function_now()

    def unchanged(self, function: Any = None) -> bool:
        """Whether it is that still. ``function``: the model's own, if it is known."""
        same = (function or self._function_now()) is self._function and self._kernel is F.scaled_dot_product_attention
        return same and _torch_modes.ATTENTION.read() == self._backends

    def _function_now(self) -> Any:
        return names.attention_function(self._module, self._implementation.name)


def is_fresh(ctx: LiveContext, positions: Tensor | None, parts: DecoderParts) -> bool:
    """Whether a forward is one whole prompt for an empty cache of growing layers, at its usual positions.

    A cache of a subclass may do something of its own in ``update()``, which a copy-out doesn't call. And without causal
    attention padded rows would reach real ones.

    ``positions``: [1, n] as the caller gave them. Looking at them waits for the device, which has nothing to do yet.
    """
    if ctx.batch != 1 or not is_empty(ctx.cache, len(parts.layers)) or ctx.implementation.name != "sdpa":
        return False
    if not_causal(parts) is not None:
        return False
    # Without a mask of the caller's, full attention at the usual positions has none but the causal one.
    if ctx.masked and {*map(type, ctx.masks)} - {type(None)}:
        return False
    return are_usual(positions, ctx.length)


def is_empty(cache: Any, layers: int) -> bool:
    """Whether a cache has no tokens, and as yet no layers or ``layers`` ones that keep every token."""
    if type(cache) is not names.cache_type() or cache.get_seq_length():
        return False
    return len(cache.layers) in (0, layers) and not {*map(type, cache.layers)} - {names.full_cache_layer()}


def are_usual(positions: Tensor | None, n: int) -> bool:
    """Whether ``positions`` [1, n] are those that a prompt of ``n`` tokens has without any being given."""
    return positions is None or torch.equal(positions[0], torch.arange(n, device=positions.device))


def _name(sequences: int, padded: bool) -> str:
    """The strategy for batches of so many sequences, as counters name it."""
    return f"{PrimeStrategy.name}, batches of {sequences}{', padded' if padded else ''}"


def _taker(name: str) -> Callable[[Any], list[tuple[int, Any]] | None]:
    """What gives the prompts of a context that was found to be for strategy ``name`` when it was made, which is once for each
    call: one request, whose session is the cache."""

    def prompts(ctx: Any) -> list[tuple[int, Any]] | None:
        return [(ctx.batch * ctx.length, ctx.cache)] if isinstance(ctx, LiveContext) and ctx.prime == name else None

    return prompts


def _numbers(ctx: LiveContext) -> Tensor:
    assert ctx.numbers is not None
    return ctx.numbers
