"""What an explicit capture says."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

import segue
from segue.errors import ReplayError, UsageError
from segue.runner import GraphRunner, Input
from segue.runner.memory_budget import Cost
from segue.runner.progress import CaptureSummary


def test_the_closing_line_has_buckets_segments_seconds_and_bytes(device, model, capsys, caplog):
    runner = GraphRunner(model, {"x": Input(0, 0.0)}, [4, 8], device=device)
    with caplog.at_level(logging.INFO, "segue"):
        summary = runner.capture(model.x(3))
    line = str(summary)
    assert (
        line.startswith("captured 2 buckets (4 to 8), 4 segments and 2 breaks in ")
        and "MiB pool" in line
        and "driver" in line
    )
    said = capsys.readouterr()
    assert f"segue: {line}" in said.err and not said.out
    assert line in caplog.text and runner.summary is summary


def test_progress_can_be_turned_off(device, model, capsys):
    GraphRunner(model, {"x": Input(0, 0.0)}, [4], device=device, progress=False).capture(model.x(3))
    assert capsys.readouterr() == ("", "")


def test_a_bucket_that_fails_behind_a_break_is_left_to_eager_and_the_others_are_captured(device, model, caplog):
    @segue.break_point
    def middle(x):
        return x + 1

    def fn(x):
        y = middle(x * 2)
        return y if x.shape[0] != 8 or float(y.abs().max()) >= 0 else -y

    with caplog.at_level(logging.WARNING, "segue"):
        runner = GraphRunner(fn, {"x": Input(0, 0.0)}, [4, 8, 16], device=device, on_failure="eager")
        summary = runner.capture(model.x(3))
    assert [b for b in (4, 8, 16) if f"bucket {b} runs eager" in caplog.text] == [8]
    assert summary.buckets == (16, 4) and runner.stats.buckets == (4, 16)
    for n in (3, 7, 12):
        x = model.x(n)
        assert torch.equal(runner(x), x * 2 + 1)
    assert runner.stats.reasons == {"a failed capture": 1}


def test_a_capture_without_breaks_says_so(make, model, caplog):
    with caplog.at_level(logging.WARNING, "segue"):
        runner = make(lambda x: x * 2, {"x": Input(0, 0.0)}, [4, 8])
        assert "No break point was met" in str(runner.capture(model.x(3)))
    assert [r.message for r in caplog.records] == [
        r.message for r in caplog.records if "without meeting a break" in r.message
    ]
    assert len(caplog.records) == 1


def test_one_bucket_is_named_alone():
    text = str(CaptureSummary((8,), 2, 1, 0.25, Cost(2**20, 0)))
    assert text == "captured 1 bucket (8), 2 segments and 1 break in 0.2 s; 1.0 MiB pool, 0.0 MiB driver"


def test_the_summary_names_what_was_left_out_and_what_changed():
    summary = CaptureSummary((8,), 2, 1, 0.5, Cost(0, 0), {16: Cost(2**20, 0)}, {"fn: calls": (0, 2)})
    text = "Left out: 16 (1.0 MiB (1.0 MiB pool, 0.0 MiB driver)). Python attributes that it changed: fn: calls"
    assert str(summary).endswith(text)


@pytest.mark.parametrize("ahead", [False, True], ids=["lazily", "ahead"])
def test_a_bucket_is_warmed_up_as_often_as_is_asked_for(make, model, ahead):
    phases, contexts = [], []

    @segue.break_point
    def tuned(x):
        phases.append(segue.capture_phase())
        return x + 1

    runner = make(lambda x: tuned(x * 2), {"x": Input(0, 0.0)}, [4], warmups=3, capture_ctx=contexts.append)
    if ahead:
        runner.capture(model.x(3))
        assert contexts == [4] * 4
    else:
        for _ in range(4):
            assert torch.equal(runner(model.x(3)), model.x(3) * 2 + 1)
    assert phases == [*[None] * 3, "break"]
    assert torch.equal(runner(model.x(3)), model.x(3) * 2 + 1)
    assert (runner.stats.warmed, runner.stats.captured, runner.stats.replayed) == (1, 1, 1)
    with pytest.raises(UsageError, match="warmups=0 must be a whole number, at least 1"):
        make(model, warmups=0)


class Counts:
    """A forward that decides by an iterator, which nothing can watch: each run adds the next number."""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def __call__(self, x):
        return doubled(x) + next(self.numbers)


@segue.break_point
def doubled(x):
    return x * 2


def test_a_trial_replay_that_differs_from_the_reference_is_raised_or_goes_eager(make, model, caplog):
    raising = make(Counts(), {"x": Input(0, 0.0)}, [4, 8])
    with pytest.raises(ReplayError, match=r"capture\(verify=True\): bucket 8 with 8 tokens: the replay isn't what the reference"):
        raising.capture(model.x(3), verify=True)
    assert raising.stats.buckets == ()
    with caplog.at_level(logging.WARNING, "segue"):
        runner = make(Counts(), {"x": Input(0, 0.0)}, [4, 8], on_failure="eager")
        assert runner.capture(model.x(3), verify=True).buckets == () == runner.stats.buckets
    assert "bucket 8 runs eager from now on: ReplayError: capture(verify=True)" in caplog.text
    runner(model.x(3))
    assert dict(runner.stats.reasons) == {"a trial replay that differs from the reference": 1}


@pytest.mark.parametrize("made", [False, True], ids=["the example's context", "contexts made anew"])
def test_a_trial_replay_leaves_no_trace(device, make, model, made):
    class Context:
        def __init__(self):
            self.calls, self.cache = 0, torch.zeros(16, 4, device=device.torch_device)

    shared, contexts = torch.zeros(16, 4, device=device.torch_device), []

    @segue.break_point
    def keep(x):
        ctx = segue.current_forward_ctx()
        ctx.calls += 1
        ctx.cache[: len(x)] += x
        shared[: len(x)] += x
        return x + ctx.cache[: len(x)] + shared[: len(x)]

    def make_context(bucket):
        contexts.append(Context())
        return contexts[-1]

    runner = make(lambda x: keep(x * 2), {"x": Input(0, 0.0)}, [4, 8], capture_ctx=make_context if made else None)
    ctx = Context()
    assert runner.capture(model.x(3), ctx=ctx, verify=True).buckets == (8, 4)
    assert not shared.any() and not ctx.cache.any()
    assert ctx.calls == (0 if made else 6) and [c.calls for c in contexts] == [1] * (8 if made else 0)
    x = model.x(6)
    assert torch.equal(runner(x, ctx=ctx), x * 2 * 3)


def test_the_first_replay_is_said_once(make, model, caplog):
    runner = make(model)
    with caplog.at_level(logging.INFO, "segue"):
        for n in (3, 3, 8, 8):
            runner(model.x(n))
        assert "graphs serve" not in caplog.text
        for n in (3, 8, 3, 2, 8):
            runner(model.x(n))
    said = [r.message for r in caplog.records if "graphs serve" in r.message]
    assert len(said) == 1 and said[0].startswith("segue: graphs serve the runner of ") and said[0].endswith("in 2 buckets so far")
