"""Which names stand in the code that a function may run: what has another name, it can't read."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
LIBRARIES = {"torch", "segue", *sys.stdlib_module_names}
_BREAK = "_segue_break"
_BY_TEXT = {"getattr", "hasattr", "attrgetter", "vars", "__dict__"}  # who reads an attribute by a name that is a constant
_FILLS = {"setdefault", "update", "__setitem__"}
_NAMED = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"}
_ENVIRONMENT = {"environ", "getenv"}
# Methods that are called without their name. An object that is being made, shown or copied is not being read by a forward.
_NEVER = {"__init__", "__new__", "__init_subclass__", "__post_init__", "__repr__", "__str__", "__del__", "__reduce__"}
_NEVER |= {"__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__", "__dir__", "__class_getitem__"}
_NEVER |= {"__setattr__", "__delattr__", "__set_name__", "__eq__", "__hash__", "__format__", "__sizeof__", "__instancecheck__"}


def mark_break(wrapper: Any) -> None:
    """Say that ``wrapper`` is a break point: what its function reads is live at a replay."""
    setattr(wrapper, _BREAK, True)


def is_break(fn: FunctionType) -> bool:
    """Whether ``fn`` is a break point."""
    return _BREAK in fn.__dict__


@functools.lru_cache(maxsize=4096)
def globals_of(code: CodeType) -> tuple[str, ...]:
    """Names of the globals that a function and the functions inside it use."""
    names = [i.argval for c in _all(code) for i in dis.get_instructions(c) if i.opname in _GLOBAL]
    return tuple(dict.fromkeys(names))


@functools.lru_cache(maxsize=4096)
def attributes_of(code: CodeType) -> frozenset[str]:
    """Names of all that a function and the functions inside it may read of an object, or of a Python module."""
    names = {name for c in _all(code) for name in c.co_names}
    if names & _BY_TEXT:
        names |= texts_of(code)
    return frozenset(names - {"__dict__", "__class__"})


@functools.lru_cache(maxsize=4096)
def stores_of(code: CodeType) -> frozenset[str]:
    """Names of the attributes that a function and the functions inside it set."""
    return frozenset(i.argval for c in _all(code) for i in dis.get_instructions(c) if i.opname == "STORE_ATTR")


@functools.lru_cache(maxsize=4096)
def texts_of(code: CodeType) -> frozenset[str]:
    """The names among the texts that stand in a function and the functions inside it."""
    return frozenset(const for c in _all(code) for const in c.co_consts if isinstance(const, str) and const.isidentifier())


@functools.lru_cache(maxsize=4096)
def imports_of(code: CodeType) -> tuple[str, ...]:
    """Names of the Python modules that a function and those inside it import, a dot for each level of relative ones."""
    found = []
    for c in _all(code):
        steps = list(dis.get_instructions(c))
        found += ["." * steps[n - 2].argval + str(i.argval) for n, i in enumerate(steps) if i.opname == "IMPORT_NAME"]
    return tuple(dict.fromkeys(found))


@functools.lru_cache(maxsize=4096)
def filled_by(code: CodeType) -> frozenset[str]:
    """Names of the containers that a function and those inside it may fill. A local variable may be any that it names."""
    found: set[str] = set()
    for c in _all(code):
        steps = list(dis.get_instructions(c))
        for i in steps:
            if i.opname == "STORE_SUBSCR" or i.argval in _FILLS:
                names = {s.argval for s in steps if s.opname in _NAMED and _start(s) == _start(i)} - _FILLS
                found |= names or {*c.co_names, *c.co_freevars, *c.co_cellvars}
    return frozenset(found)


def _start(step: dis.Instruction) -> tuple[int | None, int | None]:
    """Where the expression of an instruction begins; that of an item begins where that of its container does."""
    at = step.positions
    return (None, None) if at is None else (at.lineno, at.col_offset)


def own_classes(cls: type) -> Iterator[type]:
    """The classes whose methods an object of ``cls`` has, without those at the root, which hold no state's names."""
    return (c for c in cls.__mro__ if c not in (object, torch.nn.Module, dict, list, tuple, type))


