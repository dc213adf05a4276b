"""What a break gets from the live context, and what a capture refuses to freeze."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue.devices import Device

pytestmark = pytest.mark.usefixtures("inference")


@dataclasses.dataclass
class Meta:
    bias: Tensor
    lengths: list[int]


def _ctx(device: Device, value: float, *lengths: int) -> SimpleNamespace:
    return SimpleNamespace(meta=Meta(torch.full((2,), value, device=device.torch_device), list(lengths)), n=len(lengths))


def test_breaks_read_the_context_of_the_running_forward(device: Device) -> None:
    @segue.break_point
    def add(y: Tensor) -> Tensor:
        return y + segue.current_forward_ctx().meta.bias

    x = torch.ones(2, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with segue.active_forward(_ctx(device, 1.0)), capture:
        out = add(x * 2) * 1
    assert out.tolist() == [3.0, 3.0]
    with segue.active_forward(_ctx(device, 5.0)):
        capture.replay()
    assert out.tolist() == [7.0, 7.0]
    assert segue.current_forward_ctx() is None


@pytest.mark.parametrize("how", ["the context", "a field", "a field of a field", "in a tuple", "in a dict"])
def test_arguments_that_live_in_the_context_are_rebound_by_path(device: Device, how: str) -> None:
    @segue.break_point
    def add(y: Tensor, given: Any) -> Tensor:
        meta = {
            "the context": lambda: given.meta,
            "a field": lambda: given,
            "a field of a field": lambda: Meta(given, [1, 2]),
            "in a tuple": lambda: given[1][0],
            "in a dict": lambda: Meta(given["bias"], given["lengths"]),
        }[how]()
        return y + meta.bias * len(meta.lengths)

    def forward(x: Tensor) -> Tensor:
        ctx = segue.current_forward_ctx()
        given = {
            "the context": ctx,
            "a field": ctx.meta,
            "a field of a field": ctx.meta.bias,
            "in a tuple": (3, [ctx.meta]),
            "in a dict": {"bias": ctx.meta.bias, "lengths": ctx.meta.lengths},
        }[how]
        return add(x * 2, given) * 1

    x = torch.ones(2, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with segue.active_forward(_ctx(device, 1.0, 4, 4)), capture:
        out = forward(x)
    assert out.tolist() == [4.0, 4.0]
    with segue.active_forward(_ctx(device, 10.0, 7, 7)):
        capture.replay()
    assert out.tolist() == [22.0, 22.0]


def test_a_captured_none_is_never_replaced(device: Device) -> None:
    @segue.break_point
    def maybe(y: Tensor, extra: Tensor | None) -> Tensor:
        return y if extra is None else y + extra

    x = torch.ones(2, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with segue.active_forward(SimpleNamespace(extra=None)), capture:
        out = maybe(x * 2, segue.current_forward_ctx().extra) * 1
    with segue.active_forward(SimpleNamespace(extra=torch.ones(2, device=device.torch_device))):
        capture.replay()
    assert out.tolist() == [2.0, 2.0]


def test_an_object_the_context_does_not_hold_is_refused_by_name(device: Device) -> None:
    class Metadata:
        pass

    @segue.break_point
    def attend(y: Tensor, metadata: Any) -> Tensor:
        return y

    x = torch.ones(2, device=device.torch_device)
    with pytest.raises(segue.SegueError) as error, segue.BreakableCapture(device=device, name="bucket 2"):
        attend(x * 2, Metadata())
    for part in ("bucket 2", "attend", "'metadata'", "Metadata", "active_forward"):
        assert part in str(error.value)


def test_a_context_without_the_captured_field_is_refused_by_name(device: Device) -> None:
    @segue.break_point
    def add(y: Tensor, bias: Tensor) -> Tensor:
        return y + bias

    x = torch.ones(2, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with segue.active_forward(_ctx(device, 1.0)), capture:
        add(x * 2, segue.current_forward_ctx().meta.bias)
    with segue.active_forward(SimpleNamespace()), pytest.raises(segue.SegueError, match=r"ctx\.meta\.bias"):
        capture.replay()


def test_valid_rows_are_known_in_breaks_only(device: Device) -> None:
    seen: list[int | None] = []

    @segue.break_point
    def look(y: Tensor) -> Tensor:
        seen.append(segue.current_valid_rows())
        return y

    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, device=device)
    with capture:
        assert segue.current_valid_rows() is None
        look(x * 2)
    capture.replay(valid_rows=3)
    capture.replay()
    look(x)
    assert seen == [4, 3, 4, None]
    with pytest.raises(segue.SegueError, match="valid_rows=5 is not between 0 and its 4 rows"):
        capture.replay(valid_rows=5)
