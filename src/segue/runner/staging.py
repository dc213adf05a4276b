"""Fixed memory for the inputs, and what fills it before each replay: the real rows, and padding over older rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.runner.inputs import Leaf, Spec

_MOST_VIEWS = 1024  # per stage: views of the row counts seen, dropped all at once


class Buffer:
    """One input's storage, sized for the largest bucket. Each bucket sees its head as a contiguous tensor.

    Which rows hold something else than padding is known as two ranges: ``[0, low)`` that the last call wrote, and one
    beyond its bucket that an older, longer call left. That works where a row is the same memory in every bucket.
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
        self.version = self.flat._version

    def view(self, rows: int) -> Tensor:
        """The contiguous tensor of a bucket of ``rows`` rows."""
        sizes = self.spec.sizes(rows)
        with torch.inference_mode(False):
            return self.flat[: prod(sizes)].view(sizes)

    def claim(self, real: int, rows: int) -> tuple[int, int]:
        """Rows of ``[real, rows)`` to pad again, as the first ``real`` are about to be written; noted as done."""
        if not self.tracked:
            return real, rows
        if self.flat._version != self.version:  # something else than staging wrote here
            self._low = self.capacity
            self._from = self._upto = 0
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
        """Pad rows ``[begin, end)`` of a bucket's view."""
        dim = self.spec.dim
        assert dim is not None
        tail = view.narrow(dim, begin, end - begin)
        if self._edge and real:
            tail.copy_(view.narrow(dim, real - 1, 1).expand_as(tail))
        else:
            tail.fill_(self.pad)

    def written_by_graph(self) -> None:
        """A segment writes here without a trace in the version: pad the whole tail every time."""
        self.tracked = False

    def padded(self, t: Tensor, real: int, rows: int) -> Tensor:
        """Fresh memory of the bucket's shape with ``t`` in it, independent of the buffer."""
        with torch.inference_mode(False), torch.no_grad():
            view = torch.full(self.spec.sizes(rows), self.pad, dtype=self.spec.dtype, device=self.flat.device)
            if self.spec.dim is None:
                view.copy_(t)
            else:
                view.narrow(self.spec.dim, 0, real).copy_(t)
                if real < rows:
                    self.refill(view, real, rows, real)
            return view


class Stage:
    """The buffers of one variant in one bucket. ``fill`` is what every replay runs first."""

    def __init__(self, buffers: Sequence[Buffer | None], tokens: int, requests: int) -> None:
        self.tokens, self.requests = tokens, requests
        self._slots = [i for i, b in enumerate(buffers) if b is not None]
        self._all = len(self._slots) == len(buffers)
        self.buffers = [b for b in buffers if b is not None]
        self._rows = [self._count(b, tokens, requests) for b in self.buffers]
        self._views = [b.view(rows) for b, rows in zip(self.buffers, self._rows, strict=True)]
        self.static: list[Tensor | None] = [None] * len(buffers)
        for slot, view in zip(self._slots, self._views, strict=True):
            self.static[slot] = view
        self._grown = [
            (b, view, rows, b.leaf.extra, b.leaf.token)
            for b, view, rows in zip(self.buffers, self._views, self._rows, strict=True)
            if b.spec.dim is not None
        ]
        kinds: dict[torch.dtype, list[int]] = {}
        for i, b in enumerate(self.buffers):
            kinds.setdefault(b.spec.dtype, []).append(i)
        self._groups = list(kinds.values())
        self._cut: dict[tuple[int, int], list[Tensor]] = {}

    def fill(self, tensors: Sequence[Tensor | None], tokens: int, requests: int, foreign: bool = False) -> None:
        """Copy the real rows into the buffers and pad the tails that hold anything else.

        ``foreign``: some tensors are on the CPU and the buffers aren't. They go through pinned memory that torch's host
        allocator keeps until the copy has run, so that the caller may reuse its own at once.
        """
        given: Sequence[Any] = tensors if self._all else [tensors[i] for i in self._slots]
        if foreign:
            given = [self._pinned(t, b) for t, b in zip(given, self.buffers, strict=True)]
        views = self._cut.get((tokens, requests))
        if views is None:
            views = self._narrow(tokens, requests)
        try:
            tails = []
            for buffer, view, rows, extra, of_tokens in self._grown:
                real = (tokens if of_tokens else requests) + extra
                begin, end = buffer.claim(real, rows)
                if begin < end:
                    tails.append((buffer, view, begin, end, real))
            self._copy(views, given, foreign)
            for buffer, view, begin, end, real in tails:
                buffer.refill(view, begin, end, real)
            for buffer in self.buffers:
                buffer.version = buffer.flat._version
        except BaseException:
            for buffer in self.buffers:
                buffer.version = -1
            raise

    def _copy(self, views: list[Tensor], given: Sequence[Tensor], foreign: bool) -> None:
        if foreign:
            for view, t in zip(views, given, strict=True):
                view.copy_(t, non_blocking=True)
        elif len(self._groups) == 1:
            _torch.foreach_copy(views, given)
        else:
            for group in self._groups:
                if len(group) == 1:
                    views[group[0]].copy_(given[group[0]])
                else:
                    _torch.foreach_copy([views[i] for i in group], [given[i] for i in group])

    def padded(self, tensors: Sequence[Tensor | None], tokens: int, requests: int) -> list[Tensor | None]:
        """Fresh padded tensors with the values that ``fill`` would leave in the buffers: for the reference."""
        fresh: list[Tensor | None] = [None] * len(tensors)
        for slot, buffer, rows in zip(self._slots, self.buffers, self._rows, strict=True):
            t = tensors[slot]
            assert t is not None
            fresh[slot] = buffer.padded(t, self._count(buffer, tokens, requests), rows)
        return fresh

    def _narrow(self, tokens: int, requests: int) -> list[Tensor]:
        if len(self._cut) >= _MOST_VIEWS:
            self._cut.clear()
        with torch.inference_mode(False):  # a view made in inference mode can't be written outside it
            cut = [
                view if b.spec.dim is None else view.narrow(b.spec.dim, 0, self._count(b, tokens, requests))
                for b, view in zip(self.buffers, self._views, strict=True)
            ]
        self._cut[tokens, requests] = cut
        return cut

    @staticmethod
    def _count(buffer: Buffer, tokens: int, requests: int) -> int:
        leaf = buffer.leaf
        return (tokens if leaf.token else requests) + leaf.extra if buffer.spec.dim is not None else 1

    @staticmethod
    def _pinned(t: Tensor, buffer: Buffer) -> Tensor:
        if t.device == buffer.flat.device:
            return t
        host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        return host.copy_(t)
