"""Nested values as data: taken apart once at capture, checked in one pass at every replay."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

TokenDims = Any  # int, None, or a structure of them: by position, key or field
Take = Callable[[Any], None]  # accepts a value at replay, or raises
Build = Callable[[Iterator[Any]], Any]
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
    keys = [key for key, _ in parts]
    done = [
        settle(child, _dim_of(token_dims, key, len(parts), path), on_leaf, opaque, path + _step(value, key))
        for key, child in parts
    ]
    return Branch(value, [take for take, _ in done], path), around(value, keys)([new for _, new in done])


@dataclasses.dataclass(frozen=True)
class Tree:
    """A structure taken apart. ``leaves``: (path, value, dimension) in order. ``build``: the same containers around an
    iterator's values; it holds none of the old ones. ``outline``: the containers alone, comparable with ``==``.
    """

    leaves: list[tuple[str, Any, int | None]]
    build: Build
    outline: Any


def take_apart(value: Any, dims: TokenDims = None, path: str = "output") -> Tree:
    """Walk tuples, lists, mappings (``ModelOutput`` too) and dataclasses. Everything else is a leaf.

    Raises:
        ValueError: ``dims`` is a structure that doesn't match.
    """
    found: list[tuple[str, Any, int | None]] = []
    build, outline = _walk(value, dims, path, found)
    return Tree(found, build, outline)


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


def around(value: Any, keys: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """How to make containers of the type of ``value`` around children at ``keys``. Doesn't hold ``value``."""
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


def _walk(value: Any, dims: TokenDims, path: str, found: list[tuple[str, Any, int | None]]) -> tuple[Build, Any]:
    parts = parts_of(value)
    if parts is None:
        if dims is not None and not isinstance(dims, int):
            raise ValueError(f"{dims!r} is given for {path}, which is one value")
        found.append((path, value, dims))
        return next, isinstance(value, torch.Tensor)
    keys = [key for key, _ in parts]
    walked = [
        _walk(child, _dim_of(dims, key, len(parts), path), path + _step(value, key), found) for key, child in parts
    ]
    make, builds = around(value, keys), [build for build, _ in walked]
    return (lambda values: make([build(values) for build in builds])), (
        type(value),
        tuple(keys),
        tuple(o for _, o in walked),
    )


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