def function_of(value: Any) -> FunctionType | None:
    """The plain function in an entry of a class: a method, a property's getter, or what a decorator has wrapped."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", None) or getattr(value, "func", None) or value
    return value if isinstance(value, FunctionType) else None


class Names:
    """The names in the code of everything that a walk meets: functions, and those methods of classes that are called by name.

    ``all``: of globals, attributes and methods. ``called``: the methods. ``filled``: names of containers that the code may add
    items to. ``asked``: attributes that the user's code asks for as texts, as they may be absent. ``environment``: the texts in
    the user's code that looks at environment variables.

    A method of the user's class counts once some code says its name. A method of an installed package's class counts once the
    class's own code does, or the user's, as such packages say nearly every name somewhere.
    """

    def __init__(self) -> None:
        self.all: set[str] = set()
        self.called: dict[int, FunctionType] = {}  # methods, by id
        self.filled: set[str] = set()
        self.asked: set[str] = set()
        self.environment: set[str] = set()
        self._by_users: set[str] = set()
        self._by_class: dict[type, set[str]] = {}
        self._read: set[tuple[type, int]] = set()

    def meet(self, obj: Any) -> None:
        """Take in the names of a function, or the class of an object."""
        if isinstance(obj, FunctionType):
            self._take(obj.__code__, is_installed(obj.__module__))
        cls = obj if isinstance(obj, type) else type(obj)
        self._by_class.setdefault(cls, {"forward", "__call__"})

    def methods(self) -> list[tuple[str, FunctionType]]:
        """Methods of the classes met so far that are named by now, each once, to be walked; of libraries only names are taken."""
        found: dict[int, tuple[str, FunctionType]] = {}
        more = True
        while more:
            more = False
            for cls, own in list(self._by_class.items()):
                said = own | (self._by_users if is_installed(cls.__module__) else self.all)
                for home in own_classes(cls):
                    for name, value in list(vars(home).items()):
                        if (cls, id(value)) in self._read or not may_run(name, said):
                            continue
                        if (fn := function_of(value)) is None:
                            if hasattr(value, "__get__") and type(value) not in self._by_class:  # a descriptor
                                self.meet(value)
                                more = True
                            continue
                        self._read.add((cls, id(value)))
                        own |= attributes_of(fn.__code__)
                        self._take(fn.__code__, is_installed(home.__module__))
                        more = True
                        self.called[id(fn)] = fn
                        if not is_library(home.__module__):
                            found[id(value)] = f"{home.__qualname__}.{name}", fn
        return list(found.values())

    def _take(self, code: CodeType, installed: bool) -> None:
        names = attributes_of(code)
        self.all |= names
        self.filled |= filled_by(code)
        if not installed:
            self._by_users |= names
            if names & _BY_TEXT:
                self.asked |= texts_of(code)
            if not _ENVIRONMENT.isdisjoint(names):
                self.environment.update(const for c in _all(code) for const in c.co_consts if isinstance(const, str))


def is_library(module: Any) -> bool:
    """Whether a Python module of this name is of Python, torch or segue. These hold nothing of the user's. Compiled classes may
    have something else than a name as their ``__module__``.
    """
    return isinstance(module, str) and module.partition(".")[0] in LIBRARIES


@functools.lru_cache(maxsize=4096)
def is_installed(module: str | None) -> bool:
    """Whether a Python module of this name belongs to a library or an installed package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return is_library(module) or "site-packages" in file or "dist-packages" in file


def may_run(name: str, said: Collection[str]) -> bool:
    """Whether code that says the names ``said`` may run a method of a class that has this name."""
    return name in said or (name.startswith("__") and name.endswith("__") and name not in _NEVER)


def _all(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _all(const)
