"""A sandbox works on a clone of a runner and sees the steps of its captures, through what any user could call."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

import segue
from segue.capture.break_points import Break
from segue.check.sandbox import Environment, Sandbox
from segue.check.trial_calls import AS_GIVEN, TrialCall
from segue.errors import UsageError
from segue.runner import GraphRunner, Input


@segue.break_point
def halves(x):
    y = x * 2
    return y, (y, x.sum(1))


def forward(x, bias=None):
    y, (same, total) = halves(x + 1)
    return y + same + total[:, None] + (0 if bias is None else bias)


INPUTS = {"x": Input(0, 0.0), "bias": Input(0, 0.0, optional=True)}


@pytest.fixture
def runner(device):
    made = GraphRunner(forward, INPUTS, [4, 8], device=device, progress=False, memory_budget=1 << 30, verify_every=1)
    yield made
    made.close()


def rows(n, device):
    return torch.linspace(-1, 1, n * 3, device=device.torch_device).view(n, 3)


def test_a_clone_answers_like_its_runner_from_graphs_and_counters_of_its_own(runner, device, inference):
    x = rows(3, device)
    for _ in range(3):
        want = runner(x)
    before, pool = runner.stats, device.new_pool()
    with runner.clone(pool) as clone:
        assert clone.pool is pool and clone.pool is not runner.pool and clone._budget is None and not clone.progress
        assert clone.stats.captured == 0, "graphs are its own"
        for _ in range(3):
            assert torch.equal(clone(x), want)
        assert clone.stats.captured == 1 and runner.stats == before
    assert torch.equal(runner(x), want), "closing the clone leaves the runner alone"


def test_a_clone_knows_what_calls_have_shown_of_the_inputs(runner, device, inference):
    runner(rows(3, device))
    with runner.clone(device.new_pool()) as clone, pytest.raises(segue.SegueError, match="shape"):
        clone(torch.ones(3, 5, device=device.torch_device))


def test_a_clone_is_quiet_about_a_capture_without_breaks_and_raises_where_the_runner_falls_back(device, inference, caplog):
    def fails(x):
        if segue.is_breakable_capture_active():
            raise RuntimeError("not in a capture")
        return x + 1

    x = rows(4, device)
    with (
        caplog.at_level(logging.WARNING, logger="segue"),
        GraphRunner(lambda x: x + 1, {"x": Input(0, 0.0)}, [4], device=device) as plain,
        plain.clone(device.new_pool()) as clone,
    ):
        clone(x), clone(x)
        assert clone.stats.captured == 1 and not caplog.records
    with (
        GraphRunner(fails, {"x": Input(0, 0.0)}, [4], device=device, on_failure="eager") as lenient,
        lenient.clone(device.new_pool()) as clone,
    ):
        clone(x)
        with pytest.raises(RuntimeError, match="not in a capture"):
            clone(x)


def test_a_call_with_other_tensors_is_of_the_variant_that_they_make(runner, device):
    sandbox = Sandbox(runner, Environment(forward, None, [], device.torch_device), device.new_pool())
    x = rows(3, device)
    bare, full = sandbox.example((x,), {}), sandbox.example((x, x), {})
    assert bare.key != full.key
    assert sandbox.binder.with_tensors(bare, [x, x]).key == full.key
    assert sandbox.binder.with_tensors(full, [x, None]).key == bare.key
    sandbox.close()


def test_a_runner_that_is_closed_cant_be_prepared(runner):
    runner.close()
    with pytest.raises(UsageError, match="closed"):
        runner.prepare()


def test_the_steps_of_a_captured_bucket_are_segments_and_breaks_with_their_calls_and_hand_offs(runner, device):
    sandbox = Sandbox(runner, Environment(forward, None, [], device.torch_device), device.new_pool())
    trial = TrialCall(AS_GIVEN, sandbox.example((rows(5, device),), {}), 8, None, 0)
    sandbox.capture(trial)
    capture = sandbox.plan(trial).capture
    assert capture is not None and [isinstance(step, Break) for step in capture.steps] == [False, True, False]
    (met,) = sandbox.breaks(trial)
    assert met.called_at.endswith(f"test_sandbox.py:{forward.__code__.co_firstlineno + 1} in forward")
    assert "halves" in met.spec.label
    assert [tuple(h.buffer.shape) for h in met.handoffs] == [(8, 3), (8,)], "a tensor that stands twice is one hand-off"
    assert all(sandbox.recorder.owns(e.tensor) for e in capture.unnamed_externals), "only inputs' buffers have no name"
    sandbox.close()
    assert capture.steps == () and capture.unnamed_externals == ()


def test_a_break_that_fills_the_callers_memory_hands_that_on(device, inference):
    pool = device.new_pool()
    x = rows(4, device)
    with segue.BreakableCapture(device=device, pool=pool) as capture:
        out = torch.empty_like(x)
        segue.break_here(lambda t: t * 2, out, x + 1)
        out + 1
    (met,) = [step for step in capture.steps if isinstance(step, Break)]
    assert [h.buffer.data_ptr() for h in met.handoffs] == [out.data_ptr()]
    capture.close()


def test_tensors_that_a_run_writes_outside_are_put_back_and_part_of_its_outcome(device):
    cache = SimpleNamespace(kv=torch.zeros(8, 3, device=device.torch_device))
    seen = torch.zeros(1, device=device.torch_device)

    @segue.break_point(trim=("x",))
    def store(x):
        segue.current_forward_ctx().kv[: len(x)] = x
        seen.add_(1)
        return x * 1

    def writes(x):
        return store(x)

    with GraphRunner(writes, {"x": Input(0, 0.0)}, [8], device=device, progress=False) as runner:
        environment = Environment(writes, cache, [], device.torch_device)
        sandbox = Sandbox(runner, environment, device.new_pool())
        trial = TrialCall(AS_GIVEN, sandbox.example((rows(5, device),), {}), 8, None, 0)
        sandbox.capture(trial)
        outcome = sandbox.replay(trial, perturbed=True)
        assert outcome.error is None and not cache.kv.any() and not seen.any()
        kept = outcome.state["ctx.kv"].value
        assert torch.equal(kept[:5], rows(5, device)) and not kept[5:].any()
        assert [value.value.item() for name, value in outcome.state.items() if name != "ctx.kv"] == [1.0]
        environment.close()
        sandbox.close()
