"""How each kind of thing that Python decides by is compared with what was there at capture: in C loops, all of a kind at once.

Each comparison has the same methods: ``same`` says quickly whether all is as it was, ``changes`` finds out what isn't, ``accept``
takes what is there now, ``drop`` leaves out what differs, and ``paths`` gives the names of what is compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import getitem, is_not
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from segue import _source_lines
from segue.capture.context_paths import equal, is_plain
from segue.capture.object_graph import OF_EVERY_MODULE

Kind = Literal["module", "forward", "hook", "global hook", "value", "memory"]

CONTAINERS = (dict, list, deque)
MOST_ITEMS = 256  # of a container whose items are compared: a vocabulary decides by its size alone
INERT_HOOKS = {"output_capturing_hook"}  # transformers' recorders, which do nothing unless a call asks for what they record
_EVERYWHERE: tuple[dict[int, Any], ...] = (nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks)
_BY_KEY = (dict, MappingProxyType)
_NOTHING: Any = object()


@dataclass(frozen=True)
class Change:
    """Something that Python read at capture and that is something else now.

    ``path``: its name. ``before``, ``after``: as text. ``value``: what is there now; of hooks, the hook. As text it is
    ``layers.3.mlp.act_fn: ReLU -> Identity``. A tensor of the kind ``"memory"`` is held elsewhere than graphs have it.
    """

    kind: Kind
    path: str
    before: str
    after: str
    value: Any = None

    @classmethod
    def of(cls, kind: Kind, path: str, before: Any, after: Any) -> Change:
        """The change of what is at ``path`` from one object to another."""
        old, new = _show(before), _show(after)
        return cls(kind, path, old, f"another {new.removeprefix('a ')}" if old == new else new, after)

    def __str__(self) -> str:
        return f"{self.path}: {self.before} -> {self.after}"


class Entries:
    """Entries of dicts and lists, compared by identity: numbers, functions, objects, None."""

    def __init__(self) -> None:
        # Holder, key, value, path, and the holder that it had first: a module moves what was None and becomes a tensor.
        self._found: dict[tuple[int, Any], tuple[Any, Any, Any, str, Any]] = {}

    def add(self, holder: Any, key: Any, value: Any, path: str) -> None:
        self._found.setdefault((id(holder), key), (holder, key, value, path, holder))

    def accept(self) -> None:
        self._holders, self._keys, self._values = ([e[i] for e in self._found.values()] for i in range(3))

    def same(self) -> bool:
        try:
            return not any(map(is_not, map(self._get, self._holders, self._keys), self._values))
        except (KeyError, IndexError, AttributeError, ValueError):
            return False

    def changes(self) -> Iterator[Change]:
        for where, (holder, key, value, path, home) in list(self._found.items()):
            there, now = self._find(home, key)
            if now is value and there is holder:
                continue
            if not _equal(now, value):
                yield Change.of("forward" if key == "forward" else "value", path.removesuffix(".forward"), value, now)
            # Of a container or an object, what the old one held is compared.
            elif now is value or is_plain(now) or isinstance(now, Tensor | nn.Module | frozenset | tuple):
                self._found[where] = there, key, now, path, home
        self.accept()

    def drop(self) -> None:
        self._found = {where: e for where, e in self._found.items() if _equal(self._find(e[4], e[1])[1], e[2])}
        self.accept()

    def paths(self) -> list[str]:
        return [path for *_, path, _ in self._found.values()]

    def _find(self, home: Any, key: Any) -> tuple[Any, Any]:
        """What has a key now, and its holder."""
        try:
            return home, self._get(home, key)
        except (KeyError, IndexError, AttributeError, ValueError):
            pass
        # A module keeps tensors and submodules beside its attributes: where None becomes one of these, it moves there.
        tables = [home.get(name) for name in ("_modules", "_parameters", "_buffers")] if isinstance(home, dict) else []
        return next(((table, table[key]) for table in tables if isinstance(table, dict) and key in table), (home, _NOTHING))

    _get: Callable[[Any, Any], Any] = staticmethod(getitem)


class Kept(Entries):
    """The same for a dict whose class makes something of what it holds when it is asked: what it holds."""

    _get: Callable[[Any, Any], Any] = staticmethod(dict.__getitem__)


def makes_items(holder: Any) -> bool:
    """Whether a dict gives something else than it holds."""
    return isinstance(holder, dict) and type(holder).__getitem__ is not dict.__getitem__


class Attributes(Entries):
    """The same for closure cells, slots and context variables."""

    _get: Callable[[Any, Any], Any] = staticmethod(getattr)


class Growing:
    """Dicts and lists that may get new entries: those of objects by attributes, those of containers by keys."""

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self._found: dict[int, tuple[Any, str, set[str] | None]] = {}
        self._restless: set[int] = set()  # dicts whose order a captured forward changes itself
        self._filled: set[int] = set()  # containers that the forward may fill itself
        self._only: set[int] = set()  # dicts in which the names in the code don't count

    def add(self, holder: Any, path: str, also: set[str] | None, filled: bool = False, only: bool = False) -> None:
        """``also``: names that count beside those in the code, for the dict of an object, or ``only`` they; None for a container.
        ``filled``: the code may fill it."""
        self._found.setdefault(id(holder), (holder, path, also))
        if only:
            self._only.add(id(holder))
        if filled:
            self._filled.add(id(holder))

    def let_grow(self) -> None:
        """Take in what there is now; what has grown is filled by the forward."""
        self._filled.update(id(held) for held, size in zip(self._sized, self._sizes, strict=True) if len(held) > size)
        self.accept()

    def accept(self) -> None:
        self._sized = [holder for holder, _, _ in self._found.values()]
        self._sizes = list(map(len, self._sized))
        self._keys = [dict.fromkeys(h) if isinstance(h, _BY_KEY) else {} for h in self._sized]
        # Only where keys are names: an order of others is that of a cache.
        small = [(h, p) for h, p, also in self._found.values() if also is None and 1 < len(h) <= MOST_ITEMS]
        named = [(h, p) for h, p in small if isinstance(h, dict) and _by_name(h) and id(h) not in self._restless]
        self._ordered, self._paths, self._orders = [h for h, _ in named], [p for _, p in named], [list(h) for h, _ in named]

    def same(self) -> bool:
        return list(map(len, self._sized)) == self._sizes and list(map(list, self._ordered)) == self._orders

    def changes(self) -> Iterator[Change]:
        for (holder, path, also), size, keys in zip(self._found.values(), self._sizes, self._keys, strict=True):
            if not isinstance(holder, _BY_KEY):
                if len(holder) != size:
                    yield Change("value", path, f"{size} items", f"{len(holder)} items", holder)
                continue
            for key in () if holder.keys() <= keys.keys() else holder:
                if key in keys:
                    continue
                if key == "forward" and also is not None:
                    yield Change.of("forward", path, _NOTHING, holder[key])
                elif also is not None and self._reads(key, also, holder) and key not in OF_EVERY_MODULE:
                    yield Change.of("value", f"{path}.{key}", _NOTHING, holder[key])
                # Tables by length grow with each length that was not seen before; what has a name is another thing, and so is
                # what no code fills.
                elif also is None and (id(holder) not in self._filled or _by_name(holder)):
                    yield Change.of("value", f"{path}[{key!r}]", _NOTHING, holder[key])
        for holder, path, order in zip(self._ordered, self._paths, self._orders, strict=True):
            if (now := list(holder)) != order and now[: len(order)] != order:
                yield Change("value", path, f"in the order {_show(order)}", _show(now), holder)
        before = self._keys
        self.accept()
        self._keys = [{**old, **new} for old, new in zip(before, self._keys, strict=True)]  # what is gone may come back

    def drop(self) -> None:
        self._restless.update(id(h) for h, order in zip(self._ordered, self._orders, strict=True) if list(h) != order)
        keep = zip(list(self._found.items()), self._sizes, strict=True)
        self._found = {i: e for (i, e), size in keep if e[2] is not None or isinstance(e[0], _BY_KEY) or len(e[0]) == size}
        self.accept()

    def paths(self) -> list[str]:
        return [path for _, path, also in self._found.values() if also is None]

    def _reads(self, key: Any, also: set[str], holder: Any) -> bool:
        return key in also or (key in self._names and id(holder) not in self._only)


class Tables:
    """The submodules of modules, compared by identity; of those that hold them as a list or dict does, their order too."""

    def __init__(self) -> None:
        self._found: list[tuple[dict[str, Any], str, dict[str, Any], list[str]]] = []
        self._orders: list[tuple[dict[str, Any], str, list[str]]] = []

    def add(self, table: dict[str, Any], path: str, inside: dict[str, Any], ordered: bool) -> None:
        """``inside``: the submodules that are compared."""
        self._found.append((table, path, inside, list(table)))
        if ordered:
            self._orders.append((table, path, list(table)))

    def accept(self) -> None:
        # Dicts are compared in one pass, which asks objects that differ for __eq__. Modules have none of their own, mostly.
        self._none = [table for table, _, _, _ in self._found if not table]
        self._live = [table for table, _, _, _ in self._found if table]
        self._then = [dict(table) for table in self._live]
        plain: Any = object.__eq__
        self._quick = all(type(m).__eq__ is plain for t in self._live for m in t.values() if m is not None)

    def same(self) -> bool:
        return (
            self._quick
            and not any(self._none)
            and self._live == self._then
            and all(list(table) == order for table, _, order in self._orders)
        )

    def changes(self) -> Iterator[Change]:
        for table, path, inside, names in self._found:
            for name, then in inside.items():
                if (now := table.get(name, _NOTHING)) is not then:
                    yield Change.of("module", f"{path}.{name}", then, now)
            # None in the place of a submodule reads like the attribute that was None before.
            for name in [name for name, child in table.items() if child is not None and name not in names]:
                yield Change.of("module", f"{path}.{name}", _NOTHING, table[name])
        for table, path, order in self._orders:
            if list(table) != order:
                yield Change("module", path, f"in the order {_show(order)}", _show(list(table)))
        self.accept()

    def drop(self) -> None:
        kept = [(t, p, {n: m for n, m in inside.items() if t.get(n) is m}) for t, p, inside, _ in self._found]
        self._found = [(*found, list(found[0])) for found in kept]
        self._orders = [(table, path, list(table)) for table, path, _ in self._orders]
        self.accept()

    def paths(self) -> list[str]:
        return [f"{path}.{name}" for _, path, inside, _ in self._found for name in inside]


class Hooks:
    """Forward hooks on modules, and on all of them. What they do is in the graph if they were there at capture, and only then."""

    def __init__(self) -> None:
        self._found: list[tuple[dict[int, Any], str, list[Any]]] = []
        for hooks in _EVERYWHERE:
            self.add(hooks, "torch.nn.Module")

    def add(self, hooks: dict[int, Any], path: str) -> None:
        self._found.append((hooks, path, acting(hooks)))

    def accept(self) -> None:
        self._none = [hooks for hooks, _, _ in self._found if not hooks]
        self._some = [hooks for hooks, _, _ in self._found if hooks]
        self._then = [list(hooks.values()) for hooks in self._some]

    def same(self) -> bool:
        return not any(self._none) and [list(hooks.values()) for hooks in self._some] == self._then

    def changes(self) -> Iterator[Change]:
        for hooks, path, then in self._found:
            kind: Kind = "global hook" if any(hooks is h for h in _EVERYWHERE) else "hook"
            now = acting(hooks)
            for hook in now:
                if not any(hook is h for h in then):
                    yield Change(kind, path, "no hook", f"a forward hook, {_source_lines.of(hook)}", hook)
            for hook in then:
                if not any(hook is h for h in now):
                    yield Change(kind, path, f"a forward hook, {_source_lines.of(hook)}", "no hook", hook)
            if len(now) != len(then) or any(map(is_not, now, then)):  # the same ones more often, or in another order
                before, after = (", ".join(map(_source_lines.of, hooks)) for hooks in (then, now))
                yield Change(kind, path, f"the forward hooks {before}", after, now[-1])
        self.accept()

    def drop(self) -> None:
        self._found = [(hooks, path, acting(hooks)) for hooks, path, _ in self._found]
        self.accept()

    def paths(self) -> list[str]:
        return []


class Sets:
    """Sets, compared by what is in them."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[set[Any], str]] = {}

    def add(self, found: set[Any], path: str) -> None:
        self._found.setdefault(id(found), (found, path))

    def accept(self) -> None:
        self._live = [found for found, _ in self._found.values()]
        self._then = [set(found) for found in self._live]

    def same(self) -> bool:
        return self._live == self._then

    def changes(self) -> Iterator[Change]:
        for (now, path), then in zip(self._found.values(), self._then, strict=True):
            if now != then:
                yield Change("value", path, _show(then), _show(now), now)

    def drop(self) -> None:
        kept = zip(list(self._found.items()), self._then, strict=True)
        self._found = {i: e for (i, e), then in kept if e[0] == then}
        self.accept()

    def paths(self) -> list[str]:
        return []  # the entries that hold them have these names


