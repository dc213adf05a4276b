"""What Python values a forward can reach: so that those which a warm-up changed can be named."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_MOST = 50_000  # values looked at
_DEEP = 6  # of containers and plain objects; submodules are followed to the end
_PLAIN = (bool, int, float, str)
_FOREIGN = (
    "torch",
    "builtins",
    "threading",
    "logging",
    "segue",
    "functools",
)  # libraries: slow to walk, and hold no model


def plain_values(root: Any, name: str = "") -> dict[str, Any]:
    """Plain values by name: attributes, items, closure cells, and globals that a function uses."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    todo: list[tuple[Any, str, int]] = [(root, name or _name_of(root), 0)]
    looked = 0
    while todo and looked < _MOST:
        obj, label, depth = todo.pop()
        if id(obj) in seen or (depth > _DEEP and not isinstance(obj, nn.Module)):
            continue
        seen.add(id(obj))
        for text, value in _children(obj):
            looked += 1
            if value.__class__ in _PLAIN:
                found[label + text] = value
            elif value is not None and not isinstance(value, type | types.ModuleType | Tensor):
                todo.append((value, label + text, depth + 1))
    return found


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, nn.Module):
        yield from ((f".{k}", v) for k, v in list(obj._modules.items()))
        yield from ((f".{k}", v) for k, v in list(obj.__dict__.items()) if not k.startswith("_"))
    elif isinstance(obj, types.MethodType):
        yield "", obj.__self__
        yield "", obj.__func__
    elif isinstance(obj, functools.partial):
        yield "", obj.func
        yield from ((f".{k}", v) for k, v in obj.keywords.items())
    elif isinstance(obj, types.FunctionType):
        yield from _of_function(obj)
    elif isinstance(obj, dict):
        yield from ((f"[{k!r}]", v) for k, v in list(obj.items()))
    elif isinstance(obj, list | tuple):
        yield from ((f"[{i}]", v) for i, v in enumerate(obj))
    elif isinstance(own := getattr(obj, "__dict__", None), dict) and type(obj).__module__.split(".")[0] not in _FOREIGN:
        yield from ((f".{k}", v) for k, v in list(own.items()))


def _of_function(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield f": {name}", cell.cell_contents
        except ValueError:
            continue  # not filled yet
    for name in fn.__code__.co_names:
        if name in fn.__globals__:
            yield f": {name}", fn.__globals__[name]
    if isinstance(wrapped := getattr(fn, "__wrapped__", None), types.FunctionType):
        yield "", wrapped


def _name_of(obj: Any) -> str:
    return str(getattr(obj, "__qualname__", None) or type(obj).__qualname__)
