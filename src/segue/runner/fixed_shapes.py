"""Which results of a forward have a shape that no call can change. Such an output can have the bucket's size by chance only."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from segue import _torch

_OPEN_END = 1 << 62  # of a slice


class FixedShapes(_torch.WatchingMode):
    """Watches a forward's ops. ``t in shapes`` says whether the shape of ``t`` follows from those of the ``known`` tensors alone.

    It is true only where that is certain: ``t`` is known, or an op returned it whose tensors are all such tensors, and none of
    whose other arguments could be a size of the call. It is false for everything else, also for what compiled code returns.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._found: dict[int, weakref.ref[Tensor]] = {}
        for t in known:
            self._found[id(t)] = weakref.ref(t)

    def __contains__(self, t: object) -> bool:
        found = self._found.get(id(t))
        return found is not None and found() is t

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and self._constant(func, (*args, *(kwargs or {}).values())):
            self._found[id(result)] = weakref.ref(result)
        return result

    def _constant(self, func: Any, values: tuple[Any, ...]) -> bool:
        flat = [v for value in values for v in (value if isinstance(value, list | tuple) else (value,))]
        tensors = [v for v in flat if isinstance(v, Tensor)]
        return (
            bool(tensors)
            and all(t in self for t in tensors)
            and not any(isinstance(v, int) and 2 <= v < _OPEN_END for v in flat)
            and torch.Tag.dynamic_output_shape not in func.tags
        )
