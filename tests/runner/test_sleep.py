"""A runner that sleeps has given its memory back, and one that wakes serves as before; what graphs will take is estimated."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import segue
from runner.rows import close
from segue.errors import NoBucketError, UsageError
from segue.runner import Input

INPUTS = {"x": Input(0, 0.0)}


def expect_equal(runner, model, *lengths):
    for n in lengths:
        x = model.x(n, seed=n)
        assert torch.equal(runner(x), runner.reference(x)) and close(runner(x), model(x))


def test_sleep_frees_graphs_and_memory_and_wake_captures_the_example_anew(make, model):
    runner = make(model)
    before = runner.capture(model.x(3))
    expect_equal(runner, model, 16, 3)
    buffer = weakref.ref(runner.prepare().recorder.buffers[0].flat)
    replays = runner.stats.replayed
    runner.sleep()
    runner.sleep()
    gc.collect()
    assert runner.stats.pool_bytes == runner.stats.driver_bytes == 0 and runner.stats.buckets == () and buffer() is None
    decision = runner.admit(3)
    assert (decision.bucket, decision.strategy, decision.reason) == (None, "eager", "asleep")
    assert runner.explain(3).startswith("3 tokens: eager, asleep")
    for n in (16, 3):
        assert close(runner(model.x(n)), model(model.x(n)))
    assert dict(runner.stats.reasons) == {"asleep": 2} and runner.stats.replayed == replays
    after = runner.wake()
    assert after.buckets == before.buckets == (16, 8, 4) and runner.stats.buckets == (4, 8, 16)
    runner.pool.poison()
    expect_equal(runner, model, 16, 3, 9, 1)
    assert dict(runner.stats.reasons) == {"asleep": 2}
    assert runner.wake() is None, "it is awake"


def test_weights_may_go_and_come_while_it_sleeps(make, model):
    runner = make(model)
    runner.capture(model.x(3))
    old = weakref.ref(model.weight.untyped_storage())
    runner.sleep()
    model.weight = None
    gc.collect()
    assert old() is None
    model.weight = torch.full((4, 4), 0.5, device=model.device)
    runner.wake()
    expect_equal(runner, model, 9, 2)


def test_what_was_captured_by_calls_is_captured_by_calls_again(make, model):
    runner = make(model)
    x = model.x(3)
    for _ in range(3):
        runner(x)
    runner.sleep()
    assert close(runner(x), model(x)) and runner.wake() is None
    for _ in range(3):
        assert torch.equal(runner(x), runner.reference(x))
    assert (runner.stats.captured, runner.stats.replayed) == (2, 2)


def test_wake_takes_an_example_of_its_own_and_a_runner_may_sleep_before_its_first_call(make, model):
    runner = make(model, pool=None)
    runner.sleep()
    assert close(runner(model.x(3)), model(model.x(3))) and dict(runner.stats.reasons) == {"asleep": 1}
    assert runner.wake(model.x(5), bias=torch.ones(4, device=model.device)).buckets == (16, 8, 4)
    x, bias = model.x(7), torch.full((4,), 2.0, device=model.device)
    assert torch.equal(runner(x, bias), runner.reference(x, bias)) and runner.stats.replayed == 1
    runner.close()


@pytest.mark.parametrize("made", [False, True], ids=["the example's context", "contexts made anew"])
def test_the_example_keeps_its_context_flags_and_structure(make, model, made):
    @segue.break_point
    def scale(x):
        return x * segue.current_forward_ctx()["scale"]

    def fn(pair, double=False, **more):
        y = scale(pair["a"] + pair["b"])
        return y * (2 if double else 1) * more.get("factor", 1)

    declared = {"pair": {"a": Input(0, 0.0), "b": Input(0, 0.0)}}
    runner = make(fn, declared, [4, 8], capture_ctx=(lambda bucket: {"scale": 1.0}) if made else None)
    pair = {"a": model.x(3), "b": model.x(3, seed=1)}
    runner.capture(pair, double=True, factor=3, ctx={"scale": 2.0})
    runner.sleep()
    assert runner.wake().buckets == (8, 4)
    got = runner(pair, double=True, factor=3, ctx={"scale": 5.0})
    assert close(got, (pair["a"] + pair["b"]) * 30) and runner.stats.replayed == 1


def test_a_runner_that_sleeps_says_so_where_graphs_are_demanded(make, model):
    runner = make(model, strict=True)
    runner.capture(model.x(3))
    decision = runner.admit(3)
    runner.sleep()
    for given in (None, decision):
        with pytest.raises(NoBucketError, match=r"3 tokens: eager, asleep: Call wake\(\)"):
            runner(model.x(3), decision=given)
    with pytest.raises(UsageError, match=r"asleep, so nothing is captured: call wake\(\)"):
        runner.capture(model.x(3))
    runner.recapture(model.x(3))
    assert torch.equal(runner(model.x(3)), runner.reference(model.x(3)))
    runner.close()
    with pytest.raises(UsageError, match="was closed"):
        runner.sleep()


def wide(x):
    """Takes 16 KiB a row, for a moment."""
    return segue.break_here(lambda t: t + 1, torch.empty_like(x), x.repeat(1, 1024).view(len(x), 1024, 4).sum(1)) * 2


def test_the_memory_of_all_graphs_is_estimated_before_any_is_there(device, make, model):
    runner = make(wide, INPUTS, [64, 128, 256, 512])
    cost = runner.estimate(model.x(3))
    assert runner.stats.captured == runner.stats.pool_bytes == 0 and runner.stats.buckets == ()
    assert cost.total == cost.pool + cost.driver + cost.inputs and (cost.driver > 0) <= device.traits.driver_memory
    taken = runner.capture(model.x(3)).cost
    assert cost.pool <= taken.pool <= 1.1 * cost.pool
    assert cost.inputs >= 512 * 4 * 4
    torch.testing.assert_close(runner(model.x(200)), wide(model.x(200)))
    assert runner.stats.replayed == 1


def test_examples_of_several_strategies_are_all_captured_anew(make, model):
    scale = segue.break_point(lambda x: x * 2)
    full = segue.Full(takes=lambda args, kwargs, ctx: args[0].shape[0] <= 2, buckets=[1, 2])
    runner = make(lambda x: scale(x + 1) + 1, INPUTS, [4, 8], strategies=[full, segue.Breakable()])
    runner.capture(model.x(1))
    runner.capture(model.x(3))
    assert runner.stats.buckets == (1, 2, 4, 8)
    runner.sleep()
    assert runner.admit(1, strategy="full").reason == "asleep" and close(runner(model.x(1)), (model.x(1) + 1) * 2 + 1)
    runner.wake()
    assert runner.stats.buckets == (1, 2, 4, 8)
    expected = [2, 7, 1, 3]
    for n in expected:
        assert torch.equal(runner(model.x(n)), (model.x(n) + 1) * 2 + 1)
    assert runner.stats.strategies == {"full": 2, "breakable": 2}
