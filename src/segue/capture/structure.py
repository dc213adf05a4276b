"""Nested values as data: taken apart once at capture, checked in one pass at every replay."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

TokenDims = Any  # int, None, or a structure of them: by position, key or field
Take = Callable[[Any], None]  # accepts a value at replay, or raises
OnLeaf = Callable[[Any, str, int | None], tuple[Take, Any]]


class StructureChanged(Exception):
    """A value doesn't have the structure it had at capture. Carries the path, and what was found and expected there."""

    def __init__(self, path: str, found: str, expected: str) -> None:
        super().__init__(path, found, expected)
        self.path, self.found, self.expected = path, found, expected


class Branch:
    """A container at a place of a structure: at replay it must have the same type and keys, and its children are taken."""

    __slots__ = ("_children", "_keys", "_path", "_type")

    def __init__(self, value: Any, children: list[Take], path: str) -> None:
        self._type, self._children, self._path = type(value), children, path
        self._keys = [key for key, _ in parts_of(value) or ()]

    def __call__(self, value: Any) -> None:
        parts = parts_of(value) if type(value) is self._type else None
        if parts is None or [key for key, _ in parts] != self._keys:
            raise StructureChanged(self._path, _outline(value, parts), f"a {self._type.__qualname__} of {self._keys}")
        for take, (_, child) in zip(self._children, parts, strict=True):
            take(child)


def settle(
    value: Any, token_dims: TokenDims, on_leaf: OnLeaf, opaque: Callable[[Any], bool], path: str = "result"
) -> tuple[Take, Any]:
    """Walk a structure once. ``on_leaf(leaf, path, token_dim)`` gives, for each leaf, what takes it at replay and what stands
    in its place now; returned are the same two for the whole. Values that are ``opaque`` are leaves whatever they contain.

    Raises:
        ValueError: ``token_dims`` is a structure that doesn't match.
    """
    parts = None if opaque(value) else parts_of(value)
    if parts is None:
        if token_dims is not None and not isinstance(token_dims, int):
            raise ValueError(f"token_dim gives {token_dims!r} for {path}, which is one value")
        return on_leaf(value, path, token_dims)
    done = [
        settle(child, _dim_of(token_dims, key, len(parts), path), on_leaf, opaque, path + _step(value, key))
        for key, child in parts
    ]
    return Branch(value, [take for take, _ in done], path), with_children(value, [new for _, new in done])


def leaves(value: Any) -> Iterator[Any]:
    """Every leaf of a nested structure, in order."""
    parts = parts_of(value)
    if parts is None:
        yield value
    else:
        for _, child in parts:
            yield from leaves(child)


def parts_of(value: Any) -> list[tuple[Any, Any]] | None:
    """``(key, child)`` of a container: tuple, list, mapping (so ``ModelOutput`` too), dataclass. None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def with_children(value: Any, children: Sequence[Any]) -> Any:
    """A container of the type and keys of ``value`` around other children."""
    if isinstance(value, tuple | list):
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    new = copy.copy(value)
    for (key, _), child in zip(parts_of(value) or (), children, strict=True):
        if isinstance(value, Mapping):
            new[key] = child
        else:
            object.__setattr__(new, key, child)
    return new


def _dim_of(token_dims: TokenDims, key: Any, count: int, path: str) -> TokenDims:
    if token_dims is None or isinstance(token_dims, int):
        return token_dims
    if isinstance(token_dims, Mapping):
        if key not in token_dims:
            raise ValueError(f"token_dim has no entry for {path}[{key!r}]")
        return token_dims[key]
    if isinstance(token_dims, Sequence) and isinstance(key, int):
        if len(token_dims) != count:
            raise ValueError(f"token_dim has {len(token_dims)} entries for the {count} values of {path}")
        return token_dims[key]
    raise ValueError(f"token_dim is {token_dims!r}, which doesn't fit {path}")


def _step(value: Any, key: Any) -> str:
    return f".{key}" if dataclasses.is_dataclass(value) else f"[{key!r}]"


def _outline(value: Any, parts: list[tuple[Any, Any]] | None) -> str:
    return f"a {type(value).__qualname__}" + ("" if parts is None else f" of {[key for key, _ in parts]}")
