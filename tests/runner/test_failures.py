"""Captures that fail: said so, never silently eager, and what was captured before goes on working."""

from __future__ import annotations

import logging

import pytest
import torch

import segue
from runner.rows import close
from segue.errors import CaptureError, GraphMemoryError, SegueError, UsageError
from segue.runner import Breakable, Input

INPUTS = {"x": Input(0, 0.0)}


def reads_host(x):
    """Can't be in a graph from 8 rows on."""
    if x.shape[0] > 4:
        return x * float(x.sum().item())
    return x * 2


def test_a_failed_capture_raises_each_time_and_other_buckets_work(make, model):
    runner = make(reads_host, INPUTS, [4, 8])
    for n in (3, 3, 3):
        assert close(runner(model.x(n)), model.x(n) * 2)
    assert runner(model.x(7)).shape == (7, 4), "the warm-up is the reference"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"item|local_scalar|captur"):
            runner(model.x(7))
    assert close(runner(model.x(3)), model.x(3) * 2)
    assert runner.stats.eager == 0


def test_a_failed_capture_is_retried_eagerly_counted_and_logged_once(make, model, caplog):
    runner = make(reads_host, INPUTS, [4, 8], on_failure="eager")
    with caplog.at_level(logging.WARNING, "segue"):
        for _ in range(5):
            assert close(runner(model.x(8)), reads_host(model.x(8)))
    assert dict(runner.stats.reasons) == {"a failed capture": 4}
    assert len(caplog.records) == 1 and "bucket 8 runs eager from now on" in caplog.text
    assert runner.explain(7) == "7 tokens: eager, a failed capture (bucket 8)"
    for _ in range(3):
        assert close(runner(model.x(3)), model.x(3) * 2)
    assert runner.stats.replayed == 1


@pytest.mark.parametrize("ahead", [False, True], ids=["lazily", "ahead"])
def test_a_capture_without_memory_is_raised_once_even_if_failures_go_eager(make, model, ahead):
    def fn(x):
        if segue.capture_phase() is not None and x.shape[0] == 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x * 2

    runner = make(fn, INPUTS, [4, 8], on_failure="eager")
    if not ahead:
        runner(model.x(8))
    with pytest.raises(GraphMemoryError, match=r"bucket 8: out of memory while recording .*2.00 GiB"):
        runner.capture(model.x(8)) if ahead else runner(model.x(8))
    for n in (8, 3, 7, 3, 3):
        assert close(runner(model.x(n)), model.x(n) * 2)
    assert dict(runner.stats.reasons) == {"a failed capture: out of memory": 2} and runner.stats.replayed == 1
    assert runner.explain(7) == "7 tokens: eager, a failed capture: out of memory (bucket 8)"


def test_strict_raises_for_a_failed_capture(make, model):
    runner = make(reads_host, INPUTS, [8], on_failure="eager", strict=True)
    runner(model.x(8))
    for _ in range(2):
        with pytest.raises(SegueError, match=r"strict=True.*a failed capture"):
            runner(model.x(8))


def test_nothing_is_retried_once_a_break_has_run(make, model):
    ran = []

    @segue.break_point
    def count(x):
        ran.append(1)
        return x

    def fn(x):
        return reads_host(count(x * 1))

    runner = make(fn, INPUTS, [8], on_failure="eager")
    runner(model.x(8))
    with pytest.raises(RuntimeError) as e:
        runner(model.x(8))
    assert any("part of this call has run, so it isn't retried" in note for note in e.value.__notes__)
    assert len(ran) == 2
    assert close(runner(model.x(8)), fn(model.x(8))) and dict(runner.stats.reasons) == {"a failed capture": 1}


def test_an_explicit_capture_goes_on_past_a_bucket_that_fails_only_if_asked_to(make, model):
    runner = make(reads_host, INPUTS, [2, 4, 8], on_failure="eager")
    assert runner.capture(model.x(3)).buckets == (4, 2)
    assert close(runner(model.x(8)), reads_host(model.x(8))) and dict(runner.stats.reasons) == {"a failed capture": 1}
    raising = make(reads_host, INPUTS, [2, 4, 8])
    with pytest.raises(RuntimeError):
        raising.capture(model.x(3))
    for _ in range(3):
        assert close(raising(model.x(3)), model.x(3) * 2)


