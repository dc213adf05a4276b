"""Ops are listed with what Python decided, and a difference is followed back to the op, segment or break it begins at."""

from __future__ import annotations

import pytest
import torch

import segue
from segue.capture.op_watch import observing
from segue.check.blame import first_break, first_op
from segue.check.compare import RowCounts
from segue.check.oplog import OpLog, OpLogMode
from segue.check.origin import align, origin
from segue.check.sandbox import Environment, Sandbox
from segue.check.trial_calls import AS_GIVEN, TrialCall
from segue.runner import GraphRunner, Input


def line(fn, offset):
    return f"test_origin.py:{fn.__code__.co_firstlineno + offset} in {fn.__name__}"


def test_a_capture_and_its_reference_list_the_same_ops(device, inference):
    weight = torch.ones(3, 3, device=device.torch_device)
    double = segue.break_point(lambda x: x * 2)

    def forward(x):
        y = torch.nn.functional.linear(x, weight)
        return double(y[1:]).add_(1)

    x = torch.ones(4, 3, device=device.torch_device)
    recorded, traced = OpLog(), OpLog()
    with observing(recorded), segue.BreakableCapture(device=device, pool=device.new_pool()) as capture:
        forward(x)
    with OpLogMode(traced):
        forward(x)
    capture.close()
    assert [op.key for op in recorded.ops] == [op.key for op in traced.ops if op.name != "aten::mul.Tensor"]
    assert [(op.name, op.segment) for op in recorded.ops][-1] == ("aten::add_.Tensor", 1)
    sliced = next(op for op in recorded.ops if op.name == "aten::slice.Tensor")
    assert sliced.plain == {"dim": "0", "start": "1", "end": "9223372036854775807"} and line(forward, 2) in sliced.where
    assert not sliced.writes, "a view writes nothing"
    assert recorded.ops[-1].plain["other"] == "1" and not recorded.ops[-1].ours and recorded.ops[-1].writes


def test_uninitialised_memory_is_filled_for_a_trace(device):
    with OpLogMode(OpLog(), fill=3.0):
        x = torch.empty(2, 2, device=device.torch_device)
        y = torch.empty_like(x, dtype=torch.int64)
    assert bool((x == 3).all()) and y.dtype is torch.int64


def test_forwards_that_part_are_aligned_where_they_meet_again(device):
    def forward(times):
        x = torch.ones(2, device=device.torch_device)
        for _ in range(times):
            x = x + 1
        return x * 2

    logs = [OpLog(), OpLog()]
    for log, times in zip(logs, (1, 3), strict=True):
        with OpLogMode(log):
            forward(times)
    pairs = align(logs[0].ops, logs[1].ops)
    assert [None if a is None else a.name for a, _ in pairs] == [
        "aten::ones",
        "aten::add.Tensor",
        None,
        None,
        "aten::mul.Tensor",
    ]
    assert all(b is not None for _, b in pairs)


def test_a_difference_that_reaches_no_result_is_not_blamed(device):
    def forward(x):
        unused = x.sum(0)
        y = x * 2
        z = y.amax(0)
        return y + z, unused

    logs, out = [OpLog("values"), OpLog("values")], []
    for log, tail in zip(logs, (0.0, 9.0), strict=True):
        x = torch.ones(4, 3, device=device.torch_device)
        x[3:] = tail
        with OpLogMode(log):
            out.append(forward(x)[0])
    found = origin(logs[1], logs[0], [out[1].untyped_storage().data_ptr()], RowCounts(4, 4, 3, exact=True))
    assert found is not None and found.op.name == "aten::amax" and line(forward, 3) in found.op.where
    assert any("aten::mul.Tensor" in source for source in found.sources)


@pytest.fixture
def sandbox_of(device):
    sandboxes = []

    def make(fn):
        runner = GraphRunner(fn, {"x": Input(0, 0.0)}, [4, 8], device=device, progress=False)
        x = torch.linspace(-1, 1, 20, device=device.torch_device).view(5, 4)
        sandbox = Sandbox(runner, Environment(fn, None, [], device.torch_device), device.new_pool())
        sandboxes.append(sandbox)
        return sandbox, TrialCall(AS_GIVEN, sandbox.example((x,), {}), 8, None, 0)

    yield make
    for sandbox in sandboxes:
        sandbox.close()


def test_the_first_break_whose_arguments_or_results_differ_is_named(sandbox_of):
    @segue.break_point
    def first(x):
        return x + 1

    @segue.break_point(trim=("x",))
    def second(x):
        return x * 2

    def before(x):
        y = x * (1 if segue.capture_phase() is None else 2)
        return second(first(y) * 3)

    def between(x):
        y = first(x * 2)
        return second(y * (1 if segue.capture_phase() is None else 2))

    def after(x):
        return second(first(x)) * (1 if segue.capture_phase() is None else 2)

    for fn, text in (
        (before, "segment 0, which ends at the break"),
        (between, "segment 1"),
        (after, "the last segment"),
    ):
        for find, said in ((first_break, text), (first_op, "aten::mul.Tensor in segment")):
            scout, _ = sandbox_of(fn)
            sandbox, trial = sandbox_of(fn)
            scout.capture(trial)
            blamed = find(sandbox, [trial], trial, [step.spec for step in scout.breaks(trial)])
            assert blamed is not None and said in blamed.text and fn.__name__ in blamed.where, blamed


def test_a_break_whose_result_differs_is_named(sandbox_of):
    @segue.break_point
    def odd(x):
        return x * (2 if segue.capture.thread_state.state.reference else 3)

    def forward(x):
        return odd(x + 1)

    sandbox, trial = sandbox_of(forward)
    scout, _ = sandbox_of(forward)
    scout.capture(trial)
    blamed = first_break(sandbox, [trial], trial, [step.spec for step in scout.breaks(trial)])
    assert blamed is not None and "odd" in blamed.text and "it got the same, and its result differs" in blamed.text
    assert line(forward, 1) in blamed.where


def test_nothing_is_blamed_where_nothing_differs(sandbox_of):
    sandbox, trial = sandbox_of(lambda x: x + 1)
    assert first_op(sandbox, [trial], trial, []) is None
