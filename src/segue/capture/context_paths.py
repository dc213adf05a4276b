"""Paths from the live context to the objects it holds, so that what came from one forward's context is read from the next's."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from segue import _torch

PathStep = tuple[str, Any]  # ("attr", name) or ("item", key)
Path = tuple[PathStep, ...]

PLAIN = (
    bool, int, float, complex, str, bytes, enum.Enum, range, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Size,
)  # fmt: skip
DEEPEST, MOST = 12, 20_000  # levels and values of a context that are looked at
_MOST_PATHS = 4  # to one object
_FROZEN = (*PLAIN, type, FunctionType, BuiltinFunctionType, ModuleType)


def is_plain(value: Any) -> bool:
    """Whether a capture may freeze ``value``: it is None, an immutable scalar, or code."""
    return value is None or isinstance(value, _FROZEN)


def equal(a: Any, b: Any) -> bool:
    """Whether two plain values are equal. NaN counts as equal to NaN."""
    return bool(a == b or (a != a and b != b))


def show(path: Path) -> str:
    """``path`` as an expression, as in ``ctx.meta['slots']``."""
    return "ctx" + "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in path)


def getter(path: Path) -> Callable[[Any], Any]:
    """A function from a context to what lies at ``path`` of it.

    It raises AttributeError, KeyError, IndexError or TypeError for a context that has nothing there.
    """

    def get(ctx: Any) -> Any:
        for kind, key in path:
            ctx = getattr(ctx, key) if kind == "attr" else ctx[key]
        return ctx

    return get


class ContextMap:
    """Finds the paths to each object of a context, by identity, the shortest first.

    The walk enters each object once. It goes ``levels`` deep and looks at no more than ``most`` values. ``whole`` says that there
    is nothing beyond. ``deep``: where else to look for what isn't found.
    """

    def __init__(self, ctx: Any, deep: DeepContext | None = None, levels: int = 2, most: int = 2_000) -> None:
        self.ctx, self.whole, self._deep = ctx, True, deep
        self._paths: dict[int, list[Path]] = {}
        self._storages: dict[int, list[Path]] = {}
        self._nones: list[Path] = []
        self._owners: list[tuple[Path, Any]] = []  # what may hold something near
        self._keep: list[Any] = []  # the objects, so that Python doesn't give their ids to others while the map lives
        if ctx is not None:
            self._add(ctx, levels, most)

    def find(self, value: Any) -> Path | None:
        """The path to ``value``, if it is the context or an object that it holds. Plain values have none."""
        paths = self.paths(value)
        return paths[0] if paths else None

    def paths(self, value: Any) -> list[Path]:
        """Paths to ``value``, the shortest first: what is one object now may be two in another forward's context."""
        if is_plain(value):
            return []
        found = self._paths.get(id(value), [])
        return found if found or self.whole or self._deep is None else self._deep.paths(self.ctx, value)

    def find_memory(self, t: Tensor) -> list[Path]:
        """The paths to tensors of the context that share ``t``'s storage."""
        found = self._storages.get(_torch.storage_key(t), []) if self._storages else []
        return found if found or self.whole or self._deep is None else self._deep.find_memory(self.ctx, t)

    def nones(self, keys: Collection[Any]) -> list[Path]:
        """The first paths at which the context has None, of those that end with one of ``keys``. At most four levels deep, for
        engines hold what breaks take there, and a None has no identity that would tell it from others.
        """
        if not self.whole and self._deep is not None:
            return self._deep.nones(self.ctx, keys)
        return list(islice((path for path in self._nones if 0 < len(path) <= 4 and path[-1][1] in keys), _MOST_PATHS))

    def missing(self, keys: Collection[str]) -> list[Path]:
        """The first paths ending with one of ``keys`` at which the context has nothing: items of dicts and attributes of objects,
        for code that asks for them with a default. They are as near as those of :meth:`nones`.
        """
        if not self.whole and self._deep is not None:
            return self._deep.missing(self.ctx, keys)
        found: list[Path] = []
        for path, owner in self._owners if keys else ():
            kind, held = ("item", owner) if isinstance(owner, dict) else ("attr", getattr(owner, "__dict__", None))
            new: list[Path] = [(*path, (kind, key)) for key in keys if isinstance(held, dict) and key not in held]
            found += [place for place in new if _read(place, self.ctx) is None]
            if len(found) >= _MOST_PATHS:
                break
        return found[:_MOST_PATHS]

    def let_go(self) -> None:
        """Stop holding the tensors: a cache that grows would be in memory twice. Paths must be read again before they count."""
        self._keep = [value for value in self._keep if not isinstance(value, Tensor)]

    def _add(self, ctx: Any, levels: int, most: int) -> None:
        # Level by level: if a longer path to an object came first, what lies below it by a shorter path would be missed.
        level: list[tuple[Any, Path]] = [(ctx, ())]
        seen = 1
        for depth in range(levels + 1):
            below: list[tuple[Any, Path]] = []
            for value, path in level:
                if is_plain(value):
                    if value is None:
                        self._nones.append(path)
                    continue
                known = self._paths.setdefault(id(value), [])
                new = not known
                if len(known) < _MOST_PATHS:
                    known.append(path)
                self._keep.append(value)
                if isinstance(value, Tensor):
                    if value.layout is torch.strided:
                        self._storages.setdefault(_torch.storage_key(value), []).append(path)
                elif new:
                    if len(path) < 4:
                        self._owners.append((path, value))
                    room = most - seen if depth < levels else 0
                    found = [(child, (*path, step)) for step, child in islice(children(value), room + 1)]
                    self.whole = self.whole and len(found) <= room
                    below += found[:room]
                    seen += len(found[:room])
            level = below


