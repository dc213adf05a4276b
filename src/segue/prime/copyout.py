"""Copies the real rows and the whole states of a scratch cache into sessions, and nothing else, in a handful of copies.

No copy changes a byte. Where it can, a copy moves 8-byte integers instead of elements of the tensor's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segue import _torch
from segue.capture.aliasing import first_overlap, overlap
from segue.errors import InputError, UsageError
from segue.prime.trunk import Rows, Whole

_WIDE = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_MOST_VIEWS = 512
State = Mapping[str, Rows | Whole]


@dataclass(frozen=True)
class _Entry:
    """One tensor of the scratch cache's state.

    ``rows``: the tokens of each of its rows, 0 if it is :class:`Whole`. ``other``: its shape without ``dim``. ``unit``: the dtype
    as which it is copied.
    """

    name: str
    rows: int
    dim: int
    tensor: Tensor
    other: tuple[int, ...]
    unit: torch.dtype


class CopyOut:
    """The copies out of one scratch cache.

    Args:
        state: the trunk's state of the scratch cache.
        bucket: rows of the cache that the graph fills, at least.
        requests: the most requests in a run.
        name: what errors call the graph.

    Raises:
        UsageError: ``state`` is none of a cache for this bucket and number of requests.
    """

    def __init__(self, state: State, bucket: int, requests: int, name: str) -> None:
        self._name, self._requests = name, requests
        self._entries = [_entry(key, value, bucket, requests, name) for key, value in state.items()]
        if not self._entries:
            raise UsageError(
                f"{name}: trunk.state() of the scratch cache is empty, so a session would stay as fresh as it is"
            )
        self._names = {e.name for e in self._entries}
        self._storages = {_torch.storage_span(e.tensor)[0] for e in self._entries}
        self._sources: dict[tuple[int, int, int], list[Tensor]] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the scratch cache's state, in the order in which the trunk names them."""
        return [e.tensor for e in self._entries]

    def pairs(self, state: State, request: int, start: int, n: int) -> list[tuple[Tensor, Tensor]]:
        """Destination and source of each copy into the session whose state is ``state``.

        The request has ``n`` rows in the scratch cache, from row ``start`` on. Destination and source are views as the same
        integer dtype, the widest that fits both.

        Raises:
            InputError: the session isn't like the scratch cache. Nothing has been written.
        """
        if state.keys() != self._names:
            raise self._refuse(request, f"has the state {sorted(state)} where the graph fills {sorted(self._names)}")
        found = []
        for entry, source in zip(self._entries, self._cut(request, start, n), strict=True):
            value = state[entry.name]
            self._check(entry, value, request, n)
            t = value.tensor
            if entry.rows:
                t = t.narrow(entry.dim, 0, n // entry.rows)
            elif t.dim() < source.dim():
                t = t.unsqueeze(entry.dim)
            found.append(_alike(t, source))
        return found

    def check_apart(self, states: Sequence[State], requests: Sequence[int]) -> None:
        """Refuse sessions that share memory. Slices of one tensor that have no byte in common are fine.

        ``requests``: the number of the request to which each of ``states`` belongs.

        Raises:
            InputError: two of them do, so that the second request would overwrite the first. Nothing has been written.
        """
        if len(states) < 2:
            return
        together: dict[int, list[tuple[int, str, Tensor]]] = {}
        for r, state in zip(requests, states, strict=True):
            for name, value in state.items():
                if not value.tensor.numel():
                    continue
                together.setdefault(_torch.storage_span(value.tensor)[0], []).append((r, name, value.tensor))
        for group in together.values():
            found = first_overlap([(r, t) for r, _, t in group]) if group[0][0] != group[-1][0] else None
            if found is not None:
                (one, name, _), (other, _, _) = (group[i] for i in found)
                raise InputError(
                    f"{self._name}: the sessions of requests {one} and {other} share the memory of {name}, and the second "
                    "would overwrite the first. Both were left as they were; give each prompt a session of its own"
                )

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each source to its destination. Copies between contiguous tensors of one dtype are fused into one call."""
        if len(pairs) == 1:  # a plain copy takes the host less than fusing one
            to, source = pairs[0]
            to.copy_(source)
            return
        fused: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for to, source in pairs:
            if to.is_contiguous() and source.is_contiguous():
                if to.stride() != source.stride():  # torch fuses equal strides only, and a dimension of size 1 may have any
                    to, source = to.view(-1), source.view(-1)
                group = fused.setdefault(to.dtype, ([], []))
                group[0].append(to)
                group[1].append(source)
            else:
                to.copy_(source)
        for destinations, sources in fused.values():
            _torch.foreach_copy(destinations, sources)

    def _cut(self, request: int, start: int, n: int) -> list[Tensor]:
        key = request, start, n
        cut = self._sources.get(key)
        if cut is None:
            if len(self._sources) >= _MOST_VIEWS:
                self._sources.clear()
            cut = self._sources[key] = [self._source(e, request, start, n) for e in self._entries]
        return cut

    def _source(self, entry: _Entry, request: int, start: int, n: int) -> Tensor:
        t = entry.tensor
        if entry.rows:
            t = t.narrow(entry.dim, start // entry.rows, n // entry.rows)
        elif self._requests > 1:
            t = t.narrow(entry.dim, request, 1)
        return t if t.dtype is entry.unit else t.view(entry.unit)

    def _check(self, entry: _Entry, value: Rows | Whole, request: int, n: int) -> None:
        t, mine = value.tensor, entry.tensor
        if isinstance(value, Rows) is not bool(entry.rows):
            raise self._refuse(
                request, f"says that {entry.name} is {type(value).__name__}, and the scratch cache says otherwise"
            )
        if t.dtype is not mine.dtype or t.device != mine.device:
            raise self._refuse(
                request,
                f"has {entry.name} as {t.dtype} on {t.device}, and the graph makes it as {mine.dtype} on {mine.device}",
            )
        if _torch.storage_span(t)[0] in self._storages and any(overlap(t, e.tensor) for e in self._entries):
            raise self._refuse(
                request, f"shares the memory of {entry.name} with the scratch cache, which every run overwrites"
            )
        if 0 in (steps := t.stride()) and any(step == 0 and size > 1 for step, size in zip(steps, t.shape, strict=True)):
            raise self._refuse(
                request, f"has {entry.name} as an expanded tensor, whose rows of shape {tuple(t.shape)} are one and the same"
            )
        shape = tuple(t.shape)
        if entry.rows:
            dim = value.dim % t.dim() if t.dim() else 0
            if dim != entry.dim or (*shape[:dim], *shape[dim + 1 :]) != entry.other:
                raise self._refuse(
                    request, f"has {entry.name} of shape {shape}, and the scratch cache {tuple(mine.shape)}"
                )
            if shape[dim] < n // entry.rows:
                raise self._refuse(request, f"has room for {shape[dim]} rows in {entry.name}, and the prompt has {n}")
        elif shape != tuple(mine.shape) if self._requests == 1 else shape not in (entry.other, _with_one(entry)):
            raise self._refuse(request, f"has {entry.name} of shape {shape}, and the scratch cache {tuple(mine.shape)}")

    def _refuse(self, request: int, what: str) -> InputError:
        return InputError(
            f"{self._name}: the session of request {request} {what}. It was left as it was; give one that this trunk's "
            "new_cache() made, large enough"
        )


def _entry(key: str, value: Rows | Whole, bucket: int, requests: int, name: str) -> _Entry:
    if not isinstance(value, Rows | Whole):
        raise UsageError(
            f"{name}: trunk.state()[{key!r}] is a {type(value).__qualname__}; say segue.Rows(t) or segue.Whole(t)"
        )
    t, rows = value.tensor, value.tokens if isinstance(value, Rows) else 0
    if not t.dim() or not -t.dim() <= value.dim < t.dim():
        if rows or requests > 1:
            raise UsageError(f"{name}: trunk.state()[{key!r}] has shape {tuple(t.shape)}, and no dimension {value.dim}")
        return _Entry(key, 0, 0, t, (), t.dtype)
    dim = value.dim % t.dim()
    if rows and t.shape[dim] < bucket // rows:
        raise UsageError(
            f"{name}: trunk.state()[{key!r}] has {t.shape[dim]} rows along dimension {dim} of {tuple(t.shape)}, and "
            f"new_cache({bucket}, {requests}) was asked for {bucket}"
        )
    if not rows and requests > 1 and t.shape[dim] != requests:
        raise UsageError(
            f"{name}: trunk.state()[{key!r}] is Whole and has {t.shape[dim]} entries along dimension {dim} of "
            f"{tuple(t.shape)}; a scratch cache of {requests} requests has one each there"
        )
    other = (*t.shape[:dim], *t.shape[dim + 1 :])
    return _Entry(key, rows, dim, t, other, _unit(t, dim if rows or requests > 1 else -1))


def _with_one(entry: _Entry) -> tuple[int, ...]:
    return (*entry.other[: entry.dim], 1, *entry.other[entry.dim :])


def _unit(t: Tensor, cut: int) -> torch.dtype:
    """The widest integer dtype of which every contiguous run that is copied is a multiple. ``cut``: the dimension that is cut."""
    size = t.element_size()
    if size >= 8 or not t.numel():
        return t.dtype
    same = next(dtype for width, dtype in _WIDE if width == size)
    if cut == t.dim() - 1 or t.stride(-1) != 1:
        return same
    steps = [t.shape[-1], int(t.storage_offset()), *t.stride()[:-1]]
    for width, dtype in _WIDE:
        if width > size and all(step * size % width == 0 for step in steps):
            return dtype
    return same


def _alike(to: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """``to`` as a view of the integer dtype that ``source`` has, or both as views of a narrower one."""
    if to.dtype is source.dtype:
        return to, source
    try:
        return to.view(source.dtype), source
    except RuntimeError:  # the strides of the session's tensor don't allow the wide view
        same = next(dtype for width, dtype in _WIDE if width == to.element_size())
        return to.view(same), source.view(same)
