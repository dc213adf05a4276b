"""Several ways of doing one thing, measured in turns within one run, with the spread beside the median."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from segue.bench import clock

Run = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """Seconds: the median of the rounds, and the quartiles below and above it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.low * 1e6:.1f} to {self.high * 1e6:.1f}"


def host(runs: Mapping[str, Run], rounds: int, warm_up: int = 10) -> dict[str, Spread]:
    """Seconds that the host spends in each run. The device is idle before each, and what it does is not waited for."""

    def once(run: Run) -> float:
        clock.synchronize()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return _in_turns(runs, rounds, warm_up, once)


def device(runs: Mapping[str, Run], rounds: int, repeats: int = 10, warm_up: int = 3) -> dict[str, Spread]:
    """Seconds that the device takes for each run, out of ``repeats`` back to back between two events. CUDA only.

    They mean the device's own time where a run keeps it busy for longer than the host takes to launch it.
    """

    def once(run: Run) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        clock.synchronize()
        run()  # while this one runs, the host gets ahead
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        clock.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeats

    return _in_turns(runs, rounds, warm_up, once)


def _in_turns(runs: Mapping[str, Run], rounds: int, warm_up: int, once: Callable[[Run], float]) -> dict[str, Spread]:
    """Each run once a round, every round beginning with another one, so that none always comes after the same."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    with _no_collection():
        for i in range(warm_up + rounds):
            first = i % len(names)
            for name in names[first:] + names[:first]:
                seconds = once(runs[name])
                if i >= warm_up:
                    taken[name].append(seconds)
    clock.synchronize()
    return {name: Spread.of(seconds) for name, seconds in taken.items()}


@contextmanager
def _no_collection() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
