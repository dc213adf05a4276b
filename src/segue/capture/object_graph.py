"""What an object holds by name, and where. Every search of the user's objects is this one walk.

It finds names for externals, the modules that a function reaches, and the plain values that a forward changes.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segue.capture.code_names import Names, attributes_of, globals_of, imports_of, is_break, is_installed, is_library
from segue.capture.compiled import Compiled
from segue.capture.context_paths import is_plain, slots

# Packages whose objects hold no state of a model.
_PATCHED = {"torch", "torch.nn", "torch.nn.functional"}  # whose functions users replace, as with another attention
_PATCHABLE = (FunctionType, BuiltinFunctionType, ModuleType)
_OPAQUE = {"torch", "segue", "builtins", "functools", "logging", "threading", "_thread", "weakref", "_weakref"}
_NO_STATE = {"logging", "threading", "_thread", "typing", "re", "dataclasses", "importlib"}
_HELD_BY_CLASSES = (Tensor, torch.nn.Module, dict, list)
# What a class holds for its objects; its code is met by name.
_OF_CLASSES = (FunctionType, classmethod, staticmethod, property, GetSetDescriptorType, MemberDescriptorType)
_EVERY_CLASS = {"__annotations__", "__dataclass_fields__", "__orig_bases__", "__parameters__", "__members__"}
OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, str)
_DEPTH = 20  # of containers and plain objects; submodules are followed to the end
_FAR = 2  # behind functions and classes of installed packages, which reach each other without end
_MOST = 50_000  # objects visited: names only make errors clearer, so a capture must not walk the whole process for them


class Held(NamedTuple):
    """Something held by name: ``holder[key]``, or ``holder.key`` where the holder isn't a dict, list or tuple.

    ``text``: what follows the holder's name in the name of the value, as in ``.weight``.
    """

    holder: Any
    key: Any
    value: Any
    text: str


def held_by(obj: Any) -> Iterator[Held]:
    """Everything that an object holds by name: attributes, items, closure cells, defaults, and the globals it reads."""
    if isinstance(obj, torch.nn.Module):
        for table in (obj._parameters, obj._buffers, obj._modules):
            yield from (Held(table, k, v, f".{k}") for k, v in list(table.items()))
        yield from (Held(obj.__dict__, k, v, f".{k}") for k, v in list(obj.__dict__.items()) if _is_state(k))
        for hooks in (obj._forward_pre_hooks, obj._forward_hooks):
            yield from (Held(hooks, k, v, f": hook {_name_of(v)}") for k, v in list(hooks.items()))
    elif isinstance(obj, Compiled):
        yield Held(vars(obj), "__wrapped__", vars(obj)["__wrapped__"], "")  # and nothing of what dynamo keeps for it
    elif isinstance(obj, MethodType):
        yield Held(obj, "__self__", obj.__self__, "")
        yield Held(obj, "__func__", obj.__func__, "")
    elif isinstance(obj, functools.partial):
        yield Held(obj, "func", obj.func, "")
        yield from (Held(obj.args, i, v, f"[{i}]") for i, v in enumerate(obj.args))
        yield from (Held(obj.keywords, k, v, f".{k}") for k, v in list(obj.keywords.items()))
    elif isinstance(obj, FunctionType):
        yield from _held_by_function(obj)
    elif isinstance(obj, ContextVar):
        yield Held(current := _Current(obj), "value", current.value, "")
    elif isinstance(obj, dict | list | tuple | deque):
        # Not as a subclass iterates, which may load what is asked for.
        items = list(dict.items(obj)) if isinstance(obj, dict) else enumerate(list.copy(obj) if isinstance(obj, list) else obj)
        yield from (Held(obj, k, v, f"[{k!r}]") for k, v in items)
        if type(obj) not in (dict, list, tuple, deque):
            yield from _attributes(obj)
    elif isinstance(obj, type):
        follow = _HELD_BY_CLASSES if is_installed(obj.__module__) else object
        held = [(k, v) for k, v in list(vars(obj).items()) if isinstance(v, type) or (isinstance(v, follow) and not is_plain(v))]
        yield from (Held(obj, k, v, f".{k}") for k, v in held if not isinstance(v, _OF_CLASSES) and k not in _EVERY_CLASS)
    elif isinstance(obj, threading.local):
        yield from (Held(obj, k, v, f".{k}") for k, v in list(vars(obj).items()))  # by name: each thread has others
    else:
        yield from _attributes(obj)


def _attributes(obj: Any) -> Iterator[Held]:
    own = getattr(obj, "__dict__", None)
    if isinstance(own, dict):
        yield from (Held(own, k, v, f".{k}") for k, v in list(own.items()))
    for name in slots(type(obj)):
        if not name.startswith("__") and hasattr(obj, name):
            yield Held(obj, name, getattr(obj, name), f".{name}")


class _Current:
    """What a context variable holds for whoever asks."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self._variable = variable

    @property
    def value(self) -> Any:
        """Its value here and now; None if it has none."""
        try:
            return self._variable.get()
        except LookupError:
            return None

    @value.setter
    def value(self, value: Any) -> None:
        self._variable.set(value)


