"""Tells memory that breaks made during a capture from memory that was there before.

A break makes its tensors anew at each replay, and a graph goes on with the captured ones. So what a break makes may reach the
forward as its result only, which is a hand-off.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.externals import External

_OF_A_NUMBER = str(torch.ops.aten.lift_fresh.default)


class BreakMemory:
    """Finds tensors among the externals of one capture whose memory its breaks made.

    The garbage collector is off during a capture, so its youngest generation holds every object that was made in it. Memory that
    belongs to such tensors alone, and to none that was there when the first break began, is new. A mode would see the ops of
    breaks too, but some kernels can't run under one.
    """

    def __init__(self) -> None:
        self._before: dict[int, weakref.ref[Any]] | None = None

    def begin(self) -> None:
        """Note what there is, before the first break runs. Later calls do nothing."""
        if self._before is None:
            self._before = {_torch.storage_key(t): weakref.ref(t.untyped_storage()) for t in _young()}

    def made(self, externals: Iterable[External], device: torch.device) -> External | None:
        """The first of ``externals`` on ``device`` whose memory a break made; None if there is none, or no break has run."""
        if self._before is None:
            return None
        young = Counter(map(_torch.storage_key, _young()))
        for external in externals:
            key = _torch.storage_key(external.tensor)
            before = self._before.get(key)
            # What torch makes of a number, as in `y[0] = 3.0`, is the segment's own.
            mine = external.tensor.device != device or external.op == _OF_A_NUMBER
            new = not mine and (before is None or before() is None)
            if new and young[key] >= _torch.storage_users(external.tensor):
                return external
        return None


def _young() -> Iterator[Tensor]:
    with _torch.function_modes_off():
        yield from [t for t in gc.get_objects(generation=0) if issubclass(type(t), Tensor) and _torch.address(t)]
