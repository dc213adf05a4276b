"""What a runner's call costs the host over the bare replay: admission, staging four inputs, one output of the caller's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from segue.bench import rounds
from segue.bench.rounds import Run
from segue.devices import Device
from segue.runner import GraphRunner, Input

Row = dict[str, Any]
ADDS = 7  # eager in-place adds whose host time the added cost is held against


@dataclass(frozen=True)
class Result:
    """One row a way of running the call; ``added`` and ``allowed`` in seconds, None without a device that has time."""

    rows: list[Row]
    added: float | None
    allowed: float | None
    right: bool
    notes: list[str] = field(default_factory=list)


def forward(x: Tensor, residual: Tensor, scale: Tensor, positions: Tensor) -> Tensor:
    """[rows, width], twice; [width]; [rows] int64. Small kernels, so that the host sets the pace."""
    return (x * scale + residual).relu() + positions[:, None]


def measure(
    device: Device, tokens: int = 50, bucket: int = 64, width: int = 64, times: int = 300, progress: Callable[[str], None] = print
) -> Result:
    """Run each way in turns, ``times`` rounds."""
    place = device.torch_device
    x, residual = torch.randn(tokens, width, device=place), torch.randn(tokens, width, device=place)
    scale, positions = torch.randn(width, device=place), torch.arange(tokens, device=place)
    tokenwise = {"x": Input(token_dim=0, pad=0.0), "residual": Input(token_dim=0, pad=0.0)}
    runner = GraphRunner(
        forward,
        inputs={**tokenwise, "scale": Input(token_dim=None), "positions": Input(token_dim=0, pad=0)},
        buckets=[bucket],
        device=device,
    )
    with runner, torch.inference_mode():
        progress("capturing")
        call: Run = lambda: runner(x, residual, scale, positions)  # noqa: E731
        call()
        call()
        runs: dict[str, Run] = {"bare replay": _bare(runner, tokens), "runner": call, f"{ADDS} in-place adds": _adds(x)}
        hand = _by_hand(tokens, bucket, x, residual, scale, positions)
        if hand is not None:
            runs["make_graphed_callables, padded and copied by hand"] = hand
        want = runner.reference(x, residual, scale, positions)
        verdicts = {name: _verdict(run(), want) for name, run in runs.items()}
        progress("measuring")
        taken = rounds.host(runs, times) if device.traits.timing else {}
    rows: list[Row] = []
    for name in runs:
        row: Row = {"call": name, "host us": None, "quartiles us": None}
        if taken:
            row |= {"host us": f"{taken[name].median * 1e6:.1f}", "quartiles us": str(taken[name])}
        rows.append({**row, "output = reference": verdicts[name]})
    added = taken["runner"].median - taken["bare replay"].median if taken else None
    allowed = taken[f"{ADDS} in-place adds"].median if taken else None
    notes = [f"{tokens} tokens in a bucket of {bucket}, width {width}, fp32, inference mode"]
    if added is not None and allowed is not None:
        notes.append(f"Over the bare replay: {added * 1e6:.1f} us; {ADDS} in-place adds: {allowed * 1e6:.1f} us.")
    else:
        notes.append(f"Device {device.name}: no time is meant, only the verdicts.")
    return Result(rows, added, allowed, all(v in ("", "bit for bit") for v in verdicts.values()), notes)


def _verdict(got: object, want: Tensor) -> str:
    if not isinstance(got, Tensor):
        return ""
    return "bit for bit" if torch.equal(got, want) else f"differs by up to {(got - want).abs().max().item():.3g}"


def _bare(runner: GraphRunner, tokens: int) -> Run:
    buckets = runner._buckets
    assert buckets is not None
    replay = next(iter(buckets.graphs.values())).program.replay
    return lambda: replay(tokens)


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
