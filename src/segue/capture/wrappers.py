"""Tensors that wrap others and have no memory of their own: graphs and hand-offs need an address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from segue import _torch
from segue.errors import CaptureError


def refuse_wrapper(t: Tensor, what: str) -> None:
    """Raise CaptureError if ``t`` has no memory of its own. ``what``: names the tensor in the error."""
    if not _torch.is_wrapper(t):
        return
    mend = "Wait for it (t.wait())" if _torch.is_under_way(t) else "Hand over the tensor inside it (t.to_local() of a DTensor)"
    raise CaptureError(
        f"{what} is of type {type(t).__qualname__}, which wraps another tensor and has no memory of its own, and graphs need an "
        f"address. {mend}."
    )


def with_collectives_done(value: Any, which: Callable[[Tensor], bool]) -> Any:
    """``value``, an argument or a list or tuple of some, with the results of functional collectives in place of what stands for
    them until they are done. ``which``: takes a result, and says whether to wait for it now.
    """
    if isinstance(value, Tensor):
        return _torch.waited(value) if _torch.is_under_way(value) and which(_torch.result_under_way(value)) else value
    if type(value) in (list, tuple) and any(isinstance(v, Tensor) and _torch.is_under_way(v) for v in value):
        return type(value)(with_collectives_done(v, which) for v in value)
    return value
