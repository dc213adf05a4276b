"""What a runner's call costs the host over the bare replay: admission, staging of four inputs, a copy of one output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue.bench import timing
from segue.bench.result import SAME, BenchResult, Row
from segue.bench.timing import Run, Spread
from segue.devices import Device, Pool
from segue.runner import Breakable, CapturedForward, GraphRunner, Input, Job

ADDS = 7  # eager in-place adds whose host time the added cost is held against


@dataclass(frozen=True, kw_only=True)
class CallCost(BenchResult):
    """What a call costs; one row for each way of running it.

    ``added``: seconds that a runner's call takes over the bare replay. ``allowed``: seconds of the in-place adds. Both are None
    on a device without timing.
    """

    title = "What a runner's call costs"

    rows: list[Row]
    added: float | None
    allowed: float | None

    @property
    def tables(self) -> dict[str, list[Row]]:
        """The rows under the titles that are printed above them."""
        return {"One call": self.rows}


def forward(x: Tensor, residual: Tensor, scale: Tensor, positions: Tensor) -> Tensor:
    """A forward of small kernels, so that the host sets the pace.

    ``x`` and ``residual`` [rows, width], ``scale`` [width], ``positions`` [rows] int64. Returns [rows, width].
    """
    return (x * scale + residual).relu() + positions[:, None]


def measure(
    device: Device, tokens: int = 50, bucket: int = 64, width: int = 64, times: int = 300, progress: Callable[[str], None] = print
) -> CallCost:
    """Run each way in turns, ``times`` rounds, with ``tokens`` real rows in a bucket of ``bucket`` rows."""
    place = device.torch_device
    x, residual = torch.randn(tokens, width, device=place), torch.randn(tokens, width, device=place)
    scale, positions = torch.randn(width, device=place), torch.arange(tokens, device=place)
    tokenwise = {"x": Input(token_dim=0, pad=0.0), "residual": Input(token_dim=0, pad=0.0)}
    strategy = _Kept()
    runner = GraphRunner(
        forward,
        inputs={**tokenwise, "scale": Input(token_dim=None), "positions": Input(token_dim=0, pad=0)},
        buckets=[bucket],
        device=device,
        strategies=[strategy],
    )
    with runner, torch.inference_mode():
        progress("capturing")
        call: Run = lambda: runner(x, residual, scale, positions)  # noqa: E731
        call()
        call()
        runs: dict[str, Run] = {"bare replay": _bare(strategy, tokens), "runner": call, f"{ADDS} in-place adds": _adds(x)}
        hand = _by_hand(tokens, bucket, x, residual, scale, positions)
        if hand is not None:
            runs["make_graphed_callables, padded and copied by hand"] = hand
        want = runner.reference(x, residual, scale, positions)
        verdicts = {name: _verdict(run(), want) for name, run in runs.items()}
        progress("measuring")
        taken = timing.host_in_turns(runs, times) if device.traits.timing else {}
    rows = [_row(name, taken.get(name), verdict) for name, verdict in verdicts.items()]
    added = taken["runner"].median - taken["bare replay"].median if taken else None
    allowed = taken[f"{ADDS} in-place adds"].median if taken else None
    notes = [f"{tokens} tokens in a bucket of {bucket}, width {width}, fp32, inference mode"]
    if added is not None and allowed is not None:
        notes.append(f"Over the bare replay: {added * 1e6:.1f} us; {ADDS} in-place adds: {allowed * 1e6:.1f} us.")
    else:
        notes.append(f"Device {device.name}: no time is meant, only the verdicts.")
    notes.append(
        f"Medians of {times} rounds, all in turns, with the quartiles beside them. *host*: how long the call keeps the host."
    )
    right = all(v in ("", SAME) for v in verdicts.values())
    return CallCost(rows=rows, added=added, allowed=allowed, right=right, notes=notes)


def _row(name: str, taken: Spread | None, verdict: str) -> Row:
    times = (None, None) if taken is None else (f"{taken.median * 1e6:.1f}", str(taken))
    return {"call": name, "host us": times[0], "quartiles us": times[1], "output = reference": verdict}


def _verdict(got: object, want: Tensor) -> str:
    if not isinstance(got, Tensor):
        return ""
    return SAME if torch.equal(got, want) else f"differs by up to {(got - want).abs().max().item():.3g}"


class _Kept(Breakable):
    """Keeps what it captured last, so that it can be replayed without the runner."""

    captured: CapturedForward
    pool: Pool

    def capture(self, job: Job) -> CapturedForward:
        self.captured, self.pool = super().capture(job), job.pool
        return self.captured


def _bare(strategy: _Kept, tokens: int) -> Run:
    replay, turn = strategy.captured.replay, strategy.pool.turn()

    def run() -> None:
        with turn:
            replay(tokens)

    return run


def _adds(x: Tensor) -> Run:
    t = torch.zeros_like(x)

    def run() -> None:
        for _ in range(ADDS):
            t.add_(1)

    return run


def _by_hand(tokens: int, bucket: int, *inputs: Tensor) -> Run | None:
    """The same call as one writes it without a runner. None where there is no CUDA."""
    if inputs[0].device.type != "cuda":
        return None
    sizes = [(bucket, *t.shape[1:]) if t.shape[0] == tokens else tuple(t.shape) for t in inputs]
    with torch.inference_mode(False), torch.no_grad():
        static = [torch.zeros(size, dtype=t.dtype, device=t.device) for size, t in zip(sizes, inputs, strict=True)]
        graphed: Any = torch.cuda.make_graphed_callables(forward, tuple(static))

    def run() -> Tensor:
        for buffer, t in zip(static, inputs, strict=True):
            if buffer.shape == t.shape:
                buffer.copy_(t)
            else:
                buffer[:tokens].copy_(t)
                buffer[tokens:].zero_()
        out: Tensor = graphed(*static)
        return out[:tokens].clone()

    return run
