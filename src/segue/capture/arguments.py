"""A break's arguments, bound once at capture and read at every replay.

What is fixed is bound as a value. What lives in the context is bound as a path and read from the live context. Memory of the
graph pool is bound weakly, so that its block goes back to the pool when the forward lets go of it. A replay runs in the order of
the capture, so the block holds the right values when its break runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from segue import _source_lines, _torch
from segue.capture.allocations import made_from_input
from segue.capture.context_paths import DEEPEST, MOST, ContextMap, DeepContext, Path, getter, is_plain, show
from segue.capture.externals import Baked, External, FrozenObject
from segue.capture.nested import around, contents, leaves, parts_of
from segue.capture.object_graph import parts_within
from segue.capture.op_watch import OpWatch
from segue.capture.thread_state import state
from segue.capture.views import cut_rows, weak_ref_tensor
from segue.capture.wrappers import refuse_wrapper
from segue.errors import CaptureError, ReplayError

Make = Callable[[], Any]  # gives an argument's value for the forward that is running


class BoundArguments:
    """The arguments of one break. :meth:`caller` calls its function with those of the running forward.

    Args:
        watch: of the capture, and ``baked``: what its breaks have bound, which is added to.
        user: the break in words, for errors of later replays, and ``line``: of its call. ``where``: both, for errors of now.
        into: the destination of the result, if it is no argument.

    ``plain``: what Python decided at capture. ``frozen``: modules and other objects that the context doesn't hold, by name. Each
    replay gets the same objects.

    Raises:
        CaptureError: an argument is an object that holds a part of the context, so that a replay could only freeze that part.
    """

    def __init__(
        self,
        names: list[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        watch: OpWatch,
        baked: Baked,
        trim: Mapping[str, int],
        receiver: bool,
        user: str,
        line: str,
        into: Any,
        where: str,
    ) -> None:
        self._op_watch, self._baked, self._trim, self._where = watch, baked, trim, where
        self._user, self._line = user, line
        self._map = ContextMap(state.ctx, watch.deep)
        self.plain: dict[str, Any] = {}
        self.frozen: dict[str, Any] = {}
        self._args: list[Any] = []
        self._kwargs: dict[str, Any] = {}
        self._live_args: list[tuple[int, Make]] = []
        self._live_kwargs: list[tuple[str, Make]] = []
        self._containers: list[_Container] = []
        self._open: set[int] = set()  # containers whose children are being bound
        for i, value in enumerate(args):
            name = names[i] if i < len(names) else f"argument {i}"
            self._args.append(None)
            held = receiver and i == 0 and self._map.find(value) is None
            fixed, bound = self._freeze(name, value, looks=False) if held else self._bound(name, value)
            if fixed:
                self._args[i] = bound
            else:
                self._live_args.append((i, bound))
        for name, value in kwargs.items():
            fixed, bound = self._bound(name, value)
            if fixed:
                self._kwargs[name] = bound
            else:
                self._live_kwargs.append((name, bound))
        for t in leaves(into):
            if isinstance(t, Tensor):
                self._tensor("the destination", t)
        del self._map, self._op_watch, self._baked, self._open

    def caller(self, fn: Callable[..., Any]) -> Callable[[], Any]:
        """A function that calls ``fn`` with these arguments. It holds no object of a context after the call."""
        args, kwargs, live_args, live_kwargs = self._args, self._kwargs, self._live_args, self._live_kwargs
        for container in self._containers:
            container.settle()
        if not live_args and not live_kwargs:
            return functools.partial(fn, *args, **kwargs) if args or kwargs else fn

        def call() -> Any:
            now = args.copy()
            for i, make in live_args:
                now[i] = make()
            if not live_kwargs:
                return fn(*now, **kwargs)
            return fn(*now, **kwargs, **{name: make() for name, make in live_kwargs})

        return call

    def _bound(self, name: str, value: Any) -> tuple[bool, Any]:
        fixed, bound = self._bind(name, value)
        dim = self._trim.get(name)
        if dim is not None and isinstance(value, Tensor):
            return False, _trimmed(bound, dim) if fixed else _trimmed_live(bound, dim)
        return fixed, bound

    def _bind(self, name: str, value: Any) -> tuple[bool, Any]:
        """``(True, value)`` for what never changes, ``(False, make)`` for what is read at each replay."""
        if paths := self._map.paths(value):
            return False, _read_live(paths, name, self._where)
        if (read := self._in_variable(name, value)) is not None:
            return False, read
        if isinstance(value, Tensor):
            return True, self._tensor(name, value)
        if value is None:
            self._note_none(name)
        if is_plain(value) and getattr(value, "__closure__", None) is None:
            self.plain[name] = value
            return True, value
        parts = None if isinstance(value, torch.nn.Module) else parts_of(value)
        return self._freeze(name, value) if parts is None else self._container(name, value, parts)

    def _in_variable(self, name: str, value: Any) -> Make | None:
        """What reads ``value`` from a context variable of the caller's; None if none holds it."""
        variables = self._baked.variables
        read = None if variables is None or is_plain(value) else variables.find(value, name, self._where)
        ours = read is not None and isinstance(value, Tensor) and value.layout is torch.strided
        return None if ours and self._op_watch.pool.owns(value) else read

    def _tensor(self, name: str, t: Tensor) -> Tensor:
        """``t`` as a replay uses it. Outside the pool, each replay looks whether its holder still holds that memory."""
        refuse_wrapper(t, f"{self._where}: argument {name!r}")
        if t.layout is not torch.strided or not t.untyped_storage().nbytes():
            return t
        if self._op_watch.pool.owns(t):
            self._op_watch.prove(t, f"the argument {name!r} of a break")
            return weak_ref_tensor(t)
        paths = self._map.find_memory(t)
        for path in paths:
            get = getter(path)
            self._baked.context_tensors[show(path)] = get, get(state.ctx)
        used = self._op_watch.externals.get(_torch.storage_key(t))
        written = used is not None and used.written  # by the graph, at each replay: state, or a workspace
        if not paths and not written and (line := made_from_input(t)) is not None:
            raise CaptureError(
                f"{self._where}: argument {name!r} was made from an input by an earlier run of the forward ({line}) and kept. "
                "Every replay would pass that call's tensor. Make it anew in each forward, or inside the break."
            )
        self._baked.tensors.setdefault(_torch.storage_key(t), self._use(name, t))
        return t

    def _note_none(self, name: str) -> None:
        """Note where in the context the None of an argument may have come from. A None has no identity, so these are the places
        with the argument's name, and those that the running functions can have read.
        """
        read = _source_lines.read_by_callers(lambda v: not isinstance(v, Tensor) and bool(self._map.paths(v)))
        texts = [word for word, is_text in read.items() if is_text and word.isidentifier()]
        for path in self._map.nones({name, *read}) or self._map.missing(texts):
            self._baked.nones.setdefault(path, self._said(name))

    def _container(self, name: str, value: Any, parts: list[tuple[Any, Any]]) -> tuple[bool, Any]:
        if id(value) in self._open:
            return self._freeze(name, value)
        self._open.add(id(value))
        children = [self._bind(f"{name}[{key!r}]", child) for key, child in parts]
        self._open.remove(id(value))
        make = around(value, [key for key, _ in parts])
        if isinstance(value, tuple) and all(fixed for fixed, _ in children):
            return True, make([child for _, child in children])
        rebuilt: Make = lambda: make([c if fixed else c() for fixed, c in children])  # noqa: E731
        if isinstance(value, tuple) or not all(map(self._stays, leaves(value))):
            return False, rebuilt
        self._containers.append(_Container(value, rebuilt))
        return False, self._containers[-1].get

    def _stays(self, leaf: Any) -> bool:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and self._op_watch.pool.owns(leaf):
            return False
        return not self._map.paths(leaf)

    def _freeze(self, name: str, value: Any, looks: bool = True) -> tuple[bool, Any]:
        if isinstance(value, MethodType):
            method, (fixed, owner) = value.__func__, self._bind(name, value.__self__)
            return (True, value) if fixed else (False, lambda: MethodType(method, owner()))
        if not isinstance(value, slice):
            self.frozen[name] = value
            if id(value) not in self._baked.objects:
                frozen = self._baked.objects[id(value)] = FrozenObject(value)
                if looks and not isinstance(value, torch.nn.Module):
                    self._look_into(name, frozen)
        return True, value

    def _look_into(self, name: str, frozen: FrozenObject) -> None:
        """Note what must not be frozen with an object that the forward made: parts of the context, and tensors."""
        kind = f"{self._where}: argument {name!r} is a {type(frozen.value).__qualname__}"
        if not self._map.whole and not self._op_watch.deep.whole(state.ctx):
            frozen.refusal = (
                f"{kind}, and whether the live context holds it can't be told: only {DEEPEST} levels and {MOST} values of a "
                "context are looked at, and this one has more. Read it inside the break, from current_forward_ctx(), or give "
                "active_forward() a context that holds less."
            )
        for value in parts_within(frozen.value) if self._op_watch.is_new(frozen.value) else ():
            if path := self._map.find(value):
                frozen.refusal = (
                    f"{kind} with {show(path)} in it, which a replay would go on using. Put the object on the context given to "
                    "active_forward(), make it inside the break, or pass its parts."
                )
            elif isinstance(value, Tensor) and _torch.address(value) and not self._op_watch.pool.owns(value):
                frozen.tensors.append(self._use(name, value))

    def _said(self, name: str) -> str:
        return f"argument {name!r} of {self._user} at {self._line}"

    def _use(self, name: str, t: Tensor) -> External:
        # As one of the second segment it is looked at while the first runs. Breaks come later still.
        return External(t.detach(), t, f"{self._user} as {name!r}", self._line, segment=1)


