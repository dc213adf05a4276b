"""Where what a function reads is held: a name for each tensor that is reachable from it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.context_paths import globals_of, is_plain, slots

_LIBRARIES = {"torch", "segue", *sys.stdlib_module_names}
_HELD_BY_CLASSES = (Tensor, torch.nn.Module, dict, list)
_DEPTH = 4  # of containers and plain objects; submodules are followed to the end
_MOST = 50_000  # objects looked at: names are a service, and a capture must not walk the whole process for them


class Place:
    """Where something is held: ``holder[key]``, or ``holder.key`` where the holder isn't a dict, list or tuple.

    ``within``: the place of the holder, so that a place has a path from the root.
    """

    __slots__ = ("holder", "key", "name", "subscript", "within")

    def __init__(self, holder: Any, key: Any, name: str, within: Place | None) -> None:
        self.holder, self.key, self.name, self.within = holder, key, name, within
        self.subscript = isinstance(holder, dict | list | tuple)

    def get(self) -> Any:
        try:
            return self.holder[self.key] if self.subscript else getattr(self.holder, self.key)
        except (KeyError, IndexError, AttributeError, ValueError):
            return None


class Places:
    """The place of each storage that is reachable from ``root``, the first one found. None has none.

    The walk takes milliseconds, so it may be done ahead of captures: a place counts while that storage is still there, and
    who misses one looks again.

    ``compiled``: whether compiled code is reachable.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self.look_again()

    def look_again(self) -> None:
        """Walk once more."""
        self._found, self.compiled = _walk(self._root) if self._root is not None else ({}, False)

    def of(self, t: Tensor) -> Place | None:
        """Where ``t``'s memory is held, if it is."""
        key = _torch.storage_key(t)
        place = self._found.get(key)
        held = None if place is None else place.get()
        return place if isinstance(held, Tensor) and _torch.storage_key(held) == key else None

    def tensors(self) -> Iterator[Tensor]:
        """What is held at all places now."""
        for place in self._found.values():
            if isinstance(t := place.get(), Tensor):
                yield t


def _walk(root: Any) -> tuple[dict[int, Place], bool]:
    found: dict[int, Place] = {}
    compiled = False
    seen: dict[int, Any] = {}  # by id, and held, since the id of what is made anew at each look would be given out again
    stack: list[tuple[Any, str, int, Place | None]] = [(root, getattr(root, "__name__", type(root).__name__), _DEPTH, None)]
    while stack and len(seen) < _MOST:
        value, name, depth, within = stack.pop()
        if id(value) in seen or depth < 0:
            continue
        seen[id(value)] = value
        compiled = compiled or _is_compiled(value)
        for holder, key, child, text in _held(value):
            place = Place(holder, key, f"{name}{text}", within)
            if isinstance(child, Tensor):
                if _torch.address(child):
                    found.setdefault(_torch.storage_key(child), place)
            elif isinstance(child, torch.nn.Module):
                stack.append((child, place.name, _DEPTH, place))
            elif not is_plain(child) or isinstance(child, FunctionType | type):
                stack.append((child, place.name, depth - 1, place))
    return found, compiled


def _is_compiled(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        return getattr(value, "_compiled_call_impl", None) is not None or "_torchdynamo_orig_callable" in value.__dict__
    held: dict[str, Any] = value.__dict__ if isinstance(value, FunctionType) else {}
    return "_torchdynamo_orig_callable" in held and not held.get("_torchdynamo_disable", False)


def _held(value: Any) -> Iterator[tuple[Any, Any, Any, str]]:
    """``(holder, key, child, how to say it)`` for everything that an object holds by name."""
    if isinstance(value, torch.nn.Module):
        for table in (value._parameters, value._buffers, value._modules):
            yield from ((table, k, v, f".{k}") for k, v in table.items() if v is not None)
        yield from ((value.__dict__, k, v, f".{k}") for k, v in list(value.__dict__.items()) if not k.startswith("_"))
    elif isinstance(value, MethodType):
        yield value, "__self__", value.__self__, ""
        yield value, "__func__", value.__func__, ""
    elif isinstance(value, functools.partial):
        yield value, "func", value.func, ""
        yield from ((value.args, i, v, f"[{i}]") for i, v in enumerate(value.args))
        yield from ((value.keywords, k, v, f".{k}") for k, v in value.keywords.items())
    elif isinstance(value, FunctionType):
        yield from _held_by_function(value)
    elif isinstance(value, dict):
        yield from ((value, k, v, f"[{k!r}]") for k, v in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((value, i, v, f"[{i}]") for i, v in enumerate(value))
    elif isinstance(value, type):
        yield from ((value, k, v, f".{k}") for k, v in list(vars(value).items()) if isinstance(v, _HELD_BY_CLASSES))
    else:
        if isinstance(getattr(value, "__dict__", None), dict):
            yield from ((value.__dict__, k, v, f".{k}") for k, v in list(value.__dict__.items()))
        for name in slots(type(value)):
            if hasattr(value, name):
                yield value, name, getattr(value, name), f".{name}"


def _held_by_function(fn: FunctionType) -> Iterator[tuple[Any, Any, Any, str]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        if isinstance(cell, CellType) and (content := _content(cell)) is not None:
            yield cell, "cell_contents", content, f": {name}"
    for i, default in enumerate(fn.__defaults__ or ()):
        yield fn.__defaults__, i, default, f" default {i}"
    for name in globals_of(fn.__code__):
        if name in fn.__globals__ and not _is_library(fn.__globals__[name]):
            yield fn.__globals__, name, fn.__globals__[name], f": {name}"
    if (wrapped := getattr(fn, "__wrapped__", None)) is not None:
        yield fn, "__wrapped__", wrapped, ""


def _is_library(value: Any) -> bool:
    """Modules, builtins, and functions and classes of torch or Python: they hold nothing of the captured function's."""
    if isinstance(value, ModuleType | BuiltinFunctionType):
        return True
    home = getattr(value, "__module__", None) if isinstance(value, type | FunctionType) else None
    return isinstance(home, str) and home.partition(".")[0] in _LIBRARIES


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
