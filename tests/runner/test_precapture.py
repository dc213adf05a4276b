"""What an explicit capture says."""

from __future__ import annotations

import logging

import torch

import segue
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