class Contents:
    """What has contents and no names for them: bytes, small arrays, environment variables."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, str, Callable[[Any], Any]]] = {}

    def add(self, obj: Any, path: str, content: Callable[[Any], Any]) -> None:
        """``content``: gives what is compared."""
        self._found.setdefault(id(obj), (obj, path, content))

    def accept(self) -> None:
        self._then = self._now()

    def same(self) -> bool:
        return self._now() == self._then

    def changes(self) -> Iterator[Change]:
        for (_, path, _), then, now in zip(self._found.values(), self._then, self._now(), strict=True):
            if now != then:
                yield Change.of("value", path, then, now)

    def drop(self) -> None:
        keep = zip(list(self._found.items()), self._then, self._now(), strict=True)
        self._found = {i: found for (i, found), then, now in keep if now == then}
        self.accept()

    def paths(self) -> list[str]:
        return [path for _, path, _ in self._found.values()]

    def _now(self) -> list[Any]:
        return [content(obj) for obj, _, content in self._found.values()]


class Classes:
    """The classes of modules and objects: one may be given another."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._then: list[type] = []
        self._paths: list[str] = []

    def add(self, obj: Any, path: str) -> None:
        self._objects.append(obj)
        self._then.append(type(obj))
        self._paths.append(path)

    def accept(self) -> None:
        """There is nothing to work out."""

    def same(self) -> bool:
        return list(map(type, self._objects)) == self._then

    def changes(self) -> Iterator[Change]:
        for obj, then, path in zip(self._objects, self._then, self._paths, strict=True):
            if type(obj) is not then:
                yield Change("module", path, then.__qualname__, type(obj).__qualname__, obj)

    def drop(self) -> None:
        self._then = list(map(type, self._objects))

    def paths(self) -> list[str]:
        return []


