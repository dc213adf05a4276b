"""Nested values: a structure is taken apart once, at capture, and compared in one pass at every replay."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

TokenDims = Any  # int, None, or a structure of them: by position, key or field
Take = Callable[[Any], None]  # accepts a value at replay, or raises
Build = Callable[[Iterator[Any]], Any]


class StructureChanged(Exception):
    """A value doesn't have the structure it had at capture. Carries the path, and what was found and expected there."""

    def __init__(self, path: str, found: str, expected: str) -> None:
        super().__init__(path, found, expected)
        self.path, self.found, self.expected = path, found, expected


class Branch:
    """Takes a container at a place of a structure: at a replay it must have the same type and keys, and its children are taken.

    Raises:
        StructureChanged: when called with another container.
    """

    __slots__ = ("_keys", "_path", "_type", "children")

    def __init__(self, kind: type, keys: list[Any], children: list[Take], path: str) -> None:
        self._type, self._keys, self.children, self._path = kind, keys, children, path

    def __call__(self, value: Any) -> None:
        parts = parts_of(value) if type(value) is self._type else None
        if parts is None or [key for key, _ in parts] != self._keys:
            raise StructureChanged(self._path, _outline(value, parts), f"a {self._type.__qualname__} of {self._keys}")
        for take, (_, child) in zip(self.children, parts, strict=True):
            take(child)


@dataclasses.dataclass(frozen=True)
class Tree:
    """A structure taken apart, which holds none of the containers it came from.

    ``leaves``: (path, value, dimension) in order. ``build``: the same containers around an iterator's values. ``takes``: what
    accepts such a structure at replay, from what accepts each leaf. ``outline``: the containers alone, comparable with ``==``.
    """

    leaves: list[tuple[str, Any, int | None]]
    build: Build
    takes: Callable[[Iterator[Take]], Take]
    outline: Any


def take_apart(value: Any, dims: TokenDims = None, path: str = "output", opaque: Callable[[Any], bool] | None = None) -> Tree:
    """Walk tuples, lists, mappings (``ModelOutput`` too) and dataclasses once. Everything else is a leaf.

    ``opaque``: which values are leaves whatever they contain.

    Raises:
        ValueError: ``dims`` is a structure that doesn't match.
    """
    parts = None if opaque is not None and opaque(value) else parts_of(value)
    if parts is None:
        if dims is not None and not isinstance(dims, int):
            raise ValueError(f"token_dim gives {dims!r} for {path}, which is one value")
        return Tree([(path, value, dims)], next, next, isinstance(value, torch.Tensor))
    keys, kind = [key for key, _ in parts], type(value)
    trees = [take_apart(child, _dim_of(dims, k, len(parts), path), path + _step(value, k), opaque) for k, child in parts]
    make = around(value, keys)
    return Tree(
        [leaf for tree in trees for leaf in tree.leaves],
        lambda values: make([tree.build(values) for tree in trees]),
        lambda takes: Branch(kind, keys, [tree.takes(takes) for tree in trees], path),
        (kind, tuple(keys), tuple(tree.outline for tree in trees)),
    )


def leaves(value: Any) -> Iterator[Any]:
    """Every leaf of a nested structure, in order. What contains itself is entered once."""
    return _leaves(value, ())


def contents(value: Any) -> Any:
    """What a nested structure holds, by identity: equal as long as nobody changed it."""
    return _contents(value, ())


def parts_of(value: Any) -> list[tuple[Any, Any]] | None:
    """``(key, child)`` of a container: tuple, list, mapping (so ``ModelOutput`` too), dataclass. None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def around(value: Any, keys: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """A function that makes containers of the type of ``value`` around children at ``keys``. It doesn't hold ``value``."""
    cls: Any = type(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return lambda children: cls(*children)
    if isinstance(value, tuple | list):
        return lambda children: cls(children)
    if isinstance(value, Mapping) and hasattr(cls, "__dataclass_fields__"):
        return lambda children: cls(**dict(zip(keys, children, strict=True)))
    if isinstance(value, Mapping):
        empty: Any = copy.copy(value)
        empty.clear()

        def mapping(children: list[Any]) -> Any:
            new = copy.copy(empty)
            new.update(zip(keys, children, strict=True))
            return new

        return mapping

    def record(children: list[Any]) -> Any:
        new = object.__new__(cls)
        for key, child in zip(keys, children, strict=True):
            object.__setattr__(new, key, child)
        return new

    return record


def _leaves(value: Any, around_it: tuple[int, ...]) -> Iterator[Any]:
    parts = parts_of(value)
    if parts is None:
        yield value
    elif id(value) not in around_it:
        for _, child in parts:
            yield from _leaves(child, (*around_it, id(value)))


def _contents(value: Any, around_it: tuple[int, ...]) -> Any:
    parts = None if id(value) in around_it else parts_of(value)
    return id(value), parts and [(key, _contents(child, (*around_it, id(value)))) for key, child in parts]


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
