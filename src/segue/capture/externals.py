"""Who owns what a graph reads: names for external tensors, and a quick look, before each replay, whether they are still there.

A graph bakes addresses. The capture keeps the memory behind them alive, so nothing dangles; but a parameter that was given
other memory (``p.data = ...``, a new ``Parameter``, a cache replaced) would go on being read as it was, in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.context_paths import ContextMap, getter, show
from segue.capture.object_graph import Place, Places
from segue.capture.thread_state import state
from segue.errors import ReplayError

_data_ptr = Tensor.data_ptr


@dataclass(slots=True)
class External:
    """A tensor that segments read or write and that lies outside the pool. The capture keeps its memory alive.

    ``tensor``: a detached alias, which stays on the captured memory. ``seen``: the object that was used, which may be given
    other memory later. ``where``: the line that used it first, in segment number ``segment``. ``written``: by some op of a
    segment.
    """

    tensor: Tensor
    seen: Tensor
    op: str
    where: str
    segment: int = 0
    written: bool = False


class Externals:
    """The externals of one capture, where they are held, and whether they still are.

    Args:
        externals: what segments read or write outside the pool.
        root: the function that was captured, from which names are looked for, or its places, found before; None for a bare
            capture.
        context_tensors: tensors of the live context whose address a break's arguments have baked, by path.
        defer_checks: the first segment may run before the rest is looked at: it writes nothing outside the pool, as far as was
            seen, and nobody is to find what the last replay left in the pool.

    ``named`` pairs a name with each external that has one, ``unnamed`` are the others. Where compiled code is reachable from
    the root, its inner operands were not watched: then every tensor that the root reaches counts as read.

    ``early``: the first segment may be launched after :meth:`check_first`, and :meth:`check_rest` done while it runs, before
    anything else.
    """

    def __init__(
        self,
        externals: list[External],
        root: Any,
        context_tensors: Mapping[str, tuple[Callable[[Any], Any], Tensor]],
        defer_checks: bool,
    ) -> None:
        places = root if isinstance(root, Places) else Places(root)
        found = [places.of(e.tensor) for e in externals]
        if places is root and None in found:
            places.look_again()
            found = [places.of(e.tensor) for e in externals]
        if places.compiled:
            externals = [*externals, *_unwatched(externals, places)]
            found = [*found, *(places.of(e.tensor) for e in externals[len(found) :])]
        contexts = ContextMap(state.ctx)
        named: list[tuple[Place, External]] = []
        self.unnamed: list[External] = []
        self._context: list[tuple[str, Callable[[Any], Any], int, External | None]] = [
            (path, get, t.data_ptr(), None) for path, (get, t) in context_tensors.items()
        ]
        for external, place in zip(externals, found, strict=True):
            if place is not None:
                named.append((place, external))
            elif paths := contexts.find_memory(external.tensor):
                for path in paths:
                    get = getter(path)
                    self._context.append((show(path), get, get(state.ctx).data_ptr(), external))
            else:
                self.unnamed.append(external)
        self.named = [(place.name, external) for place, external in named]
        self.early = defer_checks and not places.compiled
        self._first, self._rest = (
            _Look(
                [(place, e) for place, e in named if (e.segment == 0 or not self.early) is first],
                [e for e in self.unnamed if (e.segment == 0 or not self.early) is first],
            )
            for first in (True, False)
        )
        self.check_rest = self._rest.check

    def check(self) -> None:
        """See that everything a segment baked is where it was.

        Raises:
            ReplayError: something was re-pointed, resized or freed; names it and the line that reads it.
        """
        self.check_first()
        self.check_rest()

    def check_first(self) -> None:
        """The same of what the first segment uses, and of the live context's tensors."""
        self._first.check()
        for path, get, pointer, used in self._context:
            try:
                now = get(state.ctx)
            except (AttributeError, KeyError, IndexError, TypeError):
                now = None
            if _pointer(now) != pointer:
                raise _context_moved(path, used)


