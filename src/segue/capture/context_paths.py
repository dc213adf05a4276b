"""Paths from the live context to the objects it holds, so that what came from one forward's context is read from the next's."""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from segue import _torch

Step = tuple[str, Any]  # ("attr", name) or ("item", key)
Path = tuple[Step, ...]

PLAIN = (
    bool, int, float, complex, str, bytes, enum.Enum, range, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Size,
)  # fmt: skip
_FROZEN = (*PLAIN, type, FunctionType, BuiltinFunctionType, ModuleType)


def is_plain(value: Any) -> bool:
    """Whether ``value`` is one that a capture may freeze: an immutable scalar, or code."""
    return value is None or isinstance(value, _FROZEN)


def show(path: Path) -> str:
    """``ctx.meta['slots']``."""
    return "ctx" + "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in path)


def getter(path: Path) -> Callable[[Any], Any]:
    """A function from a context to what lies at ``path`` of it."""

    def get(ctx: Any) -> Any:
        for kind, key in path:
            ctx = getattr(ctx, key) if kind == "attr" else ctx[key]
        return ctx

    return get


class ContextMap:
    """Where each object within two levels of a context is to be found, by identity."""

    def __init__(self, ctx: Any) -> None:
        self._paths: dict[int, list[Path]] = {}
        self._storages: dict[int, list[Path]] = {}
        self._keep: list[Any] = []  # ids stay taken while the map lives
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
        # Level by level, so that what is within reach by a short path isn't missed for a longer one that was met first.
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


def children(value: Any) -> Iterator[tuple[Step, Any]]:
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


@functools.lru_cache(maxsize=4096)
def globals_of(code: CodeType) -> tuple[str, ...]:
    """The globals that a function reads, those of functions inside it too. ``co_names`` has its attributes as well."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in globals_of(c)]
    return tuple(dict.fromkeys([*names, *inner]))
