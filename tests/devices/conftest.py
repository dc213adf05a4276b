"""Fixtures for tests against the device protocol, run on the emulator and, where there is one, on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from segue import _source_lines, _torch
from segue.devices import Device, Pool, Recording, Segment, resolve
from segue.devices.cuda.op_checks import OpChecks

_source_lines._SKIPPED = (*_source_lines._SKIPPED, __file__)  # the modes below stand for segue's own

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


class Passing(_torch.WatchingMode):
    """Hands every op to a recording, as the capture's own mode does."""

    recording: Recording

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self.recording.run(func, args, kwargs or {})


class Checking(_torch.WatchingMode):
    """Hands ops to the checks of a CUDA segment. Tensors without memory stand for the device's: the same ops arrive for them."""

    def __init__(self) -> None:
        super().__init__()
        self.checks = OpChecks()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self.checks.run(func, args, kwargs or {})


class Sandbox:
    """A device with a pool of its own, and the few lines that a capture needs."""

    def __init__(self, device: Device, pool: Pool | None = None) -> None:
        self.device = device
        self.pool = device.new_pool() if pool is None else pool
        self.token = object()
        self.segments: list[Segment] = []
        self.pool.attach(self.token)

    def tensor(self, *values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device.torch_device)

    def record(self, *parts: Callable[[], Any]) -> tuple[Segment, Any]:
        """Record each part as a segment and launch it. Returns the last segment and what the last part returned."""
        out: Any = None
        with self.pool.turn(), self.device.on_capture_stream(self.pool, self.device.default_stream()):
            for part in parts:
                mode = Passing()
                recording = mode.recording = self.device.begin(self.pool)
                recording.reenter = mode
                try:
                    with mode:
                        out = part()
                except BaseException:
                    recording.abort()
                    raise
                segment = recording.commit()
                self.segments.append(segment)
                segment.launch()
        return self.segments[-1], out

    def launch(self, *segments: Segment) -> None:
        with self.pool.turn():
            for s in segments:
                s.launch()
        self.device.synchronize()

    def close(self) -> None:
        self.pool.retire(self.token, self.segments)
        self.segments = []


@pytest.fixture(params=["emulator", CUDA])
def device(request: pytest.FixtureRequest) -> Device:
    """Each device there is."""
    return resolve(request.param)


@pytest.fixture
def lab(device: Device) -> Iterator[Sandbox]:
    """Each device there is, with a pool of its own."""
    made = Sandbox(device)
    with torch.inference_mode():
        yield made
    made.close()


@pytest.fixture
def emulated() -> Iterator[Sandbox]:
    """The emulator with a pool of its own that poisons what is freed."""
    made = Sandbox(resolve("emulator"))
    made.pool.poison_freed = True  # type: ignore[attr-defined]
    with torch.inference_mode():
        yield made
    made.close()
