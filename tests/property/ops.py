"""The ops that a random forward is made of: what segments hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from property.world import SLOTS, World


@dataclass(frozen=True)
class Op:
    """``mixes``: a row of the result depends on others. ``jumpy``: rounding may grow, or random numbers are drawn."""

    takes: tuple[str, ...]
    gives: str
    run: Callable[..., Any]
    text: str
    mixes: bool = False
    jumpy: bool = False


def _small(t: Tensor) -> Tensor:
    return torch.nan_to_num(t, nan=1.0).clamp(-50, 50)


def _catch(w: World, a: Tensor) -> None:
    n = min(a.shape[0], SLOTS)
    w.cache.index_copy_(0, torch.arange(n, device=a.device), a[:n])


def _around(a: Tensor, by: int) -> Tensor:
    return (torch.arange(a.shape[0], device=a.device) + by) % max(1, a.shape[0])


def _foreach(w: World, a: Tensor, b: Tensor) -> None:
    if a.is_neg():  # torch has no such kernel
        a.add_(b.clone())
    else:
        torch._foreach_add_([a], [b.clone().resolve_neg()])


def _neg(a: Tensor, b: Tensor) -> Tensor:
    return torch.complex(a.contiguous(), b.contiguous()).conj().imag


def _table() -> dict[str, Op]:
    R, H, C, L, I, V, S, X = "rows", "half", "cols", "low", "ints", "vec", "scal", "wide"  # noqa: E741
    return {
        # token-wise
        "add": Op((R, R), R, lambda w, a, b: a + b, "{0} + {1}"),
        "mul": Op((R, R), R, lambda w, a, b: a * torch.tanh(b), "{0} * tanh({1})"),
        "addv": Op((R, V), R, lambda w, a, v: a + v, "{0} + {1}"),
        "muls": Op((R, S), R, lambda w, a, s: a * torch.tanh(s), "{0} * tanh({1})"),
        "addx": Op((R, X), R, lambda w, a, x: a - x, "{0} - {1}"),
        "relu": Op((R,), R, lambda w, a: torch.relu(a), "relu({0})"),
        "matmul": Op((R,), R, lambda w, a: a @ w.weight, "{0} @ weight"),
        "linear": Op((R,), R, lambda w, a: F.linear(a, w.weight, w.vec), "linear({0}, weight, vec)"),
        "mmc": Op((C,), C, lambda w, a: w.weight @ a, "weight @ {0}"),
        "cat1": Op((R, R), R, lambda w, a, b: torch.cat([a, b], 1)[:, 2:5], "cat([{0}, {1}], 1)[:, 2:5]"),
        "slice": Op((R,), H, lambda w, a: a[:, 1:], "{0}[:, 1:]"),
        "head": Op((R,), H, lambda w, a: a[:, :2], "{0}[:, :2]"),
        "split": Op((R,), H, lambda w, a: torch.split(a, [1, 2], 1)[1], "split({0}, [1, 2], 1)[1]"),
        "widen": Op((H,), R, lambda w, h: torch.cat([h, h[:, :1]], 1), "cat([{0}, {0}[:, :1]], 1)"),
        "t": Op((R,), C, lambda w, a: a.t(), "{0}.t()"),
        "tc": Op((C,), R, lambda w, a: a.t(), "{0}.t()"),
        "contiguous": Op((R,), R, lambda w, a: a.contiguous(), "{0}.contiguous()"),
        "clone": Op((R,), R, lambda w, a: a.clone(), "{0}.clone()"),
        "expand": Op((V, R), X, lambda w, v, a: v.expand(a.shape[0], 3), "{0}.expand({1}.shape[0], 3)"),
        "fold": Op(
            (R,), R, lambda w, a: a.unsqueeze(1).expand(-1, 2, 3).sum(1), "{0}.unsqueeze(1).expand(-1, 2, 3).sum(1)"
        ),
        "softmax": Op((R,), R, lambda w, a: torch.softmax(a, 1), "softmax({0}, 1)"),
        "cumsum1": Op((R,), R, lambda w, a: a.cumsum(1), "{0}.cumsum(1)"),
        "stack": Op((R,), R, lambda w, a: torch.stack(a.unbind(1), 1), "stack({0}.unbind(1), 1)"),
        "center": Op(
            (R,), R, lambda w, a: a - torch.max(a, 1, keepdim=True).values, "{0} - {0}.max(1, keepdim=True).values"
        ),
        "neg": Op((R, R), R, lambda w, a, b: _neg(a, b), "complex({0}, {1}).conj().imag"),
        "max": Op((R, R), R, lambda w, a, b: torch.where(a > b, a, b), "where({0} > {1}, {0}, {1})"),
        "low": Op((R,), L, lambda w, a: a.bfloat16(), "{0}.bfloat16()", jumpy=True),
        "addl": Op((L, L), L, lambda w, a, b: a + b, "{0} + {1}", jumpy=True),
        "up": Op((L,), R, lambda w, a: a.float(), "{0}.float()"),
        "ints": Op((R,), I, lambda w, a: (_small(a) * 4).long(), "({0} * 4).long()", jumpy=True),
        "addi": Op((I, I), I, lambda w, a, b: a + b, "{0} + {1}"),
        "floats": Op((I,), R, lambda w, a: a.clamp(-200, 200) * 0.25, "{0} * 0.25"),
        "gather": Op((R, I), R, lambda w, a, i: a.gather(1, i.remainder(3)), "{0}.gather(1, {1} % 3)"),
        "sort": Op((R,), R, lambda w, a: _small(a).sort(1).values, "{0}.sort(1).values"),
        "fresh": Op((R,), R, lambda w, a: torch.zeros_like(a).add_(1), "zeros_like({0}).add_(1)"),
        "void": Op((R, "void"), R, lambda w, a, v: a + v.sum(0), "{0} + {1}.sum(0)"),
        "counted": Op((R,), R, lambda w, a: a + w.count, "{0} + count"),
        # rows mix
        "sum0": Op((R,), V, lambda w, a: a.sum(0), "{0}.sum(0)", mixes=True),
        "sum": Op((R,), S, lambda w, a: a.sum(), "{0}.sum()", mixes=True),
        "sumc": Op((C,), V, lambda w, a: a.sum(1), "{0}.sum(1)", mixes=True),
        "flip": Op((R,), R, lambda w, a: a.flip(0), "{0}.flip(0)", mixes=True),
        "cumsum": Op((R,), R, lambda w, a: a.cumsum(0) * 0.25, "{0}.cumsum(0) / 4", mixes=True),
        "roll": Op((R,), R, lambda w, a: torch.cat([a[1:], a[:1]]), "cat([{0}[1:], {0}[:1]])", mixes=True),
        "attend": Op(
            (R, R), R, lambda w, a, b: torch.softmax(a @ b.t(), 1) @ b, "softmax({0} @ {1}.t(), 1) @ {1}", mixes=True
        ),
        "gram": Op((R, R), R, lambda w, a, b: a @ torch.tanh(a.t() @ b), "{0} @ tanh({0}.t() @ {1})", mixes=True),
        "select": Op(
            (R,),
            R,
            lambda w, a: a.index_select(0, _around(a, 2)),
            "{0}.index_select(0, (arange(R) + 2) % R)",
            mixes=True,
        ),
        # in place
        "add_": Op((R, R), "", lambda w, a, b: a.add_(b.clone()), "{0}.add_({1}.clone())"),
        "mul_": Op((R, R), "", lambda w, a, b: a.mul_(torch.tanh(b)), "{0}.mul_(tanh({1}))"),
        "copy_": Op((R, R), "", lambda w, a, b: a.copy_(b.clone()), "{0}.copy_({1}.clone())"),
        "addv_": Op((R, V), "", lambda w, a, v: a.add_(v.clone()), "{0}.add_({1})"),
        "one_": Op((R,), "", lambda w, a: a[:1].add_(1), "{0}[:1].add_(1)"),
        "part_": Op((R, H), "", lambda w, a, h: a[:, 1:].add_(h.clone()), "{0}[:, 1:].add_({1}.clone())"),
        "half_": Op((H,), "", lambda w, h: h.mul_(0.5), "{0}.mul_(0.5)"),
        "cols_": Op((C,), "", lambda w, c: c[1].add_(0.25), "{0}[1].add_(0.25)"),
        "vec_": Op((V,), "", lambda w, v: v.mul_(0.5), "{0}.mul_(0.5)"),
        "low_": Op((L,), "", lambda w, a: a.mul_(0.5), "{0}.mul_(0.5)"),
        "ints_": Op((I,), "", lambda w, a: a.add_(1), "{0}.add_(1)"),
        "zero_": Op((R,), "", lambda w, a: a[:, :1].zero_(), "{0}[:, :1].zero_()"),
        "clamp_": Op((R,), "", lambda w, a: a.clamp_(-1, 1), "{0}.clamp_(-1, 1)"),
        "fill_": Op((R,), "", lambda w, a: a.masked_fill_(a > 1, 0.5), "{0}.masked_fill_({0} > 1, 0.5)", jumpy=True),
        "out_": Op((R, R), "", lambda w, a, b: torch.mul(b.clone(), 0.5, out=a), "mul({1}.clone(), 0.5, out={0})"),
        "foreach_": Op((R, R), "", _foreach, "_foreach_add_([{0}], [{1}.clone()])"),
        "put_": Op(
            (R, R),
            "",
            lambda w, a, b: a.index_put_((_around(a, 1),), b.clone()),
            "{0}[(arange(R) + 1) % R] = {1}",
            mixes=True,
        ),
        "indexadd_": Op(
            (R, R),
            "",
            lambda w, a, b: a.index_add_(0, _around(a, 1), b.clone()),
            "{0}.index_add_(0, (arange(R) + 1) % R, {1})",
            mixes=True,
        ),
        "scatter_": Op(
            (R, R),
            "",
            lambda w, a, b: a.scatter_(1, (torch.arange(3, device=a.device) + 1).remainder(3).expand_as(a), b.clone()),
            "{0}.scatter_(1, [[1, 2, 0]], {1})",
        ),
        # external state
        "state_": Op(
            (R,), "", lambda w, a: w.rows[: a.shape[0]].mul_(0.5).add_(a.clone()), "rows[:R].mul_(0.5).add_({0})"
        ),
        "vecsum_": Op(
            (R,),
            "",
            lambda w, a: w.vec.mul_(0.5).add_(torch.tanh(a.sum(0))),
            "vec = vec / 2 + tanh({0}.sum(0))",
            mixes=True,
        ),
        "weight_": Op((), "", lambda w: w.weight.mul_(-0.5), "weight.mul_(-0.5)"),
        "count_": Op((), "", lambda w: w.count.add_(1), "count.add_(1)"),
        "cache_": Op((R,), "", _catch, "cache.index_copy_(0, arange(R)[:6], {0}[:6])", mixes=True),
        "cached": Op((R,), R, lambda w, a: a + torch.tanh(w.cache.sum(0)), "{0} + tanh(cache.sum(0))"),
        # random numbers
        "noise": Op((R,), R, lambda w, a: a + torch.rand_like(a), "{0} + rand_like({0})", jumpy=True),
        "dropout": Op((R,), R, lambda w, a: F.dropout(a, 0.5, training=True), "dropout({0}, 0.5)", jumpy=True),
        "normal_": Op((R,), "", lambda w, a: a.normal_(), "{0}.normal_()", jumpy=True),
    }


OPS = _table()
