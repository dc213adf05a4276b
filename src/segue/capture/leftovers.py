"""What a forward leaves behind in the user's objects: a tensor kept as an attribute, a list that grew, a counter that went on.

A replay runs no Python but that of breaks. What the segments' Python left in an object at capture would stay as it was then, and
a tensor among it lies in graph memory, which every other replay overwrites.
"""

from __future__ import annotations

import dis
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from segue import _source_lines
from segue.capture import containers
from segue.capture.code_names import globals_of, is_library
from segue.capture.compiled import Compiled
from segue.capture.containers import ABSENT, Container, ContainerGroup, leaves_of, same
from segue.capture.context_paths import slots
from segue.capture.host_generators import generator_of
from segue.capture.object_graph import OF_EVERY_MODULE, Place, is_users, visits, walk
from segue.errors import LeftBehindError

_CONTEXT_LEVELS = 3  # an engine's context leads to objects that other threads change meanwhile
_MOST_SHOWN = 4
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR")


class _Listing(threading.local):
    texts: list[str] | None = None


_listing = _Listing()


@contextmanager
def listing() -> Iterator[list[str]]:
    """Within this block captures of this thread go on when a forward leaves something behind, and the list says what it was."""
    before, _listing.texts = _listing.texts, []
    try:
        yield _listing.texts
    finally:
        _listing.texts = before


class Leftovers:
    """Everything that a forward reaches by name, as it is when this is made, and what the segments' Python changes of it.

    Args:
        root: the function that is captured, and its ``name``. ``context``: the live context, some levels deep; None for none.

    What a break changes doesn't count, since each replay runs the break.
    """

    def __init__(self, root: Any, context: Any = None, name: str = "") -> None:
        self._found: list[Container] = []
        self._seen: dict[int, Any] = {}  # what was noted, by id
        self._globals: dict[int, tuple[dict[str, Any], dict[str, str]]] = {}  # of modules: those that functions use
        self._classes: dict[type, list[str]] = {}  # with the names of their slots
        hidden: set[int] = set()  # behind objects of segue's, torch's or Python's, which change at will
        for visit in visits(root, name):
            obj = visit.obj
            if obj is root or isinstance(obj, torch.nn.Module | type) or (id(obj) not in hidden and is_users(obj)):
                self._note(obj, visit.name)
            else:
                hidden.update(id(value) for _, value in visit.held)
            for place, value in () if visit.live else visit.held:
                self._note_generator(value, place.name)
        for held, users in self._globals.values():
            self._found.append(containers.of_globals(held, dict(users)))
        own = len(self._found)
        self._own = self._found[:own]
        if context is not None:
            self._note(context, "ctx")
            for place, value in _near(context, "ctx"):
                self._note(value, place.name)
        often = [c for c in self._found[:own] if not c.seldom], [c for c in self._found[own:] if not c.seldom]
        self._often = [ContainerGroup(found) for found in often]
        self._all = [*self._often, ContainerGroup([c for c in self._found if c.seldom])]

    def before_break(self, code: CodeType | None, where: str) -> None:
        """Note what the segment before a break has changed.

        Args:
            code: of the break's function. ``where``: what errors call the break.

        Raises:
            CaptureError: the break's code names something that the segment has set. At a replay it would find something else.
        """
        names = None
        for c, key, before in self._note_changes(self._often):
            names = _names_in(code) if names is None else names
            if isinstance(key, str) and key in names:
                _refuse(
                    f"{where}: the forward sets {c.text(key, before)}{self._set_at(key)} before the break, which names it and "
                    "would find what the capture left there at every replay. Pass it to the break as an argument."
                )

    def after_break(self, code: CodeType | None, entered: CodeType | None, where: str) -> None:
        """Take what a break has changed as it is: it will do so at each replay.

        Args:
            code: of the break's function. ``entered``: the code that began the capture, where the user did so. ``where``: what
                errors call the break.

        Raises:
            CaptureError: the break sets a number, or the like, which the forward reads. Segments would go on with that of the
                capture.
        """
        read = _source_lines.names_in_callers(entered)
        changed = []
        for group in self._often:
            for c, key, _ in group.changes():
                c.first.pop(key, None)
                if group is self._often[0]:  # of what the function holds; what the context holds is live
                    changed.append((c, key))
        # What the break has set to what was there already is no change, and may be one at the next replay.
        if again := _stored_in(code) & read:
            changed += [(c, key) for c in self._own for key in again & {k for k in c.saved if isinstance(k, str)}]
        for c, key in changed:
            if isinstance(key, str) and key in read and isinstance(c.saved.get(key, ABSENT), bool | int | float | str):
                _refuse(
                    f"{where}: the break sets {c.show(key)}, which the forward reads outside it. A replay runs no Python but "
                    "that of breaks, so its segments would go on with the value of the capture. Read it inside a break, or keep "
                    "it in a tensor that the break returns, or fills in place."
                )

    def check(self, name: str) -> None:
        """Raise CaptureError if the segments of the capture ``name`` have left something behind."""
        self._note_changes(self._all)
        left = [
            (c, key, before) for c in self._found for key, before in c.first.items() if not same(before, c.saved.get(key, ABSENT))
        ]
        if not left:
            return
        shown = [c.text(key, before) + self._set_at(key) for c, key, before in left[:_MOST_SHOWN]]
        more = f", and {len(left) - _MOST_SHOWN} more" if len(left) > _MOST_SHOWN else ""
        tensors = any(isinstance(t, Tensor) for c, key, _ in left for t in leaves_of(c.saved.get(key, ABSENT)))
        remedy = "Return a tensor as an output, or copy_ it into a buffer that was made beforehand. " if tensors else ""
        _refuse(
            f"{name}: the forward leaves something behind that a replay wouldn't: {', '.join(shown)}{more}. A replay runs no "
            f"Python but that of breaks, so it would stay as the capture left it, padded rows included. {remedy}Count in a "
            "tensor that is changed in place, or change Python objects in a break."
        )

    def put_back(self) -> None:
        """Make everything hold again what it held when it was last looked at."""
        for c in self._found:
            if not c.is_as_saved():
                c.put(c.saved)

    def let_go(self, owns: Callable[[Tensor], bool]) -> None:
        """After a failed capture, put back what was where its segments have kept a tensor that ``owns`` says is graph memory.
        It may never have been written, and what replays there overwrites it.
        """
        self._note_changes(self._all)
        for c in self._found:
            kept = {k: v for k, v in c.first.items() if any(isinstance(t, Tensor) and owns(t) for t in leaves_of(c.saved.get(k)))}
            if kept:
                c.put({**c.saved, **kept})

    def _note_changes(self, groups: list[ContainerGroup]) -> list[tuple[Container, Any, Any]]:
        """Note what segments have changed since the last look, and return it: the container, the key, and what was there."""
        changes = [change for group in groups for change in group.changes()]
        for c, key, before in changes:
            c.first.setdefault(key, before)
        return changes

    def _note(self, value: Any, name: str) -> None:
        if id(value) in self._seen or isinstance(value, Tensor | ModuleType | Compiled):
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            self._note_function(value, name)
        elif isinstance(value, dict):
            self._found.append(containers.of_dict(value, lambda k: f"{name}[{k!r}]"))
        elif isinstance(value, list | deque):
            self._found.append(containers.of_list(value, name))
        elif isinstance(value, set):
            self._found.append(containers.of_set(value, name))
        if isinstance(value, type | FunctionType | MethodType):
            return

        def show(key: Any) -> str:
            return f"{name}.{key}"

        own = getattr(value, "__dict__", None)
        if isinstance(value, torch.nn.Module):
            self._found.append(containers.of_dict(value.__dict__, show, unless=OF_EVERY_MODULE))
            for held in (value._parameters, value._buffers, value._modules):
                if isinstance(held, dict):  # a scripted module's are none, and no Python of a forward changes them
                    self._found.append(containers.of_dict(held, show, seldom=held is not value._buffers or not held))
        elif isinstance(own, dict):
            self._found.append(containers.of_dict(own, show))
        if names := self._slots_of(type(value)):
            self._found.append(containers.of_slots(value, names, name))

    def _slots_of(self, cls: type) -> list[str]:
        """The names of the slots of a class. It, and what it inherits from, is noted when it is met first."""
        if cls not in self._classes:
            for c in cls.__mro__:
                if c not in self._classes and not is_library(c.__module__):
                    self._found.append(containers.of_class(c))
                    self._classes[c] = _slots(c)
            self._classes[cls] = _slots(cls)
        return self._classes[cls]

    def _note_function(self, fn: FunctionType, name: str) -> None:
        if cells := dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False)):
            self._found.append(containers.of_cells(cells, name))
        _, names = self._globals.setdefault(id(fn.__globals__), (fn.__globals__, {}))
        for n in globals_of(fn.__code__):
            names.setdefault(n, name)
        self._found.append(containers.of_dict(fn.__dict__, lambda k: f"{name}.{k}", seldom=not fn.__dict__))

    def _note_generator(self, value: Any, name: str) -> None:
        """Note a generator of Python's or numpy's that the forward names. At a replay nobody draws from it."""
        if (found := generator_of(value)) is not None and id(found[0]) not in self._seen:
            self._seen[id(found[0])] = found[0]
            self._found.append(containers.of_generator(found[1], name))

    def _set_at(self, key: Any) -> str:
        """The line that sets an attribute or a variable of this name, where one of the functions that were seen does."""
        values = [*self._seen.values(), *(v for cls in self._classes for v in vars(cls).values())]
        for fn in [v for v in values if isinstance(v, FunctionType)]:
            for i in dis.get_instructions(fn):
                if i.opname in _STORES and i.argval == key and i.positions is not None and fn.__name__ != "__init__":
                    return f", set at {_source_lines.line(fn.__code__, i.positions.lineno)}"
        return ""