def test_running_out_of_memory_names_the_bucket_and_earlier_buckets_work(make, model):
    def fn(x):
        if segue.is_breakable_capture_active() and x.shape[0] == 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x * 2

    runner = make(fn, INPUTS, [4, 8])
    runner(model.x(3)), runner(model.x(3)), runner(model.x(8))
    with pytest.raises(CaptureError, match=r"bucket 8: out of memory while recording .*2.00 GiB.*memory budget"):
        runner(model.x(8))
    assert close(runner(model.x(3)), model.x(3) * 2)


def test_an_error_of_the_forward_itself_passes_as_it_is(make, model):
    def fn(x):
        if not x.shape[1]:
            raise ZeroDivisionError("no width")
        return x * 2

    runner = make(fn, INPUTS, [8], on_failure="eager")
    with pytest.raises(ZeroDivisionError):
        runner(model.x(3)[:, :0])
    for _ in range(3):
        assert close(runner(model.x(3)), model.x(3) * 2)


@pytest.mark.parametrize("fails_at", [3, 4])
def test_a_failed_replay_never_returns_an_old_output_and_the_next_one_is_right(make, model, fails_at):
    calls = []

    @segue.break_point(trim=("x",))
    def sometimes(x):
        calls.append(1)
        if len(calls) == fails_at:
            raise ConnectionError("lost")
        return x + 1

    runner = make(lambda x: sometimes(x * 2) * 3, INPUTS, [8], on_failure="eager")
    for i in range(6):
        x = model.x(5, i)
        if i + 1 == fails_at:
            with pytest.raises(ConnectionError):
                runner(x)
        else:
            assert close(runner(x), (x * 2 + 1) * 3)
    assert not torch.is_inference_mode_enabled()


def test_an_interrupt_during_an_explicit_capture_leaves_a_working_runner(make, model):
    hit = []

    @segue.break_point
    def interrupted(x):
        hit.append(1)
        if len(hit) == 4:
            raise KeyboardInterrupt
        return x

    runner = make(lambda x: interrupted(x * 2) + 1, INPUTS, [4, 8])
    with pytest.raises(KeyboardInterrupt):
        runner.capture(model.x(3))
    for n in (3, 8, 3, 8, 3):
        assert close(runner(model.x(n)), model.x(n) * 2 + 1)
    assert runner.stats.eager == 0


def test_a_strategy_that_takes_some_calls_is_preferred_and_counted(make, model):
    class Short(Breakable):
        name = "short"

        def takes(self, call):
            return call.tokens < 5

    runner = make(model, strategies=[Short(), Breakable()])
    for n in (3, 3, 3, 7, 7, 7):
        assert close(runner(model.x(n)), model(model.x(n)))
    assert dict(runner.stats.strategies) == {"short": 1, "breakable": 1}


def test_a_strategy_is_asked_at_every_call_since_it_may_look_at_more_than_the_counts(make, model):
    class Fed(Breakable):
        name = "fed"

        def takes(self, call):
            return call.ctx is not None

    runner = make(lambda x: x * 2, {"x": Input(0, 0.0)}, strategies=[Fed(), Breakable()])
    for ctx in (None, None, None, None, object(), object(), object(), object(), None):
        assert close(runner(model.x(3), ctx=ctx), model.x(3) * 2)
    assert dict(runner.stats.strategies) == {"breakable": 3, "fed": 2}


def test_a_given_decision_is_kept_to_though_calls_like_this_one_went_elsewhere(make, model):
    runner = make(model)
    for _ in range(4):
        runner(model.x(3))
    wider = runner.admit(7)
    for _ in range(3):
        assert close(runner(model.x(3), decision=wider), model(model.x(3)))
    assert runner.stats.buckets == (4, 8)
    runner(model.x(3))
    assert runner.stats.padding_share == (5 * 1 + 3 * 5) / (5 * 4 + 3 * 8), "nor do later calls go where that one was sent"
    with pytest.raises(UsageError, match=r"take decisions from runner\.admit"):
        runner(model.x(3), decision=4)
