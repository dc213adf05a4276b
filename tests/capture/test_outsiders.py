"""What strict outsiders tried: each of these once gave other values than eager, or an error that named nothing."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue.capture import reference_frame
from segue.devices import Device

pytestmark = pytest.mark.usefixtures("inference")


class Backend:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @segue.break_point
    def attend(self, y: Tensor) -> Tensor:
        return y * self.factor

    def plain(self, y: Tensor) -> Tensor:
        return y * self.factor


@pytest.mark.parametrize("how", ["a method that is a break", "break_point of a bound method", "break_here of a bound method"])
def test_a_method_of_an_object_of_the_context_is_the_running_forwards(device: Device, how: str) -> None:
    def forward(y: Tensor) -> Tensor:
        backend = segue.current_forward_ctx().backend
        if how == "a method that is a break":
            return backend.attend(y)
        if how == "break_point of a bound method":
            return segue.break_point(backend.plain)(y)
        return segue.break_here(backend.plain, torch.empty_like(y), y)

    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with segue.active_forward(SimpleNamespace(backend=Backend(2))), capture:
        out = forward(x * 2) * 1
    with segue.active_forward(SimpleNamespace(backend=Backend(5))):
        capture.replay()
    assert out.tolist() == [10.0] * 4


def test_clearing_the_tail_of_an_expanded_argument_leaves_its_one_row(device: Device) -> None:
    @segue.break_point
    def spread(y: Tensor) -> Tensor:
        return y[:1].expand(4, 2)

    x = torch.ones(4, 2, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, device=device)
    with capture:
        y = x * 3
        out, kept = spread(y) * 1, y * 1
    capture.replay(valid_rows=2)
    assert out[:, 0].tolist() == [3.0, 3.0, 0.0, 0.0]
    assert kept.tolist() == [[3.0, 3.0]] * 4


@pytest.mark.parametrize("rows", [4, None])
def test_clearing_a_tail_never_touches_state_that_the_forward_did_not_make(device: Device, rows: int | None) -> None:
    @segue.break_point
    def update(y: Tensor, cache: Tensor) -> Tensor:
        cache[0] += y[0]
        return cache

    x, cache = torch.ones(4, 2, device=device.torch_device), torch.ones(4, 2, device=device.torch_device)
    capture = segue.BreakableCapture(rows=rows, device=device)
    with capture:
        out = update(x * 2, cache) * 1
    with reference_frame(rows=rows, valid_rows=2):
        update(x * 2, cache)
    capture.replay(valid_rows=2)
    assert cache.tolist() == [[7.0, 7.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    assert out[:2].tolist() == [[7.0, 7.0], [1.0, 1.0]]


def test_an_argument_changed_in_place_and_returned_is_still_the_argument(device: Device) -> None:
    @segue.break_point
    def scale(y: Tensor) -> Tensor:
        return y.mul_(2)

    def forward(x: Tensor) -> Tensor:
        y = x + 1
        z = scale(y)
        z.add_(1)
        return y * 1

    x = torch.ones(4, 2, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, device=device)
    with capture:
        out = forward(x)
    assert out.tolist() == [[5.0, 5.0]] * 4
    x.fill_(2)
    capture.replay(valid_rows=3)
    with reference_frame(rows=4, valid_rows=3):
        assert torch.equal(out, forward(x))


def test_one_tensor_at_two_places_that_become_two_tensors_is_refused(device: Device) -> None:
    apart = [False]

    @segue.break_point
    def pair(y: Tensor) -> tuple[Tensor, Tensor]:
        z = y * 2
        return (z, y * 5) if apart[0] else (z, z)

    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        a, b = pair(x * 1)
        out = a + b
    capture.replay()
    apart[0] = True
    with pytest.raises(segue.SegueError, match=r"result\[1\] and an earlier place of the result were one tensor"):
        capture.replay()
    apart[0] = False
    capture.replay()
    assert out.tolist() == [4.0] * 4


def test_a_break_that_fills_a_container_argument_is_refused_by_name(device: Device) -> None:
    @segue.break_point
    def fill(into: list[Tensor], y: Tensor) -> None:
        into.append(y * 2)

    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with pytest.raises(segue.SegueError, match=r"fill.*changed what a list, dict or dataclass argument holds"), capture:
        fill([], x * 1)


def test_a_break_that_declares_out_and_returns_another_tensor_is_refused(device: Device) -> None:
    @segue.break_point(out="dst")
    def forgets(y: Tensor, dst: Tensor) -> Tensor:
        return y * 2

    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with pytest.raises(segue.SegueError, match="declares out='dst' and returned another tensor"), capture:
        forgets(x * 1, torch.empty_like(x))


def test_single_segments_refuse_to_run_after_close_and_when_something_was_re_pointed(device: Device) -> None:
    with torch.inference_mode(False):
        x, w = torch.ones(4, device=device.torch_device), torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = segue.break_here(lambda y: y + 1, torch.empty_like(x), x * w) * 1
    steps = capture.segments
    x.fill_(3)
    for step in steps:
        step()
    assert out.tolist() == [4.0] * 4
    w.data = torch.zeros(4, device=device.torch_device)
    with pytest.raises(segue.SegueError, match="has other memory than at capture"):
        steps[0]()
    capture.close()
    for step in steps:
        with pytest.raises(segue.SegueError, match="it was closed"):
            step()
    assert (capture.graphs, capture.breaks, capture.num_segments) == (2, 1, 3)


def test_a_plain_nan_is_the_value_it_was(device: Device) -> None:
    @segue.break_point
    def nan(y: Tensor) -> tuple[Tensor, float]:
        return y + 1, float("nan")

    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        nan(x * 1)
    capture.replay()


def test_a_sparse_result_at_replay_is_refused_by_name(device: Device) -> None:
    sparse = [False]

    @segue.break_point
    def sometimes(y: Tensor) -> Tensor:
        return (y * 2).to_sparse() if sparse[0] else y * 2

    x = torch.ones(4, 2, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        sometimes(x * 1) + 1
    sparse[0] = True
    with pytest.raises(segue.SegueError, match=r"torch\.sparse_coo"):
        capture.replay()


def test_a_plain_break_here_fills_and_checks_as_a_captured_one() -> None:
    dst = torch.full((4, 2), 7.0)
    assert segue.break_here(lambda y: y[:2] * 2, dst, torch.ones(4, 2)) is dst
    assert dst[:, 0].tolist() == [2.0, 2.0, 0.0, 0.0]
    for wrong in (lambda y: y.double(), lambda y: y[:, :1], lambda y: torch.cat([y, y])):
        with pytest.raises(segue.SegueError, match=r"result is torch\.float"):
            segue.break_here(wrong, dst, torch.ones(4, 2))


@pytest.mark.parametrize("bad", [2.0, True, "2", -1])
def test_row_counts_that_are_none_are_refused_before_anything_runs(device: Device, bad: Any) -> None:
    x = torch.ones(4, device=device.torch_device)
    ran: list[int] = []
    capture = segue.BreakableCapture(rows=4, device=device)
    with capture:
        x * 2
        capture.add_eager(lambda: ran.append(1))
    with pytest.raises(segue.SegueError, match="valid_rows"):
        capture.replay(valid_rows=bad)
    assert ran == [1]
    with pytest.raises(segue.SegueError, match="rows="):
        segue.BreakableCapture(rows=bad, device=device)


def test_a_missing_field_of_the_context_is_a_replays_error(device: Device) -> None:
    @segue.break_point
    def add(y: Tensor, bias: Tensor) -> Tensor:
        return y + bias

    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with segue.active_forward(SimpleNamespace(bias=x * 1)), capture:
        add(x * 1, segue.current_forward_ctx().bias)
    with segue.active_forward(SimpleNamespace()), pytest.raises(segue.errors.ReplayError, match=r"ctx\.bias"):
        capture.replay()


@pytest.mark.parametrize("scripted", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 4, device=m.weight.device))])
def test_scripted_modules_and_compiled_objects_of_others_may_be_reached(device: Device, scripted: Any) -> None:
    rng = pytest.importorskip("numpy").random  # whose compiled classes have a descriptor as their __module__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        linear = scripted(torch.nn.Linear(4, 4, device=device.torch_device).eval())

    def forward(x: Tensor) -> Tensor:
        return double(linear(x)) if rng is not None else x

    runner = segue.GraphRunner(forward, {"x": segue.Input(0, 0.0)}, [4], device=device, pool=device.new_pool(), progress=False)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(3, 4, device=device.torch_device)
            torch.testing.assert_close(runner(x), forward(x))
    assert runner.stats.replayed == 2
    runner.close()


def test_a_number_written_into_a_tensor_behind_a_break_is_in_the_graph(device: Device) -> None:
    x = torch.ones(2, 2, device=device.torch_device)
    with segue.BreakableCapture(device=device) as capture:
        y = double(x)
        y[0] = 5.0
        y[y > 4] = 7.0
        out = y + 1
    x.fill_(2.0)
    capture.replay()
    assert out.tolist() == [[8.0, 8.0], [5.0, 5.0]]


@segue.break_point
def double(x: Tensor) -> Tensor:
    return x * 2
