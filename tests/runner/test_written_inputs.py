"""What a forward writes into an input is found in the caller's tensor, as after an eager call."""

from __future__ import annotations

import pytest
import torch

import segue
from runner.rows import close
from segue.runner import Input

INPUTS = {"x": Input(0, 0.0), "cache": Input()}


def by_a_segment(x, cache):
    cache.add_(x.sum(0))
    return x + cache


def by_a_fused_op(x, cache):
    torch._foreach_add_([cache], [x.sum(0)])
    return x + cache


@segue.break_point(trim=("x",))
def _write(x, cache):
    cache.add_(x.sum(0))
    return x + cache


def by_a_break(x, cache):
    return _write(x * 1, cache)


@segue.break_point(trim=("x",))
def _double(x):
    x.mul_(2)


def rows_by_a_break(x, cache):
    _double(x)
    return x + cache


@pytest.mark.parametrize("fn", [by_a_segment, by_a_fused_op, by_a_break, rows_by_a_break])
@pytest.mark.parametrize("home", ["device", "cpu"])
@pytest.mark.parametrize("outputs", ["copy", "lease"])
def test_every_way_a_call_runs_writes_the_callers_tensor_as_eager_does(make, model, fn, home, outputs):
    runner = make(fn, INPUTS, [4, 8], outputs=outputs)
    place = model.device if home == "device" else torch.device("cpu")
    cache = torch.zeros(4, device=place)
    expected = torch.zeros(4, device=model.device)
    for i, n in enumerate((3, 3, 3, 8, 8, 8, 2, 99, 4, 0)):  # warm-up, capture, replays, eager, long then short
        x = model.x(n, i).to(place)
        mine = x.to(model.device, copy=True)
        got, want = runner(x, cache), fn(mine, expected)
        assert close(got if outputs == "copy" else got.value, want)
        assert close(cache.to(model.device), expected) and close(x.to(model.device), mine)
    assert runner.stats.replayed >= 4 and runner.stats.eager == 1


def test_only_what_was_written_is_copied_back(make, model):
    runner = make(by_a_break, INPUTS, [4])
    x, cache = model.x(3), torch.zeros(4, device=model.device)
    for _ in range(5):
        before, written = x._version, cache._version
        runner(x, cache)
        assert x._version == before and cache._version > written


def test_a_reference_and_an_explicit_capture_leave_the_callers_tensors_alone(make, model):
    runner = make(by_a_break, INPUTS, [4, 8])
    x, cache = model.x(3), torch.ones(4, device=model.device)
    want = by_a_break(x, cache.clone())
    assert close(runner.reference(x, cache), want) and torch.equal(cache, torch.ones_like(cache))
    runner.capture(x, cache)
    assert torch.equal(cache, torch.ones_like(cache))
    assert close(runner(x, cache), want) and not torch.equal(cache, torch.ones_like(cache))
    assert runner.stats.replayed == 1


def test_an_inference_tensor_and_a_strided_one_are_written_outside_inference_mode_too(make, model):
    runner = make(by_a_segment, INPUTS, [4])
    with torch.inference_mode():
        born = torch.zeros(4, device=model.device)
    strided = torch.zeros(4, 2, device=model.device)[:, 0]
    for i in range(4):
        runner(model.x(3, i), born)
        runner(model.x(3, i), strided)
    assert close(born.clone(), strided.clone()) and born.any()
