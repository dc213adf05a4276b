"""Compiled functions around break points and inside segments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue.devices import Device

pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.filterwarnings("default"),  # what inductor warns of while it is imported is not ours
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@segue.break_point(trim=("y",))
def row_mix(y: Tensor) -> Tensor:
    assert not torch.compiler.is_compiling()
    return y + y.sum(0, keepdim=True)


def test_a_break_point_ends_dynamos_graph_by_itself_and_stays_out_of_it() -> None:
    @torch.compile(backend="eager")
    def forward(x: Tensor) -> Tensor:
        return row_mix(x + 1) * 2

    x = torch.ones(4, 2)
    assert torch.equal(forward(x), (x + 1 + 8) * 2)
    counters: Any = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2
    assert list(counters["graph_break"].values()) == [1]
    assert counters["frames"]["total"] == 2


def test_a_compiled_forward_with_a_break_is_captured_and_replays_as_eager(device: Device) -> None:
    backend = "inductor" if device.traits.compiled else "eager"

    @torch.compile(backend=backend, dynamic=True)
    def forward(x: Tensor) -> Tensor:
        return (row_mix((x + 1).sin()) * 2).relu()

    runs = {}
    for b in (16, 8):
        with torch.inference_mode(False):
            x = torch.ones(b, 3, device=device.torch_device)
        with segue.capture.reference_frame(rows=b, valid_rows=b):
            forward(x)
            forward(x)
        capture = segue.BreakableCapture(rows=b, device=device)
        with capture:
            out = forward(x)
        runs[b] = capture, x, out
    assert runs[16][0].breaks == runs[8][0].breaks == 1
    for b, n in ((16, 16), (8, 3), (16, 1), (8, 8)):
        capture, x, out = runs[b]
        x.copy_(torch.randn(b, 3))
        capture.pool.poison()
        capture.replay(valid_rows=n)
        with segue.capture.reference_frame(rows=b, valid_rows=n):
            assert torch.equal(out, forward(x))


def test_a_compiled_function_that_would_recompile_inside_a_capture_is_named(device: Device) -> None:
    if not device.traits.compiled:
        pytest.skip("compiled code runs eager on this device")

    @torch.compile(dynamic=False)
    def twice(x: Tensor) -> Tensor:
        return (x * 2).sin()

    x = torch.ones(4, device=device.torch_device)
    twice(torch.ones(8, device=device.torch_device))
    with pytest.raises(RuntimeError, match="recompile"), segue.BreakableCapture(device=device):
        twice(x)
    torch.rand(3, device=device.torch_device)
    twice(x)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = twice(x)
    x.fill_(0)
    capture.replay()
    assert out.tolist() == [0.0] * 4


class _Scaled:
    def __init__(self, by: float) -> None:
        self.by = by

    @segue.compile_dynamic
    def run(self, x: Tensor) -> Tensor:
        return x * self.by


def test_a_method_compiled_in_its_class_gets_its_object() -> None:
    x = torch.ones(3)
    assert torch.equal(_Scaled(2.0).run(x), x * 2)
    assert isinstance(_Scaled.run, type(segue.compile_dynamic(torch.sin)))


def test_what_a_compiled_function_reaches_is_guarded_as_if_it_were_not_compiled() -> None:
    with torch.inference_mode(False):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).eval()
    compiled, x = segue.compile_dynamic(net.forward), torch.ones(3, 4)
    runner = segue.GraphRunner(lambda x: compiled(x) + 0, inputs={"x": segue.Input(0, pad=0.0)}, buckets=[4], device="emulator")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(runner(x), net(x))
    with torch.enable_grad(), pytest.raises(segue.InputError, match="requires grad while grad mode is on"):
        runner(x)
    net.train()
    with torch.no_grad(), pytest.raises(segue.UsageError, match=r"Dropout .*is in training mode"):
        runner(x)
