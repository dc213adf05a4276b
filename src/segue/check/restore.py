"""Putting back the Python values that a forward changes, so that the next forward starts where this one did."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from segue.capture.context_paths import globals_of, slots
from segue.runner.attributes import is_foreign

_MOST_OBJECTS = 50_000
_MAX_DEPTH = 6  # of containers and plain objects; submodules are followed to the end
_PLAIN = (bool, int, float, str, type(None))
_FOREIGN = ("torch", "builtins", "threading", "logging", "segue", "functools", "_thread")


class PlainValues:
    """The plain values (numbers, strings, None) that objects within reach of ``root`` hold by name, as they are now.

    Nothing else is put back: what a forward builds once and keeps (tables, memos) must stay, because graphs may read it.
    """

    def __init__(self, root: Any) -> None:
        self._slots = [
            (holder, key, value) for holder, key, value in _reach(root) if type(value) in _PLAIN and key is not None
        ]

    def restore(self) -> None:
        """Put back every value that is another plain value now."""
        for holder, key, value in self._slots:
            now = _now(holder, key)
            if now is value or type(now) not in _PLAIN:
                continue
            if isinstance(holder, types.CellType):
                holder.cell_contents = value
            elif isinstance(holder, dict | list):
                holder[key] = value
            else:
                object.__setattr__(holder, key, value)


class ContextContents:
    """Everything that a context holds, as it is now: attributes, and items in their order. Tensors are put back as objects."""

    def __init__(self, root: Any) -> None:
        holders: dict[int, Any] = {}
        self._slots: list[tuple[Any, str, Any]] = []
        for holder, key, value in _reach(root):
            if isinstance(holder, dict | list):
                holders[id(holder)] = holder
            elif not isinstance(holder, types.CellType):
                self._slots.append((holder, key, value))
        self._saved = [(holder, holder.copy()) for holder in holders.values()]

    def restore(self) -> None:
        """Put back the attributes and items, and remove those that were added to dicts and lists."""
        for holder, saved in self._saved:
            if isinstance(holder, list):
                holder[:] = saved
            elif len(holder) != len(saved) or any(holder.get(k, _ABSENT) is not v for k, v in saved.items()):
                holder.clear()
                holder.update(saved)
        for holder, name, value in self._slots:
            object.__setattr__(holder, name, value)


_ABSENT: Any = object()


def _reach(root: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Walk what ``root`` reaches: ``(holder, key, value)`` of everything that is held by name.

    ``holder`` is a dict, a list, a closure cell (key ``"cell_contents"``) or an object with slots. Each dict and list is
    also given once with a key of None, so that empty ones show; so are values that nothing can be assigned to.
    """
    seen: dict[int, Any] = {}  # by id; the objects are held, because the id of a temporary object would be given out again
    todo: list[tuple[Any, int]] = [(root, 0)]
    while todo and len(seen) < _MOST_OBJECTS:
        obj, depth = todo.pop()
        if id(obj) in seen or (depth > _MAX_DEPTH and not isinstance(obj, torch.nn.Module)):
            continue
        seen[id(obj)] = obj
        for holder, key, value in _children(obj):
            yield holder, key, value
            if type(value) not in _PLAIN and not isinstance(value, type | types.ModuleType | Tensor):
                todo.append((value, depth + 1))


def _children(obj: Any) -> Iterator[tuple[Any, Any, Any]]:
    if isinstance(obj, torch.nn.Module):
        yield from ((obj.__dict__, k, v) for k, v in list(obj.__dict__.items()) if not k.startswith("_"))
        yield from ((obj._modules, k, v) for k, v in list(obj._modules.items()))
    elif isinstance(obj, types.MethodType):
        yield {}, None, obj.__self__
        yield {}, None, obj.__func__
    elif isinstance(obj, functools.partial):
        yield {}, None, obj.func
        yield from ((obj.keywords, k, v) for k, v in list(obj.keywords.items()))
    elif isinstance(obj, types.FunctionType):
        if not is_foreign(obj.__module__):
            yield from _of_function(obj)
    elif isinstance(obj, dict):
        yield obj, None, None
        yield from ((obj, k, v) for k, v in list(obj.items()))
    elif isinstance(obj, list):
        yield obj, None, None
        yield from ((obj, i, v) for i, v in enumerate(list(obj)))
    elif isinstance(obj, tuple):
        yield from (({}, None, v) for v in obj)
    elif type(obj).__module__.split(".")[0] not in _FOREIGN or dataclasses.is_dataclass(obj):
        if isinstance(own := getattr(obj, "__dict__", None), dict):
            yield own, None, None
            yield from ((own, k, v) for k, v in list(own.items()))
        names = (name for name in slots(type(obj)) if not name.startswith("__"))
        yield from ((obj, name, getattr(obj, name)) for name in names if hasattr(obj, name))


def _of_function(fn: types.FunctionType) -> Iterator[tuple[Any, Any, Any]]:
    for cell in fn.__closure__ or ():
        if (value := _cell(cell)) is not _ABSENT:
            yield cell, "cell_contents", value
    for name in globals_of(fn.__code__):
        if name in fn.__globals__:
            yield fn.__globals__, name, fn.__globals__[name]
    if isinstance(wrapped := getattr(fn, "__wrapped__", None), types.FunctionType):
        yield {}, None, wrapped


def _now(holder: Any, key: Any) -> Any:
    if isinstance(holder, types.CellType):
        return _cell(holder)
    if isinstance(holder, list):
        return holder[key] if key < len(holder) else _ABSENT
    return holder.get(key, _ABSENT) if isinstance(holder, dict) else getattr(holder, key, _ABSENT)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT
