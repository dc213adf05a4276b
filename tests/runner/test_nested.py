"""A runner inside another forward: in a break it serves, elsewhere it would take padded rows for real ones."""

from __future__ import annotations

import pytest
import torch

import segue
from runner.rows import close
from segue.errors import UsageError
from segue.runner import Input

INPUTS = {"x": Input(0, 0.0)}


def test_a_runner_called_in_another_forward_is_refused_until_it_is_called_in_a_break(make, model):
    inner = make(model, buckets=[4, 8])
    outer = make(lambda x: inner(x) + 1, INPUTS, [4, 8])
    for n in (3, 3, 3, 6):
        with pytest.raises(UsageError, match=r"inside the warm-up, reference or capture of another forward.*break point"):
            outer(model.x(n))
        with pytest.raises(UsageError, match=r"Call it in a break point"):
            outer.reference(model.x(n))
        assert close(inner(model.x(n)), model(model.x(n)))  # captured by now, too
    live = segue.break_point(trim=("x",))(lambda x: inner(x))
    right = make(lambda x: live(x * 1) + 1, INPUTS, [4, 8])
    for i in range(4):
        assert close(right(model.x(3, i)), model(model.x(3, i)) + 1)
    assert right.stats.replayed == 2


def test_a_runner_called_in_a_bare_capture_is_refused(make, model, device):
    runner, x = make(model, buckets=[4]), model.x(3)
    with torch.inference_mode(), pytest.raises(UsageError, match=r"outside a break"), segue.BreakableCapture(device=device):
        runner(x)
    assert close(runner(model.x(3)), model(model.x(3)))


def test_an_eager_call_of_the_outer_runner_may_call_the_inner_one(make, model):
    inner = make(model, buckets=[4, 32])
    outer = make(lambda x: inner(x) + 1, INPUTS, [4])
    for i in range(4):
        assert close(outer(model.x(20, i)), model(model.x(20, i)) + 1)
    assert inner.stats.replayed == 2
