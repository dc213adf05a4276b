"""What a decoder's forward gives to its layers, seen without running them.

While :class:`LayerStubs` are in the places of the layers' forwards, the decoder's own forward runs live: embedding, positions,
masks, rotary tables. Each stub notes what its layer would get and hands the hidden states on as they are, and the last one runs
all layers at once. So whatever a family makes before its layers is made by its own code, for this call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Named = dict[str, Any]

_PLAIN = (bool, int, float, str)


class NotSeen(Exception):
    """A forward whose layers can't be run at once. The text says what it does instead."""


@dataclass(frozen=True)
class ReturnLayout:
    """How a module returns its result: alone, or first in a tuple of ``width``."""

    width: int | None

    @staticmethod
    def of(result: Any) -> ReturnLayout:
        """The layout of what a module returned."""
        return ReturnLayout(len(result) if isinstance(result, tuple) else None)

    def wrap(self, first: Any) -> Any:
        """``first`` as the module would return it; the rest is None."""
        return first if self.width is None else (first, *[None] * (self.width - 1))


def first_of(result: Any) -> Any:
    """The result itself, or the first of a tuple."""
    return result[0] if isinstance(result, tuple) else result


class Signature:
    """Names the arguments of a module's calls. The first is the hidden states."""

    def __init__(self, module: Any) -> None:
        parameters = inspect.signature(module.forward).parameters.values()
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Named:
        """All arguments that a call gives, by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


Finish = Callable[[Tensor, list[Named]], Tensor]


class LayerStubs:
    """Stand in for the forwards of all layers.

    ``layouts``: how each layer returns its result.
    """

    def __init__(self, layers: Sequence[nn.Module], layouts: Sequence[ReturnLayout]) -> None:
        self._layers = list(layers)
        self._signatures = [Signature(layer) for layer in layers]
        self._layouts = list(layouts)
        self._stubs = [_Stub(self, at) for at in range(len(self._layers))]
        self._own: list[Any] = []
        self._finish: Finish | None = None
        self._x: Any = None
        self._calls: list[Named] = []

    @contextmanager
    def placed(self, finish: Finish) -> Iterator[None]:
        """Within this block the last layer's call returns ``finish(hidden states, arguments of each layer by name)``. The layers'
        own forwards are back while it runs."""
        self._finish, self._x, self._calls = finish, None, []
        self._own = [vars(layer).get("forward") for layer in self._layers]
        for layer, stub in zip(self._layers, self._stubs, strict=True):
            vars(layer)["forward"] = stub
        try:
            yield
        finally:
            self._remove()
            self._finish, self._x, self._calls = None, None, []

    @property
    def finished(self) -> bool:
        """Whether the last layer was reached."""
        return len(self._calls) == len(self._layers)

    def reach(self, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call of layer ``at`` returns."""
        signature = self._signatures[at]
        named = signature.named(args, kwargs)
        hidden = named.pop(signature.names[0])
        if len(self._calls) != at:
            raise NotSeen(f"layer {at} was called after {len(self._calls)} layers")
        if at and hidden is not self._x:
            raise NotSeen(f"the forward does something with the hidden states between layers {at - 1} and {at}")
        self._x = hidden
        self._calls.append(named)
        if not self.finished:
            return self._layouts[at].wrap(hidden)
        assert self._finish is not None
        self._remove()
        return self._layouts[at].wrap(self._finish(hidden, self._calls))

    def _remove(self) -> None:
        for layer, own in zip(self._layers, self._own, strict=False):
            if own is None:
                vars(layer).pop("forward", None)
            else:
                vars(layer)["forward"] = own
        self._own = []


class _Stub:
    """One layer's."""

    def __init__(self, stubs: LayerStubs, at: int) -> None:
        self._stubs, self._at = stubs, at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stubs.reach(self._at, args, kwargs)


def token_axis(t: Tensor, batch: int, length: int) -> int | None:
    """The dimension of ``t`` that is ``batch`` or 1 where the next one is ``length``; None without such a pair."""
    sizes = t.shape
    pairs = range(len(sizes) - 1)
    return next((i for i in pairs if sizes[i] in (1, batch) and sizes[i + 1] == length), None)


def to_rows(t: Tensor, axis: int, batch: int, length: int) -> Tensor:
    """[.., 1 or B, T, ..] to one row a token, [B*T, .., ..]."""
    t = t if axis == 0 else t.movedim((axis, axis + 1), (0, 1))
    return t.expand(batch, length, *t.shape[2:]).reshape(batch * length, *t.shape[2:])


def from_rows(rows: Tensor, axis: int, batch: int = 1) -> Tensor:
    """[B*T, .., ..] to [.., B, T, ..]."""
    t = rows.view(batch, -1, *rows.shape[1:])
    return t if axis == 0 else t.movedim((0, 1), (axis, axis + 1))


@dataclass(frozen=True)
class TokenRows:
    """An argument that holds one row a token: input ``at`` of the graphs, whose token axis is ``axis``."""

    at: int
    axis: int


@dataclass(frozen=True)
class ArgumentParts:
    """A tuple or list of arguments, each of which is described by itself."""

    kind: type
    each: tuple[Any, ...]


