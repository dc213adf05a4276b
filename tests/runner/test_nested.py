"""A runner inside another forward: in a break it serves, elsewhere it would take padded rows for real ones."""

from __future__ import annotations

import pytest
import torch

import segue
from runner.rows import close
from segue.errors import UsageError
from segue.runner import GraphRunner, Input

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


def test_a_runner_that_only_breaks_of_others_call_says_why_it_has_no_graph(make, model, caplog):
    inner = make(model, INPUTS, [4])
    live = segue.break_point(trim=("x",))(lambda x: inner(x))
    outer = make(lambda x: live(x * 1) + 1, INPUTS, [4])
    with caplog.at_level("WARNING", "segue"):
        for i in range(4):
            assert close(outer(model.x(3, i)), model(model.x(3, i)) + 1)
    assert outer.stats.replayed == 2
    assert (inner.stats.warmed, inner.stats.captured, inner.stats.eager) == (1, 0, 3)
    assert inner.stats.reasons == {"inside another forward, where nothing can be captured": 3}
    said = [r.getMessage() for r in caplog.records if "inside another forward" in r.getMessage()]
    assert len(said) == 1 and "Capture it ahead: runner.capture(" in said[0] and "bucket 4" in said[0]
    inner.capture(model.x(3))
    assert close(outer(model.x(3, 9)), model(model.x(3, 9)) + 1)
    assert inner.stats.replayed == 1 and inner.stats.eager == 3


def test_a_break_that_goes_on_after_a_refused_replay_has_not_lost_the_outer_calls_inputs(make, device):
    other: list[torch.Tensor] = []
    refused: list[str] = []

    @segue.break_point(trim=("h",))
    def live(h):
        for x in other:
            try:
                runner(x)
            except UsageError as e:
                refused.append(str(e))
        return h * 1

    runner = make(lambda x: live(x * 1) + x, INPUTS, [4, 8])
    x = torch.ones(3, 4, device=device.torch_device)
    for _ in range(3):
        runner(x)
    other.append(x * 100)
    assert torch.equal(runner(x), x * 2), "in a replay"
    wide = torch.ones(7, 4, device=device.torch_device)
    for _ in range(2):
        assert torch.equal(runner(wide), wide * 2), "and in a capture"
    assert runner.stats.captured == 2
    # One each, and one in the replay that the wide bucket's warm-up may make.
    assert len(refused) == 3 and all("bucket 4 was replayed inside a forward of the same pool" in text for text in refused)


def test_a_runner_is_refused_two_forwards_deep_as_well(device):
    """Only the innermost pool was looked at: outer, inner on another pool, outer again overwrote the outer call's inputs."""
    runners = {}
    rows = torch.ones(3, 4, device=device.torch_device)

    def calls(name, wanted):
        @segue.break_point(trim={"h": 0})
        def mix(h):
            if segue.current_forward_ctx() == wanted:
                runners[name](rows * 100, ctx="inner" if wanted == "outer" else "last")
            return h * 1

        return mix

    first, second = calls("inner", "outer"), calls("outer", "inner")
    for name, mix in (("outer", first), ("inner", second)):
        runners[name] = GraphRunner(
            lambda x, mix=mix: mix(x * 1) + x, {"x": Input(0, 0.0)}, [4, 8], device=device, pool=device.new_pool(), progress=False
        )
    for _ in range(3):
        for runner in runners.values():
            runner(rows, ctx="plain")
    with pytest.raises(segue.SegueError, match="replayed inside a forward of the same pool"):
        runners["outer"](rows, ctx="outer")
    assert torch.equal(runners["outer"](rows, ctx="plain"), rows * 2)
