"""Tensors that wrap others: results of collectives are waited for, others have no memory of their own and are refused by name."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import segue
from segue.devices import Device

INPUTS = {"x": segue.Input(0, 0.0)}
pytestmark = pytest.mark.usefixtures("inference")


class Wrapping(Tensor):
    """Wraps a tensor, as DTensor does."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapping:
        made: Wrapping = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.inner if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Marked(Tensor):
    """A class of its own with memory of its own."""


@segue.break_point
def scaled(x: Tensor, by: Tensor) -> Tensor:
    return x * by


def test_an_input_without_memory_is_refused_even_where_a_plain_one_fitted(make, device: Device) -> None:
    runner = make(lambda x: x * 2, INPUTS, [4])
    x = torch.ones(3, 2, device=device.torch_device)
    for plain in (False, True, True, True):
        if plain:
            assert runner(x).sum() == 12
        with pytest.raises(segue.InputError, match=r"input 'x' is of type Wrapping, which wraps another tensor.*to_local"):
            runner(Wrapping(x))
    assert runner(torch.nn.Parameter(x, requires_grad=False)).sum() == 12 and runner.stats.replayed == 2


def test_an_argument_or_result_of_a_break_without_memory_is_refused_by_name(make, device: Device) -> None:
    w = torch.full((1, 2), 3.0, device=device.torch_device)

    @segue.break_point
    def wraps(x: Tensor) -> Any:
        return Wrapping(x)

    x = torch.ones(3, 2, device=device.torch_device)
    as_argument = r"scaled .*test_wrappers.py:\d+.*argument 'by' is of type Wrapping, .*to_local"
    with pytest.raises(segue.CaptureError, match=as_argument), segue.BreakableCapture(device=device):
        scaled(x + 1, Wrapping(w))
    as_result = r"wraps .*: result is of type Wrapping, .*address"
    with pytest.raises(segue.CaptureError, match=as_result), segue.BreakableCapture(device=device):
        wraps(x + 1)
    with pytest.raises(segue.CaptureError, match=r"bucket 4: output\[1\] is of type Wrapping, "):
        make(lambda x: (x, Wrapping(w)), INPUTS, [4])(x)
    runner = make(lambda x: scaled(x + 1, w.as_subclass(Marked)), INPUTS, [4])
    assert [runner(x).sum().item() for _ in range(3)] == [36.0] * 3 and runner.stats.replayed == 1


@pytest.fixture
def group(device: Device) -> Iterator[Any]:
    """A process group of this process alone, and functional collectives over it."""
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.torch_device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{Path(folder) / 'rendezvous'}", rank=0, world_size=1)
        try:
            yield lambda t: collectives.all_reduce(t, "sum", dist.group.WORLD)
        finally:
            dist.destroy_process_group()


def test_a_collective_under_way_is_waited_for_as_an_input(make, device: Device, group: Any) -> None:
    runner = make(lambda x: x * 2, INPUTS, [4])
    for k in range(4):
        assert runner(group(torch.full((3, 2), float(k), device=device.torch_device))).tolist() == [[2.0 * k] * 2] * 3
    assert runner.stats.replayed == 2


@pytest.mark.parametrize("nested", [False, True])
def test_a_collective_that_a_segment_began_is_waited_for_before_a_break(make, device: Device, group: Any, nested: bool) -> None:
    @segue.break_point
    def mixed(parts: Any) -> Tensor:
        return parts[0] * 2 if nested else parts * 2

    def forward(x: Tensor) -> Tensor:
        reduced = group(x + 1)
        return mixed((reduced, 1) if nested else reduced) + 1

    runner = make(forward, INPUTS, [4])
    under_way = torch._C._distributed_c10d._get_work_registry_size()
    for k in range(4):
        assert runner(torch.full((3, 2), float(k), device=device.torch_device)).tolist() == [[2.0 * k + 3] * 2] * 3
    assert runner.stats.replayed == 2
    assert torch._C._distributed_c10d._get_work_registry_size() == under_way


def test_a_collective_from_outside_is_waited_for_outside_the_graph(device: Device, group: Any) -> None:
    x = torch.ones(4, device=device.torch_device)
    w = group(torch.full((4,), 3.0, device=device.torch_device))
    with segue.BreakableCapture(device=device) as capture:
        y = scaled(x * 2, w) + 1
    x.fill_(2)
    capture.replay()
    assert y.tolist() == [13.0] * 4


def test_a_collective_at_the_end_of_a_forward_is_waited_for(make, device: Device, group: Any) -> None:
    runner = make(lambda x: group(x * 2), INPUTS, [4])
    under_way = torch._C._distributed_c10d._get_work_registry_size()
    for k in range(4):
        out = runner(torch.full((3, 2), float(k), device=device.torch_device))
        assert out.tolist() == [[2.0 * k] * 2] * 3
    assert runner.stats.replayed == 2
    assert torch._C._distributed_c10d._get_work_registry_size() == under_way


def test_a_weight_that_wraps_a_tensor_is_noticed_when_another_takes_its_place(make, device: Device) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", wrapped(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return scaled(x + 0, x + 1) * self.weight

    def wrapped(value: float) -> Tensor:
        return Wrapping(torch.full((2,), value, device=device.torch_device))

    layer = Layer().eval()
    runner = make(layer, INPUTS, [4])
    x = torch.ones(3, 2, device=device.torch_device)
    for _ in range(3):
        assert runner(x).sum() == 24
    layer.weight = wrapped(3.0)
    with pytest.raises(segue.StateChangedError, match=r"Layer\.weight: a tensor \[2\] -> another tensor \[2\]"):
        runner(x)
    runner.recapture()
    for _ in range(3):
        assert runner(x).sum() == 36
