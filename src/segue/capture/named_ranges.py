"""Names what a replay does for torch's profiler: ranges for staging, each segment, each break and what is copied out.

They are made only while a profiler records. Otherwise a replay reads one attribute of a module, which takes some nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from segue._torch import PROFILER

_P = ParamSpec("_P")
_R = TypeVar("_R")
PREFIX = "segue: "  # how the names of all ranges begin


def range_of(what: str) -> Any:
    """A context manager: in it, a profiler's timeline says ``what`` segue does."""
    return torch.profiler.record_function(PREFIX + what)


def named(what: str, call: Callable[_P, _R]) -> Callable[_P, _R]:
    """``call``, in a range of its own if a profiler records."""
    if not PROFILER._is_profiler_enabled:
        return call

    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with range_of(what):
            return call(*args, **kwargs)

    return run
