"""One step of a decoder over resident memory: what a full graph holds, from token ids to logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from segue.capture import BreakableCapture
from segue.capture.places import Places
from segue.errors import UsageError
from segue.integrations.transformers import names
from segue.integrations.transformers.attention import LIVE, attention_goes_to
from segue.integrations.transformers.decoder_forward import Body
from segue.integrations.transformers.resident_memory import Residence, ResidentMemory

_BY_FLASH = {"scaling", "dropout", "sliding_window", "is_causal"}  # options of an attention function that the flash op honours


class StepState:
    """Where the sequences of the next step lie, for up to ``most`` of them, on the device. Each step moves it one token on.

    ``slots`` [most]: the rows for the new keys and values. ``starts`` [most + 1], int32: the rows of the first real tokens.
    ``used`` [most], int32: the real tokens, the new one included. Padded sequences have a row of their own, and stay there.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self.most = most
        with torch.inference_mode(False):
            self._numbers = torch.zeros(4, most, dtype=torch.long, device=device)
            self.starts, self.used, self.live32 = (torch.zeros(most + 1, dtype=torch.int32, device=device) for _ in range(3))
            self.queries = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.slots, self.live = self._numbers[0], self._numbers[3]

    def point_at(self, memory: ResidentMemory, residence: Residence | None) -> None:
        """Be ready for a step of ``residence``; None: of padded sequences alone."""
        rows = [[memory.padding_row] * self.most, [memory.padding_row] * self.most, [1] * self.most, [0] * self.most]
        if residence is not None:
            assert residence.batch <= self.most
            for b, pad in enumerate(residence.pads):
                first = residence.start + b * residence.room
                new = first + residence.length, first + pad, residence.length - pad + 1, 1
                for kind, number in zip(rows, new, strict=True):
                    kind[b] = number
        self._numbers.copy_(torch.tensor(rows, device="cpu"))
        for at, t in enumerate((self.starts, self.used, self.live32), 1):
            t[: self.most].copy_(self._numbers[at])

    def advance(self, count: int) -> None:
        """Move the first ``count`` sequences on. It is recorded at the end of each step."""
        self.slots[:count].add_(self.live[:count])
        self.used[:count].add_(self.live32[:count])

    @property
    def tensors(self) -> list[Tensor]:
        """All that the graphs read."""
        return [self._numbers, self.starts, self.used, self.live32, self.queries]


class DecodeBody:
    """``(ids [B], position_ids [B], width) -> (logits [B, V],)``: the next token of B sequences.

    Args:
        body: of the decoder.
        model: its head makes the logits; None for the last hidden states [B, D] instead.
        state: where the sequences lie.
        attention: the model's own attention function, which gets all ``width`` rows and a mask; None: flash attention over
            exactly the used rows, whatever the width.
        additive: the function takes a mask of numbers to add, not one of truth values.
    """

    owner = "the handle of segue.accelerate"

    def __init__(
        self, body: Body, model: Any, state: StepState, attention: Callable[..., Any] | None, additive: bool = False
    ) -> None:
        self.decoder, self.model, self.state = body.decoder, model, state
        self._body, self._attention, self._additive = body, attention, additive
        self.memory: ResidentMemory | None = None
        self.cuts: Sequence[int] = ()  # layers before whose attention the graph is cut
        outside = (self.decoder,) if model is None else (self.decoder, model)
        root = self.decoder if model is None else model
        self.places = Places(root, outside=outside, also=("is_causal",), once=True)

    @property
    def by_flash(self) -> bool:
        """Whether attention reads the used rows alone."""
        return self._attention is None

    def attend_by(self, attention: Callable[..., Any] | None) -> None:
        """Take another attention function, or flash attention."""
        self._attention = attention

    def __call__(self, ids: Tensor, position_ids: Tensor, width: int, alone: bool = False) -> tuple[Tensor]:
        hidden = self.hidden(ids, position_ids, width, alone)
        return (hidden if self.model is None else self.model.get_output_embeddings()(hidden),)

    def hidden(self, ids: Tensor, position_ids: Tensor, width: int, alone: bool = False) -> Tensor:
        """The last hidden states [B, D]."""
        assert self.memory is not None
        x = self.decoder.get_input_embeddings()(ids)
        step = _Step(self.memory, self.state, 1 if alone else len(ids), width, self.cuts)
        if self._attention is None:
            attend: Callable[..., Any] = _ByFlash(step)
        else:
            attend = _ByMask(step, self._attention, x.dtype if self._additive else None)
        with attention_goes_to(attend), names.unrecorded():
            hidden = self._body(x, position_ids)
        self.state.advance(step.batch)
        return hidden