class Place:
    """Where something is held, with the place of its holder, so that a place has a path from the root."""

    __slots__ = ("holder", "key", "name", "subscript", "within")

    def __init__(self, holder: Any, key: Any, name: str, within: Place | None) -> None:
        self.holder, self.key, self.name, self.within = holder, key, name, within
        self.subscript = isinstance(holder, dict | list | tuple | deque)

    def get(self) -> Any:
        """The value that is there now; None if there is none."""
        try:
            return self.holder[self.key] if self.subscript else getattr(self.holder, self.key)
        except (KeyError, IndexError, AttributeError, ValueError):
            return None


class Visit(NamedTuple):
    """An object that a walk came to, its name, what it holds, and whether only breaks reach it, where everything is live."""

    obj: Any
    name: str
    held: list[tuple[Place, Any]]
    live: bool


def visits(root: Any, name: str = "", enter: Callable[[Any], bool] | None = None, names: Names | None = None) -> Iterator[Visit]:
    """Every object that ``root`` reaches by name, each once, the nearest first, so that a value gets its shortest name.

    Submodules are followed to the end, other objects some levels deep. Plain values, tensors and libraries are held, and never
    visited. Of a class that was met, the methods are followed whose names stand in the code that was met.

    ``enter``: whether the walk goes on into an object that is none of these and no module; by default always. Given it, no
    class and no method is followed. ``names``: collects those of the code.
    """
    seen: dict[int, Any] = {}  # by id; held, since Python would give the id of a temporary object to another
    names = Names() if names is None else names
    ahead: deque[tuple[Any, str, int, Place | None]] = deque([(root, name or _name_of(root), _DEPTH, None)])
    later: deque[tuple[Any, str, int, Place | None]] = deque()  # behind the functions of breaks
    live = False
    while len(seen) < _MOST:
        if not ahead and not live and enter is None:
            ahead.extend((fn, text, _FAR if is_installed(fn.__module__) else _DEPTH, None) for text, fn in names.methods())
        if not ahead:
            if not later:
                return
            ahead, later, live = later, ahead, True
        obj, label, depth, within = ahead.popleft()
        if id(obj) in seen or depth < 0:
            continue
        seen[id(obj)] = obj
        if not live and isinstance(obj, FunctionType) and is_break(obj):
            later.append((obj, label, depth, within))
            del seen[id(obj)]
            continue
        if not live:
            names.meet(obj)
        found = [(Place(h.holder, h.key, label + h.text, within), h.value) for h in held_by(obj)]
        yield Visit(obj, label, found, live)
        for place, value in found:
            if isinstance(value, Tensor) or (is_plain(value) and not isinstance(value, FunctionType | type)):
                continue
            if isinstance(value, torch.nn.Module):
                ahead.append((value, place.name, _DEPTH, place))
            elif not _is_library(value) and (enter is None or enter(value)):
                far = _FAR if isinstance(value, FunctionType | type) and is_installed(value.__module__) else depth
                ahead.append((value, place.name, min(depth, far) - 1, place))
        if enter is None and not is_library((cls := type(obj)).__module__):
            ahead.append((cls, cls.__qualname__, depth - 1, None))


def walk(root: Any, name: str = "", enter: Callable[[Any], bool] | None = None) -> Iterator[tuple[Place, Any]]:
    """``(place, value)`` of everything that ``root`` reaches by name, as :func:`visits` does."""
    for visit in visits(root, name, enter):
        yield from visit.held