class _Container:
    """A list, dict or dataclass among the arguments that has nothing of the graph or of the context in it.

    A replay passes the object itself, so that the break sees what its owner did to it since. If the forward changed it later in
    the capture, a replay passes one with the children that it had when the break was called.
    """

    def __init__(self, value: Any, rebuilt: Make) -> None:
        self._value, self._then, self._make = value, contents(value), rebuilt

    def settle(self) -> None:
        """Decide which, at the end of the capture."""
        if contents(self._value) == self._then:
            value = self._value
            self._make = lambda: value

    def get(self) -> Any:
        """The argument for the forward that is running."""
        return self._make()


def of_context(fn: Callable[..., Any], deep: DeepContext, where: str) -> Callable[..., Any]:
    """``fn``; but if it is a method of an object that the context holds, a function that calls this method of the object that the
    running forward's context holds in its place. ``deep``: that context. ``where``: what errors call the break.
    """
    owner = fn.__self__ if isinstance(fn, MethodType) else None
    path = None if owner is None else ContextMap(state.ctx, deep).find(owner)
    if path is None:
        return fn
    get, plain = getter(path), fn.__func__  # type: ignore[attr-defined]

    def method(*args: Any, **kwargs: Any) -> Any:
        return plain(_read(get, path, "self", where), *args, **kwargs)

    return method


