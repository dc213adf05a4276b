"""Two processes that run a test's functions side by side, as ranks of one process group."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PATIENCE = 60  # seconds for an answer


class TwoRanks:
    """Calls functions of a module in both processes, with the device of the rank, in inference mode."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def __call__(self, scenario: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``scenario(device, *args)`` returns on each rank. An error there is an error here."""
        for pipe in self._pipes:
            pipe.send((scenario, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(_PATIENCE), f"rank {rank} gives no answer to {scenario.__name__}"
            answers.append(pipe.recv())
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]


@contextlib.contextmanager
def two_ranks(device: str) -> Iterator[TwoRanks]:
    """Two ranks on ``device``: CPU processes with the emulator, or one GPU each."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(2)]
        arguments = [(rank, device, str(Path(folder) / "rendezvous"), ends[rank][1]) for rank in range(2)]
        processes = [context.Process(target=_serve, args=a, daemon=True) for a in arguments]
        for process in processes:
            process.start()
        try:
            yield TwoRanks([mine for mine, _ in ends])
        finally:
            for mine, _ in ends:
                with contextlib.suppress(OSError):
                    mine.send(None)
            for process in processes:
                process.join(5)
                process.kill()


def _serve(rank: int, device: str, meeting: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")  # as torchrun does
    place = torch.device("cpu" if device == "emulator" else f"cuda:{rank}")
    backend = "gloo"
    if place.type == "cuda":
        torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=2)
    while (request := pipe.recv()) is not None:
        scenario, args = request
        try:
            with torch.inference_mode():
                pipe.send(("", scenario(place, *args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
