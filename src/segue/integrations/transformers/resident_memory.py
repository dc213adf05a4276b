"""Resident keys and values: memory at fixed addresses, where caches lie while they decode, so that one graph serves all.

Each layer has its keys and values in two tensors [rows, heads, size]. A cache that lies there, a :class:`Residence`, has a run of
rows for each of its sequences. Its tensors are views of them, so it has the shapes that it would have anywhere else.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.views import weak_ref_tensor

_LEAST_ROOM = 256  # rows of a sequence
_serials = itertools.count(1)
_MOST_UNUSED = 64  # runs whose rooms are kept for the next ones there, since making a room takes the host 4 us
_SPARE = 2  # the last rows: one that is never written, and one for padded sequences


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token: ``heads`` keys of ``key_size`` and values of ``value_size`` numbers. ``window``: how many
    tokens attention sees, the last one included; 0 for all."""

    heads: int
    key_size: int
    value_size: int
    window: int = 0


class ResidentMemory:
    """``rows`` rows of keys and values for each layer, handed out in runs.

    ``keys``, ``values``: of each layer, for graphs. They don't own the memory. Each run has storages of its own over its part,
    by which it is known whether anybody still looks at it. ``turn``: whose context lets this thread alone write, after all steps.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        turn: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.shapes, self.rows, self.turn = tuple(shapes), rows, turn
        with torch.inference_mode(False), torch.no_grad():
            self._owned = [
                torch.zeros(rows + _SPARE, shape.heads, size, dtype=dtype, device=device)
                for shape in shapes
                for size in (shape.key_size, shape.value_size)
            ]
            aliases = [weak_ref_tensor(t) for t in self._owned]
        self.keys, self.values = aliases[::2], aliases[1::2]
        self.zero_row, self.padding_row = rows, rows + 1
        self._live: weakref.WeakSet[Residence] = weakref.WeakSet()
        self._runs: dict[int, tuple[int, int, list[Tensor]]] = {}  # that are taken, by serial: first row, how many, the room
        self._unused: dict[tuple[int, ...], list[Tensor]] = {}  # rooms by first row, batch and room
        self._ended: list[int] = []  # those whose cache has gone, and that somebody may still look at

    @staticmethod
    def bytes_of(shapes: Sequence[LayerShape], rows: int, dtype: torch.dtype) -> int:
        """What ``rows`` rows take."""
        return sum(shape.heads * (shape.key_size + shape.value_size) for shape in shapes) * (rows + _SPARE) * dtype.itemsize

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return sum(t.nbytes for t in self._owned)

    @property
    def residences(self) -> list[Residence]:
        """Those of caches that live, the one that stepped last at the end."""
        return sorted(self._live, key=lambda each: (each.stepped, each.serial))

    def place(self, batch: int, room: int, make: Callable[..., Residence] | None = None) -> Residence | None:
        """Rows for ``batch`` sequences of up to ``room`` tokens; None if there aren't so many together.

        ``make``: the kind of residence, called as :class:`Residence` is.
        """
        size = batch * room
        for serial in [*self._ended]:
            rooms = self._runs[serial][2]
            if all(_torch.storage_users(t) == 1 for t in rooms):
                self._ended.remove(serial)
                first, *_ = self._runs.pop(serial)
                self._unused[first, *rooms[0].shape[:2]] = rooms
        start = 0
        for first, taken in sorted(run[:2] for run in self._runs.values()):
            if first - start >= size:
                break
            start = max(start, first + taken)
        if start + size > self.rows:
            return None
        rooms = self._unused.pop((start, batch, room), [])
        if not rooms:
            rooms = [_torch.with_own_storage(t[start : start + size].unflatten(0, (batch, room))) for t in self._owned]
            if len(self._unused) > _MOST_UNUSED:
                self._unused.clear()
        residence = (make or Residence)(self, start, batch, room, rooms)
        self._live.add(residence)
        self._runs[residence.serial] = start, size, rooms
        weakref.finalize(residence, self._ended.append, residence.serial).atexit = False
        return residence

    def view(self, residence: Residence, layer: int, which: int) -> Tensor:
        """Keys (``which`` 0) or values (1) of a layer [B, heads, T, size], as a cache holds them."""
        return residence.rooms[2 * layer + which][:, residence.shown(layer)].transpose(1, 2)


class Residence:
    """Where one cache lies: sequence ``b`` has ``room`` rows from ``start + b * room`` on, of which ``length`` are filled.

    ``rooms``: all of them, keys and values [batch, room, heads, size] of each layer.
    ``pads``: how many of those are padding, at the left, for each sequence. ``mask``: the mask [B, room] that says so, continued
    with ones. ``stepped``: when it made its last step, or when its prompt came. ``decodes``: it has made one. ``layers``:
    of the cache, in their order. ``ids``: theirs. ``whole``: they live, and none has left.
    """

    sizes: Mapping[str, int] | None = None  # how many rows a static cache's layers show, by kind

    def __init__(self, memory: ResidentMemory, start: int, batch: int, room: int, rooms: Sequence[Tensor]) -> None:
        self.memory, self.start, self.batch, self.room, self.rooms = memory, start, batch, room, rooms
        self.length, self.stepped, self.decodes, self.whole, self.serial = 0, 0, False, True, next(_serials)
        self.pads: Sequence[int] = (0,) * batch
        self.mask: Tensor | None = None
        self.layers: list[weakref.ref[Any]] = []
        self.ids: list[int] = []

    def shown(self, layer: int) -> slice:
        """The rows that a layer of the cache shows."""
        window = self.memory.shapes[layer].window
        return slice(max(0, self.length - window + 1) if window else 0, self.length)

    def is_current(self) -> bool:
        """Whether its length is that of the cache."""
        return True

    def advance(self) -> None:
        """A step has put a token into each sequence."""
        self.length += 1

    def take_in(self, kept: Sequence[tuple[Tensor, Tensor]], length: int) -> None:
        """Copy keys and values [B, heads, n, size] of each layer, which are all that it shows of ``length`` tokens."""
        self.length = length
        to: list[Tensor] = []
        given: list[Tensor] = []
        with torch.no_grad():
            for layer, tensors in enumerate(kept):
                for which, t in enumerate(tensors):
                    rows, shown = self.rooms[2 * layer + which], self.shown(layer)
                    if shown.start:  # behind the window: nobody sees them, but no attention can bear what is no number
                        rows[:, : shown.start].zero_()
                    if self.batch == 1:  # torch fuses the copies if strides are equal, which a dimension of size 1 may have any
                        to.append(rows[0, shown])
                        given.append(t[0].transpose(0, 1))
                    else:
                        to.append(rows[:, shown])
                        given.append(t.transpose(1, 2))
            _torch.foreach_copy(to, given)

    def reorder(self, layer: int, order: Tensor) -> bool:
        """Let each sequence have what the one whose number stands in ``order`` [B] has in a layer. Returns False, having done
        nothing, where that makes another batch or somebody has a view of the layer.

        Padding stays as it is: whoever makes the next step shows its mask.
        """
        rooms = self.rooms[2 * layer : 2 * layer + 2]
        if order.shape != (self.batch,) or any(_torch.storage_users(t) > 1 for t in rooms):
            return False
        with torch.no_grad():
            rows, order = [t[:, self.shown(layer)] for t in rooms], order.to(rooms[0].device)
            _torch.foreach_copy(rows, [t.index_select(0, order) for t in rows])
        return True

    def is_known(self, mask: Any) -> bool:
        """Whether ``mask`` [B, length + 1], or None, is that of the step before, continued with ones. It is one op to see."""
        if mask is None:
            return not any(self.pads)
        known = self.mask
        if known is None or not isinstance(mask, Tensor) or known.dtype is not mask.dtype or known.device != mask.device:
            return False
        if mask.dim() != 2 or mask.shape[1] != self.length + 1:
            return False
        return torch.equal(known[:, : self.length + 1], mask)

    def pad(self, pads: Sequence[int], mask: Tensor | None) -> None:
        """Take the padding of a mask, from :func:`left_padding`, for that of this step and those to come."""
        self.pads, self.mask = pads, None
        if mask is not None:
            self.mask = torch.ones(self.batch, self.room, dtype=mask.dtype, device=mask.device)
            self.mask[:, : mask.shape[1]] = mask


def left_padding(mask: Any, batch: int, n: int) -> Sequence[int] | None:
    """How many of ``n`` tokens of each sequence ``mask`` [batch, n] masks at the left; None if it masks anything else."""
    if mask is None:
        return (0,) * batch
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (batch, n):
        return None
    real = mask != 0
    pads = (~real).sum(1)
    if not bool(((real.int().argmax(1) == pads) & (pads < n)).all()):
        return None
    return tuple(pads.tolist())


def room_for(tokens: int, most: int | None = None) -> int:
    """How many rows to give a sequence that has ``tokens``: a power of two with some to spare, and no more than ``most``."""
    room = max(_LEAST_ROOM, 1 << (tokens + tokens // 8).bit_length())
    return room if most is None else max(tokens, min(room, most))
