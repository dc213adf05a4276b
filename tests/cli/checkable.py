"""Factories for the tests of ``segue check`` and ``segue inspect``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import segue
from segue.runner import GraphRunner, Input

WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@segue.break_point(trim=("x",))
def mix(x: Tensor) -> Tensor:
    return x + x.mean(0) if len(x) else x


def _forward(x: Tensor) -> Tensor:
    return mix(torch.relu(x @ WEIGHT)) * 2


def _faulty(x: Tensor) -> Tensor:
    return (x @ WEIGHT).softmax(0)  # mixes rows


def _scaled(x: Tensor) -> Tensor:
    return mix(x @ WEIGHT) * segue.current_forward_ctx()["scale"]  # freezes


def _runner(fn: Any) -> GraphRunner:
    return GraphRunner(fn, {"x": Input(0, 0.0)}, [4, 8], device="emulator", progress=False)


def right() -> Any:
    return _runner(_forward), (torch.randn(5, 4),), {}


def faulty() -> Any:
    return _runner(_faulty), (), {"x": torch.randn(5, 4)}


def frozen() -> Any:
    return _runner(_scaled), (torch.randn(5, 4),), {}, lambda n: {"scale": 1.0 / n}


def alone() -> Any:
    inputs = {"x": Input(0, 0.0, shape=(None, 4), dtype=torch.float32)}
    return GraphRunner(_forward, inputs, [4], device="emulator", progress=False)


def nothing() -> Any:
    return "a runner", 1


def trunk() -> Any:
    from segue.check.tiny_trunk import Dense

    return Dense().eval().requires_grad_(False)


def graph() -> Any:
    return segue.PrimeGraph(trunk(), bucket=4, device="emulator")


def fault(fn: str) -> str:
    """``cli/checkable.py:12 in fn`` of a planted line."""
    code = globals()[fn].__code__
    return f"cli/checkable.py:{code.co_firstlineno + 1} in {fn}"


def chatty() -> Any:
    print("loading")
    return _runner(_chatty), (torch.randn(5, 4),), {}


def _chatty(x: Tensor) -> Tensor:
    print("running")
    return _forward(x)


def raising() -> Any:
    raise ValueError("no weights here")


def raising_forward() -> Any:
    return _runner(_raise), (torch.randn(5, 4),), {}


def _raise(x: Tensor) -> Tensor:
    raise ValueError("no forward here")


def contextual() -> Any:
    return _runner(_times_scale), (torch.randn(5, 4),), {}, {"scale": torch.ones(4)}


def _times_scale(x: Tensor) -> Tensor:
    return mix(x * segue.current_forward_ctx()["scale"])
