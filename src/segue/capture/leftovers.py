"""What a forward leaves behind in the user's objects: a tensor kept as an attribute, a list that grew, a counter that went on.

A replay runs no Python but that of breaks. What the segments' Python left in an object at capture would stay as it was then, and
a tensor among it lies in graph memory, which every other replay overwrites.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from segue import _source_lines
from segue.capture.code_names import globals_of, is_library
from segue.capture.compiled import Compiled
from segue.capture.context_paths import PLAIN, slots
from segue.capture.host_generators import generator_of
from segue.capture.object_graph import OF_EVERY_MODULE, Place, is_users, visits, walk
from segue.errors import LeftBehindError

_CONTEXT_LEVELS = 3  # an engine's context leads to objects that other threads change meanwhile
_DEPTH = 6  # of values that are compared
_MOST_SHOWN = 4
ABSENT: Any = object()  # where nothing is held
Values = Callable[[], Iterable[Any]]
Entries = Callable[[], dict[Any, Any]]
Show = Callable[[Any], str]
Put = Callable[[dict[Any, Any]], object]
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


class _Container:
    """Something that holds values by key, with what it held when it was last looked at.

    Args:
        values: gives what it holds now, in a fixed order. ``entries``: the same by key. ``show``: from a key to its name.
        put: makes it hold such entries. ``unless``: keys that don't count. ``seldom``: a break isn't expected to change it.

    ``first``: for each key that segments have changed, what was there before the capture.
    """

    __slots__ = ("entries", "first", "put", "saved", "seldom", "show", "unless", "values")

    def __init__(
        self, values: Values, entries: Entries, show: Show, put: Put, unless: frozenset[str], seldom: bool
    ) -> None:
        self.values, self.entries, self.show, self.put = values, entries, show, put
        self.unless, self.seldom = unless, seldom
        self.saved = entries()
        self.first: dict[Any, Any] = {}

    def take_changes(self) -> dict[Any, Any]:
        """The keys whose values differ from those that were saved, with the latter. What is there now is saved."""
        before, now = self.saved, self.entries()
        self.saved = now
        keys = [k for k in {**before, **now} if k not in self.unless]
        return {k: b for k in keys if not same(b := before.get(k, ABSENT), now.get(k, ABSENT))}

    def text(self, key: Any, before: Any) -> str:
        """The change of a key in words: ``Model.n (0 to 8)``."""
        now = self.saved.get(key, ABSENT)
        if any(isinstance(t, Tensor) for t in _leaves(now)):
            return f"{self.show(key)} ({_short(now)})"
        return f"{self.show(key)} ({_short(before)} to {_short(now)})"


class _Group:
    """Containers that are looked at together. Where nothing has changed, as is usual, that is one pass over all their values."""

    def __init__(self, containers: list[_Container]) -> None:
        self._containers = containers
        self._looks = [c.values for c in containers]
        self._saved = [v for c in containers for v in c.saved.values()]

    def changes(self) -> Iterator[tuple[_Container, Any, Any]]:
        """Each key whose value has changed since the last look: its container, itself, and the value that was there."""
        now = [*chain.from_iterable([look() for look in self._looks])]
        if len(now) == len(self._saved) and all(map(is_, now, self._saved)):
            return
        for c in self._containers:
            held, saved = [*c.values()], c.saved
            if len(held) != len(saved) or not all(map(is_, held, saved.values())):
                yield from [(c, key, before) for key, before in c.take_changes().items()]
        self._saved = [v for c in self._containers for v in c.saved.values()]


class Leftovers:
    """Everything that a forward reaches by name, as it is when this is made, and what the segments' Python changes of it.

    Args:
        root: the function that is captured, and its ``name``. ``context``: the live context, some levels deep; None for none.

    What a break changes doesn't count, since each replay runs the break.
    """

    def __init__(self, root: Any, context: Any = None, name: str = "") -> None:
        self._found: list[_Container] = []
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
            self._note_globals(held, dict(users))
        own = len(self._found)
        self._own = self._found[:own]
        if context is not None:
            self._note(context, "ctx")
            for place, value in _near(context, "ctx"):
                self._note(value, place.name)
        often = [c for c in self._found[:own] if not c.seldom], [c for c in self._found[own:] if not c.seldom]
        self._often = [_Group(containers) for containers in often]
        self._all = [*self._often, _Group([c for c in self._found if c.seldom])]

    def before_break(self, code: CodeType | None, where: str) -> None:
        """Note what the segment before a break has changed.

        Args:
            code: of the break's function. ``where``: what errors call the break.

        Raises:
            CaptureError: the break's code names something that the segment has set. At a replay it would find something else.
        """
        names = None
        for c, key, before in self._changes(self._often):
            c.first.setdefault(key, before)
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
        for c, key, before in self._changes(self._all):
            c.first.setdefault(key, before)
        left = [
            (c, key, before)
            for c in self._found
            for key, before in c.first.items()
            if not same(before, c.saved.get(key, ABSENT))
        ]
        if not left:
            return
        shown = [c.text(key, before) + self._set_at(key) for c, key, before in left[:_MOST_SHOWN]]
        more = f", and {len(left) - _MOST_SHOWN} more" if len(left) > _MOST_SHOWN else ""
        tensors = any(isinstance(t, Tensor) for c, key, _ in left for t in _leaves(c.saved.get(key, ABSENT)))
        remedy = "Return a tensor as an output, or copy_ it into a buffer that was made beforehand. " if tensors else ""
        _refuse(
            f"{name}: the forward leaves something behind that a replay wouldn't: {', '.join(shown)}{more}. A replay runs no "
            f"Python but that of breaks, so it would stay as the capture left it, padded rows included. {remedy}Count in a "
            "tensor that is changed in place, or change Python objects in a break."
        )

    def put_back(self) -> None:
        """Make everything hold again what it held when it was last looked at."""
        for c in self._found:
            now = [*c.values()]
            if len(now) != len(c.saved) or not all(map(is_, now, c.saved.values())):
                c.put(c.saved)

    def let_go(self, owns: Callable[[Tensor], bool]) -> None:
        """After a failed capture, put back what was where its segments have kept a tensor that ``owns`` says is graph memory.
        It may never have been written, and what replays there overwrites it.
        """
        for c, key, before in self._changes(self._all):
            c.first.setdefault(key, before)
        for c in self._found:
            kept = {k: v for k, v in c.first.items() if any(isinstance(t, Tensor) and owns(t) for t in _leaves(c.saved.get(k)))}
            if kept:
                c.put({**c.saved, **kept})

    def _changes(self, groups: list[_Group]) -> Iterator[tuple[_Container, Any, Any]]:
        for group in groups:
            yield from group.changes()

    def _methods(self) -> list[FunctionType]:
        return [f for cls in self._classes for f in vars(cls).values() if isinstance(f, FunctionType)]

    def _note(self, value: Any, name: str) -> None:
        if id(value) in self._seen or isinstance(value, Tensor | ModuleType | Compiled):
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            self._note_function(value, name)
        elif isinstance(value, dict):
            self._note_dict(value, lambda k: f"{name}[{k!r}]")
        elif isinstance(value, list | deque):
            self._add(value.__iter__, lambda: dict(enumerate(value)), lambda k: f"{name}[{k}]", _putter(value, value.extend))
        elif isinstance(value, set):
            self._add(value.__iter__, lambda: {v: v for v in value}, lambda k: f"{name}[{k!r}]", _putter(value, value.update))
        if isinstance(value, type | FunctionType | MethodType):
            return
        own = getattr(value, "__dict__", None)
        if isinstance(value, torch.nn.Module):
            self._note_dict(value.__dict__, lambda k: f"{name}.{k}", unless=OF_EVERY_MODULE)
            for held in (value._parameters, value._buffers, value._modules):
                if isinstance(held, dict):  # a scripted module's are none, and no Python of a forward changes them
                    self._note_dict(held, lambda k: f"{name}.{k}", seldom=held is not value._buffers or not held)
        elif isinstance(own, dict):
            self._note_dict(own, lambda k: f"{name}.{k}")
        cls = type(value)
        if cls not in self._classes:
            for c in cls.__mro__:
                if c not in self._classes and not is_library(c.__module__):
                    self._note_class(c)
            self._classes[cls] = [n for n in slots(cls) if not n.startswith("__")]
        if names := self._classes[cls]:
            self._add(
                lambda: [getattr(value, n, ABSENT) for n in names],
                lambda: {n: getattr(value, n, ABSENT) for n in names},
                lambda k: f"{name}.{k}",
                lambda entries: _put_attributes(value, entries),
            )

    def _note_class(self, cls: type) -> None:
        self._classes[cls] = [n for n in slots(cls) if not n.startswith("__")]
        held = vars(cls)
        self._add(held.values, lambda: dict(held), lambda k: f"{cls.__qualname__}.{k}", lambda new: _put_attributes(cls, new))

    def _note_function(self, fn: FunctionType, name: str) -> None:
        if cells := dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False)):
            self._add(
                lambda: map(_content, cells.values()),
                lambda: {k: _content(c) for k, c in cells.items()},
                lambda k: f"{name}: {k}",
                lambda new: _put_contents(cells, new),
            )
        _, names = self._globals.setdefault(id(fn.__globals__), (fn.__globals__, {}))
        for n in globals_of(fn.__code__):
            names.setdefault(n, name)
        self._note_dict(fn.__dict__, lambda k: f"{name}.{k}", seldom=not fn.__dict__)

    def _note_globals(self, held: dict[str, Any], users: dict[str, str]) -> None:
        """``users``: by the name of each variable, a function that uses it."""
        self._add(
            lambda: [held.get(n, ABSENT) for n in users],
            lambda: {n: held.get(n, ABSENT) for n in users},
            lambda k: f"{users[k]}: {k}",
            lambda new: _put_entries(held, new, users),
        )

    def _note_generator(self, value: Any, name: str) -> None:
        """Note a generator of Python's or numpy's that the forward names. At a replay nobody draws from it."""
        if (found := generator_of(value)) is None or id(found[0]) in self._seen:
            return
        generator, (get, put) = found
        self._seen[id(generator)] = generator
        states: dict[str, Any] = {}

        def entries() -> dict[int, str]:
            state = get()
            text = hashlib.sha256(repr(state).encode()).hexdigest()[:12]
            states[text] = state
            return {0: text}

        show = f"the state of {name}, from which it draws random numbers on the host,"
        self._add(lambda: entries().values(), entries, lambda _: show, lambda kept: put(states[kept[0]]))

    def _note_dict(self, held: dict[Any, Any], show: Show, unless: frozenset[str] = frozenset(), seldom: bool = False) -> None:
        put = functools.partial(_put_entries, held)
        # Not through the methods of a subclass, which may make values as they are asked for.
        self._add(functools.partial(dict.values, held), lambda: dict(dict.items(held)), show, put, unless, seldom)

    def _add(
        self,
        values: Values,
        entries: Entries,
        show: Show,
        put: Put,
        unless: frozenset[str] = frozenset(),
        seldom: bool = False,
    ) -> None:
        self._found.append(_Container(values, entries, show, put, unless, seldom))

    def _set_at(self, key: Any) -> str:
        """The line that sets an attribute or a variable of this name, where one of the functions that were seen does."""
        seen = [v for v in self._seen.values() if isinstance(v, FunctionType)]
        for fn in [*seen, *self._methods()]:
            for i in dis.get_instructions(fn):
                if i.opname in _STORES and i.argval == key and i.positions is not None and fn.__name__ != "__init__":
                    return f", set at {_source_lines.line(fn.__code__, i.positions.lineno)}"
        return ""


def same(a: Any, b: Any, depth: int = _DEPTH) -> bool:
    """Whether a value says the same as before: it is the same object, an equal plain value, a tensor over the same elements, or a
    structure of such. Objects of other kinds count as the same if their types are equal.
    """
    if a is b or depth < 0:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return _same_elements(a, b)
    if isinstance(a, PLAIN):
        return bool(a == b or (a != a and b != b))
    if isinstance(a, dict):
        there = dict(dict.items(b))
        return len(a) == len(b) and all(same(v, there.get(k, ABSENT), depth - 1) for k, v in dict.items(a))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(same(x, y, depth - 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, set | frozenset):
        return bool(a == b)
    if isinstance(a, FunctionType):
        return a.__code__ is b.__code__
    if isinstance(a, type | ModuleType):
        return False
    own, other = getattr(a, "__dict__", None), getattr(b, "__dict__", None)
    if isinstance(own, dict) and isinstance(other, dict):
        return same(own, other, depth - 1)
    return True


def _same_elements(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return (a.data_ptr(), a.shape, a.stride(), a.dtype, a.device) == (b.data_ptr(), b.shape, b.stride(), b.dtype, b.device)


def _refuse(text: str) -> None:
    if _listing.texts is None:
        raise LeftBehindError(text)
    _listing.texts.append(text)


def _putter(held: Any, fill: Callable[[list[Any]], object]) -> Put:
    def put(entries: dict[Any, Any]) -> None:
        held.clear()
        fill([v for v in entries.values() if v is not ABSENT])

    return put


def _put_entries(held: dict[Any, Any], entries: dict[Any, Any], keys: Iterable[Any] = ()) -> None:
    for k in [k for k in keys or held if k in held and entries.get(k, ABSENT) is ABSENT]:
        del held[k]
    for k, v in entries.items():
        if v is not ABSENT and held.get(k, ABSENT) is not v:
            held[k] = v


def _put_attributes(held: Any, entries: dict[str, Any]) -> None:
    for k in [*vars(held)] if isinstance(held, type) else [*entries]:
        if entries.get(k, ABSENT) is ABSENT and getattr(held, k, ABSENT) is not ABSENT:
            delattr(held, k)
    for k, v in entries.items():
        now = vars(held).get(k, ABSENT) if isinstance(held, type) else getattr(held, k, ABSENT)
        if v is not ABSENT and now is not v:
            (setattr if isinstance(held, type) else object.__setattr__)(held, k, v)


def _put_contents(cells: dict[str, CellType], entries: dict[str, Any]) -> None:
    for k, cell in cells.items():
        if entries[k] is not ABSENT:
            cell.cell_contents = entries[k]


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


def _leaves(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple | deque | set):
        inner = value
    elif not isinstance(value, Tensor | type) and isinstance(own := getattr(value, "__dict__", None), dict):
        inner = own.values()
    yield value
    if depth:
        for v in [*inner]:
            yield from _leaves(v, depth - 1)


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


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return ABSENT


def _short(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, PLAIN) or value is None:
        text = repr(value)
        return text if len(text) <= 40 else text[:37] + "..."
    tensors = any(isinstance(t, Tensor) for t in _leaves(value))
    return f"a {type(value).__qualname__}" + (" with tensors" if tensors else "")
