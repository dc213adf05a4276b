"""Random forwards: those in which padding can't show pass, none is said to replay otherwise, and a check leaves no trace."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings

from property.play import Served, compare, values, written_copies_refused
from property.strategies import RunnerCase, runner_cases
from segue import devices


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    log = logging.getLogger("segue")
    level, threads = log.level, torch.get_num_threads()
    log.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    yield
    log.setLevel(level)
    torch.set_num_threads(threads)


@settings(
    max_examples=20, derandomize=True, database=None, deadline=None, phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(runner_cases())
def test_a_random_forward_is_checked_and_left_as_it_was(case: RunnerCase) -> None:
    note(case.program.code())
    with written_copies_refused():
        _check(case)


def _check(case: RunnerCase) -> None:
    served = Served(case, devices.resolve("emulator"))
    runner, world = served.runners[0], served.worlds[0]
    before = world.clone()
    bias = {"bias": values(5, 50, served.place)} if case.biased & 1 else {}
    report = runner.check(values(5, 0, served.place), ctx=world.context, **bias)
    compare("check() left a trace: world tensor", world.tensors(), before.tensors())
    kinds = {finding.kind for finding in report.findings if "writes what a break returned" not in finding.text}
    assert kinds <= {"padding"}, str(report)
    assert not kinds or not (case.program.token_wise and case.program.smooth), str(report)
    for one in served.runners:
        one.close()
