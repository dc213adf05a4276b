"""Where a static cache lies: its layers show a fixed number of rows and count on the device, and masks are made beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from segue.integrations.transformers.resident_memory import Residence, left_padding

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, as configs and dicts of masks name them


class StaticResidence(Residence):
    """A residence whose layers show ``sizes`` rows each, by kind, as those of a static cache do.

    ``counts``: each layer's tokens, as the cache counts them, on the device: tensors without dimensions. They are parts of one,
    whose version tells whether anybody else has changed one of them.
    """

    sizes: Mapping[str, int]

    def __init__(self, *args: Any, sizes: Mapping[str, int]) -> None:
        super().__init__(*args)
        self.sizes = sizes
        self.counts: list[Tensor] = []
        self._changed = False  # its length, by somebody else
        self._seen: Tensor | None = None  # [B, room]: the rows that masks made beforehand show

    def shown(self, layer: int) -> slice:
        """The rows that a layer of the cache shows."""
        size = self.sizes[SLIDING if self.memory.shapes[layer].window else FULL]
        first = max(0, self.length - size)
        return slice(first, first + size)

    def count(self, counts: Sequence[Tensor]) -> None:
        """Take the counts of all layers over, in their order."""
        order = sorted(range(len(counts)), key=lambda layer: self.memory.shapes[layer].window)
        with torch.inference_mode(False), torch.no_grad():
            self._all = torch.stack([counts[layer] for layer in order])
            self._endless = self._all[: sum(not shape.window for shape in self.memory.shapes)]  # of layers that keep every token
            self.counts = [self._all[order.index(layer)] for layer in range(len(counts))]
        self._version = self._all._version

    def is_current(self) -> bool:
        """Whether its length is that of the cache. It is read from the device where somebody else has changed it."""
        if self._all._version != self._version:
            found = {*self._endless.tolist(), *([self.length] if SLIDING in self.sizes else [])}
            if len(found) > 1 or (length := found.pop()) < 0:
                return False
            self.length, self._version, self._changed = length, self._all._version, True
        return True

    def advance(self) -> None:
        """A step has put a token into each sequence. Layers count no tokens beyond their window."""
        (self._all if self.length < self.sizes.get(SLIDING, self.room) else self._endless).add_(1)
        self._version = self._all._version
        super().advance()

    def is_known(self, mask: Any) -> bool:
        """Whether ``mask`` is that of the step before, continued with ones: None, [B, length + 1], or made beforehand."""
        if self._changed:
            return False
        if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
            return super().is_known(mask)
        rows, seen = _made_beforehand(mask, self.batch, self.sizes), self._seen
        if rows is None or seen is None or (rows[0].dtype, rows[0].device) != (seen.dtype, seen.device):
            return False
        seen[:, self.length] = _value(True, seen.dtype)
        return _shows(rows, seen, self.length)

    def pad(self, pads: Sequence[int], mask: Any) -> None:
        """Take the padding of a mask, from :func:`padding_of`, for that of this step and those to come."""
        rows = _made_beforehand(mask, self.batch, self.sizes)
        super().pad(pads, mask if rows is None else None)
        with torch.inference_mode(False):  # a later step, which writes to it, may be in another mode
            self._seen = None if rows is None else _seen(torch.tensor(pads), self.length, self.room, rows[0])
        self._changed = False


def padding_of(
    mask: Any, batch: int, length: int, sizes: Mapping[str, int] | None, added: bool = False
) -> Sequence[int] | None:
    """How many tokens ``mask`` masks at the left of each sequence that has ``length`` and gets another; None if it masks anything
    else.

    ``added``: attention adds a mask made beforehand, and takes no truth values.
    ``sizes``: how many rows the layers of a static cache show, by kind, those that keep every token first; None: it grows.
    """
    rows = None if sizes is None else _made_beforehand(mask, batch, sizes)
    if rows is None:
        return left_padding(mask, batch, length + 1)
    if added and rows[0].dtype is torch.bool:
        return None
    shown = rows[0] == _value(True, rows[0].dtype)
    pads = shown.int().argmax(1) + _first(rows[0], length)
    if not _shows(rows, _seen(pads, length, max(length + 1, *(m.shape[1] for m in rows)), rows[0]), length):
        return None
    return tuple(pads.tolist())


def _made_beforehand(mask: Any, batch: int, sizes: Mapping[str, int]) -> list[Tensor] | None:
    """What the masks of a step, [B, 1, 1, rows that layers show], by kind of layer, say of these rows: [B, rows]. None if they
    aren't such."""
    given = [mask.get(kind) for kind in sizes] if isinstance(mask, dict) else [mask]
    like = given[0]
    if len(given) != len(sizes) or not isinstance(like, Tensor) or not (like.dtype is torch.bool or like.is_floating_point()):
        return None
    found = []
    for m, size in zip(given, sizes.values(), strict=True):
        if not isinstance(m, Tensor) or (tuple(m.shape), m.dtype, m.device) != ((batch, 1, 1, size), like.dtype, like.device):
            return None
        found.append(m.reshape(batch, size))
    return found


def _shows(rows: Sequence[Tensor], seen: Tensor, length: int) -> bool:
    """Whether masks of a step, from :func:`_made_beforehand`, show what ``seen`` [B, rows of the residence] does."""
    return all(torch.equal(seen[:, (first := _first(m, length)) : first + m.shape[1]], m) for m in rows)


def _first(rows: Tensor, length: int) -> int:
    """The first row that a mask is about."""
    return max(0, length + 1 - rows.shape[1])


def _seen(pads: Tensor, length: int, room: int, like: Tensor) -> Tensor:
    """What a mask says of ``room`` rows, where a step sees ``length`` + 1 without ``pads`` [B] at the left."""
    at = torch.arange(room, device=like.device)
    seen = (at >= pads.to(like.device)[:, None]) & (at <= length)
    if like.dtype is torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, _value(False, like.dtype))


def _value(seen: bool, dtype: torch.dtype) -> float | bool:
    """What a mask of a dtype says of a row."""
    return seen if dtype is torch.bool else 0.0 if seen else torch.finfo(dtype).min
