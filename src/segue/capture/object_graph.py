"""What an object holds by name, and where. Every search of the user's objects is this one walk.

It finds names for externals, the modules that a function reaches, and the plain values that a forward changes.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segue import _torch
from segue.capture.compiled import Compiled
from segue.capture.context_paths import is_plain, slots

_LIBRARIES = {"torch", "segue", *sys.stdlib_module_names}
_OPAQUE = {"torch", "segue", "builtins", "functools", "logging", "threading", "_thread"}  # whose objects hold no state of a model
_HELD_BY_CLASSES = (Tensor, torch.nn.Module, dict, list)
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, str)
_DEPTH = 6  # of containers and plain objects; submodules are followed to the end
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
        yield from (Held(obj.__dict__, k, v, f".{k}") for k, v in list(obj.__dict__.items()) if _is_state(k, v))
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
    elif isinstance(obj, dict):
        yield from (Held(obj, k, v, f"[{k!r}]") for k, v in list(obj.items()))
    elif isinstance(obj, list | tuple):
        yield from (Held(obj, i, v, f"[{i}]") for i, v in enumerate(obj))
    elif isinstance(obj, type):
        yield from (Held(obj, k, v, f".{k}") for k, v in list(vars(obj).items()) if isinstance(v, _HELD_BY_CLASSES))
    else:
        own = getattr(obj, "__dict__", None)
        if isinstance(own, dict):
            yield from (Held(own, k, v, f".{k}") for k, v in list(own.items()))
        for name in slots(type(obj)):
            if not name.startswith("__") and hasattr(obj, name):
                yield Held(obj, name, getattr(obj, name), f".{name}")


class Place:
    """Where something is held, with the place of its holder, so that a place has a path from the root."""

    __slots__ = ("holder", "key", "name", "subscript", "within")

    def __init__(self, holder: Any, key: Any, name: str, within: Place | None) -> None:
        self.holder, self.key, self.name, self.within = holder, key, name, within
        self.subscript = isinstance(holder, dict | list | tuple)

    def get(self) -> Any:
        """The value that is there now; None if there is none."""
        try:
            return self.holder[self.key] if self.subscript else getattr(self.holder, self.key)
        except (KeyError, IndexError, AttributeError, ValueError):
            return None


def walk(root: Any, name: str = "", enter: Callable[[Any], bool] | None = None) -> Iterator[tuple[Place, Any]]:
    """``(place, value)`` of everything that ``root`` reaches by name.

    Submodules are followed to the end, other objects some levels deep. Plain values, tensors and libraries are yielded, and what
    they hold isn't. ``enter``: whether the walk goes on into an object that is none of these and no module; by default always.
    """
    seen: dict[int, Any] = {}  # by id; held, since Python would give the id of a temporary object to another
    # The nearest first, so that a value gets its shortest name.
    ahead: deque[tuple[Any, str, int, Place | None]] = deque([(root, name or _name_of(root), _DEPTH, None)])
    while ahead and len(seen) < _MOST:
        obj, label, depth, within = ahead.popleft()
        if id(obj) in seen or depth < 0:
            continue
        seen[id(obj)] = obj
        for holder, key, value, text in held_by(obj):
            place = Place(holder, key, label + text, within)
            yield place, value
            if isinstance(value, Tensor) or (is_plain(value) and not isinstance(value, FunctionType | type)):
                continue
            if isinstance(value, torch.nn.Module):
                ahead.append((value, place.name, _DEPTH, place))
            elif not _is_library(value) and (enter is None or enter(value)):
                ahead.append((value, place.name, depth - 1, place))


def reached(root: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that ``root`` reaches, with its name, and the root itself. Objects of libraries are not entered."""
    yield name or _name_of(root), root
    yield from ((place.name, value) for place, value in walk(root, name, is_users))


def plain_values(root: Any, name: str = "") -> dict[str, Any]:
    """Numbers and strings by name: attributes, items, closure cells, and globals that a function uses."""
    return {label: value for label, value in reached(root, name) if value.__class__ in _PLAIN}


