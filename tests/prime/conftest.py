"""Trunks for the tests: the tiny dense one, and the hybrid of the examples."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from segue.check import tiny_trunk
from segue.devices import Device

_HYBRID = Path(__file__).parents[2] / "examples" / "hybrid.py"


def _load() -> ModuleType:
    if "hybrid" not in sys.modules:
        spec = importlib.util.spec_from_file_location("hybrid", _HYBRID)
        assert spec is not None and spec.loader is not None
        sys.modules["hybrid"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["hybrid"])
    return sys.modules["hybrid"]


@pytest.fixture
def hybrid() -> ModuleType:
    """examples/hybrid.py."""
    return _load()


@pytest.fixture(params=["dense", "hybrid"])
def trunk(request: pytest.FixtureRequest, device: Device) -> Any:
    """Each of the two trunks, on the device."""
    return (tiny_trunk if request.param == "dense" else _load()).build(device.torch_device.type)


@pytest.fixture
def dense_trunk(device: Device) -> Any:
    """The dense one."""
    return tiny_trunk.build(device.torch_device.type)
