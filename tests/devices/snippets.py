"""Small pieces of forwards: those a graph can hold and those it can't. Every device must agree with these lists.

Each takes ``x`` (float32 [4]), ``m`` (float32 [3, 4]), ``mask`` (bool [4], x > 0) and ``i`` (int64 [3], within 0..2),
all on the device. What torch makes of some of them differs between its versions, and so does the list that holds them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Snippet = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def _set(t: Tensor, where: Any, value: Any) -> Tensor:
    t[where] = value
    return t


# name: (what does it, words that the emulator's error must contain)
REFUSED: dict[str, tuple[Snippet, str]] = {
    "item": (lambda x, m, mask, i: x[0].item(), "Tensor.item() at"),
    "tolist": (lambda x, m, mask, i: i.tolist(), "Tensor.tolist() at"),
    "cpu": (lambda x, m, mask, i: x.cpu(), "Tensor.cpu() at"),
    "numpy": (lambda x, m, mask, i: x.numpy(), "Tensor.numpy() at"),
    "to cpu": (lambda x, m, mask, i: x.to("cpu"), 'Tensor.to("cpu") at'),
    "bool": (lambda x, m, mask, i: bool(mask.any()), "Tensor.__bool__() at"),
    "if": (lambda x, m, mask, i: x + 1 if x.sum() > 0 else x, "Tensor.__bool__() at"),
    "int": (lambda x, m, mask, i: int(i[0]), "Tensor.__int__() at"),
    "float": (lambda x, m, mask, i: float(x[0]), "Tensor.__float__() at"),
    "range": (lambda x, m, mask, i: list(range(i[0])), "Tensor.__index__() at"),
    "slice": (lambda x, m, mask, i: x[: i[0]], "item at"),
    "select": (lambda x, m, mask, i: x[i[0]], "item at"),
    "format": (lambda x, m, mask, i: f"{x[0]}", "Tensor.__format__() at"),
    "repr": (lambda x, m, mask, i: repr(x), "Tensor.__repr__() at"),
    "in": (lambda x, m, mask, i: 3.0 in x, "Tensor.__contains__() at"),
    "equal": (lambda x, m, mask, i: torch.equal(x, x + 0), "equal at"),
    "allclose": (lambda x, m, mask, i: torch.allclose(x, x + 0), "at"),
    "nonzero": (lambda x, m, mask, i: x.nonzero(), "nonzero at"),
    "where": (lambda x, m, mask, i: torch.where(mask), "nonzero"),
    "mask": (lambda x, m, mask, i: x[mask], "index.Tensor at"),
    "mask write of a tensor": (lambda x, m, mask, i: _set(x.clone(), mask, x[:1]), "index_put_ at"),
    "masked select": (lambda x, m, mask, i: x.masked_select(mask), "masked_select at"),
    "unique": (lambda x, m, mask, i: torch.unique(x), "unique"),
    "bincount": (lambda x, m, mask, i: torch.bincount(i), "bincount at"),
    "repeat interleave": (lambda x, m, mask, i: torch.repeat_interleave(i, i), "Pass output_size="),
    "one hot": (lambda x, m, mask, i: F.one_hot(i), "num_classes="),
    "list index": (lambda x, m, mask, i: x[[0, 2]], "shape (2,)"),
    "list": (lambda x, m, mask, i: x[:2] + torch.tensor([1.0, 2.0], device=x.device), "shape (2,)"),
    "new tensor": (lambda x, m, mask, i: x.new_tensor([1.0]), "shape (1,)"),
    "new scalar": (lambda x, m, mask, i: x + x.new_tensor(1.0), "Tensor.new_tensor() at"),
    "scalar on the device": (lambda x, m, mask, i: x + torch.tensor(1.0, device=x.device), "torch.full((), value"),
    "host zeros": (lambda x, m, mask, i: x + torch.zeros(4), "torch.zeros(...) at"),
    "host arange": (lambda x, m, mask, i: x + torch.arange(4), "torch.arange(...) at"),
    "host scalar copied": (lambda x, m, mask, i: x.clone()[0].copy_(torch.tensor(1.0)), "fill_"),
    "index write of a number": (lambda x, m, mask, i: _set(m.clone(), i, 2.0), "index_fill_"),
    "host scalar moved": (lambda x, m, mask, i: x + torch.tensor(1.0).to(x.device), "Tensor.to(...) at"),
    "histogram": (lambda x, m, mask, i: torch.histc(x), "Pass min="),
    "matrix inverse": (lambda x, m, mask, i: torch.linalg.inv(m[:, :3] + 9 * torch.eye(3, device=x.device)), "at"),
    "element write": (lambda x, m, mask, i: _set(x.clone(), 0, 1.0), "fill_"),
}

ALLOWED: dict[str, Snippet] = {
    "arange on the device": lambda x, m, mask, i: torch.arange(4, device=x.device) + x,
    "full scalar": lambda x, m, mask, i: x + torch.full((), 2.0, device=x.device),
    "host scalar operand": lambda x, m, mask, i: x * torch.tensor(2.0),
    "like": lambda x, m, mask, i: torch.zeros_like(x) + x.new_ones(4) + x,
    "default device": lambda x, m, mask, i: _under(x, lambda: torch.ones(4) + x),
    "where of three": lambda x, m, mask, i: torch.where(mask, x, 0.0),
    "masked fill": lambda x, m, mask, i: x.masked_fill(~mask, -1.0),
    "mask write of a number": lambda x, m, mask, i: _set(x.clone(), mask, 0.5),
    "slice write of a number": lambda x, m, mask, i: _set(m.clone(), slice(0, 2), 0.5),
    "index write of a tensor": lambda x, m, mask, i: _set(m.clone(), i, x),
    "index fill": lambda x, m, mask, i: m.index_fill(0, i, 2.0),
    "row write of a number": lambda x, m, mask, i: _set(m.clone(), 0, 2.0),
    "fill by a host scalar": lambda x, m, mask, i: x.clone().fill_(torch.tensor(2.0)),
    "deep copy": lambda x, m, mask, i: copy.deepcopy(x) + 1,
    "range histogram": lambda x, m, mask, i: torch.histc(x, 4, -5, 5),
    "nonzero of a size": lambda x, m, mask, i: torch.nonzero_static(mask, size=4),
    "index": lambda x, m, mask, i: x[i],
    "two indices": lambda x, m, mask, i: m[i % 3, i],
    "repeat interleave of a size": lambda x, m, mask, i: torch.repeat_interleave(
        i, torch.full_like(i, 2), output_size=6
    ),
    "repeat interleave by a number": lambda x, m, mask, i: x.repeat_interleave(2),
    "one hot of a size": lambda x, m, mask, i: F.one_hot(i, 4),
    "to its own device": lambda x, m, mask, i: (x + 1).to(m.device),
    "to a dtype": lambda x, m, mask, i: (x + 1).to(torch.float16).float(),
    "shapes": lambda x, m, mask, i: x.reshape(2, -1).expand(3, 2, 2) * len(x) * m.numel(),
    "scatter": lambda x, m, mask, i: torch.zeros_like(x).scatter_add_(0, i, x[:3]),
    "cumsum": lambda x, m, mask, i: x.cumsum(0) + mask.cumsum(0),
    "softmax": lambda x, m, mask, i: m.softmax(-1).log(),
    "norm": lambda x, m, mask, i: F.rms_norm(m, (4,)) + F.layer_norm(m, (4,)),
    "split": lambda x, m, mask, i: torch.cat([t.flip(0) for t in m.split([1, 3], 1)], 1),
    "foreach": lambda x, m, mask, i: torch._foreach_add([x, x * 2], 1.0)[1],
    "overlapping": lambda x, m, mask, i: (x[:1].expand(4) + 0).unfold(0, 2, 1) * 2,
    "complex": lambda x, m, mask, i: torch.view_as_real(torch.view_as_complex(x.reshape(2, 2)).conj() * 1j),
    "float64 scalar": lambda x, m, mask, i: (x.sum().double() * 3.0).float(),
    "bool reduction": lambda x, m, mask, i: mask.any() | mask.all(),
    "sort": lambda x, m, mask, i: x.sort(descending=True).values,
    "out": lambda x, m, mask, i: torch.add(x, x, out=torch.empty_like(x)),
    "empty then filled": lambda x, m, mask, i: torch.empty(4, device=x.device).copy_(x).add_(1),
    "deep views": lambda x, m, mask, i: (m + 1).t()[1:3].contiguous().view(2, 3).neg_(),
    "searchsorted": lambda x, m, mask, i: torch.searchsorted(torch.arange(4.0, device=x.device), x),
    "type promotion": lambda x, m, mask, i: x.half().sum() * 2.5 + i.sum(),
}


class _Ops(TorchDispatchMode):
    """Notes the names of the ops that arrive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _copies_a_number(snippet: Snippet) -> bool:
    """Whether a write of a Python number copies it from the host. Torch 2.15 fills instead, and a graph can hold that."""
    with _Ops() as ops:
        snippet(torch.ones(4), torch.ones(3, 4), torch.ones(4, dtype=torch.bool), torch.tensor([1, 0, 2]))
    return not ops.names & {"fill_", "index_fill_"}


for _name in ("element write", "index write of a number"):
    if not _copies_a_number(REFUSED[_name][0]):
        ALLOWED[_name] = REFUSED.pop(_name)[0]


def _under(x: Tensor, fn: Callable[[], Tensor]) -> Tensor:
    with x.device:
        return fn()
