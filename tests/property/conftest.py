"""What every property test runs under."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """One thread, since tensors have a few rows; and no warnings that a forward has no break."""
    before, log = torch.get_num_threads(), logging.getLogger("segue")
    level = log.level
    torch.set_num_threads(1)
    log.setLevel(logging.ERROR)
    yield
    torch.set_num_threads(before)
    log.setLevel(level)
