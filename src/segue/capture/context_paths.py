"""Paths from the live context to the objects it holds, so that what came from one forward's context is read from the next's."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
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
_FROZEN = (*PLAIN, type, FunctionType, BuiltinFunctionType, ModuleType)


def is_plain(value: Any) -> bool:
    """Whether a capture may freeze ``value``: it is None, an immutable scalar, or code."""
    return value is None or isinstance(value, _FROZEN)


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
    """Finds the paths to each object within two levels of a context, by identity."""

    def __init__(self, ctx: Any) -> None:
        self._paths: dict[int, list[Path]] = {}
        self._storages: dict[int, list[Path]] = {}
        self._keep: list[Any] = []  # the objects, so that Python doesn't give their ids to others while the map lives
        if ctx is not None:
            self._add(ctx)

    def find(self, value: Any) -> Path | None:
        """The path to ``value``, if it is the context or an object within two levels of it. Plain values have none."""
        paths = self.paths(value)
        return paths[0] if paths else None

    def paths(self, value: Any) -> list[Path]:
        """Every path to ``value``, the shortest first: what is one object now may be two in another forward's context."""
        return [] if is_plain(value) else self._paths.get(id(value), [])

    def find_memory(self, t: Tensor) -> list[Path]:
        """The paths to tensors of the context that share ``t``'s storage."""
        return self._storages.get(_torch.storage_key(t), []) if self._storages else []

    def _add(self, ctx: Any) -> None:
        # Level by level: if a longer path to an object came first, what lies below it by a shorter path would be missed.
        level: list[tuple[Any, Path]] = [(ctx, ())]
        for deeper in (True, True, False):
            below: list[tuple[Any, Path]] = []
            for value, path in level:
                if is_plain(value):
                    continue
                known = self._paths.setdefault(id(value), [])
                known.append(path)
                if isinstance(value, Tensor):
                    if value.layout is torch.strided:
                        self._storages.setdefault(_torch.storage_key(value), []).append(path)
                elif deeper and len(known) == 1:
                    below += [(child, (*path, step)) for step, child in children(value)]
                self._keep.append(value)
            level = below


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
        if hasattr(value, name):
            yield ("attr", name), getattr(value, name)


def slots(cls: type) -> Iterator[str]:
    """Names of the slots of a class, inherited ones too."""
    for base in cls.__mro__:
        own = base.__dict__.get("__slots__", ())
        yield from (own,) if isinstance(own, str) else own
