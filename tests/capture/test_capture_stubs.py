"""Capture stubs, which run in a break's place where nobody waits for the answer, and the hook after each segment's end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue.devices import Device

pytestmark = pytest.mark.usefixtures("inference")


class Body:
    """A break with a stub, on one device. It notes in which phase either ran."""

    def __init__(self, **options: Any) -> None:
        self.ran: list[tuple[str, str | None]] = []

        @segue.break_point(capture_stub=self.stub, **options)
        def body(x: Tensor, out: Tensor | None = None) -> Tensor:
            self.ran.append(("body", segue.capture_phase()))
            return x * 10 if out is None else out.copy_(x * 10)

        self.body = body

    def stub(self, x: Tensor, out: Tensor | None = None) -> Tensor | None:
        self.ran.append(("stub", segue.capture_phase()))
        return torch.zeros_like(x) if out is None else None


def rows(device: Device, n: int) -> Tensor:
    return torch.arange(n * 4.0, device=device.torch_device).view(n, 4)


@pytest.mark.parametrize("filled", [False, True], ids=["returned", "filled"])
def test_a_bare_capture_runs_the_stub_and_its_replays_the_function(device: Device, filled: bool) -> None:
    body = Body(out="out") if filled else Body()
    x = rows(device, 8)
    capture = segue.BreakableCapture(rows=8, device=device, pool=device.new_pool())

    def forward() -> Tensor:
        y = x * 2
        return (body.body(y, torch.empty_like(y)) if filled else body.body(y)) + 1

    with capture:
        out = forward()
    assert body.ran == [("stub", "break")]
    for valid in (8, 3, 8):
        x.add_(1)
        with capture.pool.turn():
            capture.replay(valid)
            assert torch.equal(out[:valid], x[:valid] * 20 + 1) and (out[valid:] == 1).all()
    assert body.ran[1:] == [("body", None)] * 3
    assert torch.equal(forward(), x * 20 + 1) and body.ran[-1] == ("body", None)


def test_a_runner_runs_the_stub_ahead_of_traffic_and_the_function_for_whoever_waits(device: Device) -> None:
    ahead, lazy = Body(trim=("x",)), Body(trim=("x",))
    options: Any = {"inputs": {"x": segue.Input(0, 0.0)}, "buckets": [4, 8], "device": device, "progress": False}
    runners = [
        segue.GraphRunner(lambda x, b=b: b.body(x * 2) + 1, pool=device.new_pool(), **options) for b in (ahead, lazy)
    ]
    runners[0].capture(rows(device, 3))
    assert ahead.ran == [("stub", None), ("stub", "break")] * 2
    for n in (7, 3, 7, 2):
        x = rows(device, n)
        for runner in runners:
            assert torch.equal(runner(x), x * 20 + 1)
            assert torch.equal(runner.reference(x), x * 20 + 1)
    assert {who for who, _ in ahead.ran[4:]} == {"body"} and runners[0].stats.replayed == 4
    assert {who for who, _ in lazy.ran} == {"body"} and runners[1].stats.captured == 2


def test_a_trial_replay_runs_the_function(device: Device) -> None:
    body = Body()
    options: Any = {"device": device, "pool": device.new_pool(), "progress": False}
    with segue.GraphRunner(lambda x: body.body(x * 2) + 1, {"x": segue.Input(0, 0.0)}, [4], **options) as runner:
        runner.capture(rows(device, 3), verify=True)
    assert [who for who, _ in body.ran] == ["stub", "stub", "body", "body"]


def test_a_function_that_gives_another_shape_than_its_stub_is_named_at_the_replay(device: Device) -> None:
    @segue.break_point(capture_stub=lambda x: x.new_zeros(8, 2))
    def body(x: Tensor) -> Tensor:
        return x * 10

    x = rows(device, 8)
    capture = segue.BreakableCapture(device=device, pool=device.new_pool())
    with capture:
        body(x * 2).sum()
    with pytest.raises(segue.ReplayError, match=r"result is torch.float32 \(8, 4\).*at capture it was torch.float32 \(8, 2\)"):
        capture.replay()


def test_a_stub_must_be_a_function() -> None:
    with pytest.raises(segue.UsageError, match=r"capture_stub=3 must be a function of what .*<lambda>.* takes"):
        segue.break_point(capture_stub=3)(lambda x: x)


def test_the_hook_is_called_after_each_segment_before_its_launch_and_at_no_replay(device: Device) -> None:
    x, seen = rows(device, 4), []

    def barrier() -> None:
        assert not segue.is_breakable_capture_active()
        seen.append((capture.graphs, capture.breaks))

    capture = segue.BreakableCapture(device=device, pool=device.new_pool(), after_segment=barrier)
    with capture:
        y = capture.add_eager(lambda: x * 2) + 1
        capture.cut()
        out = y * 3
    assert seen == [(1, 0), (2, 1), (3, 1)]
    x.fill_(2)
    capture.replay()
    assert (out == 15).all() and len(seen) == 3
    capture.close()


def test_a_hook_that_fails_fails_the_capture_which_leaves_no_trace(device: Device) -> None:
    x, left = rows(device, 4), []

    def barrier() -> None:
        if len(left) == 1:
            raise TimeoutError("rank 1 is missing")
        left.append(1)

    runner = segue.GraphRunner(
        lambda x: segue.break_here(lambda t: t + 1, torch.empty_like(x), x * 2) * 3, {"x": segue.Input(0, 0.0)}, [4],
        device=device, pool=device.new_pool(), after_segment=barrier,
    )  # fmt: skip
    runner(x)
    with pytest.raises(TimeoutError, match="rank 1 is missing"):
        runner(x)
    left.clear()
    left += [1, 1]
    for _ in range(3):
        assert torch.equal(runner(x), (x * 2 + 1) * 3)
    with pytest.raises(segue.UsageError, match="after_segment=3 must be a function of no arguments"):
        segue.GraphRunner(lambda x: x, {"x": segue.Input(0, 0.0)}, [4], after_segment=3)  # type: ignore[arg-type]


def test_a_full_graph_holds_the_function_and_never_its_stub(device: Device) -> None:
    def stub(x: Tensor) -> Tensor:
        raise AssertionError("the stub ran")

    body = segue.break_point(lambda x: x * 10, capture_stub=stub)
    strategies = [segue.Full(takes=lambda args, kwargs, ctx: True, buckets=[2, 4]), segue.Breakable()]
    runner = segue.GraphRunner(
        lambda x: body(x * 2) + 1, {"x": segue.Input(0, 0.0)}, [8], device=device, pool=device.new_pool(), progress=False,
        strategies=strategies,
    )  # fmt: skip
    runner.capture(rows(device, 1))
    x = rows(device, 3)
    assert torch.equal(runner(x), x * 20 + 1) and runner.stats.strategies == {"full": 1}
