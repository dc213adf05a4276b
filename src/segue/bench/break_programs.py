"""The programs that ``segue bench breaks`` measures: small graphs with breaks between them, bare launches, and a rival's."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue.bench.result import SAME
from segue.bench.timing import Run
from segue.capture import BreakableCapture, break_point, reference_frame
from segue.capture.break_points import Break
from segue.devices import Device, Segment

RIVAL = "breakable-cuda-graphs"


@dataclass(frozen=True)
class ProgramSize:
    """The size of a program. A segment is ``steps`` times three elementwise kernels over [rows, width] bf16."""

    cuts: int = 32
    steps: int = 1
    rows: int = 128
    valid: int = 100  # rows that are real where a tail is to be cleared
    width: int = 1024
    layers: int = 28  # of eleven parameters each, to look after
    long_rows: int = 2048  # for the gap: segments that take the device much longer than the host
    long_steps: int = 4


def _step(y: Tensor) -> Tensor:
    return y.mul_(0.97).add_(0.03).clamp_(-3.0, 3.0)


class BreakProgram:
    """A program over fixed buffers [rows, width] bf16: ``x``, its input, and ``y``, its result, which it writes in place.

    ``join(y)`` is called between two segments.
    """

    def __init__(self, device: Device, size: ProgramSize, rows: int, join: Callable[[Tensor], object], steps: int) -> None:
        self._size, self._join, self._steps = size, join, steps
        self.x, self.y = (
            torch.zeros(rows, size.width, dtype=torch.bfloat16, device=device.torch_device) for _ in range(2)
        )

    def __call__(self, x: Tensor | None = None, y: Tensor | None = None) -> None:
        x, y = (self.x, self.y) if x is None or y is None else (x, y)
        y.copy_(x)
        for i in range(self._size.cuts + 1):
            if i:
                self._join(y)
            for _ in range(self._steps):
                _step(y)

    def verdict(self, replay: Run, capture: BreakableCapture | None, valid: int | None = None) -> str:
        """:data:`SAME` if ``replay`` gives what the reference gives, padded rows included, and on the ``valid`` rows what eager
        gives; otherwise the largest difference.
        """
        self.x.copy_(torch.randn(self.x.shape, generator=torch.Generator().manual_seed(7)))
        n = self.x.shape[0] if valid is None else valid
        eager = torch.empty_like(self.x[:n])
        self(self.x[:n], eager)
        reference = torch.empty_like(self.x)
        with reference_frame(self.x.shape[0], valid):
            self(self.x, reference)
        self.y.fill_(float("nan"))
        if capture is not None:
            capture.pool.poison()
        replay()
        if not torch.equal(self.y, reference):
            return f"NO: off the reference by {off(self.y, reference)}"
        return SAME if torch.equal(self.y[:n], eager) else f"NO: off eager by {off(self.y[:n], eager)}"


def off(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors."""
    return (a.float() - b.float()).abs().max().item()


def _idle() -> None:
    return None


_nothing = break_point(_idle)


def no_op(_: Tensor) -> None:
    """A break that does nothing."""
    _nothing()


def go_on(_: Tensor) -> None:
    """No break."""


def captured(device: Device, program: BreakProgram, valid: int | None = None) -> BreakableCapture:
    """The program captured, after a warm-up. ``valid``: how many of its rows are real."""
    rows = program.x.shape[0]
    program.x.fill_(1.0)
    with reference_frame(rows, valid):
        program()
    with BreakableCapture(rows=rows, device=device, valid_rows=valid) as capture:
        program()
    return capture


def loop(calls: list[Run]) -> Run:
    """One run that makes these calls in order."""

    def run() -> None:
        for call in calls:
            call()

    return run


def launches(capture: BreakableCapture) -> Run:
    """One run that launches the graphs of a capture with nothing between them."""
    return loop([segment.launch for segment in _segments(capture)])


def bare_loops(capture: BreakableCapture) -> dict[str, Run]:
    """Runs that launch the graphs of a capture with nothing between them: by torch's Python method, on CUDA, and without it."""
    loops = {"bare, launched as segue does": launches(capture)}
    graphs: list[Any] = [getattr(segment, "graph", None) for segment in _segments(capture)]
    if all(isinstance(graph, torch.cuda.CUDAGraph) for graph in graphs):
        loops = {"bare, CUDAGraph.replay": loop([graph.replay for graph in graphs]), **loops}
    return loops


def rival_of(
    device: Device, program_of: Callable[[Callable[[Tensor], object]], BreakProgram], notes: list[str]
) -> tuple[BreakProgram, Run] | None:
    """The program and its replay by the PyPI package :data:`RIVAL`.

    None where there is no CUDA, or the package is not installed or fails; for these two ``notes`` gets a line.
    """
    if device.torch_device.type != "cuda":
        return None
    try:
        other: Any = importlib.import_module("breakable_cuda_graphs")
    except ImportError:
        notes.append(f"{RIVAL} is not installed, so its rows are missing (pip install --no-deps {RIVAL}).")
        return None
    nothing = other.no_graph(_idle)
    program = program_of(lambda _: nothing())
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            program()
        torch.cuda.current_stream().wait_stream(side)
        graph = other.BreakableCUDAGraph()
        with other.breakable_graph(graph):
            program()
    except Exception as e:
        notes.append(f"{RIVAL} could not record the program: {type(e).__name__}: {e}")
        return None
    notes.append(f"{RIVAL} {_version(RIVAL)}")
    return program, graph.replay


def _segments(capture: BreakableCapture) -> list[Segment]:
    return [step for step in capture.steps if not isinstance(step, Break)]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
