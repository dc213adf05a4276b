"""Comparing tensors: bit for bit, to rounding, or only in the rows that mean something; and finding the tensors to compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue.capture.context_paths import children, is_plain

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The part of the largest value by which another number of rows may change a result, because torch chooses other kernels for
# it. Faults change more.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
_TF32 = 1e-2  # matrix products on CUDA may round to it


@dataclass(frozen=True)
class RowCounts:
    """Says which rows of two forwards are compared, and how.

    The forwards have ``a`` and ``b`` rows, of which the first ``real`` mean something. ``exact``: values must be equal, and
    NaN equals NaN; otherwise rounding is allowed.
    """

    a: int
    b: int
    real: int
    exact: bool


def tensors_in(root: Any, name: str = "", max_depth: int | None = None) -> dict[str, Tensor]:
    """Every tensor that an object holds, by its path from ``name``, as in ``layers[1].k``.

    Attributes and items are followed, the shortest path first, through at most ``max_depth`` objects. A tensor that is held
    at two paths is listed at both. The path of a nameless root that is a tensor is ``itself``.
    """
    found: dict[str, Tensor] = {}
    seen: dict[int, Any] = {}  # by id; the objects are held, because the id of a temporary object would be given out again
    level, depth = [(name, root)], 0
    while level:
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if isinstance(value, Tensor):
                found[path.lstrip(".") or "itself"] = value
            elif not is_plain(value) and id(value) not in seen and (max_depth is None or depth < max_depth):
                seen[id(value)] = value
                for (kind, key), child in children(value):
                    below.append((f"{path}.{key}" if kind == "attr" else f"{path}[{key!r}]", child))
        level, depth = below, depth + 1
    return found


def bits(t: Tensor) -> Tensor:
    """``t`` seen as integers of the same width; a 16-byte complex dtype becomes pairs of int64."""
    return torch.view_as_real(t).view(torch.int64) if t.element_size() > 8 else t.view(_BITS[t.element_size()])


def poison(t: Tensor) -> None:
    """Set every bit of ``t`` in place: floats become NaN, signed integers -1."""
    with torch.inference_mode():
        bits(t).fill_(-1 if t.element_size() > 1 else 255)


def difference(got: Tensor, want: Tensor) -> str | None:
    """How the bits of two tensors differ, in words, or None. Shapes may differ where the number of elements doesn't."""
    if got.dtype is not want.dtype or (got.shape != want.shape and got.numel() != want.numel()):
        return f"{got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
    got, want = got.detach().reshape(want.shape), want.detach()
    unequal = bits(got.contiguous()) != bits(want.contiguous())
    count = int(unequal.sum())
    if not count:
        return None
    at = tuple(unequal.nonzero()[0].tolist())[: got.dim()]
    found, wanted = got[at].tolist(), want[at].tolist()
    return f"{count} of {unequal.numel()} values differ, first at {list(at)}: {found} instead of {wanted}"


def value_difference(x: Tensor, y: Tensor, exact: bool) -> str | None:
    """How the values of two tensors of one shape differ, in words, or None. NaN equals NaN, and 0.0 equals -0.0."""
    if x.dtype is not y.dtype:
        return f"has dtype {y.dtype} and {x.dtype}"
    if x.is_floating_point() and x.element_size() == 1:
        x, y = bits(x), bits(y)  # few ops take float8
    if torch.equal(x, y):
        return None
    wrong = wrong_elements(x, y, exact)
    count = int(wrong.sum())
    if not count:
        return None
    if not x.is_floating_point():
        return f"differs in {count} of {x.numel()} elements"
    gap = (x.double() - y.double()).abs()[wrong].nan_to_num(float("inf")).max().item()
    return f"differs in {count} of {x.numel()} elements, by at most {gap:.3g}"


def real_difference(x: Tensor, y: Tensor, rows: RowCounts) -> str | None:
    """How the real rows of two tensors differ, in words. None: they don't, or can't be told from padded rows."""
    pair = _real_parts(x, y, rows)
    if pair is None:
        return None
    text = value_difference(*pair, rows.exact)
    if text and rows.a == rows.b and rows.a not in x.shape:
        # Tokens were flattened together with another dimension: the padded ones are the last.
        for d, size in enumerate(x.shape):
            if size > rows.a and size % rows.a == 0:
                head = size // rows.a * rows.real
                if not value_difference(x.narrow(d, 0, head), y.narrow(d, 0, head), rows.exact):
                    return None
    return text


def wrong_elements(x: Tensor, y: Tensor, exact: bool) -> Tensor:
    """Where the values of two tensors of one shape and dtype differ: a bool tensor of that shape."""
    if not x.is_floating_point():
        return x != y
    wrong = (x != y) & ~(x.isnan() & y.isnan())
    tolerance = _TF32 if x.is_cuda and x.dtype is torch.float32 else _ROUNDING.get(x.dtype)
    if exact or tolerance is None:
        return wrong
    a, b = x.double(), y.double()
    largest = b.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return wrong & ~((a - b).abs() <= tolerance * largest)


def distance(got: Tensor, want: Tensor) -> float:
    """The largest difference, as a part of the largest value of ``want``, or of 127 where ``want`` holds integers.

    It is infinite where a NaN takes part. Shapes may differ where the number of elements doesn't.
    """
    if not got.numel():
        return 0.0
    a, b = got.detach().reshape(want.shape).double(), want.detach().double()
    scale = 127.0 if not want.dtype.is_floating_point else max(float(b.abs().max()), 1e-6)
    off = float((a - b).abs().max()) / scale
    return off if off == off else float("inf")


def _real_parts(x: Tensor, y: Tensor, rows: RowCounts) -> tuple[Tensor, Tensor] | None:
    """The parts of two tensors that real rows account for. None: their shapes have nothing to do with each other."""
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
