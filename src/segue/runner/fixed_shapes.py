"""Which results have a shape that no call can change: such an output has the bucket's size by chance only."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from segue import _torch

_OPEN_END = 1 << 62  # of a slice


class FixedShapes(_torch.WatchingMode):
    """Watches a forward's ops. ``t in constants``: its shape follows from those of ``known`` tensors alone.

    Only what is certain counts: results of ops whose tensors are all known ones or results of such ops, without a size among
    their arguments that could be the call's. Everything else, what compiled code returns too, is left alone.
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
