"""What it costs the ranks of one host to agree on a call: over sockets, over gloo, and in a runner's call."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from segue.bench.result import BenchResult, Row
from segue.bench.timing import Run
from segue.runner import GraphRunner, Input
from segue.runner.rank_group import RankGroup

_NUMBERS = list(range(13))  # as many as ranks tell each other about a call


@dataclass(frozen=True, kw_only=True)
class RankAgreement(BenchResult):
    """What agreeing costs; one row for each way."""

    title = "What it costs ranks to agree on a call"

    rows: list[Row]

    @property
    def tables(self) -> dict[str, list[Row]]:
        """The rows under the title that is printed above them."""
        return {"Ranks of one host": self.rows}


def measure(ranks: int = 2, times: int = 300, progress: Callable[[str], None] = print) -> RankAgreement:
    """Start ``ranks`` processes on the CPU, and let them agree ``times`` times in each way, one way after the other."""
    progress(f"starting {ranks} processes")
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "rendezvous")
        processes = [context.Process(target=_rank, args=(rank, ranks, meeting, times, theirs)) for rank in range(ranks)]
        for process in processes:
            process.start()
        theirs.close()
        try:
            taken, right = mine.recv()
        finally:
            for process in processes:
                process.join()
    notes = [
        f"{ranks} processes, {times} times each way, microseconds on rank 0. Where processes share cores, the least says what it "
        "costs, and the median what it costs there. A runner's call is one replay on the emulator."
    ]
    return RankAgreement(rows=[_row(way, seconds) for way, seconds in taken.items()], right=right, notes=notes)


def _row(way: str, seconds: list[float]) -> Row:
    tenths = statistics.quantiles(seconds, n=10) if len(seconds) > 1 else seconds * 9
    found = {"least us": min(seconds), "median us": statistics.median(seconds), "nine in ten below us": tenths[-1]}
    return {"way": way, **{name: f"{value * 1e6:.1f}" for name, value in found.items()}}


def _rank(rank: int, ranks: int, meeting: str, times: int, result: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    world, runner_options = dist.group.WORLD, {"device": "emulator", "progress": False}
    x, inputs = torch.ones(3, 4), {"x": Input(token_dim=0, pad=0.0)}
    with (
        torch.inference_mode(),
        GraphRunner(_forward, inputs, [4], **runner_options) as alone,  # type: ignore[arg-type]
        GraphRunner(_forward, inputs, [4], **runner_options, group=world) as together,  # type: ignore[arg-type]
    ):
        sockets, gloo = RankGroup(world, 60), RankGroup(world, 60, sockets=False)
        reduced = torch.tensor(_NUMBERS)
        ways: dict[str, Run] = {
            "segue, over sockets of the host": lambda: sockets.largest(_NUMBERS),
            "segue, over gloo, as on several hosts": lambda: gloo.largest(_NUMBERS),
            "torch.distributed.all_reduce, gloo": lambda: dist.all_reduce(reduced, dist.ReduceOp.MAX),
            "a runner's call, group=": lambda: together(x),
            "a runner's call, no group": lambda: alone(x),
        }
        taken = {way: _seconds(run, times) for way, run in ways.items()}
        if rank == 0:
            result.send((taken, torch.equal(together(x), _forward(x)) and together.stats.replayed > 0))
        else:
            together(x)
        dist.barrier()
    dist.destroy_process_group()


def _forward(x: Tensor) -> Tensor:
    return x * 2


def _seconds(run: Run, times: int) -> list[float]:
    taken = []
    for i in range(times + 20):
        start = time.perf_counter()
        run()
        if i >= 20:
            taken.append(time.perf_counter() - start)
    return taken
