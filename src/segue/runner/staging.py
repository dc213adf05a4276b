"""Staging: fixed memory for the inputs, filled before each replay with the real rows, and with padding over older rows."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from math import prod
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from segue import _torch
from segue.errors import InputError
from segue.runner.calls import Call
from segue.runner.inputs import Leaf, Spec

_MOST_PADS = 256  # rows of padding kept ready for a fused copy; longer tails are filled
_MOST_VIEWS = 1024  # per stage: views of the row counts seen, dropped all at once
_version = attrgetter("_version")


class Buffer:
    """One input's storage, sized for the largest bucket. Each bucket sees its head as a contiguous tensor.

    Two ranges say which rows hold something else than padding: ``[0, low)``, which the last call wrote, and one beyond its
    bucket, which an older, longer call left. ``tracked``: whether the ranges are known. That needs a row to be the same memory
    in every bucket. Every write, a stage's or another, raises the version counter of ``flat``.

    Args:
        leaf: the declared input. ``spec``: its dtype and sizes. ``capacity``: rows of the largest bucket.
    """

    def __init__(self, leaf: Leaf, spec: Spec, capacity: int, device: torch.device) -> None:
        self.leaf, self.spec, self.capacity = leaf, spec, capacity
        pad = leaf.declared.pad
        self._edge = isinstance(pad, str)
        self.pad: float = 0 if pad is None or isinstance(pad, str) else pad
        self.tracked = spec.dim is not None and prod(spec.head) == 1 and not self._edge
        self._low = self._from = self._upto = 0
        with torch.inference_mode(False):
            self.flat = torch.full((prod(spec.sizes(capacity)),), self.pad, dtype=spec.dtype, device=device)
            self.pads: Tensor | None = None
            if self.tracked:
                sizes = spec.sizes(min(capacity, _MOST_PADS))
                self.pads = torch.full(sizes, self.pad, dtype=spec.dtype, device=device)
        self._left, self._at = [self.flat._version], 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer and its padding."""
        return self.flat.nbytes + (0 if self.pads is None else self.pads.nbytes)

    @property
    def version(self) -> int:
        """The version counter of ``flat`` after the last fill. If it has another one now, something else has written."""
        return self._left[self._at]

    def take_over(self, left: list[int], at: int) -> None:
        """Let another stage fill from now on. It keeps in ``left[at]`` the version counter after its last fill."""
        if self.flat._version != self.version:
            self._low, self._from, self._upto = self.capacity, 0, 0
        self._left, self._at = left, at

    def view(self, rows: int) -> Tensor:
        """The contiguous tensor of a bucket of ``rows`` rows."""
        sizes = self.spec.sizes(rows)
        with torch.inference_mode(False):
            return self.flat[: prod(sizes)].view(sizes)

    def claim(self, real: int, rows: int) -> tuple[int, int]:
        """Which rows of ``[real, rows)`` must be padded when the first ``real`` are written. They are noted as padded."""
        if not self.tracked:
            return real, rows
        low, start, upto = self._low, self._from, self._upto
        begin, end = real, min(low, rows)
        if start < upto:
            far_begin, far_end = max(real, start), min(upto, rows)
            if far_begin < far_end:
                begin, end = (begin, max(end, far_end)) if begin < end else (far_begin, far_end)
            start = max(start, rows)
        if low > rows:
            start, upto = rows, max(low, upto) if start < upto else low
        self._low, self._from, self._upto = real, start, upto
        return begin, end

    def refill(self, view: Tensor, begin: int, end: int, real: int) -> None:
        """Pad rows ``[begin, end)`` of a bucket's view, whose first ``real`` rows are real."""
        dim = self.spec.dim
        assert dim is not None
        tail = view.narrow(dim, begin, end - begin)
        if self._edge and real:
            tail.copy_(view.narrow(dim, real - 1, 1).expand_as(tail))
        else:
            tail.fill_(self.pad)

    def written_by_graph(self) -> None:
        """Note that a segment writes here. Its replays don't raise the version counter, so the whole tail is padded every
        time.
        """
        self.tracked = False

    def padded(self, t: Tensor, real: int, rows: int) -> Tensor:
        """Fresh memory of the bucket's shape, which holds ``t`` and padding. ``real``: rows of ``t``. ``rows``: the bucket's."""
        with torch.inference_mode(False), torch.no_grad():
            view = torch.full(self.spec.sizes(rows), self.pad, dtype=self.spec.dtype, device=self.flat.device)
            if self.spec.dim is None:
                view.copy_(t)
            else:
                view.narrow(self.spec.dim, 0, real).copy_(t)
                if real < rows:
                    self.refill(view, real, rows, real)
            return view


