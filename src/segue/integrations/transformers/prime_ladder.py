"""Captures the prime graphs of a whole ladder ahead of traffic."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from segue import _torch
from segue.runner import GraphRunner
from segue.runner.memory_budget import mib
from segue.runner.progress import Progress


class PrimeGraphs(Protocol):
    """Graphs on a scratch cache."""

    @property
    def captured(self) -> Collection[int]: ...
    @property
    def scratch_bytes(self) -> int: ...


def capture_primes(
    graphs: PrimeGraphs, runner: GraphRunner, buckets: Iterable[int], capture: Callable[[int], Any], device: Any
) -> str:
    """Have ``capture`` capture each of ``buckets``, in this order, that ``runner`` serves. Returns what was done, as text."""
    start, ladder = time.perf_counter(), list(buckets)
    progress = Progress(len(ladder), runner.progress)
    with progress.showing():
        for bucket in ladder:
            progress.bucket(bucket, _torch.free_bytes(device))
            if runner.admit(bucket).bucket == bucket:
                capture(bucket)
            progress.done()
    count, seconds = len(graphs.captured), time.perf_counter() - start
    return f"captured {count} prime graphs in {seconds:.1f} s; {mib(graphs.scratch_bytes)} scratch cache"