def _refuse(text: str) -> None:
    if _listing.texts is None:
        raise LeftBehindError(text)
    _listing.texts.append(text)


def _near(root: Any, name: str) -> Iterator[tuple[Place, Any]]:
    """What a context holds some levels deep, with places."""
    for place, value in walk(root, name, is_users):
        if _level(place) > _CONTEXT_LEVELS:
            return
        if not isinstance(value, Tensor) and (isinstance(value, torch.nn.Module) or is_users(value)):
            yield place, value


def _level(place: Place) -> int:
    count, within = 1, place.within
    while within is not None:
        count, within = count + 1, within.within
    return count


def _slots(cls: type) -> list[str]:
    return [n for n in slots(cls) if not n.startswith("__")]


def _names_in(code: CodeType | None) -> set[str]:
    """The names and texts that a function's code has, and that of the functions inside it."""
    if code is None:
        return set()
    found = {*code.co_names, *code.co_freevars, *(c for c in code.co_consts if isinstance(c, str))}
    return found.union(*(_names_in(c) for c in code.co_consts if isinstance(c, CodeType)))


@functools.lru_cache(maxsize=256)
def _stored_in(code: CodeType | None) -> frozenset[str]:
    """The names of the attributes, variables and items that a function sets."""
    steps = [] if code is None else list(dis.get_instructions(code))
    names = {i.argval for i in steps if i.opname in _STORES}
    names |= {key.argval for key, i in pairwise(steps) if i.opname == "STORE_SUBSCR" and key.opname == "LOAD_CONST"}
    return frozenset(name for name in names if isinstance(name, str))