class _Look:
    """Some externals, by their place or by the object that was used, and a look whether they are where they were."""

    def __init__(self, named: list[tuple[Place, External]], unnamed: list[External]) -> None:
        self._unnamed = unnamed
        self._items = [(place, external) for place, external in named if place.subscript]
        self._attributes = [(place, external, place.get().data_ptr()) for place, external in named if not place.subscript]
        loose = [external.seen for external in unnamed]
        self._holders = [*(place.holder for place, _ in self._items), *(loose for _ in loose)]
        self._keys = [*(place.key for place, _ in self._items), *range(len(loose))]
        self._pointers = self._pointers_now()
        self._links = [(link, link.get()) for link in _links(place for place, _ in named)]
        holders = {id(link.holder): link.holder for link, _ in self._links}
        tables = {key: holder for key, holder in holders.items() if _is_modules(holder)}
        self._tables = list(tables.values())
        self._snapshots = [dict(table) for table in self._tables]
        self._rest = [(link, child) for link, child in self._links if id(link.holder) not in tables]

    def check(self) -> None:
        """Raise ReplayError if something was re-pointed, resized or freed."""
        try:
            there = self._pointers_now() == self._pointers
        except (KeyError, IndexError, TypeError, RuntimeError):  # something is gone, or no tensor any more
            there = False
        if not there:
            raise self._moved()
        if self._tables != self._snapshots:
            _check_links(self._links)
            self._snapshots = [dict(table) for table in self._tables]
        _check_links(self._rest)
        for place, external, pointer in self._attributes:
            if _pointer(place.get()) != pointer:
                raise _repointed(place.name, external)

    def _pointers_now(self) -> list[int]:
        held: Iterable[Any] = map(getitem, self._holders, self._keys)
        return list(map(_data_ptr, held))

    def _moved(self) -> ReplayError:
        pointers = iter(self._pointers)
        for place, external in self._items:
            if _pointer(place.get()) != next(pointers):
                return _repointed(place.name, external)
        for external, pointer in zip(self._unnamed, pointers, strict=True):
            if _pointer(external.seen) != pointer:
                return _repointed(f"a tensor {tuple(external.tensor.shape)} {external.tensor.dtype}", external)
        raise AssertionError("a pointer differed, and none does")


def _check_links(links: list[tuple[Place, Any]]) -> None:
    for link, child in links:
        if link.get() is not child:
            raise ReplayError(
                f"{link.name} was replaced since the capture; the graph would go on with the tensors of the old one. Change "
                "them in place (copy_), or capture again."
            )


def _is_modules(holder: Any) -> bool:
    """Whether ``holder`` is a module's table of submodules, which ``==`` compares by identity, in one pass."""
    return isinstance(holder, dict) and all(
        v is None or (isinstance(v, torch.nn.Module) and type(v).__eq__ is object.__eq__) for v in holder.values()
    )


def _pointer(value: Any) -> int | None:
    return value.data_ptr() if isinstance(value, Tensor) else None


def _repointed(name: str, external: External) -> ReplayError:
    return ReplayError(
        f"{name}, used by {external.op} at {external.where}, has other memory than at capture (re-pointed, resized or freed). "
        "The graph would go on with the old values. Change values in place (copy_), or capture again."
    )


def _context_moved(path: str, external: External | None) -> ReplayError:
    reader = f"{external.op} at {external.where}" if external is not None else "a break's argument, a view of it,"
    return ReplayError(
        f"{path} is another tensor than at capture, and {reader} has baked the old one's address. Declare it as an input, read "
        "it inside a break, or keep one tensor and copy_ into it."
    )


def _links(places: Iterable[Place]) -> list[Place]:
    """The places that lead from the root to these, each once."""
    found: dict[int, Place] = {}
    for place in places:
        within = place.within
        while within is not None and id(within) not in found:
            found[id(within)] = within
            within = within.within
    return list(found.values())


def _unwatched(externals: list[External], places: Places) -> list[External]:
    seen = {_torch.storage_key(e.tensor) for e in externals}
    tensors = [t for t in places.tensors() if _torch.storage_key(t) not in seen]
    return [External(t.detach(), t, "compiled code", "a line that nothing could watch") for t in tensors]