class DeepContext:
    """The context of one forward, walked to its end or some levels and tens of thousands of values far.

    Engines hold metadata three levels deep, and beside it what reaches the whole process. So this walk is made once a forward,
    when that of a single break was too short, and what it found is read again before it counts.
    """

    def __init__(self) -> None:
        self._map: ContextMap | None = None

    def paths(self, ctx: Any, value: Any) -> list[Path]:
        """The paths to ``value``, as :meth:`ContextMap.paths`."""
        return [path for path in self._of(ctx).paths(value) if _read(path, ctx) is value]

    def find_memory(self, ctx: Any, t: Tensor) -> list[Path]:
        """The paths to tensors that share ``t``'s storage."""
        key, found = _torch.storage_key(t), self._of(ctx).find_memory(t)
        return [p for p in found if isinstance(now := _read(p, ctx), Tensor) and _torch.storage_key(now) == key]

    def nones(self, ctx: Any, keys: Collection[Any]) -> list[Path]:
        """As :meth:`ContextMap.nones`."""
        return [path for path in self._of(ctx).nones(keys) if _read(path, ctx) is None]

    def missing(self, ctx: Any, keys: Collection[str]) -> list[Path]:
        """As :meth:`ContextMap.missing`."""
        return [path for path in self._of(ctx).missing(keys) if _read(path, ctx) is None]

    def whole(self, ctx: Any) -> bool:
        """Whether the walk reached the end of ``ctx``."""
        return self._of(ctx).whole

    def _of(self, ctx: Any) -> ContextMap:
        if self._map is None or self._map.ctx is not ctx:
            self._map = ContextMap(ctx, None, DEEPEST, MOST)
            self._map.let_go()
        return self._map


def _read(path: Path, ctx: Any) -> Any:
    try:
        return getter(path)(ctx)
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def children(value: Any) -> Iterator[tuple[PathStep, Any]]:
    """The attributes and items of an object, with the step that leads to each."""
    if isinstance(value, Mapping):
        yield from ((("item", key), child) for key, child in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((("item", i), child) for i, child in enumerate(value))
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    if dataclasses.is_dataclass(value):
        names.update(dict.fromkeys(f.name for f in dataclasses.fields(value)))
    names.update(dict.fromkeys(slots(type(value))))
    for name in names:
        try:
            child = getattr(value, name)
        except Exception:  # whatever a property of the user's raises: there is nothing to find
            continue
        yield ("attr", name), child


def slots(cls: type) -> Iterator[str]:
    """Names of the slots of a class, inherited ones too."""
    for base in cls.__mro__:
        own = base.__dict__.get("__slots__", ())
        yield from (own,) if isinstance(own, str) else own
