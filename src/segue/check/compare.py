"""Comparing tensors of forwards that have different numbers of rows, or differ in their padded rows only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Relative to the largest value: what another number of rows may change by choosing other kernels. Faults change more.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
_TF32 = 1e-2  # matrix products on CUDA may round to it


@dataclass(frozen=True)
class Rows:
    """Two forwards of ``a`` and ``b`` rows, of which ``real`` mean something. ``exact``: bit for bit, NaN like NaN."""

    a: int
    b: int
    real: int
    exact: bool


def difference(x: Tensor, y: Tensor, rows: Rows) -> str:
    """How the real parts of two tensors differ, in words; empty where they don't, or can't be told from padding."""
    pair = _real_parts(x, y, rows)
    if pair is None:
        return ""
    text = differs(*pair, rows.exact)
    if text and rows.a == rows.b and rows.a not in x.shape:
        # Tokens flattened together with something else: the padded ones are the last.
        for d, size in enumerate(x.shape):
            if size > rows.a and size % rows.a == 0:
                head = size // rows.a * rows.real
                if not differs(x.narrow(d, 0, head), y.narrow(d, 0, head), rows.exact):
                    return ""
    return text


def differs(x: Tensor, y: Tensor, exact: bool) -> str:
    """How two tensors of one shape differ, in words; empty where they don't."""
    if x.dtype is not y.dtype:
        return f"has dtype {y.dtype} and {x.dtype}"
    if x.is_floating_point() and x.element_size() == 1:
        x, y = x.view(torch.uint8), y.view(torch.uint8)  # few ops know float8
    if torch.equal(x, y):
        return ""
    wrong = wrong_elements(x, y, exact)
    count = int(wrong.sum())
    if not count:
        return ""
    if not x.is_floating_point():
        return f"differs in {count} of {x.numel()} elements"
    gap = (x.double() - y.double()).abs()[wrong].nan_to_num(float("inf")).max().item()
    return f"differs in {count} of {x.numel()} elements, by at most {gap:.3g}"


def wrong_elements(x: Tensor, y: Tensor, exact: bool) -> Tensor:
    """Where two tensors of one shape differ. [same shape], bool."""
    if not x.is_floating_point():
        return x != y
    wrong = (x != y) & ~(x.isnan() & y.isnan())
    tolerance = _TF32 if x.is_cuda and x.dtype is torch.float32 else _ROUNDING.get(x.dtype)
    if exact or tolerance is None:
        return wrong
    a, b = x.double(), y.double()
    largest = b.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return wrong & ~((a - b).abs() <= tolerance * largest)


def _real_parts(x: Tensor, y: Tensor, rows: Rows) -> tuple[Tensor, Tensor] | None:
    if x.dim() != y.dim():
        return None
    for d in range(x.dim()):
        size, other = x.shape[d], y.shape[d]
        if size == rows.a and other == rows.b:
            x, y = x.narrow(d, 0, min(rows.real, size)), y.narrow(d, 0, min(rows.real, other))
        elif size != other:
            if rows.a and rows.b and size * rows.b == other * rows.a and size % rows.a == 0:
                head = size // rows.a * rows.real
                x, y = x.narrow(d, 0, head), y.narrow(d, 0, head)
            else:
                return None
    return x, y
