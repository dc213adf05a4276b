"""Random forwards: every replay equals its reference bit for bit, and eager to rounding where padding can't show."""

from __future__ import annotations

import pytest
from hypothesis import given, note

from property.budget import CUDA, budget
from property.play import Bare, Served
from property.strategies import BareCase, RunnerCase, bare_cases, runner_cases
from segue import devices
from segue.devices import Device


def _bare(case: BareCase, device: Device) -> None:
    note(f"{case.program}\n{case.program.code()}")
    Bare(case, device).play()


def _runner(case: RunnerCase, device: Device) -> None:
    note(f"{case.program}\n{case.program.code()}")
    Served(case, device).play()


@budget(160, 4000)
@given(bare_cases())
def test_a_random_forward_replays_as_its_reference(case: BareCase) -> None:
    _bare(case, devices.resolve("emulator"))


@budget(110, 2000)
@given(runner_cases())
def test_a_random_forward_in_a_runner_answers_as_its_reference(case: RunnerCase) -> None:
    _runner(case, devices.resolve("emulator"))


@pytest.mark.cuda
@CUDA
@budget(60, 600)
@given(bare_cases())
def test_a_random_forward_replays_as_its_reference_on_cuda(case: BareCase) -> None:
    _bare(case, devices.resolve("cuda"))


@pytest.mark.cuda
@CUDA
@budget(40, 400)
@given(runner_cases())
def test_a_random_forward_in_a_runner_answers_as_its_reference_on_cuda(case: RunnerCase) -> None:
    _runner(case, devices.resolve("cuda"))
