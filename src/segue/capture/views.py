"""Views of tensors: without ownership, of the real rows, of the padded tail."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.errors import UsageError


def weak_ref_tensor(t: Tensor) -> Tensor:
    """A view of ``t``'s memory that doesn't keep it alive: same shape, strides, dtype and device.

    Reading it after the memory was freed or reused gives whatever lies there. So its maker must know that the memory stays, as
    that of a graph pool does. It needs no compiled extension.

    Raises:
        UsageError: ``t`` is no strided tensor.
    """
    if not isinstance(t, Tensor) or t.layout is not torch.strided:
        raise UsageError(f"weak_ref_tensor takes a strided tensor; got {getattr(t, 'layout', type(t).__qualname__)}")
    address, nbytes = _torch.storage_span(t)
    plain = _torch.tensor_at(address, nbytes, t.dtype, t.shape, t.stride(), int(t.storage_offset()), t.device)
    return _torch.lazy_bits(plain, t)


def scrub_padding_tail(n: int | None, *tensors: Tensor, dim: int = 0) -> None:
    """Zero in place the rows from ``n`` on along ``dim`` of each tensor. ``n=None``: leave the tensors as they are."""
    if n is None:
        return
    for t in tensors:
        if n < t.shape[dim]:
            t.narrow(dim, n, t.shape[dim] - n).zero_()


def slice_to_real_tokens(n: int | None, *tensors: Tensor, dim: int = 0) -> Tensor | tuple[Tensor, ...]:
    """The first ``n`` rows along ``dim`` of each tensor, as views: a tensor for one, a tuple for more. ``n=None``: all."""
    cut = tuple(t if n is None or n >= t.shape[dim] else t.narrow(dim, 0, n) for t in tensors)
    return cut[0] if len(cut) == 1 else cut


def cut_rows(t: Any, n: int | None, dim: int) -> Any:
    """The first ``n`` rows of ``t`` along ``dim``, or ``t`` as it is when it has no more."""
    return t if n is None or t is None or n >= t.shape[dim] else t.narrow(dim, 0, n)
