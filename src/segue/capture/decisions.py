"""What Python decided by when a forward was captured, and whether it still holds.

A graph holds the kernels that were launched. Which ones, Python decided by what it read on the way: submodules and their classes,
hooks, replaced forwards, plain attributes, globals, closures. A replay doesn't read them again, so they are compared.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from operator import methodcaller
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from segue import _torch
from segue.capture.code_names import Names, function_of, is_installed, is_library, may_run, own_classes
from segue.capture.comparisons import (
    CONTAINERS,
    INERT_HOOKS,
    MOST_ITEMS,
    Attributes,
    Change,
    Classes,
    Contents,
    Entries,
    Growing,
    Hooks,
    Kept,
    Sets,
    Tables,
    acting,
    makes_items,
)
from segue.capture.compiled import Compiled
from segue.capture.context_paths import ContextMap
from segue.capture.object_graph import OF_EVERY_MODULE, Place, Visit, is_users
from segue.errors import StateChangedError

_BY_KEYS = (nn.ParameterDict, nn.ParameterList)  # whose parameters no code names one by one
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # whose submodules no code names one by one
_WHOLE = (*CONTAINERS, tuple, FunctionType, MethodType, functools.partial, Compiled, ContextVar)  # whose parts no code names


class Decisions:
    """What the code that a function reaches may decide by. A call compares it: some 50 us for 28 layers.

    Compared is what has a name in that code, for what no code names none reads. Tensors are not: a look at their addresses is
    what :class:`~segue.capture.externals.Externals` is for. What only breaks read is live.

    Args:
        visits: what a walk from the function came to. ``names``: those in the code that it met.
        outside: modules that run outside the graphs, whose hooks, forwards and slots are live.
        ctx: the live context. Whoever holds it, or something in it, holds another one at the next call.
    """

    def __init__(
        self, visits: Iterable[Visit], names: Names, outside: Iterable[nn.Module] = (), ctx: Any = None
    ) -> None:
        self._contexts = ContextMap(ctx)
        self._names, self._called = names.all, names.called
        self._outside = {id(m): m for m in outside}
        self._entries, self._attributes, self._growing = Entries(), Attributes(), Growing(self._names)
        self._kept = Kept()
        self._tables, self._hooks, self._classes, self._sets = Tables(), Hooks(), Classes(), Sets()
        self._contents = Contents()
        fixed = self._classes, self._tables, self._hooks, self._sets, self._contents
        self._kinds = *fixed, self._kept, self._entries, self._attributes, self._growing
        self._filled, self._asked = names.filled, names.asked
        if names.environment:
            self._contents.add(os.environ, "os.environ", functools.partial(_variables, sorted(names.environment)))
        self._large: dict[str, None] = {}
        self._moved = False
        self._take(list(visits))
        del self._contexts  # no call's context outlives it here
        for kind in self._kinds:
            kind.accept()

    def changed(self) -> Change | None:
        """What is something else than at capture; None if nothing is. What was put back again is no change."""
        for kind in self._kinds:
            if kind.same() and not (self._moved and kind is self._growing):
                continue
            if (change := next(kind.changes(), None)) is not None:
                return change
            # What has left a dict makes room in it: until all keys have been looked at, its size says nothing.
            self._moved = kind is self._entries or (self._moved and kind is not self._growing)
        return None

    def check(self, remedy: str) -> None:
        """Raise StateChangedError if something changed. ``remedy``: what the user can do beside undoing it."""
        if (change := self.changed()) is not None:
            what = "replaced" if change.kind in ("module", "forward") or isinstance(change.value, CONTAINERS) else "changed"
            raise StateChangedError(
                f"{change}. {change.path} was {what} since the capture; the graph would go on with what was there then. Undo "
                f"the change, or {remedy}.",
                change,
            )

    def settle(self) -> None:
        """Leave out what a captured forward changed itself, after it has run: what its breaks keep for themselves is live."""
        for kind in self._kinds:
            if not kind.same():
                kind.drop()

    def let_grow(self) -> None:
        """Take in what dicts have got since, after a forward that filled them itself, with tables by length for example."""
        self._growing.let_grow()

    @property
    def paths(self) -> list[str]:
        """The names of what is compared."""
        return [path for kind in self._kinds for path in kind.paths()]

    @property
    def left_out(self) -> list[str]:
        """The names of containers with so many items that only their number is compared."""
        return [*self._large]

    def _take(self, visits: list[Visit]) -> None:
        # Whoever is named, by id, with whether it is the user's or a module's: containers of other packages are registries, which
        # grow for everybody.
        named = dict.fromkeys([*self._called, *(id(v.obj) for v in visits[:1])], True)
        classes: dict[type, None] = {}
        for obj, path, held, live in visits:
            is_module, is_class = isinstance(obj, nn.Module), isinstance(obj, type)
            if live or not (is_module or is_class or id(obj) in named):
                continue
            if (content := _content(obj)) is not None:
                self._contents.add(obj, path, content)
            if not (is_module or is_class or isinstance(obj, _WHOLE) or is_users(obj)):
                continue  # an object of Python's, torch's or segue's own
            cls = obj if is_class else type(obj)
            classes.update(dict.fromkeys(own_classes(cls)))
            if isinstance(obj, (*CONTAINERS, tuple)):
                own = named[id(obj)]
            else:
                own = is_module or not is_installed(obj.__module__ if isinstance(obj, FunctionType) else cls.__module__)
            aliases = getattr(cls, "attribute_map", None)  # a config's other names for its attributes
            mapped = {to for name, to in aliases.items() if name in self._names} if isinstance(aliases, dict) else set()
            if len(held) > MOST_ITEMS and isinstance(obj, CONTAINERS):
                self._large[path] = None
            for place, value in held if path not in self._large else ():
                if isinstance(aliases, dict) and place.key == "dtype" and value is None:
                    continue  # a config without a dtype is given that of the weights when it is saved
                by_name = isinstance(obj, _WHOLE) or place.key in self._names or place.key in mapped
                by_name = by_name or (is_module and id(obj) not in self._outside and _is_acting_hook(obj, place, value))
                if (by_name or isinstance(value, nn.Module)) and self._contexts.find(value) is None:
                    named.setdefault(id(value), own)
                    if not is_class and not (is_module and not _is_attribute(obj, place)):
                        self._compare(place, value)
            if own or not isinstance(obj, CONTAINERS):
                self._take_sizes(obj, path, mapped)
        for found in classes:
            self._take_class(found)

    def _compare(self, place: Place, value: Any) -> None:
        if isinstance(value, set) and len(value) <= MOST_ITEMS:
            self._sets.add(value, place.name)
        if not isinstance(value, Tensor) and not isinstance(place.holder, tuple) and place.key != "__wrapped__":
            entries = self._kept if makes_items(place.holder) else self._entries
            (entries if place.subscript else self._attributes).add(place.holder, place.key, value, place.name)

    def _take_sizes(self, obj: Any, path: str, mapped: set[str]) -> None:
        if isinstance(obj, nn.Module):
            self._take_module(obj, path)
        elif isinstance(obj, CONTAINERS):
            self._growing.add(obj, path, None, filled=_last_name(path) in self._filled)
        elif not isinstance(obj, (type, *_WHOLE)) and is_users(obj) and isinstance(own := getattr(obj, "__dict__", None), dict):
            self._growing.add(own, path, mapped)
            self._classes.add(obj, path)

    def _take_module(self, module: nn.Module, path: str) -> None:
        inside = {name: child for name, child in module._modules.items() if id(child) not in self._outside}
        if inside or isinstance(module, _LISTS) or not is_library(type(module).__module__):
            self._tables.add(module._modules, path, inside, ordered=isinstance(module, _LISTS))
        for table in (module._parameters, module._buffers):
            for name in self._names & {name for name, t in table.items() if t is None}:
                self._entries.add(table, name, None, f"{path}.{name}")
        if isinstance(module, _BY_KEYS):
            self._growing.add(module._parameters, path, None)
        if id(module) not in self._outside:
            self._classes.add(module, path)
            self._growing.add(vars(module), path, {"forward"})
            if self._asked and not is_installed(type(module).__module__):
                for held in (module._parameters, module._buffers):
                    self._growing.add(held, path, self._asked - held.keys() - vars(module).keys(), only=True)
            for table in (module._parameters, module._buffers):
                for name, t in table.items():
                    if t is not None and _torch.is_wrapper(t):  # a graph holds what is in it, at an address that it doesn't have
                        self._entries.add(table, name, t, f"{path}.{name}")
            self._hooks.add(module._forward_hooks, path)
            self._hooks.add(module._forward_pre_hooks, path)
            if (forward := vars(module).get("forward")) is not None:
                self._entries.add(vars(module), "forward", forward, f"{path}.forward")

    def _take_class(self, cls: type) -> None:
        library = is_library(cls.__module__)
        if not library:
            self._growing.add(vars(cls), cls.__qualname__, {"forward", "__call__"})
        for name, value in vars(cls).items():
            read = name == "forward" or (not library and (name in self._names or _runs_unnamed(name, value)))
            if read and not isinstance(value, Tensor):
                self._entries.add(vars(cls), name, value, f"{cls.__qualname__}.{name}")


def _is_attribute(module: Any, place: Place) -> bool:
    """Whether a module holds something as an attribute of its owner's, and not as a parameter, a submodule or torch's own."""
    return place.holder is vars(module) and place.key not in OF_EVERY_MODULE and place.key != "forward"


def _is_acting_hook(module: nn.Module, place: Place, value: Any) -> bool:
    hooks = place.holder is module._forward_hooks or place.holder is module._forward_pre_hooks
    return hooks and getattr(value, "__name__", "") not in INERT_HOOKS


def _runs_unnamed(name: str, value: Any) -> bool:
    """Whether a class's entry is a method that code calls without its name, such as ``__call__``."""
    return may_run(name, ()) and function_of(value) is not None


def acting_hooks(module: nn.Module) -> list[Any]:
    """Forward hooks and pre-hooks on ``module``, without recorders that do nothing unless a call asks for it."""
    return [*acting(module._forward_hooks), *acting(module._forward_pre_hooks)]


def _content(obj: Any) -> Callable[[Any], Any] | None:
    """A function that gives a copy of what ``obj`` holds, if that has no names."""
    if isinstance(obj, bytearray) and len(obj) <= MOST_ITEMS:
        return bytes
    if type(obj).__module__ == "numpy" and type(obj).__name__ == "ndarray" and obj.size <= MOST_ITEMS:
        return methodcaller("tobytes")
    return None


def _variables(names: list[str], environ: Mapping[str, str]) -> dict[str, str | None]:
    return {name: environ.get(name) for name in names}


def _last_name(path: str) -> str:
    """The name at the end of a path, as in ``layers.0.tables['a']``."""
    found = re.findall(r"\w+", re.sub(r"(\[[^\]]*\])+$", "", path))
    return found[-1] if found else ""
