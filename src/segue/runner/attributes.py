"""What a forward can reach by name: modules, tensors, and plain values, of which those that a warm-up changed can be named."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from segue.capture.context_paths import globals_of

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
    return {label: value for label, value in reached(root, name) if value.__class__ in _PLAIN}


def reached(root: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Everything that :func:`plain_values` looks at, with its name: the root, what it holds, tensors too."""
    seen: dict[int, Any] = {}  # by id, and held, since the id of what is made anew at each look would be given out again
    todo: list[tuple[Any, str, int]] = [(root, name or _name_of(root), 0)]
    looked = 0
    while todo and looked < _MOST:
        obj, label, depth = todo.pop()
        if id(obj) in seen or (depth > _DEEP and not isinstance(obj, nn.Module)):
            continue
        seen[id(obj)] = obj
        yield label, obj
        for text, value in _children(obj):
            looked += 1
            if value.__class__ in _PLAIN or isinstance(value, Tensor):
                yield label + text, value
            elif value is not None and not isinstance(value, type | types.ModuleType):
                todo.append((value, label + text, depth + 1))


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, nn.Module):
        for table in (obj._parameters, obj._buffers, obj._modules):
            yield from ((f".{k}", v) for k, v in list(table.items()))
        yield from ((f".{k}", v) for k, v in list(obj.__dict__.items()) if not k.startswith("_"))
    elif isinstance(obj, types.MethodType):
        yield "", obj.__self__
        yield "", obj.__func__
    elif isinstance(obj, functools.partial):
        yield "", obj.func
        yield from ((f"[{i}]", v) for i, v in enumerate(obj.args))
        yield from ((f".{k}", v) for k, v in obj.keywords.items())
    elif isinstance(obj, types.FunctionType):
        if not is_foreign(obj.__module__):
            yield from _of_function(obj)
    elif isinstance(obj, dict):
        yield from ((f"[{k!r}]", v) for k, v in list(obj.items()))
    elif isinstance(obj, list | tuple):
        yield from ((f"[{i}]", v) for i, v in enumerate(obj))
    elif isinstance(own := getattr(obj, "__dict__", None), dict) and not is_foreign(type(obj).__module__):
        yield from ((f".{k}", v) for k, v in list(own.items()))


def _of_function(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield f": {name}", cell.cell_contents
        except ValueError:
            continue  # not filled yet
    for name, default in _defaults(fn):
        yield f": {name}", default
    for name in globals_of(fn.__code__):
        if name in fn.__globals__:
            yield f": {name}", fn.__globals__[name]
    if isinstance(wrapped := getattr(fn, "__wrapped__", None), types.FunctionType):
        yield "", wrapped


def _defaults(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Modules and tensors among the default values of parameters."""
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    values = fn.__defaults__ or ()
    named = {**dict(zip(names[len(names) - len(values) :], values, strict=True)), **(fn.__kwdefaults__ or {})}
    yield from ((name, value) for name, value in named.items() if isinstance(value, nn.Module | Tensor))


def is_foreign(module: str | None) -> bool:
    return (module or "").split(".")[0] in _FOREIGN


def _name_of(obj: Any) -> str:
    return str(getattr(obj, "__qualname__", None) or type(obj).__qualname__)
