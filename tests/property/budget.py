"""How many programs a property test draws. ``SEGUE_FUZZ=nightly`` runs thousands with fresh seeds; ``SEGUE_FUZZ_EXAMPLES`` sets
how many."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

NIGHTLY = os.environ.get("SEGUE_FUZZ") == "nightly"
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def budget(usual: int, nightly: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Few programs, always the same, or with SEGUE_FUZZ=nightly many, never the same."""
    examples = int(os.environ.get("SEGUE_FUZZ_EXAMPLES", "0")) or (nightly if NIGHTLY else usual)
    return settings(
        max_examples=examples,
        derandomize=not NIGHTLY,
        database=None,
        deadline=None,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
