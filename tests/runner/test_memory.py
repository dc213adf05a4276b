"""The memory budget: what is predicted, what is left out, and what is said about it."""

from __future__ import annotations

import logging

import pytest
import torch

import segue
from runner.rows import close
from segue.errors import ReplayError, UsageError
from segue.runner import GraphRunner, Input
from segue.runner.memory_budget import Cost, MemoryBudget

MIB = 2**20
INPUTS = {"x": Input(0, 0.0)}


def test_pool_bytes_are_predicted_along_a_line_and_driver_bytes_a_graph():
    budget = MemoryBudget(100)
    budget.observe(1, Cost(12, 2))
    budget.observe(11, Cost(32, 4))
    assert budget.predict(21, Cost(32, 4), 2, 3) == Cost(52, 6)
    assert budget.predict(5, Cost(32, 4), 2, 2) == Cost(32, 4), "a smaller bucket uses the largest one's memory again"


def test_the_buckets_that_fit_are_told_from_those_that_do_not():
    budget = MemoryBudget(60)
    budget.observe(1, Cost(12, 2))
    budget.observe(11, Cost(32, 4))
    fitting, left_out = budget.split([1, 11, 21, 41], Cost(32, 4), 2)
    assert fitting == [1, 11, 21] and left_out == {41: Cost(92, 8)}


def hungry(x):
    """16 KiB a row, for a moment."""
    y = x.repeat(1, 1024)
    return (y * 2).view(len(x), 1024, 4).sum(1)


def runner_of(device, **options):
    return GraphRunner(hungry, INPUTS, [8, 16, 64, 256, 1024], device=device, progress=False, **options)


def test_what_does_not_fit_is_left_out_with_the_numbers_and_the_rest_works(device, model, caplog):
    with caplog.at_level(logging.WARNING, "segue"):
        runner = runner_of(device, memory_budget=24 * MIB)
        summary = runner.capture(model.x(3))
    assert 1024 in summary.left_out and 8 in summary.buckets and 1024 not in summary.buckets
    assert runner.stats.pool_bytes + runner.stats.driver_bytes <= 24 * MIB
    assert "bucket 1024 is left out: graphs would take" in caplog.text and "memory_budget is 24.0 MiB" in caplog.text
    for n in (5, 16, 1000):
        torch.testing.assert_close(runner(model.x(n)), hungry(model.x(n)))
    assert dict(runner.stats.reasons) == {"memory_budget": 1}
    assert "left out: " in runner.explain(1000) and "1024 (memory_budget)" in runner.explain(1000)


def test_a_roomy_budget_leaves_nothing_out(device, model):
    summary = runner_of(device, memory_budget=4096 * MIB).capture(model.x(3))
    assert sorted(summary.buckets) == [8, 16, 64, 256, 1024] and not summary.left_out


def test_a_bucket_that_takes_more_than_predicted_is_left_out_and_its_memory_goes(device, model):
    def sudden(x):
        return hungry(x.repeat(16, 1))[: len(x)] if len(x) > 64 else hungry(x)

    runner = GraphRunner(sudden, INPUTS, [8, 16, 64, 256], device=device, progress=False, memory_budget=64 * MIB)
    summary = runner.capture(model.x(3))
    assert set(summary.left_out) == {256} and sorted(summary.buckets) == [8, 16, 64]
    assert summary.cost.total <= 64 * MIB and runner.stats.pool_bytes <= 64 * MIB
    for n in (5, 16, 60, 250):
        torch.testing.assert_close(runner(model.x(n)), sudden(model.x(n)))


def test_a_budget_too_small_for_one_bucket_is_refused_with_the_numbers(device, model):
    runner = runner_of(device, memory_budget=1000)
    with pytest.raises(
        UsageError, match=r"memory_budget=0.0 MiB is too small for one bucket: the smallest, 8, takes .* MiB"
    ):
        runner.capture(model.x(3))
    for _ in range(3):
        assert close(runner(model.x(3)), hungry(model.x(3)))