def reached(root: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that ``root`` reaches, with its name, and the root itself. Objects of libraries are not entered."""
    yield name or _name_of(root), root
    yield from ((place.name, value) for place, value in walk(root, name, is_users))


def parts_within(obj: Any, levels: int = 3, most: int = 500) -> list[Any]:
    """The tensors and the objects of other kinds that ``obj`` holds by name, some levels deep. Modules are not entered, and what
    a function finds in its globals is not its own.
    """
    found: list[Any] = []
    seen: dict[int, Any] = {}  # held, since Python would give the id of a temporary object to another
    level = [obj]
    for _ in range(levels):
        below = []
        for value in level:
            own = getattr(value, "__globals__", None)
            below += [h.value for h in held_by(value) if h.holder is not own and not (is_plain(h.value) or id(h.value) in seen)]
            seen.update((id(v), v) for v in below)
        found += below
        level = [v for v in below if not isinstance(v, Tensor | torch.nn.Module)]
        if len(found) > most:
            break
    return found[:most]


def plain_values(root: Any, name: str = "") -> dict[str, Any]:
    """Numbers and strings by name: attributes, items, closure cells, and globals that a function uses."""
    return {label: value for label, value in reached(root, name) if value.__class__ in _PLAIN}


def _is_state(name: str) -> bool:
    """Whether an entry of a module's ``__dict__`` may be state of its owner's, and not torch's bookkeeping."""
    return not name.startswith("_") or name not in OF_EVERY_MODULE


def _held_by_function(fn: FunctionType) -> Iterator[Held]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        if isinstance(cell, CellType) and (content := cell_content(cell)) is not None:
            yield Held(cell, "cell_contents", content, f": {name}")
    for i, default in enumerate(fn.__defaults__ or ()):
        yield Held(fn.__defaults__, i, default, f" default {i}")
    yield from (Held(fn.__kwdefaults__, name, v, f" default {name}") for name, v in (fn.__kwdefaults__ or {}).items())
    for name in globals_of(fn.__code__):
        if name in fn.__globals__:
            yield from _held_by_global(fn.__globals__, name, f": {name}", attributes_of(fn.__code__))
    for name in imports_of(fn.__code__):
        module = sys.modules.get(_absolute(name, fn.__globals__))
        if module is not None and not is_library(module.__name__):
            for key in sorted(attributes_of(fn.__code__) & vars(module).keys()):
                yield from _held_by_global(vars(module), key, f": {name}.{key}", attributes_of(fn.__code__))
    yield from (Held(fn.__dict__, k, v, f".{k}") for k, v in list(fn.__dict__.items()) if not k.startswith("__"))
    if (wrapped := getattr(fn, "__wrapped__", None)) is not None:
        yield Held(fn, "__wrapped__", wrapped, "")


def _held_by_global(holder: dict[str, Any], key: str, text: str, names: frozenset[str], depth: int = 4) -> Iterator[Held]:
    """A global; and of a Python module that is no library, what code with these ``names`` may read there."""
    value = holder[key]
    yield Held(holder, key, value, text)
    if isinstance(value, ModuleType) and depth and (not is_library(value.__name__) or value.__name__ in _PATCHED):
        for name in sorted(names & vars(value).keys()):
            if value.__name__ not in _PATCHED or isinstance(vars(value)[name], _PATCHABLE):
                yield from _held_by_global(vars(value), name, f"{text}.{name}", names, depth - 1)


def _absolute(name: str, of: dict[str, Any]) -> str:
    package = of.get("__package__") or ""
    return importlib.util.resolve_name(name, package) if name.startswith(".") and package else name


def cell_content(cell: CellType, unfilled: Any = None) -> Any:
    """What the variable of an outer function holds; ``unfilled`` if it was given nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return unfilled


def _is_library(value: Any) -> bool:
    """Whether ``value`` is a Python module, a builtin, or a function or class of torch or Python. These hold nothing of the
    user's. Nor do loggers and locks, nor objects of torch's and segue's own, which hold no end of things.
    """
    if type(value) is threading.local:
        return False
    if isinstance(value, ModuleType | BuiltinFunctionType) or type(value).__module__ in _NO_STATE:
        return True
    if _is_of(type(value), ("torch", "segue")) and not isinstance(value, Compiled | dict | list | tuple):
        return not dataclasses.is_dataclass(value)
    return isinstance(value, type | FunctionType) and is_library(value.__module__)


def is_users(value: Any) -> bool:
    """Whether ``value`` is a container, a function, or an object of the user's own. Classes don't count, because they hold values
    of all their objects.
    """
    if isinstance(value, type):
        return False
    if isinstance(value, Compiled | dict | list | tuple | MethodType | functools.partial) or type(value) is threading.local:
        return True
    return not _is_of(value if isinstance(value, FunctionType) else type(value), _OPAQUE) or dataclasses.is_dataclass(value)


def _is_of(value: Any, packages: Collection[str]) -> bool:
    home = getattr(value, "__module__", None)
    return isinstance(home, str) and home.partition(".")[0] in packages


def _name_of(obj: Any) -> str:
    return str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or type(obj).__qualname__)
