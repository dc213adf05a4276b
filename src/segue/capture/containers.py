"""What an object of the user's holds by key, as it was when it was last looked at: what has changed, and how to put it back."""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from segue.capture.context_paths import PLAIN, equal
from segue.capture.host_generators import State
from segue.capture.object_graph import cell_content

_DEPTH = 6  # of values that are compared
ABSENT: Any = object()  # where nothing is held
Values = Callable[[], Iterable[Any]]
Entries = Callable[[], dict[Any, Any]]
Show = Callable[[Any], str]
Put = Callable[[dict[Any, Any]], object]


class Container:
    """Something that holds values by key, with what it held when it was last looked at.

    Args:
        values: gives what it holds now, in a fixed order. ``entries``: the same by key. ``show``: from a key to its name.
        put: makes it hold such entries. ``unless``: keys that don't count. ``seldom``: a break isn't expected to change it.

    ``first``: for each key that segments have changed, what was there before the capture.
    """

    __slots__ = ("entries", "first", "put", "saved", "seldom", "show", "unless", "values")

    def __init__(
        self, values: Values, entries: Entries, show: Show, put: Put, unless: frozenset[str] = frozenset(), seldom: bool = False
    ) -> None:
        self.values, self.entries, self.show, self.put = values, entries, show, put
        self.unless, self.seldom = unless, seldom
        self.saved = entries()
        self.first: dict[Any, Any] = {}

    def is_as_saved(self) -> bool:
        """Whether it holds the very objects that were saved."""
        now = [*self.values()]
        return len(now) == len(self.saved) and all(map(is_, now, self.saved.values()))

    def take_changes(self) -> dict[Any, Any]:
        """The keys whose values differ from those that were saved, with the latter. What is there now is saved."""
        before, now = self.saved, self.entries()
        self.saved = now
        keys = [k for k in {**before, **now} if k not in self.unless]
        return {k: b for k in keys if not same(b := before.get(k, ABSENT), now.get(k, ABSENT))}

    def text(self, key: Any, before: Any) -> str:
        """The change of a key in words: ``Model.n (0 to 8)``."""
        now = self.saved.get(key, ABSENT)
        if any(isinstance(t, Tensor) for t in leaves_of(now)):
            return f"{self.show(key)} ({_short(now)})"
        return f"{self.show(key)} ({_short(before)} to {_short(now)})"


class ContainerGroup:
    """Containers that are looked at together. Where nothing has changed, as is usual, that is one pass over all their values."""

    def __init__(self, containers: list[Container]) -> None:
        self._containers = containers
        self._looks = [c.values for c in containers]
        self._saved = [v for c in containers for v in c.saved.values()]

    def changes(self) -> Iterator[tuple[Container, Any, Any]]:
        """Each key whose value has changed since the last look: its container, itself, and the value that was there."""
        now = [*chain.from_iterable([look() for look in self._looks])]
        if len(now) == len(self._saved) and all(map(is_, now, self._saved)):
            return
        for c in self._containers:
            if not c.is_as_saved():
                yield from [(c, key, before) for key, before in c.take_changes().items()]
        self._saved = [v for c in self._containers for v in c.saved.values()]


def of_dict(held: dict[Any, Any], show: Show, unless: frozenset[str] = frozenset(), seldom: bool = False) -> Container:
    """The entries of a dict."""
    put = functools.partial(_put_entries, held)
    # Not through the methods of a subclass, which may make values as they are asked for.
    return Container(functools.partial(dict.values, held), lambda: dict(dict.items(held)), show, put, unless, seldom)


def of_list(held: list[Any] | deque[Any], name: str) -> Container:
    """The items of a list or deque."""
    return Container(held.__iter__, lambda: dict(enumerate(held)), lambda k: f"{name}[{k}]", _putter(held, held.extend))


def of_set(held: set[Any], name: str) -> Container:
    """The items of a set."""
    return Container(held.__iter__, lambda: {v: v for v in held}, lambda k: f"{name}[{k!r}]", _putter(held, held.update))


def of_slots(held: Any, names: list[str], name: str) -> Container:
    """The attributes ``names`` of an object."""
    return Container(
        lambda: [getattr(held, n, ABSENT) for n in names],
        lambda: {n: getattr(held, n, ABSENT) for n in names},
        lambda k: f"{name}.{k}",
        lambda new: _put_attributes(held, new),
    )


def of_class(cls: type) -> Container:
    """A class's own attributes."""
    held = vars(cls)
    return Container(held.values, lambda: dict(held), lambda k: f"{cls.__qualname__}.{k}", lambda new: _put_attributes(cls, new))


def of_cells(cells: dict[str, CellType], name: str) -> Container:
    """The variables of the functions around a function, ``name``."""
    return Container(
        lambda: [cell_content(c, ABSENT) for c in cells.values()],
        lambda: {k: cell_content(c, ABSENT) for k, c in cells.items()},
        lambda k: f"{name}: {k}",
        lambda new: _put_contents(cells, new),
    )


def of_globals(held: dict[str, Any], users: dict[str, str]) -> Container:
    """The globals of a module that functions use. ``users``: by the name of each, a function that uses it."""
    return Container(
        lambda: [held.get(n, ABSENT) for n in users],
        lambda: {n: held.get(n, ABSENT) for n in users},
        lambda k: f"{users[k]}: {k}",
        lambda new: _put_entries(held, new, users),
    )


def of_generator(state: State, name: str) -> Container:
    """The state of a generator, ``name``, of Python's or numpy's."""
    get, put = state
    states: dict[str, Any] = {}

    def entries() -> dict[int, str]:
        now = get()
        text = hashlib.sha256(repr(now).encode()).hexdigest()[:12]
        states[text] = now
        return {0: text}

    show = f"the state of {name}, from which it draws random numbers on the host,"
    return Container(lambda: entries().values(), entries, lambda _: show, lambda kept: put(states[kept[0]]))


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
        return equal(a, b)
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


def leaves_of(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """``value`` and what it holds, some levels deep."""
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
            yield from leaves_of(v, depth - 1)


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


def _short(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, PLAIN) or value is None:
        text = repr(value)
        return text if len(text) <= 40 else text[:37] + "..."
    tensors = any(isinstance(t, Tensor) for t in leaves_of(value))
    return f"a {type(value).__qualname__}" + (" with tensors" if tensors else "")
