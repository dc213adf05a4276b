"""Replays have named ranges in a profile, and none where nobody profiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import segue
from segue.capture import named_ranges, program
from segue.capture.named_ranges import PREFIX, named
from segue.check.tiny_trunk import build
from segue.devices import Device
from segue.prime import PrimeGraph
from segue.runner import GraphRunner, Input, captured_bucket

_LINE = "capture/test_named_ranges.py"


@segue.break_point
def between(x: Tensor) -> Tensor:
    return x + 1


def _forward(x: Tensor) -> Tensor:
    return between(between(x * 2) * 3) * 4


def _ranges(run: Any) -> list[str]:
    """The named ranges while ``run()`` runs under a profiler, in order."""
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        run()
    found = [e for e in profiler.events() if e.name.startswith(PREFIX)]
    return [e.name.removeprefix(PREFIX) for e in sorted(found, key=lambda e: e.time_range.start)]


def test_a_runners_replay_names_staging_segments_breaks_and_outputs(device: Device) -> None:
    x = torch.randn(3, 2, device=device.torch_device)
    with GraphRunner(_forward, {"x": Input(0, 0.0)}, [4], device=device, progress=False) as runner, torch.inference_mode():
        want = [runner(x) for _ in range(3)][-1]
        got: list[Tensor] = []
        ranges = _ranges(lambda: got.append(runner(x)))
        assert torch.equal(got[0], want)
    break_range = f"break between ({_LINE}:{between.__wrapped__.__code__.co_firstlineno})"
    assert ranges == ["staging, bucket 4", "segment 0", break_range, "segment 1", break_range, "segment 2", "outputs"]


def test_a_prime_graphs_run_names_staging_segments_and_the_copy_out(device: Device) -> None:
    trunk = build().to(device.torch_device)
    with PrimeGraph(trunk, bucket=8, cuts=(), device=device) as prime:
        ranges = _ranges(lambda: prime.run([1, 2, 3], trunk.new_cache(8)))
    assert ranges == ["staging, bucket 8", "segment 0", "outputs", "copy-out"]


def test_nothing_is_made_where_nobody_profiles(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(what: str) -> Any:
        raise AssertionError(f"a range for {what}")

    for module in (named_ranges, program):
        monkeypatch.setattr(module, "range_of", refuse)
    monkeypatch.setattr(captured_bucket, "named", refuse)
    assert named("anything", len) is len
    x = torch.randn(3, 2, device=device.torch_device)
    with GraphRunner(_forward, {"x": Input(0, 0.0)}, [4], device=device, progress=False) as runner, torch.inference_mode():
        for _ in range(3):
            runner(x)
