"""Fixtures shared by all tests: each scenario runs on the emulator, and on CUDA where there is one."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from segue import devices
from segue.devices import Device


@pytest.fixture(params=["emulator", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Device:
    """A device that records segments."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return devices.resolve(request.param)


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    """Each capture collects garbage first, which takes long with all that a test run has imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def inference() -> Iterator[None]:
    """Inference mode for the whole test, as the runner captures under."""
    with torch.inference_mode():
        yield