class InputBuffers:
    """The buffers of a runner's inputs by name, or of several runners that share them and a pool. Who uses them keeps them alive.

    ``most``: the most padded tokens and requests of any call of all the runners, whichever makes a buffer. ``lock``: one call at
    a time fills them. It is taken before the pool's turn.
    """

    def __init__(self, most: tuple[int, int]) -> None:
        self.most, self.lock = most, threading.RLock()
        self._named: weakref.WeakValueDictionary[str, Buffer] = weakref.WeakValueDictionary()

    def find(self, leaf: Leaf, spec: Spec) -> Buffer | None:
        """The buffer of an input, if there is one.

        Raises:
            InputError: another runner's tensors of that name are of another shape or dtype.
        """
        buffer = self._named.get(leaf.name)
        if buffer is not None and buffer.spec.describe() != spec.describe():
            raise InputError(
                f"input {leaf.name!r} is {spec.describe()}, and {buffer.spec.describe()} in the runner whose buffers this one "
                "shares. Leave buffers_of= out, or give the inputs different names"
            )
        return buffer

    def keep(self, buffer: Buffer) -> None:
        """Share ``buffer`` from now on."""
        self._named[buffer.leaf.name] = buffer


class Stage:
    """The buffers of one variant in one bucket. ``fill`` is what every replay runs first.

    Stages share buffers. Each stage keeps the version counters that its buffers had after its last fill. Every fill raises them,
    so equal counters say that nobody has written since. Then the tails are as they were, and with as many rows as before there
    is nothing to pad.

    ``static``: the tensors that the forward is captured on, one for each declared input; None where it is absent. ``written``:
    places of the inputs that segments write. What a forward writes to an input goes back to the caller's tensor.
    """

    def __init__(self, buffers: Sequence[Buffer | None], tokens: int, requests: int) -> None:
        self.tokens, self.requests = tokens, requests
        self.buffers = [b for b in buffers if b is not None]
        self.static: list[Tensor | None] = [None if b is None else b.view(_rows(b, tokens, requests)) for b in buffers]
        kinds: dict[torch.dtype, list[int]] = {}
        for slot, b in enumerate(buffers):
            if b is not None:
                kinds.setdefault(b.spec.dtype, []).append(slot)
        self._slots = list(kinds.values())  # what one fused copy can take, by place among the call's tensors
        group_of = {slot: group for group, slots in enumerate(self._slots) for slot in slots}
        self._given = [
            (slot, b, view)
            for slot, (b, view) in enumerate(zip(buffers, self.static, strict=True))
            if b and view is not None
        ]
        self._grown = [
            (b, view, _rows(b, tokens, requests), b.leaf.extra, b.leaf.token, group_of[slot])
            for slot, b, view in self._given
            if b.spec.dim is not None
        ]
        picks = list(enumerate(self._slots))
        self._fused = [(group, itemgetter(*slots)) for group, slots in picks if len(slots) > 1]
        self._single = [(group, slots[0]) for group, slots in picks if len(slots) == 1]
        self._flats = [b.flat for b in self.buffers]
        self._left = [-1] * len(self.buffers)  # the versions after the last fill
        self._counts: tuple[int, int] | None = None  # of the last fill, if another one like it has nothing to pad
        self._cuts: list[list[Tensor]] = []
        self.written: set[int] = set()
        self._heads: dict[tuple[int, int], list[list[Tensor]]] = {}
        self._tails: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def fill(self, tensors: Sequence[Any], tokens: int, requests: int, foreign: bool = False) -> None:
        """Copy the real rows into the buffers, and pad those rows after them that don't hold padding, in few fused copies.

        ``foreign``: some tensors are on the CPU and the buffers aren't. They go through pinned memory that torch's host
        allocator keeps until the copy has run, so that the caller may reuse its own at once.
        """
        try:
            untouched = [*map(_version, self._flats)] == self._left
            if not untouched:
                for at, buffer in enumerate(self.buffers):
                    buffer.take_over(self._left, at)
            if untouched and self._counts == (tokens, requests) and not foreign:
                cuts = self._cuts
                for group, pick in self._fused:
                    _torch.foreach_copy(cuts[group], pick(tensors))
                for group, slot in self._single:
                    cuts[group][0].copy_(tensors[slot])
            else:
                self._fill_and_pad(tensors, tokens, requests, foreign)
            self._left[:] = map(_version, self._flats)
        except BaseException:
            increment_version(self._flats)  # it isn't known what was written, so no stage may rely on its last fill
            raise

    def _fill_and_pad(self, tensors: Sequence[Any], tokens: int, requests: int, foreign: bool) -> None:
        heads = self._heads.get((tokens, requests))
        if heads is None:
            heads = self._cut(tokens, requests)
        if foreign:
            tensors = self._pinned(tensors)
        late, known = [], True
        tails: list[tuple[int, Tensor, Tensor]] = []
        for buffer, view, rows, extra, of_tokens, group in self._grown:
            real = (tokens if of_tokens else requests) + extra
            known = known and buffer.tracked
            begin, end = buffer.claim(real, rows)
            if begin < end:
                if buffer.pads is None or end - begin > _MOST_PADS:
                    late.append((buffer, view, begin, end, real))
                else:
                    tails.append((group, *self._tail(buffer, view, begin, end)))
        for group, slots in enumerate(self._slots):
            destinations, sources = heads[group], [tensors[slot] for slot in slots]
            if tails:
                destinations = destinations + [to for at, to, _ in tails if at == group]
                sources += [pads for at, _, pads in tails if at == group]
            if len(sources) == 1 or foreign:
                for to, source in zip(destinations, sources, strict=True):
                    to.copy_(source, non_blocking=True)
            else:
                _torch.foreach_copy(destinations, sources)
        for buffer, view, begin, end, real in late:
            buffer.refill(view, begin, end, real)
        self._counts, self._cuts = (tokens, requests) if known else None, heads

    def moved(self) -> bool:
        """Whether a buffer was written since it was filled. What a segment's replay writes needn't show."""
        return [*map(_version, self._flats)] != self._left

    def wrote(self, outside: Sequence[Tensor]) -> None:
        """Note which inputs are among the tensors that a program's segments write."""
        addresses = {t.untyped_storage().data_ptr() for t in outside}
        for slot, buffer, _ in self._given:
            if buffer.flat.data_ptr() in addresses:
                buffer.written_by_graph()
                self.written.add(slot)
                self._counts = None

    def updates(self, call: Call) -> None:
        """Note in ``call.updates`` which of its tensors the forward wrote, by writing the buffers, with the new values."""
        call.updates = [
            (slot, self._real(buffer, view, call))
            for slot, buffer, view in self._given
            if slot in self.written or buffer.flat._version != buffer.version
        ]

    def updates_of(
        self, fresh: Sequence[Tensor | None], versions: Sequence[int], wrote: Callable[[Tensor], bool], call: Call
    ) -> None:
        """Note the same for a forward that ran on ``fresh`` tensors, made by :meth:`padded`.

        ``versions``: their version counters before it ran. ``wrote``: whether an op of the forward was seen to write a tensor.
        """
        call.updates = [
            (slot, self._real(buffer, t, call))
            for slot, buffer, _ in self._given
            if (t := fresh[slot]) is not None and (t._version != versions[slot] or wrote(t))
        ]

    def _real(self, buffer: Buffer, view: Tensor, call: Call) -> Tensor:
        dim = buffer.spec.dim
        return view if dim is None else view.narrow(dim, 0, _rows(buffer, call.tokens, call.requests))

    def padded(
        self, tensors: Sequence[Tensor | None], tokens: int, requests: int, rows: int | None = None
    ) -> list[Tensor | None]:
        """Fresh padded tensors with the values that ``fill`` would leave in the buffers: for the reference.

        ``rows``: token rows of each; by default the bucket's.
        """
        upto = self.tokens if rows is None else rows
        fresh: list[Tensor | None] = [None] * len(tensors)
        for slot, buffer, _ in self._given:
            t = tensors[slot]
            assert t is not None
            fresh[slot] = buffer.padded(t, _rows(buffer, tokens, requests), _rows(buffer, upto, self.requests))
        return fresh

    def _cut(self, tokens: int, requests: int) -> list[list[Tensor]]:
        """The real rows of each buffer's view, in groups that one fused copy takes."""
        if len(self._heads) >= _MOST_VIEWS:
            self._heads.clear()
        views = {}
        with torch.inference_mode(False):  # a view made in inference mode can't be written outside it
            for slot, b, view in self._given:
                views[slot] = view if b.spec.dim is None else view.narrow(b.spec.dim, 0, _rows(b, tokens, requests))
        heads = self._heads[tokens, requests] = [[views[slot] for slot in slots] for slots in self._slots]
        return heads

    def _tail(self, buffer: Buffer, view: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The rows to pad, and as many rows of padding to copy there."""
        key = (id(buffer), begin, end)
        pair = self._tails.get(key)
        if pair is None:
            if len(self._tails) >= _MOST_VIEWS:
                self._tails.clear()
            dim = buffer.spec.dim
            assert dim is not None and buffer.pads is not None
            with torch.inference_mode(False):
                pair = view.narrow(dim, begin, end - begin), buffer.pads.narrow(dim, 0, end - begin)
            self._tails[key] = pair
        return pair

    def _pinned(self, tensors: Sequence[Any]) -> list[Any]:
        moved = list(tensors)
        for slot, buffer, _ in self._given:
            t = moved[slot]
            if t.device != buffer.flat.device:
                moved[slot] = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True).copy_(t)
        return moved


def _rows(buffer: Buffer, tokens: int, requests: int) -> int:
    leaf = buffer.leaf
    return (tokens if leaf.token else requests) + leaf.extra if buffer.spec.dim is not None else 1
