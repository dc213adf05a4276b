"""Random breaks as data: how arguments arrive, what the function does, what it returns and how that is declared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import segue
from property.bodies import do, give, tensors_of, wrapped
from property.world import World

ROW_TYPES = ("rows", "half", "low", "ints", "wide")  # one row a token along dimension 0
_TYPES = {  # of what a break may return; "" is no tensor
    **dict.fromkeys(("y", "new"), "rows"),
    **dict.fromkeys(("sum", "shift", "passed", "outer"), "vec"),
    **dict.fromkeys(("none", "number", "ctx"), ""),
    **{"half": "half", "t": "cols", "total": "scal", "void": "void", "low": "low", "ints": "ints", "wide": "wide"},
}

BODY = ("mix", "shift", "scale", "in_y", "in_z", "write", "read", "state", "noise", "nested", "deep")
GIVES = (*_TYPES, "z", "again", "part")
SECOND = ("rows", "half", "cols", "low", "ints", "wide", "vec", "scal")
CONTEXTS = ("nothing", "ctx", "shift", "listed", "mapped", "meta", "none", "number", "pair", "slots", "view")
WRAPS = ("tuple", "list", "dict", "dataclass", "named", "nested")
HOW = ("plain", "trim", "slice", "trim+slice")
TARGETS = ("empty", "zeros", "register", "rows", "part")


@dataclasses.dataclass(frozen=True)
class Break:
    """One break.

    ``how``: rows arrive whole, trimmed, or are cut by ``current_valid_rows()``. ``second`` and ``picks``: which
    registers come as ``y``, ``z``. ``passed``: what of the context is an argument. ``body``: what it does. ``gives``:
    what it returns, in ``wrap``. ``exact``: every output has its token dimension declared. ``closure``: it takes no
    arguments. ``into``: ``out`` or ``here``, with a ``target`` that it ``fills`` itself or not.
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
    closure: bool = False

    @property
    def cuts(self) -> bool:
        return self.how.endswith("slice") or (self.how == "trim" and self.into != "here" and not self.closure)

    @property
    def sees_padding(self) -> bool:
        """Whether rows mix in it and padded ones among them."""
        mixing = {"mix", "write", "sum", "total", "nested"} & {*self.body, *(() if self.into else self.gives)}
        return not self.cuts and bool(mixing)

    @property
    def writes(self) -> bool:
        """Whether it writes memory that something else sees: what was given to it, or the world's."""
        return bool({"in_y", "in_z", "deep", "state"} & set(self.body)) or bool(self.into)

    @property
    def aliases(self) -> bool:
        """Whether it may return memory that something else sees as well."""
        copied = {"again", "part", "shift", "passed", "outer"} | (
            {"y", "half", "t", "z"} if self.cuts or self.closure else set()
        )
        return not self.into and bool(copied & set(self.gives))

    @property
    def random(self) -> bool:
        return bool({"noise"} & set(self.body)) or bool({"low", "ints"} & set(self.gives))

    def declares(self, kinds: list[str]) -> bool:
        """Whether ``token_dim`` is given as a structure: where a size may be the row count by chance, it must be."""
        return self.exact or not set(kinds) <= {"", "scal", *ROW_TYPES}

    def kinds(self, second: str) -> list[str]:
        """The types of what it returns, in order; ``""`` for what is no tensor."""
        found: list[str] = []
        for what in self.gives:
            if what == "again":
                found.append(found[-1] if found else "rows")
            elif what == "part":
                found.append("half" if not found or found[-1] == "rows" else found[-1])
            else:
                found.append(second if what == "z" else _TYPES[what])
        return found

    def resolve(
        self, pick: Callable[[tuple[str, ...], int], int | None], types: dict[int, str]
    ) -> tuple[Break, tuple[int, ...], list[str], str]:
        """This break knowing the type of ``z``; what it reads; the types of what it makes; and how to say it."""
        y, z = pick(("rows",), self.picks[0]), pick((self.second,), self.picks[1])
        z = y if z is None else z
        target = pick(("rows",), self.picks[2]) if self.into and self.target in ("register", "part") else None
        assert y is not None and z is not None
        resolved = dataclasses.replace(self, second=types[z])
        kinds = resolved.kinds(resolved.second)
        made = ["half" if self.target == "part" else "rows"] if self.into else [k for k in kinds if k]
        return resolved, (y, z) if target is None else (y, z, target), made, self._text(y, z, target, kinds)

    def _text(self, y: int, z: int, target: int | None, kinds: list[str]) -> str:
        says = [f"y=r{y}", f"z=r{z}"]
        if self.closure:
            says.append("closure")
        elif self.passed != "nothing":
            says.append(f"ctx as {self.passed}")
        if self.into:
            says.append(f"{self.into}={self.target}{'' if target is None else f' r{target}'}")
        elif not self.declares(kinds):
            says.append("token_dim=0")
        end = (
            ("fill it" if self.fills else "return y") if self.into else f"return {self.wrap} of {', '.join(self.gives)}"
        )
        how = "" if self.how == "plain" else f"{self.how}: "
        return f"break({', '.join(says)}) [{how}{'; '.join((*self.body, end))}]"