def _by_name(d: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in d)


def acting(hooks: dict[int, Any]) -> list[Any]:
    return [hook for hook in hooks.values() if getattr(hook, "__name__", "") not in INERT_HOOKS]


def _equal(a: Any, b: Any) -> bool:
    """Whether two values decide alike. A number of another type doesn't: it promotes dtypes otherwise."""
    if a is b:
        return True
    if isinstance(a, str) and isinstance(b, torch.dtype):
        return a == str(b).removeprefix("torch.")  # a config that is saved is given the name of its dtype
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list | deque):
        return len(a) == len(b) and all(map(_equal, a, b))
    if is_plain(a) or isinstance(a, set | frozenset):
        return equal(a, b)
    own, other = getattr(a, "__dict__", None), getattr(b, "__dict__", None)
    if not isinstance(own, dict) or not own or callable(a) or isinstance(a, Tensor):
        return False
    return all(is_plain(value) or isinstance(value, Tensor) for value in own.values()) and _equal(own, other)


def _show(value: Any) -> str:
    if value is _NOTHING:
        return "nothing"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, nn.Module):
        return type(value).__qualname__
    if callable(value) and not isinstance(value, type):
        return _source_lines.of(value)
    if isinstance(value, type):
        return value.__qualname__
    text = repr(value) if is_plain(value) or isinstance(value, list | tuple | dict | set) else f"a {type(value).__qualname__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
