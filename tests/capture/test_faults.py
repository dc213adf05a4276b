"""Faults reported against other breakable graphs, as scenarios: a replay gives what eager gives, whatever else happens."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue.capture import reference_frame
from segue.devices import Device

pytestmark = pytest.mark.usefixtures("inference")


@segue.break_point
def plus_one(y: Tensor) -> Tensor:
    return y + 1


def test_a_fresh_result_of_a_break_survives_the_allocators_churn_and_harms_nobody(device: Device) -> None:
    x = torch.ones(256, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = plus_one(x * 2) * 3
    for k in range(20):
        x.fill_(k)
        churn = [torch.full((256,), float(i), device=device.torch_device) for i in range(32)]
        capture.pool.poison()
        capture.replay()
        assert out.tolist() == [(2.0 * k + 1) * 3] * 256
        assert all((t == i).all() for i, t in enumerate(churn))


@pytest.mark.parametrize("order", [(16, 8), (8, 16)])
def test_rows_that_a_break_leaves_unwritten_never_reach_the_next_segment(device: Device, order: tuple[int, int]) -> None:
    @segue.break_point
    def real_rows_only(y: Tensor) -> Tensor:
        n = segue.current_valid_rows()
        out = torch.full_like(y, float("nan"))
        out[:n] = y[:n] * 2
        return out

    def forward(x: Tensor) -> Tensor:
        z = real_rows_only(x + 1)
        return z + z.sum(0, keepdim=True)

    runs = {}
    for b in order:
        x = torch.zeros(b, 2, device=device.torch_device)
        capture = segue.BreakableCapture(rows=b, device=device)
        with capture:
            out = forward(x)
        runs[b] = capture, x, out
    for b, n in ((16, 16), (16, 9), (8, 8), (8, 1), (16, 1), (8, 7)):
        capture, x, out = runs[b]
        x.normal_()
        capture.pool.poison()
        capture.replay(valid_rows=n)
        with reference_frame(rows=b, valid_rows=n):
            assert torch.equal(out, forward(x))
        assert not out.isnan().any()


def test_a_bare_capture_that_meets_no_break_point_says_so(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(4, device=device.torch_device)
    with caplog.at_level(logging.WARNING, "segue"):
        with segue.BreakableCapture(device=device):
            plus_one(x)
        assert not caplog.records
        with segue.BreakableCapture(device=device, name="bucket 4"):
            x * 2
    assert "bucket 4 met no break point" in caplog.text


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_a_flag_left_over_from_another_capture_does_not_change_results(device: Device, order: tuple[bool, bool]) -> None:
    class Meta:
        fast = False

    meta = Meta()

    @segue.break_point
    def kernel(y: Tensor) -> Tensor:
        return y * 2 if segue.current_forward_ctx().fast else y * 3

    runs = {}
    for fast in order:
        meta.fast = fast
        x = torch.ones(4, device=device.torch_device)
        capture = segue.BreakableCapture(device=device)
        with segue.active_forward(meta), capture:
            out = kernel(x + 1) + 1
        runs[fast] = capture, out
    for captured in order:
        for fast in (True, False):
            meta.fast = fast
            with segue.active_forward(meta):
                runs[captured][0].replay()
            assert runs[captured][1].tolist() == [5.0 if fast else 7.0] * 4


def test_an_old_graph_in_a_cycle_may_be_collected_while_another_is_recorded(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    old: Any = segue.BreakableCapture(device=device)
    with old:
        plus_one(x * 2)
    cycle: list[Any] = [old]
    cycle.append(cycle)
    del old, cycle
    capture = segue.BreakableCapture(device=device)
    with capture:
        y = x * 3
        gc.collect()
        out = plus_one(y) * 2
        gc.collect()
    x.fill_(2)
    capture.replay()
    assert out.tolist() == [14.0] * 4
    torch.rand(3, device=device.torch_device)


def test_a_capture_that_replaces_another_in_a_loop_is_whole(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    for k in range(4):
        capture = segue.BreakableCapture(device=device)
        with capture as c:
            out = plus_one(x * k) * 2
        c.replay()
        assert out.tolist() == [2.0 * (k + 1)] * 4


def test_autocasts_weight_cache_does_not_freeze_a_weight(device: Device) -> None:
    place = device.torch_device
    with torch.inference_mode(False):
        w = torch.ones(4, 4, device=place, requires_grad=True)
    x = torch.ones(2, 4, device=place)
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(place.type, dtype=torch.bfloat16):
        torch.nn.functional.linear(x, w)
        capture = segue.BreakableCapture(device=device)
        with capture:
            out = torch.nn.functional.linear(x, w)
        w.mul_(3)
        capture.replay()
    assert out.float().tolist() == [[12.0] * 4] * 2


def test_a_cast_that_autocast_keeps_in_one_segment_is_made_anew_in_the_next(device: Device) -> None:
    place = device.torch_device
    with torch.inference_mode(False):
        w = torch.ones(4, 4, device=place, requires_grad=True)
    x = torch.ones(2, 4, device=place)

    @segue.break_point
    def grow(y: Tensor) -> Tensor:
        w.mul_(3)
        return y

    with torch.inference_mode(False), torch.no_grad(), torch.autocast(place.type, dtype=torch.bfloat16):
        with segue.BreakableCapture(device=device) as capture:
            first = torch.nn.functional.linear(x, w)
            twice = torch.nn.functional.linear(x, w)  # from the cache
            out = torch.nn.functional.linear(grow(first) + twice, w)
        assert out.float().tolist() == [[8.0 * 4 * 3] * 4] * 2
        capture.pool.poison()
        capture.replay()
        assert out.float().tolist() == [[24.0 * 4 * 9] * 4] * 2
        assert torch.nn.functional.linear(x, w).float().tolist() == [[36.0] * 4] * 2
        capture.pool.poison()
        assert torch.nn.functional.linear(x, w).float().tolist() == [[36.0] * 4] * 2


def test_a_replay_under_another_autocast_than_the_captures_is_refused(device: Device) -> None:
    x = torch.ones(2, 4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device, name="bucket 2")
    with capture:
        out = plus_one(x) * 2
    with torch.autocast(device.torch_device.type, dtype=torch.bfloat16):
        with pytest.raises(segue.SegueError, match=r"bucket 2 was captured under autocast off.*to torch.bfloat16"):
            capture.replay()
        inside = segue.BreakableCapture(device=device)
        with inside:
            plus_one(x) * 2
        inside.replay()
    capture.replay()
    assert out.tolist() == [[4.0] * 4] * 2


@pytest.mark.cuda
def test_an_unpinned_host_tensor_copied_in_a_segment_is_refused() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x, host = torch.ones(4, device="cuda"), torch.full((4,), 2.0)
    with pytest.raises(RuntimeError), segue.BreakableCapture(device="cuda"):
        x.copy_(host)
    torch.rand(3, device="cuda")
    assert x.tolist() == [1.0] * 4