@dataclass(frozen=True)
class Seen:
    """What the layers got in one forward of ``batch`` x ``length`` tokens: hidden states into the first, and the rest by name."""

    x: Tensor
    calls: Sequence[Named]
    batch: int
    length: int


class LayerArguments:
    """How the graphs get what the layers are given: told from two forwards of other lengths, a prompt's and a chunk's.

    A tensor with one row a token in both, and otherwise of one shape, is an input of the graphs. Everything else that is no plain
    value (masks, the cache, what an encoder gave) is live in the breaks, and None or a placeholder in the graphs.
    """

    def __init__(self, prompt: Seen, chunk: Seen) -> None:
        self._prompt, self._chunk = prompt, chunk
        axis = self._axis(prompt.x, chunk.x)
        if axis is None or prompt.x.shape[axis] != prompt.batch:
            raise NotSeen(f"its layers get hidden states of shape {list(prompt.x.shape)}, which hasn't one row a token")
        self.axis = axis
        self._seen: dict[int, TokenRows] = {}
        self.places: list[tuple[int, str, tuple[int, ...], int]] = []  # of each input: layer, argument, path in it, axis
        self.dtypes: list[torch.dtype] = []
        self.plans = [
            {name: self._plan(value, chunk.calls[at].get(name), at, name, ()) for name, value in call.items()}
            for at, call in enumerate(prompt.calls)
        ]
        del self._prompt, self._chunk, self._seen

    def _axis(self, t: Tensor, other: Any) -> int | None:
        """The token axis of an argument, which the chunk gave as ``other``."""
        axis = token_axis(t, self._prompt.batch, self._prompt.length)
        if axis is None or not isinstance(other, Tensor) or t.dim() != other.dim():
            return None
        rest, others = list(t.shape), list(other.shape)
        if others[axis] not in (1, self._chunk.batch) or others[axis + 1] != self._chunk.length:
            return None
        del rest[axis : axis + 2], others[axis : axis + 2]
        return axis if rest == others else None

    def _plan(self, value: Any, other: Any, at: int, name: str, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value):
            others = other if isinstance(other, tuple | list) and len(other) == len(value) else [None] * len(value)
            each = [self._plan(v, o, at, name, (*path, i)) for i, (v, o) in enumerate(zip(value, others, strict=True))]
            return ArgumentParts(type(value), tuple(each))
        if isinstance(value, Tensor):
            if id(value) not in self._seen:
                axis = self._axis(value, other)
                if axis is None:
                    return _placeholder(name, value)
                self._seen[id(value)] = TokenRows(len(self.places), axis)
                self.places.append((at, name, path, axis))
                self.dtypes.append(value.dtype)
            return self._seen[id(value)]
        return value if isinstance(value, _PLAIN) else None

    def rows(self, calls: Sequence[Named], batch: int, length: int) -> list[Tensor]:
        """The inputs of the graphs that this call gives, [B*T, ...] each.

        Raises:
            NotSeen: one is no tensor, or of another dtype than it was.
        """
        found = []
        for (at, name, path, axis), dtype in zip(self.places, self.dtypes, strict=True):
            value = calls[at][name]
            for i in path:
                value = value[i]
            if not isinstance(value, Tensor) or value.dtype is not dtype:
                raise NotSeen(f"layer {at} is given {name} that isn't in {dtype}")
            found.append(to_rows(value, axis, batch, length))
        return found

    def differs(self, calls: Sequence[Named], read: Container[str]) -> str | None:
        """An argument that code in the graphs would see, and that is not what it was; None if there is none.

        ``read``: the names of arguments that some code could read.
        """
        for at, (plan, call) in enumerate(zip(self.plans, calls, strict=True)):
            for name, value in call.items():
                if name not in plan:
                    if value is not None and value is not False and name in read:
                        return f"layer {at} is given {name} too"
                elif type(value) in _PLAIN and name != "use_cache" and not _equals(plan[name], value):
                    return f"layer {at} is given {name}={value!r} instead of {plan[name]!r}"
            if not plan.keys() <= call.keys():
                name = next(name for name in plan if name not in call)
                if plan[name] is not None and plan[name] is not False:
                    return f"layer {at} isn't given {name}"
        return None

    def given(self, at: int, rows: Sequence[Tensor]) -> Named:
        """What layer ``at`` is given in the graphs."""
        return {name: _filled(plan, rows) for name, plan in self.plans[at].items()}


def _equals(plan: Any, value: Any) -> bool:
    return type(plan) is type(value) and bool(plan == value)


def _placeholder(name: str, value: Tensor) -> Tensor | None:
    """What the graphs are given instead of a tensor that is live. Code may ask whether there are states to attend to, and makes
    a mask of its own where there is none."""
    return None if "mask" in name or not value.is_floating_point() else value


def _filled(plan: Any, rows: Sequence[Tensor]) -> Any:
    if isinstance(plan, TokenRows):
        return from_rows(rows[plan.at], plan.axis)
    if isinstance(plan, ArgumentParts):
        return plan.kind(_filled(each, rows) for each in plan.each)
    return plan
