"""A forward that writes what a break returned: in eager the write arrives in whatever memory that was."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue.devices import Device
from segue.runner import GraphRunner, Input

pytestmark = pytest.mark.usefixtures("inference")


class World:
    """What breaks return: memory of their own, of the context, of their arguments, or made anew."""

    def __init__(self, place: torch.device) -> None:
        self.cache, self.state = torch.ones(4, 2, device=place), torch.ones(3, device=place)
        self.last: Tensor | None = None
        self.ctx = SimpleNamespace(t=torch.ones(4, 2, device=place))

    @segue.break_point
    def get(self, y: Tensor) -> Tensor:
        return self.cache

    @segue.break_point
    def get_rows(self, y: Tensor) -> Tensor:
        return self.cache[: segue.current_valid_rows()]

    @segue.break_point
    def get_both(self, y: Tensor) -> dict[str, Tensor]:
        return {"new": y + 1, "state": self.state[1:]}

    @segue.break_point
    def get_context(self, y: Tensor) -> Tensor:
        found: Tensor = segue.current_forward_ctx().t
        return found

    @segue.break_point
    def give_back(self, y: Tensor, given: Tensor) -> Tensor:
        return given

    @segue.break_point
    def keep(self, y: Tensor) -> Tensor:
        self.last = y + 1
        return self.last

    @segue.break_point
    def make(self, y: Tensor) -> Tensor:
        self.last = y * 3
        return y + 1

    @segue.break_point(trim=("y",))
    def in_place(self, y: Tensor) -> Tensor:
        return y.mul_(2)


def _runner(device: Device, forward: Callable[[Tensor], Any]) -> GraphRunner:
    return GraphRunner(forward, inputs={"x": Input(0, 0.0)}, buckets=[4], device=device, pool=device.new_pool())


WRITES: dict[str, Callable[[World, Tensor], Any]] = {
    "get": lambda w, x: w.get(x * 1).add_(1) + x,
    "get_rows": lambda w, x: w.get_rows(x * 1).add_(1) + x,
    "view": lambda w, x: w.get(x * 1)[1:].mul_(2).sum() + x,
    "get_both": lambda w, x: w.get_both(x * 1)["state"].add_(1).sum() + x,
    "get_context": lambda w, x: w.get_context(x * 1).copy_(x) * 1,
    "give_back": lambda w, x: w.give_back(x * 1, w.cache).add_(x) * 1,
    "keep": lambda w, x: w.keep(x * 1).add_(x) * 1,
    "out": lambda w, x: torch.mul(x, 2, out=w.get(x * 1)) * 1,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_memory_that_a_break_returned_and_others_hold_arrives_or_is_refused(device: Device, name: str) -> None:
    world, eager = World(device.torch_device), World(device.torch_device)
    x = torch.ones(4, 2, device=device.torch_device)
    match = r"aten\.\w+.* at .*test_copied_memory.py:\d+ .*writes what a break returned.*result.*lives on outside the forward"
    with segue.active_forward(world.ctx):
        runner = _runner(device, lambda x: WRITES[name](world, x))
        with pytest.raises(segue.CaptureError, match=match):
            runner(x)
        capture = segue.BreakableCapture(rows=4, device=device)
        with pytest.raises(segue.CaptureError, match=match), capture:
            WRITES[name](world, x)
    assert torch.equal(world.cache, eager.cache) and torch.equal(world.state, eager.state)


READS: dict[str, Callable[[World, Tensor], Any]] = {
    "a read": lambda w, x: w.get(x * 1) + w.get_both(x * 1)["state"].sum() + w.get_context(x * 1),
    "of a copy": lambda w, x: w.get(x * 1).clone().add_(1) + x,
    "of what the break made": lambda w, x: w.make(x * 1).add_(x).mul_(2),
    "of what it made beside": lambda w, x: w.get_both(x * 1)["new"].add_(x),
    "of its argument": lambda w, x: w.in_place(x * 1).add_(x) * 1,
    "of an earlier result": lambda w, x: w.in_place(w.make(x * 1)).add_(x) * 1,
}


@pytest.mark.parametrize("name", READS)
def test_reads_and_writes_of_the_forwards_own_replay(device: Device, name: str) -> None:
    world = World(device.torch_device)
    runner = _runner(device, lambda x: READS[name](world, x))
    with segue.active_forward(world.ctx):
        for k in range(1, 6):
            x = torch.full((4, 2), float(k), device=device.torch_device)
            world.cache.fill_(k)
            world.ctx.t.fill_(2 * k)
            assert torch.equal(runner(x), READS[name](world, x.clone()))
    assert runner.stats.replayed == 3


def test_memory_that_dies_after_the_break_is_nobodys(device: Device) -> None:
    """Its place in the pool is given to others, whose writes are innocent."""
    world = World(device.torch_device)

    def forward(x: Tensor) -> Tensor:
        total = world.get(x * 1) + 0
        for _ in range(4):
            total = total * 1
            total.add_(1)
        return total

    x = torch.ones(4, 2, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, device=device)
    with capture:
        out = forward(x)
    world.cache.fill_(3)
    capture.replay()
    assert torch.equal(out, forward(x))