class _Step:
    """What attention needs to know of one step. ``batch``: sequences that attend, the first ones; the other rows are padding."""

    def __init__(self, memory: ResidentMemory, state: StepState, batch: int, width: int, cuts: Sequence[int]) -> None:
        self.memory, self.batch, self.width, self._cuts = memory, batch, width, cuts
        self._slots, self.queries = state.slots[:batch], state.queries[: batch + 1]
        self.starts, self.used = state.starts[: batch + 1], state.used[:batch]

    def begin(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Put keys and values [1, Hkv, N, D] of the new tokens in their rows. Returns the queries [B, H, D] of ``query``
        [1, H, N, D], and the keys and values of the layer [rows, Hkv, D]."""
        if layer in self._cuts and (capture := BreakableCapture.current()) is not None:
            capture.cut()
        keys, values = self.memory.keys[layer], self.memory.values[layer]
        query, key, value = (t[0].transpose(0, 1)[: self.batch] for t in (query, key, value))
        keys.index_copy_(0, self._slots, key)
        values.index_copy_(0, self._slots, value)
        return query, keys, values

    def end(self, out: Tensor, n: int) -> Tensor:
        """The attention of all ``n`` rows [1, n, H, D] from that of those that attend [B, H, D]."""
        return (out if len(out) == n else torch.cat([out] * n))[None]


class _ByFlash:
    """Attention by torch's flash op, which reads the used rows where they are."""

    def __init__(self, step: _Step) -> None:
        self._step = step

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        for name, given in options.items():
            if name not in _BY_FLASH and name not in LIVE and given is not None and given is not False:
                raise UsageError(f"its attention is given {name}")
        step, layer = self._step, module.layer_idx
        queries, keys, values = step.begin(layer, query, key, value)
        window = step.memory.shapes[layer].window
        out = flash_over_used_rows(
            queries, keys, values, step.queries, step.starts, step.used, scaling, window, step.width
        )
        return step.end(out, query.shape[2]), None


class _ByMask:
    """Attention by the model's own function, over ``width`` rows for each sequence and a mask."""

    def __init__(self, step: _Step, attention: Callable[..., Any], additive: torch.dtype | None) -> None:
        self._step, self._attention, self._additive = step, attention, additive
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}  # by window: which rows, and the mask

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, None]:
        step, layer = self._step, module.layer_idx
        queries, *kept = step.begin(layer, query, key, value)
        window = step.memory.shapes[layer].window
        if window not in self._seen:
            self._seen[window] = self._look(window)
        rows, mask = self._seen[window]
        whole = (t.index_select(0, rows).view(step.batch, step.width, *t.shape[1:]).transpose(1, 2) for t in kept)
        out = self._attention(module, queries.unsqueeze(2), *whole, mask, **options)[0]
        return step.end(out.flatten(0, 1), query.shape[2]), None

    def _look(self, window: int) -> tuple[Tensor, Tensor]:
        """The rows [B * width] that attention gets, and its mask [B, 1, 1, width]. Where it sees nothing there is a row of
        zeros, since what somebody else has left there may be no number."""
        step = self._step
        used, start = step.used[:, None], step.starts[: step.batch, None]
        at = torch.arange(step.width, dtype=torch.int32, device=used.device)[None]
        seen = at < used
        if window:
            seen = seen & (at >= used - window)
        rows = torch.where(seen, start + at, step.memory.zero_row).long().flatten()
        mask = seen[:, None, None]
        if self._additive is not None:
            mask = torch.zeros_like(mask, dtype=self._additive).masked_fill(~mask, torch.finfo(self._additive).min)
        return rows, mask


def flash_over_used_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    queries: Tensor,
    starts: Tensor,
    used: Tensor,
    scale: float | None,
    window: int,
    width: int,
) -> Tensor:
    """Attention of one token of each sequence, ``query`` [B, H, D], over the ``used`` [B] rows of ``keys`` and ``values``
    [rows, Hkv, D] from ``starts`` [B + 1] on; the last ``window`` of them, if that isn't 0. Returns [B, H, D].

    ``queries``: 0 to B. All numbers are int32 and stay on the device. ``width``: no sequence uses more rows; the op splits its
    work by this number.
    """
    options = {} if not window else {"window_size_left": window - 1, "window_size_right": 0}
    out = torch.ops.aten._flash_attention_forward(
        query, keys, values, queries, starts, 1, width, 0.0, False, False, scale=scale, seqused_k=used, **options
    )
    return out[0]  # type: ignore[no-any-return]


def has_flash(memory: ResidentMemory) -> bool:
    """Whether torch's flash attention takes what a memory holds."""
    shape, keys, values = memory.shapes[0], memory.keys[0], memory.values[0]
    one = torch.ones(2, dtype=torch.int32, device=keys.device)
    try:
        flash_over_used_rows(keys[:1], keys, values, one - 1, one, one[:1], None, shape.window, 1)
    except RuntimeError:
        return False
    return all(each.key_size == each.value_size for each in memory.shapes)