def test_lazy_captures_keep_to_the_budget_too(device, model):
    runner = runner_of(device, memory_budget=24 * MIB)
    for n in (5, 5, 60, 60, 1000, 1000, 1000):
        torch.testing.assert_close(runner(model.x(n)), hungry(model.x(n)))
    assert 1024 not in runner.stats.buckets and set(runner.stats.reasons) == {"memory_budget"}


def test_after_a_lazy_bucket_was_dropped_over_the_budget_the_reason_says_so(device, model):
    runner = GraphRunner(hungry, INPUTS, [1024], device=device, progress=False, memory_budget=MIB)
    for _ in range(4):
        torch.testing.assert_close(runner(model.x(1000)), hungry(model.x(1000)))
    assert not runner.stats.buckets and dict(runner.stats.reasons) == {"memory_budget": 2}
    assert "eager, memory_budget: the largest bucket is 1024; left out: 1024" in runner.explain(1000)


def test_calls_of_a_bucket_that_is_left_out_later_go_to_the_next_though_they_went_there_before(device, model):
    runner = runner_of(device, memory_budget=1024 * MIB)
    for _ in range(4):
        runner(model.x(3))
    assert runner.stats.buckets == (8,) and runner.stats.replayed == 2
    runner._buckets.leave_out([8], Cost(2048 * MIB, 0))
    assert close(runner(model.x(3)), hungry(model.x(3)))
    assert runner.stats.warmed == 2 and runner.stats.replayed == 2


def test_calls_of_a_graph_that_was_dropped_do_without_it_though_they_went_there_before(device, model):
    runner = runner_of(device, memory_budget=1024 * MIB)
    for _ in range(4):
        runner(model.x(3))
    buckets = runner._buckets
    assert buckets is not None
    buckets.drop(buckets.graphs)
    for _ in range(3):
        assert close(runner(model.x(3)), hungry(model.x(3)))
    assert runner.stats.captured == 2


def test_a_call_that_found_its_graph_just_before_another_thread_dropped_it_leads_no_later_ones_there(device, model):
    runner = runner_of(device)
    for _ in range(2):
        runner(model.x(3))
    buckets = runner._buckets
    assert buckets is not None
    remember = buckets.remember

    def late(call, plan):
        buckets.drop(buckets.graphs)
        remember(call, plan)

    buckets.remember = late
    with pytest.raises(ReplayError, match="it was closed"):
        runner(model.x(3))
    buckets.remember = remember
    for _ in range(3):
        assert close(runner(model.x(3)), hungry(model.x(3)))


def test_a_ladder_takes_the_pool_of_its_largest_bucket(device):
    def wide(x):
        return x.repeat(1, 1024).view(len(x), 1024, 4).sum(1) * 2

    def taken(*buckets):
        runner = GraphRunner(wide, {"x": Input(0, 0.0)}, buckets, device=device, pool=device.new_pool(), progress=False)
        return runner.capture(torch.randn(3, 4, device=device.torch_device)).cost.pool

    assert taken(512, 256, 128, 64) <= 1.2 * taken(512)


def test_a_capture_ahead_of_traffic_takes_no_more_of_the_pool_than_a_calls_own(device, make):
    @segue.break_point
    def middle(x):
        return x.clone()

    def fn(x):
        for _ in range(8):
            y = torch.empty_like(x)
            torch.add(x, 1.0, out=y)
            x = middle(y.mul_(2.0)).add_(1.0)
        return x

    def pool_of(ahead):
        runner = make(fn, {"x": Input(0, 0.0)}, [64])
        x = torch.ones(60, 1024, device=device.torch_device)
        if ahead:
            runner.capture(x)
        for _ in range(3):
            out = runner(x)
        assert torch.equal(out, runner.reference(x))
        return runner.stats.pool_bytes

    assert pool_of(ahead=True) <= pool_of(ahead=False)