def _read_live(paths: list[Path], name: str, where: str) -> Make:
    """A function that reads what lies at the first path. If the capture's context had one object at several paths, every context
    must have one object there.
    """
    path, get = paths[0], getter(paths[0])
    others = [(other, getter(other)) for other in paths[1:]]
    if not others:
        return lambda: _read(get, path, name, where)

    def read() -> Any:
        now = _read(get, path, name, where)
        for other, get_other in others:
            if _or_none(get_other) is not now:
                raise ReplayError(
                    f"{where}: argument {name!r} was both {show(path)} and {show(other)} at capture, and in this forward's "
                    "context these are two objects, so which one is meant can't be told. Read it inside the break, from "
                    "current_forward_ctx(), or give the capture a context in which they differ too."
                )
        return now

    return read


def _or_none(get: Callable[[Any], Any]) -> Any:
    try:
        return get(state.ctx)
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def _read(get: Callable[[Any], Any], path: Any, name: str, where: str) -> Any:
    try:
        return get(state.ctx)
    except (AttributeError, KeyError, IndexError, TypeError) as e:
        raise ReplayError(
            f"{where}: argument {name!r} was {show(path)} at capture, and this forward's context "
            f"({type(state.ctx).__qualname__}) has nothing there. Give every forward a context of the same shape."
        ) from e


def _trimmed(t: Tensor, dim: int) -> Make:
    """The valid rows of a fixed tensor. The views are kept, because making one costs 2 us."""
    views: dict[int | None, Tensor] = {}

    def cut() -> Tensor:
        n = state.valid
        view = views.get(n)
        if view is None:
            if len(views) >= 64:
                views.clear()
            view = views[n] = cut_rows(t, n, dim)
        return view

    return cut


def _trimmed_live(make: Make, dim: int) -> Make:
    return lambda: cut_rows(make(), state.valid, dim)
