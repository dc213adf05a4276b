"""Random breaks as data: how arguments arrive, what the function does, what it returns and how that is declared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from property.world import SLOTS, World
from torch import Tensor

import segue

ROW_TYPES = ("rows", "half", "low", "ints", "wide")  # one row a token along dimension 0

BODY = ("mix", "shift", "scale", "in_y", "in_z", "write", "read", "state", "noise", "nested", "deep")
GIVES = ("y", "new", "half", "t", "sum", "total", "z", "void", "none", "number", "low", "ints", "wide", "again", "part", "ctx", "shift", "passed")
SECOND = ("rows", "half", "cols", "low", "ints", "wide", "vec", "scal")
CONTEXTS = ("nothing", "ctx", "shift", "listed", "mapped", "meta", "none", "number", "pair", "slots")
WRAPS = ("tuple", "list", "dict", "dataclass", "named", "nested")
HOW = ("plain", "trim", "slice", "trim+slice")
INTO = ("", "out", "here")
TARGETS = ("empty", "zeros", "register", "rows", "part")


@dataclasses.dataclass(frozen=True)
class Break:
    """One break.

    ``how``: rows arrive whole, trimmed, or are cut by ``current_valid_rows()``. ``second`` and ``picks``: which registers come
    as ``y``, ``z``. ``passed``: what of the context is an argument. ``body``: what it does. ``gives``: what it returns, in
    ``wrap``. ``exact``: every output has its token dimension declared. ``into``: ``out=`` or ``break_here`` with a ``target``.
    """

    how: str = "plain"
    second: str = "rows"
    picks: tuple[int, int, int] = (0, 0, 0)
    passed: str = "nothing"
    body: tuple[str, ...] = ()
    gives: tuple[str, ...] = ("new",)
    wrap: str = "tuple"
    exact: bool = True
    into: str = ""
    target: str = "empty"
    fills: bool = True
    keywords: bool = False

    @property
    def cuts(self) -> bool:
        return self.how != "plain" and not (self.into == "here" and self.how == "trim")

    @property
    def sees_padding(self) -> bool:
        """Whether rows mix in it and padded ones among them."""
        mixing = {"mix", "write", "sum", "total", "nested"} & {*self.body, *(() if self.into else self.gives)}
        return not self.cuts and bool(mixing)

    @property
    def writes(self) -> bool:
        """Whether it writes memory that was given to it."""
        return bool({"in_y", "in_z", "deep"} & set(self.body)) or bool(self.into)

    @property
    def aliases(self) -> bool:
        """Whether it may return memory that something else sees as well."""
        gives = {"y", "half", "t", "z"} if self.cuts else set()
        return not self.into and bool((gives | {"again", "part", "shift", "passed"}) & set(self.gives))

    @property
    def random(self) -> bool:
        return bool({"noise"} & set(self.body)) or bool({"low", "ints"} & set(self.gives))

    def declares(self, kinds: list[str]) -> bool:
        """Whether ``token_dim`` is given as a structure: where a size may be the row count by chance, it must be."""
        return self.exact or not set(kinds) <= {"", "scal", *ROW_TYPES}

    def kinds(self, second: str) -> list[str]:
        """The types of what it returns, in order; ``""`` for what is no tensor."""
        known = {"y": "rows", "new": "rows", "t": "cols", "sum": "vec", "total": "scal", "z": second, "shift": "vec", "passed": "vec"}
        known |= {"none": "", "number": "", "ctx": ""}
        found: list[str] = []
        for give in self.gives:
            if give == "again":
                found.append(found[-1] if found else "rows")
            elif give == "part":
                found.append("half" if not found or found[-1] == "rows" else found[-1])
            else:
                found.append(known.get(give, give))
        return found

    def resolve(self, pick: Callable[[tuple[str, ...], int], int | None], types: dict[int, str]) -> tuple[Break, tuple[int, ...], list[str], str]:
        """This break with the type of its second argument, what it reads, the types of what it makes, and how to say it."""
        y = pick(("rows",), self.picks[0])
        z = pick((self.second,), self.picks[1])
        z = y if z is None else z
        assert y is not None and z is not None
        reads = [y, z]
        if self.into and self.target in ("register", "part"):
            target = pick(("rows",), self.picks[2])
            assert target is not None
            reads.append(target)
        resolved = dataclasses.replace(self, second=types[z])
        kinds = resolved.kinds(resolved.second)
        made = ["half" if self.target == "part" else "rows"] if self.into else [k for k in kinds if k]
        how = "" if self.how == "plain" else f"{self.how}: "
        body = "; ".join((*self.body, f"return {self.wrap} of {', '.join(self.gives)}" if not self.into else "result"))
        into = f", {self.into}={self.target}{' r%d' % reads[2] if len(reads) > 2 else ''}{', filled' if self.fills else ''}" if self.into else ""
        extra = f", ctx as {self.passed}" if self.passed != "nothing" else ""
        text = f"break(y=r{y}, z=r{z}{extra}{into}) [{how}{body}]{'' if self.into or self.declares(kinds) else ' (token_dim=0)'}"
        return resolved, tuple(reads), made, text


def run_break(b: Break, operands: list[Tensor], world: World) -> list[Tensor]:
    """Call a resolved break in whatever mode is on, and return the tensors of its result as registers."""
    y, z = operands[:2]
    passed = _passed(b.passed, y, world)
    if b.into:
        return [_into(b, y, z, passed, operands, world)]
    kinds = b.kinds(b.second)

    def fn(y: Tensor, z: Tensor, c: Any = None) -> Any:
        return _returned(b, kinds, *_do(b, *_cut(b, y, z), c, world), c)

    token_dim: Any = _wrapped(b.wrap, [_token_dim(k) for k in kinds], dims=True) if b.declares(kinds) else 0
    point = segue.break_point(trim=_trims(b), token_dim=token_dim)(fn)
    result = point(y, z, c=passed) if b.keywords else point(y, z, passed)
    return _tensors(result)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Two):
        result = (result.a, result.b)
    children = result.values() if isinstance(result, dict) else result if isinstance(result, tuple | list) else ()
    return [t for child in children for t in _tensors(child)]


def _into(b: Break, y: Tensor, z: Tensor, passed: Any, operands: list[Tensor], world: World) -> Tensor:
    if b.target == "empty":
        dst = torch.empty_like(y, memory_format=torch.contiguous_format)
    elif b.target == "zeros":
        dst = y.new_zeros(y.shape)
    elif b.target == "rows":
        dst = world.rows[: y.shape[0]]
    else:
        dst = operands[2] if b.target == "register" else operands[2][:, 1:]
    wide = dst.shape[1]

    def fn(y: Tensor, z: Tensor, c: Any, dst: Tensor) -> Any:
        y, z = _cut(b, y, z)
        result = _do(b, y, z, c, world)[0][:, 3 - wide :]
        if b.fills:
            dst[: result.shape[0]] = result.clone()
            return None if b.into == "here" or b.exact else dst
        return result.clone()

    if b.into == "here":
        given: Tensor = segue.break_here(fn, dst, y, z, passed, dst)
        return given
    filled = dataclasses.replace(b, fills=True)

    def fill(y: Tensor, z: Tensor, c: Any, dst: Tensor) -> Any:
        y, z = _cut(filled, y, z)
        result = _do(filled, y, z, c, world)[0][:, 3 - wide :]
        dst[: result.shape[0]] = result.clone()
        return dst if b.fills else None

    given = segue.break_point(trim=_trims(b), out="dst")(fill)(y, z, passed, dst)
    return given


def _trims(b: Break) -> dict[str, int]:
    dim = _token_dim(b.second)
    return {} if not b.how.startswith("trim") else {"y": 0} if dim is None else {"y": 0, "z": dim}


def _cut(b: Break, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    n = segue.current_valid_rows() if b.how.endswith("slice") else None
    if n is None:
        return y, z
    dim = _token_dim(b.second)
    return y[:n], z if dim is None else z[:n] if dim == 0 else z[:, :n]


def _passed(what: str, y: Tensor, world: World) -> Any:
    ctx = world.ctx
    return {
        "nothing": None, "ctx": ctx, "shift": ctx.shift, "listed": [ctx.shift, y], "mapped": {"c": ctx, "k": 3}, "meta": ctx.meta,
        "none": ctx.none, "number": 2.5, "pair": (y, ctx), "slots": ctx.meta["slots"],
    }[what]  # fmt: skip


def _pull(c: Any, like: Tensor) -> Tensor | float:
    """A value [3] or number out of what was passed of the context."""
    if isinstance(c, list):
        return c[0]
    if isinstance(c, dict):
        return c["c"].shift if "c" in c else c["deep"]
    if isinstance(c, tuple):
        return c[1].shift
    if isinstance(c, Tensor):
        return c.to(like.dtype)[:3] * 0.125 if c.dtype is torch.int64 else c
    return 0.0 if c is None else c if isinstance(c, float) else c.scale


@segue.break_point(trim=("y",))
def _nested(y: Tensor) -> Tensor:
    return y - y.sum(0) * 0.125


def _do(b: Break, y: Tensor, z: Tensor, c: Any, world: World) -> tuple[Tensor, Tensor, Any]:
    ctx = segue.current_forward_ctx()
    for what in b.body:
        if what == "mix":
            y = y + torch.tanh(y.sum(0))
        elif what == "shift":
            y = y + ctx.shift + _pull(c, y)
        elif what == "scale":
            y = y * ctx.scale + _second(b, z)
        elif what == "in_y":
            y.add_(0.5)
        elif what == "in_z":
            if 0 not in z.stride():
                z.mul_(2)
        elif what == "write":
            n = min(y.shape[0], SLOTS)
            ctx.cache[ctx.meta["slots"][:n]] = y[:n]
        elif what == "read":
            y = y + torch.tanh(ctx.cache.sum(0))
        elif what == "state":
            world.vec.add_(0.125)
            world.count.add_(1)
        elif what == "noise":
            y = y + torch.rand_like(y)
        elif what == "nested":
            y = _nested(y)
        elif what == "deep":
            ctx.meta["deep"].add_(1)
            y = y + ctx.meta["deep"]
    return y, z, ctx


def _second(b: Break, z: Tensor) -> Tensor:
    z = z.t() if b.second == "cols" else z
    return z[:, :1] if b.second == "half" else z.float()


def _returned(b: Break, kinds: list[str], y: Tensor, z: Tensor, ctx: Any, c: Any) -> Any:
    found: list[Any] = []
    for at, give in enumerate(b.gives):
        last = found[-1] if found else y
        if give == "again":
            found.append(last)
        elif give == "part":
            found.append(last[:, 1:] if not at or kinds[at - 1] == "rows" else last)
        elif give == "passed":
            found.append(c if b.passed == "shift" else c[0] if b.passed == "listed" else ctx.meta["deep"])
        else:
            found.append(_GIVE[give](y, z, ctx))
    return _wrapped(b.wrap, found)


_GIVE: dict[str, Callable[[Tensor, Tensor, Any], Any]] = {
    "y": lambda y, z, ctx: y,
    "new": lambda y, z, ctx: y * 2,
    "half": lambda y, z, ctx: y[:, 1:],
    "t": lambda y, z, ctx: y.t(),
    "sum": lambda y, z, ctx: y.sum(0),
    "total": lambda y, z, ctx: y.sum(),
    "z": lambda y, z, ctx: z,
    "void": lambda y, z, ctx: y[:0],
    "none": lambda y, z, ctx: None,
    "number": lambda y, z, ctx: 3,
    "low": lambda y, z, ctx: y.bfloat16(),
    "ints": lambda y, z, ctx: (torch.nan_to_num(y).clamp(-50, 50) * 4).long(),
    "wide": lambda y, z, ctx: torch.tanh(ctx.shift).expand(y.shape[0], 3),
    "ctx": lambda y, z, ctx: ctx,
    "shift": lambda y, z, ctx: ctx.shift,
}


@dataclasses.dataclass
class Two:
    a: Any
    b: Any


class Named(NamedTuple):
    a: Any
    b: Any


def _wrapped(wrap: str, values: list[Any], dims: bool = False) -> Any:
    """``values`` in a structure; for token dimensions, the structure that says them."""
    if wrap == "list":
        return list(values)
    if wrap == "dict":
        return {f"k{i}": v for i, v in enumerate(values)}
    if wrap == "dataclass":
        rest = values[1:]
        return {"a": values[0], "b": rest} if dims else Two(values[0], rest)
    if wrap == "named":
        return Named(values[0], tuple(values[1:]))
    if wrap == "nested":
        return ([values[0]], {"rest": tuple(values[1:])})
    return values[0] if len(values) == 1 else tuple(values)


def _token_dim(kind: str) -> int | None:
    return 0 if kind in ROW_TYPES else 1 if kind == "cols" else None
