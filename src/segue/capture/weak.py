"""Tensors that own nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from segue import _torch
from segue.errors import UsageError


def weak_ref_tensor(t: Tensor) -> Tensor:
    """A view of ``t``'s memory that doesn't keep it alive: same shape, strides, dtype and device.

    Reading it after the memory was freed or reused gives whatever lies there: whoever makes one must know that the memory
    stays, as the memory of a graph pool does. Needs no compiled extension.
    """
    if not isinstance(t, Tensor) or t.layout is not torch.strided:
        raise UsageError(f"weak_ref_tensor takes a strided tensor; got {getattr(t, 'layout', type(t).__qualname__)}")
    address, nbytes = _torch.storage_span(t)
    plain = _torch.tensor_at(address, nbytes, t.dtype, t.shape, t.stride(), int(t.storage_offset()), t.device)
    return _torch.lazy_bits(plain, t)
