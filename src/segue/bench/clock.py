"""Timing on a device that works behind the host's back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def synchronize() -> None:
    """Wait until the device has done all it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wall(run: Callable[[], object]) -> float:
    """Seconds from an idle device to an idle device."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def interleaved(runs: dict[str, Callable[[], object]], times: int, warm_up: int = 3) -> dict[str, float]:
    """Median seconds of each, taken in turns, so that a host that gets slower does so for all of them."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(warm_up + times):
        for name, run in runs.items():
            seconds = wall(run)
            if i >= warm_up:
                taken[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def host(run: Callable[[], object], times: int = 200, batch: int = 10) -> float:
    """Median seconds the host spends in ``run``, not waiting for the device, which is let idle every ``batch``."""
    taken = []
    for _ in range(times // batch):
        synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            run()
        taken.append((time.perf_counter() - start) / batch)
    return statistics.median(taken)


def kernels(run: Callable[[], object], times: int = 3) -> float | None:
    """Seconds of device work in one ``run``: the sum over its kernels and copies. None where no CUDA device worked."""
    if not torch.cuda.is_available():
        return None
    from torch.profiler import ProfilerActivity, profile

    run()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as seen:
        for _ in range(times):
            run()
        synchronize()
    spent = sum(e.self_device_time_total for e in seen.events() if e.device_type.name == "CUDA")
    return float(spent) / times / 1e6 or None
