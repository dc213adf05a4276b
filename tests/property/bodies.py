"""What random breaks do inside: their statements, what they return, and in which structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import segue
from property.world import SLOTS, Context, World


def do(body: tuple[str, ...], second: str, y: Tensor, z: Tensor, c: Any, world: World) -> Tensor:
    """Run the statements ``body`` and return what has become of ``y``. ``second``: the type of ``z``."""
    ctx = segue.current_forward_ctx()
    for what in body:
        if what == "mix":
            y = y + torch.tanh(y.sum(0))
        elif what == "shift":
            y = y + ctx.shift + _pull(c)
        elif what == "scale":
            y = y * ctx.scale + _as_addend(second, z)
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
    return y


def give(gives: tuple[str, ...], wrap: str, kinds: list[str], y: Tensor, z: Tensor, c: Any, world: World) -> Any:
    """What a break returns. ``kinds``: the types of ``gives``."""
    found: list[Any] = []
    for at, what in enumerate(gives):
        last = found[-1] if found else y
        if what == "again":
            found.append(last)
        elif what == "part":
            found.append(last[:, 1:] if not at or kinds[at - 1] == "rows" else last)
        else:
            found.append(_GIVE[what](y, z, segue.current_forward_ctx(), c, world))
    return wrapped(wrap, found)


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors that a break returned, in order. The context, which may be among its results, is none."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Two):
        result = (result.a, result.b)
    children = result.values() if isinstance(result, dict) else result if isinstance(result, tuple | list) else ()
    return [t for child in children for t in tensors_of(child)]


def wrapped(wrap: str, values: list[Any], dims: bool = False) -> Any:
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


@segue.break_point(trim=("y",))
def _nested(y: Tensor) -> Tensor:
    return y - y.sum(0) * 0.125


def _pull(c: Any) -> Tensor | float:
    """A value [3] or number out of what was passed of the context."""
    if isinstance(c, Tensor):
        return torch.tanh(c.sum(0)) if c.dim() == 2 else c if c.is_floating_point() else c[:3] * 0.125
    if isinstance(c, list | tuple):
        return _pull(c[0] if isinstance(c, list) else c[1])
    if isinstance(c, dict):
        return _pull(c["c"] if "c" in c else c["deep"])
    return c.scale if isinstance(c, Context) else c or 0.0


def _as_addend(kind: str, z: Tensor) -> Tensor:
    z = z.t() if kind == "cols" else z
    return z[:, :1] if kind == "half" else z.float()


@dataclasses.dataclass
class Two:
    a: Any
    b: Any


class Named(NamedTuple):
    a: Any
    b: Any


_GIVE: dict[str, Callable[[Tensor, Tensor, Any, Any, World], Any]] = {
    "y": lambda y, z, ctx, c, w: y,
    "new": lambda y, z, ctx, c, w: y * 2,
    "half": lambda y, z, ctx, c, w: y[:, 1:],
    "t": lambda y, z, ctx, c, w: y.t(),
    "sum": lambda y, z, ctx, c, w: y.sum(0),
    "total": lambda y, z, ctx, c, w: y.sum(),
    "z": lambda y, z, ctx, c, w: z,
    "void": lambda y, z, ctx, c, w: y[:0],
    "none": lambda y, z, ctx, c, w: None,
    "number": lambda y, z, ctx, c, w: 3,
    "low": lambda y, z, ctx, c, w: y.bfloat16(),
    "ints": lambda y, z, ctx, c, w: (torch.nan_to_num(y).clamp(-50, 50) * 4).long(),
    "wide": lambda y, z, ctx, c, w: torch.tanh(ctx.shift).expand(y.shape[0], 3),
    "ctx": lambda y, z, ctx, c, w: ctx,
    "shift": lambda y, z, ctx, c, w: ctx.shift,
    "passed": lambda y, z, ctx, c, w: _vector(c, ctx),
    "outer": lambda y, z, ctx, c, w: w.vec,
}


def _vector(c: Any, ctx: Context) -> Tensor:
    """Memory [3] of what was passed, or of the context."""
    if isinstance(c, Tensor):
        return c if c.shape == (3,) else c[0] if c.dim() == 2 else ctx.shift
    found: Tensor = c[0] if isinstance(c, list) else ctx.meta["deep"]
    return found