def run_break(b: Break, operands: list[Tensor], world: World) -> list[Tensor]:
    """Call a resolved break in whatever mode is on, and return the tensors of its result as registers."""
    y, z = operands[:2]
    if b.into:
        return [_into(b, operands, world)]
    kinds = b.kinds(b.second)

    def fn(y: Tensor, z: Tensor, c: Any = None) -> Any:
        y, z = _cut(b, y, z)
        return give(b.gives, b.wrap, kinds, do(b.body, b.second, y, z, c, world), z, c, world)

    token_dim = wrapped(b.wrap, [_token_dim(k) for k in kinds], dims=True) if b.declares(kinds) else 0
    if b.closure:  # of the context it can only read what is live
        capture = segue.BreakableCapture.current()
        if capture is not None and token_dim == 0:
            return tensors_of(capture.add_eager(lambda: fn(y, z)))
        return tensors_of(segue.break_point(token_dim=token_dim)(lambda: fn(y, z))())
    point, passed = segue.break_point(trim=_trims(b), token_dim=token_dim)(fn), _passed(b.passed, y, world)
    return tensors_of(point(y, z, c=passed) if b.keywords else point(y, z, passed))


def _into(b: Break, operands: list[Tensor], world: World) -> Tensor:
    y, z = operands[:2]
    if b.target == "empty":
        dst = torch.empty_like(y, memory_format=torch.contiguous_format)
    elif b.target == "zeros":
        dst = y.new_zeros(y.shape)
    elif b.target == "rows":
        dst = world.rows[: y.shape[0]]
    else:
        dst = operands[2] if b.target == "register" else operands[2][:, 1:]
    left = 3 - dst.shape[1]

    def fn(y: Tensor, z: Tensor, c: Any, dst: Tensor) -> Any:
        y, z = _cut(b, y, z)
        result = do(b.body, b.second, y, z, c, world)[:, left:].clone()
        if b.into == "here" and not b.fills:
            return result
        dst[: result.shape[0]] = result
        return None if b.exact else dst

    passed = _passed(b.passed, y, world)
    here: Callable[..., Any] = segue.break_here
    point = segue.break_point(trim=_trims(b), out="dst")(fn)
    given: Tensor = here(fn, dst, y, z, passed, dst) if b.into == "here" else point(y, z, passed, dst)
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
        "nothing": None, "ctx": ctx, "shift": ctx.shift, "listed": [ctx.shift, y], "mapped": {"c": ctx, "k": 3},
        "meta": ctx.meta, "none": ctx.none, "number": 2.5, "pair": (y, ctx), "slots": ctx.meta["slots"],
        "view": ctx.cache[2:],
    }[what]  # fmt: skip


def _token_dim(kind: str) -> int | None:
    return 0 if kind in ROW_TYPES else 1 if kind == "cols" else None
