"""Runners for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runner.rows import Model
from segue.devices import Device
from segue.runner import GraphRunner, Input


@pytest.fixture
def model(device: Device) -> Model:
    return Model(device.torch_device)


@pytest.fixture
def make(device: Device) -> Callable[..., GraphRunner]:
    """A runner in a pool of its own, so that its memory can be poisoned and closed without touching others."""

    def runner(fn: Any, inputs: Any = None, buckets: Any = (4, 8, 16), **options: Any) -> GraphRunner:
        inputs = inputs if inputs is not None else {"x": Input(0, 0.0), "bias": Input(optional=True)}
        options.setdefault("pool", device.new_pool())
        return GraphRunner(fn, inputs=inputs, buckets=buckets, device=device, progress=False, **options)

    return runner