class Places:
    """The first place found of each storage that ``root`` reaches. None as the root reaches nothing.

    The walk takes milliseconds, so it may be done once for several captures. A place counts only while the storage is still held
    there. If one is missing, :meth:`look_again` searches once more.

    ``compiled``: whether the root reaches compiled code. ``writes_unseen``: whether some of it may write tensors that it was
    given, which no mode sees: any but that of :func:`~segue.compile_dynamic`.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self.look_again()

    def look_again(self) -> None:
        """Walk from the root once more, and replace what was found before."""
        self._found: dict[int, Place] = {}
        self.compiled = self.writes_unseen = False
        if self._root is None:
            return
        self._note_compiled(self._root)
        for place, value in walk(self._root):
            if isinstance(value, Tensor):
                if _torch.address(value):
                    self._found.setdefault(_torch.storage_key(value), place)
            else:
                self._note_compiled(value)

    def _note_compiled(self, value: Any) -> None:
        if _is_compiled(value):
            self.compiled = True
            self.writes_unseen = self.writes_unseen or not isinstance(value, Compiled)

    def of(self, t: Tensor) -> Place | None:
        """The place where ``t``'s memory is held now; None if there is none."""
        key = _torch.storage_key(t)
        place = self._found.get(key)
        held = None if place is None else place.get()
        return place if isinstance(held, Tensor) and _torch.storage_key(held) == key else None

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that are held at the places now."""
        for place in self._found.values():
            if isinstance(t := place.get(), Tensor):
                yield t


def _is_state(name: str, value: Any) -> bool:
    """Whether an entry of a module's ``__dict__`` may be state of its owner's, and not torch's bookkeeping."""
    if not name.startswith("_"):
        return True
    return name not in _OF_EVERY_MODULE and isinstance(value, Tensor | dict | list | tuple)


def _held_by_function(fn: FunctionType) -> Iterator[Held]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        if isinstance(cell, CellType) and (content := _content(cell)) is not None:
            yield Held(cell, "cell_contents", content, f": {name}")
    for i, default in enumerate(fn.__defaults__ or ()):
        yield Held(fn.__defaults__, i, default, f" default {i}")
    yield from (Held(fn.__kwdefaults__, name, v, f" default {name}") for name, v in (fn.__kwdefaults__ or {}).items())
    for name in _globals_of(fn.__code__):
        if name in fn.__globals__:
            yield Held(fn.__globals__, name, fn.__globals__[name], f": {name}")
    if (wrapped := getattr(fn, "__wrapped__", None)) is not None:
        yield Held(fn, "__wrapped__", wrapped, "")


@functools.lru_cache(maxsize=4096)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """Names of the globals that a function and the functions inside it read. ``co_names`` has the names of attributes as well."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in _globals_of(c)]
    return tuple(dict.fromkeys([*names, *inner]))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _is_library(value: Any) -> bool:
    """Whether ``value`` is a Python module, a builtin, or a function or class of torch or Python. These hold nothing of the
    user's.
    """
    if isinstance(value, ModuleType | BuiltinFunctionType):
        return True
    return isinstance(value, type | FunctionType) and _is_of(value, _LIBRARIES)


def is_users(value: Any) -> bool:
    """Whether ``value`` is a container, a function, or an object of the user's own. Classes don't count, because they hold values
    of all their objects.
    """
    if isinstance(value, type):
        return False
    if isinstance(value, Compiled | dict | list | tuple | MethodType | functools.partial):
        return True
    return not _is_of(value if isinstance(value, FunctionType) else type(value), _OPAQUE) or dataclasses.is_dataclass(value)


def _is_of(value: Any, packages: Collection[str]) -> bool:
    home = getattr(value, "__module__", None)
    return isinstance(home, str) and home.partition(".")[0] in packages


def _is_compiled(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        return getattr(value, "_compiled_call_impl", None) is not None or "_torchdynamo_orig_callable" in value.__dict__
    held: dict[str, Any] = value.__dict__ if isinstance(value, FunctionType | Compiled) else {}
    return "_torchdynamo_orig_callable" in held and not held.get("_torchdynamo_disable", False)


def _name_of(obj: Any) -> str:
    return str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or type(obj).__qualname__)
