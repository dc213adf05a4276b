"""Views of tensors: without ownership, of the real rows, of the padded tail."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from segue import _torch
from segue.errors import UsageError

T = TypeVar("T")


def weak_ref_tensor(t: T) -> T:
    """A view of ``t``'s memory that doesn't keep it alive: same shape, strides, dtype and device. What is no tensor is itself.

    Reading it after the memory was freed or reused gives whatever lies there. So its maker must know that the memory stays, as
    that of a graph pool does. It needs no compiled extension.

    Raises:
        UsageError: ``t`` is a tensor that isn't strided.
    """
    if not isinstance(t, Tensor):
        return t
    if t.layout is not torch.strided:
        raise UsageError(f"weak_ref_tensor takes a strided tensor; got {t.layout}")
    address, nbytes = _torch.storage_span(t)
    plain = _torch.tensor_at(address, nbytes, t.dtype, t.shape, t.stride(), int(t.storage_offset()), t.device)
    return _torch.lazy_bits(plain, t)  # type: ignore[return-value]


def scrub_padding_tail(n: int | None, *tensors: Tensor | None, dim: int = 0) -> None:
    """Zero in place the rows from ``n`` on along ``dim`` of each tensor; None is skipped. ``n=None``: leave them as they are.

    Raises:
        UsageError: an argument is no tensor, or has no dimension ``dim``. Then no row of any was cleared.
    """
    given = _checked("scrub_padding_tail", tensors, dim)
    if n is None:
        return
    for t in given:
        if t is not None and n < t.shape[dim]:
            t.narrow(dim, n, t.shape[dim] - n).zero_()


def slice_to_real_tokens(n: int | None, *tensors: Tensor | None, dim: int = 0) -> tuple[Tensor | None, ...]:
    """The first ``n`` rows along ``dim`` of each tensor, as views, one entry an argument. ``n=None``: all of them.

    A tensor without more rows is returned as it is, and None for None.

    Raises:
        UsageError: an argument is no tensor, or has no dimension ``dim``.
    """
    return tuple(cut_rows(t, n, dim) for t in _checked("slice_to_real_tokens", tensors, dim))


def _checked(function: str, tensors: tuple[Any, ...], dim: int) -> tuple[Tensor | None, ...]:
    for i, t in enumerate(tensors):
        if t is not None and not isinstance(t, Tensor):
            raise UsageError(f"{function}: argument {i} is a {type(t).__qualname__}, and it takes tensors and None")
        if t is not None and not -t.dim() <= dim < t.dim():
            raise UsageError(f"{function}: argument {i} has shape {tuple(t.shape)}, and no dimension {dim}")
    return tensors


def cut_rows(t: Any, n: int | None, dim: int) -> Any:
    """The first ``n`` rows of ``t`` along ``dim``, or ``t`` as it is when it has no more."""
    return t if n is None or t is None or n >= t.shape[dim] else t.narrow(dim, 0, n)
