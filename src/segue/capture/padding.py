"""Padding rules as plain functions, for use in breaks."""

from __future__ import annotations

from torch import Tensor


def scrub_padding_tail(n: int | None, *tensors: Tensor, dim: int = 0) -> None:
    """Zero in place what lies at ``n`` and beyond along ``dim`` of each tensor. ``n=None``: leave them as they are."""
    if n is None:
        return
    for t in tensors:
        if n < t.shape[dim]:
            t.narrow(dim, n, t.shape[dim] - n).zero_()


def slice_to_real_tokens(n: int | None, *tensors: Tensor, dim: int = 0) -> Tensor | tuple[Tensor, ...]:
    """The first ``n`` rows along ``dim`` of each tensor, as views: a tensor for one, a tuple for more. ``n=None``: all."""
    cut = tuple(t if n is None or n >= t.shape[dim] else t.narrow(dim, 0, n) for t in tensors)
    return cut[0] if len(cut) == 1 else cut
