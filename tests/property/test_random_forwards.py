"""Random forwards: every replay equals its reference bit for bit, and eager to rounding where padding can't show.

``SEGUE_FUZZ=nightly`` runs thousands of programs with fresh seeds; ``SEGUE_FUZZ_EXAMPLES`` sets how many.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings

from property.play import Bare, Served
from property.strategies import BareCase, RunnerCase, bare_cases, runner_cases
from segue import devices
from segue.devices import Device

_NIGHTLY = os.environ.get("SEGUE_FUZZ") == "nightly"
_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def _budget(usual: int, nightly: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Few programs, always the same, or with SEGUE_FUZZ=nightly many, never the same."""
    examples = int(os.environ.get("SEGUE_FUZZ_EXAMPLES", "0")) or (nightly if _NIGHTLY else usual)
    return settings(
        max_examples=examples,
        derandomize=not _NIGHTLY,
        database=None,
        deadline=None,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


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


def _bare(case: BareCase, device: Device) -> None:
    note(f"{case.program}\n{case.program.code()}")
    Bare(case, device).play()


def _runner(case: RunnerCase, device: Device) -> None:
    note(f"{case.program}\n{case.program.code()}")
    Served(case, device).play()


@_budget(160, 4000)
@given(bare_cases())
def test_a_random_forward_replays_as_its_reference(case: BareCase) -> None:
    _bare(case, devices.resolve("emulator"))


@_budget(110, 2000)
@given(runner_cases())
def test_a_random_forward_in_a_runner_answers_as_its_reference(case: RunnerCase) -> None:
    _runner(case, devices.resolve("emulator"))


@pytest.mark.cuda
@_CUDA
@_budget(60, 600)
@given(bare_cases())
def test_a_random_forward_replays_as_its_reference_on_cuda(case: BareCase) -> None:
    _bare(case, devices.resolve("cuda"))


@pytest.mark.cuda
@_CUDA
@_budget(40, 400)
@given(runner_cases())
def test_a_random_forward_in_a_runner_answers_as_its_reference_on_cuda(case: RunnerCase) -> None:
    _runner(case, devices.resolve("cuda"))
