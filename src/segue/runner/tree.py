"""Nested values taken apart into leaves, and put together again around others without keeping the old ones alive."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

Dims = Any  # int, None, or a structure of them: by position, key or field
Build = Callable[[Iterator[Any]], Any]


@dataclasses.dataclass(frozen=True)
class Tree:
    """``leaves``: (path, value, dimension) in order. ``build``: the same containers around an iterator's values.

    ``outline``: the containers alone, comparable with ``==``.
    """

    leaves: list[tuple[str, Any, int | None]]
    build: Build
    outline: Any


def take_apart(value: Any, dims: Dims = None, path: str = "output") -> Tree:
    """Walk tuples, lists, mappings (``ModelOutput`` too) and dataclasses. Everything else is a leaf.

    Raises:
        ValueError: ``dims`` is a structure that doesn't match.
    """
    found: list[tuple[str, Any, int | None]] = []
    build, outline = _walk(value, dims, path, found)
    return Tree(found, build, outline)


def parts_of(value: Any) -> list[tuple[Any, Any]] | None:
    """``(key, child)`` of a container, None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def same_around(value: Any, keys: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """How to make containers of the type of ``value`` around children at ``keys``."""
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


def _walk(value: Any, dims: Dims, path: str, found: list[tuple[str, Any, int | None]]) -> tuple[Build, Any]:
    parts = parts_of(value)
    if parts is None:
        if dims is not None and not isinstance(dims, int):
            raise ValueError(f"{dims!r} is given for {path}, which is one value")
        found.append((path, value, dims))
        return next, isinstance(value, torch.Tensor)
    keys = [key for key, _ in parts]
    named = dataclasses.is_dataclass(value)
    walked = [
        _walk(child, _dim_of(dims, key, len(parts), path), f"{path}.{key}" if named else f"{path}[{key!r}]", found)
        for key, child in parts
    ]
    around, builds = same_around(value, keys), [build for build, _ in walked]
    return (lambda values: around([build(values) for build in builds])), (
        type(value),
        tuple(keys),
        tuple(o for _, o in walked),
    )


def _dim_of(dims: Dims, key: Any, count: int, path: str) -> Dims:
    if dims is None or isinstance(dims, int):
        return dims
    if isinstance(dims, Mapping):
        if key not in dims:
            raise ValueError(f"there is no entry for {key!r} of {path}")
        return dims[key]
    if isinstance(dims, Sequence) and isinstance(key, int):
        if len(dims) != count:
            raise ValueError(f"there are {len(dims)} entries for the {count} values of {path}")
        return dims[key]
    raise ValueError(f"{dims!r} doesn't fit {path}")
