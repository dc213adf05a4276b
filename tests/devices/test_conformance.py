"""What every device must do, written against the protocol alone."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from segue import _torch
from segue.devices import Device, resolve

from .conftest import Sandbox


def test_a_launch_reads_inputs_where_they_were_recorded(lab: Sandbox) -> None:
    x = lab.tensor(1, 2, 3)
    segment, y = lab.record(lambda: (x * 2 + 1).relu())
    assert torch.equal(y, lab.tensor(3, 5, 7))
    x.copy_(lab.tensor(-5, 0, 4))
    lab.launch(segment)
    assert torch.equal(y, lab.tensor(0, 1, 9))


def test_a_capture_computes_real_values_for_what_comes_between_segments(lab: Sandbox) -> None:
    x = lab.tensor(1, 2)
    kept = []

    def first() -> None:
        kept.append(x + 1)

    _, y = lab.record(first, lambda: kept[0] * float(2))
    assert torch.equal(y, lab.tensor(4, 6))


def test_an_update_in_place_happens_once_at_capture_and_once_a_launch(lab: Sandbox) -> None:
    counter = lab.tensor(0, 0)
    segment, _ = lab.record(lambda: counter.add_(1))
    assert torch.equal(counter, lab.tensor(1, 1))
    lab.launch(segment, segment)
    assert torch.equal(counter, lab.tensor(3, 3))


def test_an_update_of_an_earlier_segments_result_happens_once_a_launch(lab: Sandbox) -> None:
    x, made = lab.tensor(1, 2), []

    def first() -> None:
        made.append(x + 0)

    lab.record(first, lambda: made[0].add_(10))
    assert torch.equal(made[0], lab.tensor(11, 12))
    x.fill_(5)
    lab.launch(*lab.segments)
    assert torch.equal(made[0], lab.tensor(15, 15))


def test_writes_through_views_and_out_arguments_are_replayed(lab: Sandbox) -> None:
    x, table, slot = lab.tensor(1, 2), lab.tensor(0, 0, 0, 0), torch.tensor([1, 3], device=lab.device.torch_device)
    total = lab.tensor(0, 0)

    def forward() -> None:
        table.index_copy_(0, slot, x)
        table[:1].copy_(x[1:])
        torch.add(x, x, out=total)

    segment, _ = lab.record(forward)
    x.copy_(lab.tensor(7, 8))
    slot.copy_(torch.tensor([2, 1], device=lab.device.torch_device))
    lab.launch(segment)
    assert torch.equal(table, lab.tensor(8, 8, 7, 2))
    assert torch.equal(total, lab.tensor(14, 16))


def test_an_empty_recording_is_an_empty_segment(lab: Sandbox) -> None:
    segment, _ = lab.record(lambda: None)
    assert segment.empty
    lab.launch(segment)
    x = lab.tensor(1)
    assert not lab.record(lambda: x + 1)[0].empty


def test_memory_of_dead_results_is_used_again_by_later_segments(lab: Sandbox) -> None:
    x = torch.ones(1 << 20, device=lab.device.torch_device)
    addresses = []

    def part() -> None:
        addresses.append((x + 1).data_ptr())

    lab.record(part)
    reserved = lab.pool.usage().reserved
    for _ in range(5):
        lab.record(part)
    assert len(set(addresses)) == 1
    assert lab.pool.usage().reserved == reserved


def test_results_belong_to_the_pool_and_inputs_do_not(lab: Sandbox) -> None:
    x = lab.tensor(1, 2)
    _, y = lab.record(lambda: x + 1)
    assert lab.pool.owns(y) and lab.pool.owns(y[1:]) and not lab.pool.owns(x)
    assert not lab.device.new_pool().owns(y)


def test_a_block_is_live_until_the_last_tensor_over_it_dies(lab: Sandbox) -> None:
    x = lab.tensor(*range(8))
    _, y = lab.record(lambda: x + 1)
    live = lab.pool.usage().live
    assert len(lab.pool.blocks()) == 1 and live > 0
    address, size = lab.pool.blocks()[0]
    assert address <= y.data_ptr() < address + size
    view = y[2:]
    del y
    assert lab.pool.usage().live == live
    del view
    assert lab.pool.usage().live == 0 and lab.pool.blocks() == []


def test_empty_allocates_between_segments_with_the_strides_asked_for(lab: Sandbox) -> None:
    x = lab.tensor(1, 2)
    lab.record(lambda: x + 1)
    buffer = lab.pool.empty((2, 3), (1, 2), torch.float16)
    assert buffer.shape == (2, 3) and buffer.stride() == (1, 2) and buffer.dtype is torch.float16
    assert lab.pool.owns(buffer) and buffer.device == lab.device.torch_device
    buffer.fill_(2)
    live = lab.pool.usage().live
    again = lab.pool.empty((2, 3), (1, 2), torch.float16)
    assert lab.pool.usage().live > live
    del again
    assert lab.pool.usage().live == live
    segment, y = lab.record(lambda: buffer * 2)
    buffer.fill_(3)
    lab.launch(segment)
    assert torch.equal(y, torch.full_like(y, 6))


def test_poison_reaches_every_free_block_and_no_live_one(lab: Sandbox) -> None:
    x = lab.tensor(1, 2, 3)
    segment, y = lab.record(lambda: ((x + 1) * 2) - 1)
    dead = lab.pool.empty((4,), (1,), torch.float32)
    shadow = _torch.tensor_at(dead.data_ptr(), 16, torch.float32, (4,), (1,), 0, lab.device.torch_device)
    dead.zero_()
    del dead
    assert lab.pool.poison() > 0
    lab.device.synchronize()
    assert shadow.isnan().all()
    assert torch.equal(y, lab.tensor(3, 5, 7))
    x.add_(1)
    lab.launch(segment)
    assert torch.equal(y, lab.tensor(5, 7, 9))


def test_an_aborted_recording_leaves_values_generators_and_the_pool_as_they_were(lab: Sandbox) -> None:
    x = lab.tensor(1, 2)
    where = lab.device.torch_device

    class Boom(Exception):
        pass

    def fails() -> None:
        torch.rand(4, device=where)
        x.add_(1)
        (x * 3).sum()
        raise Boom

    torch.manual_seed(3)
    with pytest.raises(Boom) as caught:
        lab.record(fails)
    del caught
    after = torch.rand(4, device=where)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(4, device=where))
    assert torch.equal(x, lab.tensor(1, 2))
    gc.collect()
    assert lab.pool.usage().live == 0
    segment, y = lab.record(lambda: x + 1)
    x.fill_(6)
    lab.launch(segment)
    assert torch.equal(y, lab.tensor(7, 7))


def test_an_abort_leaves_earlier_segments_working(lab: Sandbox) -> None:
    x = lab.tensor(1, 2)
    segment, y = lab.record(lambda: x + 1)
    with pytest.raises(ZeroDivisionError):
        lab.record(lambda: (x * 100, 1 // 0))
    x.fill_(3)
    lab.launch(segment)
    assert torch.equal(y, lab.tensor(4, 4))


def test_random_draws_advance_as_in_eager_and_follow_a_new_seed(lab: Sandbox) -> None:
    where = lab.device.torch_device
    torch.manual_seed(1)
    expected = [torch.rand(8, device=where) for _ in range(3)]
    torch.manual_seed(1)
    segment, y = lab.record(lambda: torch.rand(8, device=where) * 1)
    assert torch.equal(y, expected[0])
    lab.launch(segment)
    assert torch.equal(y, expected[1])
    assert torch.equal(torch.rand(8, device=where), expected[2])
    torch.manual_seed(1)
    lab.launch(segment)
    assert torch.equal(y, expected[0])


def test_retiring_the_last_capture_gives_the_memory_back(lab: Sandbox) -> None:
    x = torch.ones(1 << 21, device=lab.device.torch_device)
    other = object()
    lab.pool.attach(other)
    segment, y = lab.record(lambda: x + 1)
    assert lab.pool.usage().reserved > 0
    lab.close()
    x.fill_(4)
    segment.launch()
    assert y[0] == 5, "another capture still uses the pool, so nothing may be destroyed"
    del y
    lab.pool.retire(other, [segment])
    del segment
    gc.collect()
    assert lab.pool.usage().reserved == 0


def test_a_launch_that_was_kept_is_refused_once_its_graph_is_destroyed(lab: Sandbox) -> None:
    x = lab.tensor(1, 2)
    segment, _ = lab.record(lambda: x + 1)
    lab.launch(segment)
    kept = segment.launch
    lab.close()
    for launch in (kept, segment.launch):
        with pytest.raises(Exception, match=r"closed|destroyed|captur"):
            launch()
    assert torch.equal(x + 1, lab.tensor(2, 3)), "what failed is forgotten"


def test_a_pool_serves_new_captures_after_it_was_given_back(lab: Sandbox) -> None:
    x = lab.tensor(1, 2)
    lab.record(lambda: x + 1)
    lab.close()
    again = Sandbox(lab.device, lab.pool)
    segment, y = again.record(lambda: x + 2)
    x.fill_(1)
    again.launch(segment)
    assert torch.equal(y, lab.tensor(3, 3))
    again.close()


def test_turns_exclude_other_threads_nest_in_one_and_are_counted(lab: Sandbox) -> None:
    inside = threading.Event()
    order: list[str] = []

    def other() -> None:
        inside.wait()
        with lab.pool.turn():
            order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    before = lab.pool.replays
    with lab.pool.turn(), lab.pool.turn():
        inside.set()
        time.sleep(0.05)
        order.append("mine")
    thread.join()
    assert order == ["mine", "other"]
    assert lab.pool.replays >= before + 2


def test_a_segment_launches_in_every_grad_mode_and_thread(device: Device) -> None:
    lab = Sandbox(device)
    x = lab.tensor(1, 2)
    with torch.inference_mode():
        segment, y = lab.record(lambda: (x + 1).mul_(2))
    x.fill_(3)
    lab.launch(segment)
    assert torch.equal(y, lab.tensor(8, 8))
    with torch.no_grad():
        x.fill_(4)
        lab.launch(segment)
        assert torch.equal(y, lab.tensor(10, 10))
    x.fill_(5)
    thread = threading.Thread(target=lab.launch, args=(segment,))
    thread.start()
    thread.join()
    assert torch.equal(y, lab.tensor(12, 12))
    lab.close()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_composite_ops_views_and_several_results_are_recorded_whole(device: Device, mode: type) -> None:
    lab = Sandbox(device)
    with mode():
        x, w = torch.randn(4, 6, device=device.torch_device), torch.randn(8, 6, device=device.torch_device)

        def forward() -> torch.Tensor:
            h = torch.nn.functional.linear(x, w).reshape(2, 2, 8).transpose(0, 1)
            a, b = h.chunk(2, -1)
            values, index = torch.topk(a.contiguous(), 2, dim=-1)
            return torch.cat([values + index, b.sort(-1).values[..., :2]], -1).flatten()

        segment, y = lab.record(forward)
        assert torch.equal(y, forward())
        x.normal_()
        lab.pool.poison()
        lab.launch(segment)
        assert torch.equal(y, forward())
    lab.close()


def test_the_default_pool_is_one_per_device_and_a_device_one_per_name(device: Device) -> None:
    assert device.default_pool() is device.default_pool()
    assert device.new_pool() is not device.default_pool()
    assert resolve(device.name) is device
    assert device.driver_bytes() >= 0
