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

from segue.capture.allocations import made_from_input
from segue.capture.context_paths import ContextMap, Path, getter, is_plain, show
from segue.capture.nested import around, parts_of
from segue.capture.op_watch import OpWatch
from segue.capture.thread_state import state
from segue.capture.views import cut_rows, weak_ref_tensor
from segue.capture.wrappers import refuse_wrapper
from segue.errors import CaptureError, ReplayError

Make = Callable[[], Any]  # gives an argument's value for the forward that is running


class BoundArguments:
    """The arguments of one break. :meth:`caller` calls its function with those of the running forward.

    Raises:
        CaptureError: an argument is a mutable object that the context doesn't hold, so a replay could only freeze it.
    """

    def __init__(
        self,
        names: list[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        watch: OpWatch,
        trim: Mapping[str, int],
        receiver: bool,
        where: str,
    ) -> None:
        self._op_watch, self._trim, self._where = watch, trim, where
        self._map = ContextMap(state.ctx)
        self.plain: dict[str, Any] = {}  # what Python decided at capture, for `check`
        self.context_tensors: dict[str, tuple[Callable[[Any], Any], Tensor]] = {}  # ctx tensors whose views were bound by address
        self._args: list[Any] = []
        self._kwargs: dict[str, Any] = {}
        self._live_args: list[tuple[int, Make]] = []
        self._live_kwargs: list[tuple[str, Make]] = []
        for i, value in enumerate(args):
            name = names[i] if i < len(names) else f"argument {i}"
            self._args.append(None)
            held = receiver and i == 0 and self._map.find(value) is None
            fixed, bound = (True, value) if held else self._bound(name, value)
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
        del self._map, self._op_watch

    def caller(self, fn: Callable[..., Any]) -> Callable[[], Any]:
        """A function that calls ``fn`` with these arguments. It holds no object of a context after the call."""
        args, kwargs, live_args, live_kwargs = self._args, self._kwargs, self._live_args, self._live_kwargs
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
        if isinstance(value, Tensor):
            return True, self._tensor(name, value)
        if is_plain(value):
            self.plain[name] = value
            return True, value
        if isinstance(value, torch.nn.Module):
            return True, value
        return self._container(name, value)

    def _tensor(self, name: str, t: Tensor) -> Tensor:
        refuse_wrapper(t, f"{self._where}: argument {name!r}")
        if t.layout is not torch.strided or not t.untyped_storage().nbytes():
            return t
        if self._op_watch.pool.owns(t):
            self._op_watch.prove(t, f"the argument {name!r} of a break")
            return weak_ref_tensor(t)
        paths = self._map.find_memory(t)
        for path in paths:
            get = getter(path)
            self.context_tensors[show(path)] = get, get(state.ctx)
        if not paths and (line := made_from_input(t)) is not None:
            raise CaptureError(
                f"{self._where}: argument {name!r} was made from an input by an earlier run of the forward ({line}) and kept. "
                "Every replay would pass that call's tensor. Make it anew in each forward, or inside the break."
            )
        return t

    def _container(self, name: str, value: Any) -> tuple[bool, Any]:
        if isinstance(value, slice):
            return True, value
        parts = parts_of(value)
        if parts is not None:
            children = [self._bind(f"{name}[{key!r}]", child) for key, child in parts]
            make = around(value, [key for key, _ in parts])
            if isinstance(value, tuple) and all(fixed for fixed, _ in children):
                return True, make([child for _, child in children])
            return False, lambda: make([c if fixed else c() for fixed, c in children])
        raise CaptureError(
            f"{self._where}: argument {name!r} is a {type(value).__qualname__}, an object that may change and that the live "
            "context doesn't hold; a replay would go on using this one. Put it on the context given to active_forward() "
            "(two levels deep is found), read it inside the break, or pass its tensors and numbers."
        )


def of_context(fn: Callable[..., Any], where: str) -> Callable[..., Any]:
    """``fn``; but if it is a method of an object that the context holds, a function that calls this method of the object that the
    running forward's context holds in its place. ``where``: what errors call the break.
    """
    owner = fn.__self__ if isinstance(fn, MethodType) else None
    path = None if owner is None else ContextMap(state.ctx).find(owner)
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
