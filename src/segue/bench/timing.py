"""Timing on a device that works behind the host's back.

Several ways of doing one thing are measured in turns within one run, so that a host that gets slower does so for all of
them. Times are seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from segue.capture.isolation import collect_garbage, no_garbage_collection

Run = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """Seconds: the median of the rounds, and the quartiles below and above it. As text: the quartiles in microseconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        """The spread of at least one measurement."""
        low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.low * 1e6:.1f} to {self.high * 1e6:.1f}"


def synchronize() -> None:
    """Wait until the device has done all it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wall(run: Run) -> float:
    """Seconds from an idle device to an idle device."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def host(run: Run, times: int = 200, batch: int = 10) -> float:
    """Median seconds the host spends in ``run``, not waiting for the device, which is let idle every ``batch``."""
    taken = []
    for _ in range(times // batch):
        synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            run()
        taken.append((time.perf_counter() - start) / batch)
    return statistics.median(taken)


def kernels(run: Run, times: int = 3) -> float | None:
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
    # A named range is listed for the device too, with the time of the kernels in it.
    worked = (e for e in seen.events() if e.device_type.name == "CUDA" and not e.is_user_annotation)
    spent = sum(e.self_device_time_total for e in worked)
    return float(spent) / times / 1e6 or None


def wall_in_turns(runs: Mapping[str, Run], times: int, warm_up: int = 3) -> dict[str, float]:
    """Median :func:`wall` seconds of each run; every round takes all of them in the same order."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(warm_up + times):
        for name, run in runs.items():
            seconds = wall(run)
            if i >= warm_up:
                taken[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def host_in_turns(runs: Mapping[str, Run], rounds: int, warm_up: int = 10) -> dict[str, Spread]:
    """Seconds that the host spends in each run. The device is idle before each, and what it does is not waited for."""

    def once(run: Run) -> float:
        synchronize()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return _rotating(runs, rounds, warm_up, once)


def device_in_turns(runs: Mapping[str, Run], rounds: int, repeats: int = 10, warm_up: int = 3) -> dict[str, Spread]:
    """Seconds that the device takes for each run, out of ``repeats`` back to back between two events. CUDA only.

    They mean the device's own time where a run keeps it busy for longer than the host takes to launch it.
    """

    def once(run: Run) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        synchronize()
        run()  # while this one runs, the host gets ahead
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeats

    return _rotating(runs, rounds, warm_up, once)


def _rotating(runs: Mapping[str, Run], rounds: int, warm_up: int, once: Callable[[Run], float]) -> dict[str, Spread]:
    """Each run once a round, every round beginning with another one, so that none always comes after the same."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    collect_garbage()
    with no_garbage_collection():
        for i in range(warm_up + rounds):
            first = i % len(names)
            for name in names[first:] + names[:first]:
                seconds = once(runs[name])
                if i >= warm_up:
                    taken[name].append(seconds)
    synchronize()
    return {name: Spread.of(seconds) for name, seconds in taken.items()}
