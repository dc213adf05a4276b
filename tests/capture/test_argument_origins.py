"""A break's arguments from a context variable, a global, or further down than a context is looked at: live, or named."""

from __future__ import annotations

from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue.devices import Device
from segue.runner import GraphRunner, Input

pytestmark = pytest.mark.usefixtures("inference")
BATCH: ContextVar[Any] = ContextVar("batch")
SCALE: Any = None


@segue.break_point
def add(y: Tensor, given: Any) -> Tensor:
    return y + (given if isinstance(given, Tensor) else given.slots)


def full(device: Device, value: float) -> Tensor:
    return torch.full((2, 1), value, device=device.torch_device)


@pytest.mark.parametrize("what", ["the value", "an object", "a tensor in it", "a keyword"])
@pytest.mark.parametrize("in_runner", [False, True], ids=["capture", "runner"])
def test_what_a_context_variable_holds_is_read_from_what_it_holds_then(device: Device, what: str, in_runner: bool) -> None:
    def set_to(value: float) -> None:
        inner = SimpleNamespace(slots=full(device, value))
        BATCH.set(inner.slots if what == "the value" else SimpleNamespace(metas=[inner]))

    def forward(x: Tensor) -> Tensor:
        given = BATCH.get() if what == "the value" else BATCH.get().metas[0]
        if what == "a keyword":
            return add(x * 2, given=given.slots) * 1
        return add(x * 2, given.slots if what == "a tensor in it" else given) * 1

    x = full(device, 1.0)
    set_to(1.0)
    run: Any
    if in_runner:
        run = GraphRunner(forward, {"x": Input(0, 0.0)}, [2], device=device, pool=device.new_pool())
        run(x), run(x)
    else:
        capture = segue.BreakableCapture(device=device, pool=device.new_pool())
        with capture:
            out = forward(x)

        def run(_: Tensor) -> Tensor:
            capture.replay()
            return out

    if in_runner and what != "the value":  # the forward may have decided by it
        set_to(10.0)
        with pytest.raises(segue.StateChangedError, match="BATCH: a SimpleNamespace -> another SimpleNamespace"):
            run(x)
        return
    for value in (10.0, 3.0):
        set_to(value)
        assert run(x).tolist() == [[2 + value]] * 2
    if what != "the value":
        BATCH.set(SimpleNamespace())
        with pytest.raises(segue.ReplayError, match="argument 'given' came from the context variable 'batch' at capture"):
            run(x)


def test_what_the_forward_itself_sets_is_not_read_from_the_callers_variables(device: Device) -> None:
    BATCH.set(full(device, 5.0))

    def forward(x: Tensor, kept: Tensor) -> Tensor:
        token = BATCH.set(kept)
        try:
            return add(x * 2, BATCH.get()) * 1
        finally:
            BATCH.reset(token)

    x, kept = full(device, 1.0), full(device, 7.0)
    capture = segue.BreakableCapture(device=device, pool=device.new_pool())
    with capture:
        out = forward(x, kept)
    BATCH.set(full(device, 6.0))
    capture.replay()
    assert out.tolist() == [[9.0]] * 2


def test_a_global_that_a_bare_capture_gave_a_break_is_named_once_it_is_another(device: Device) -> None:
    global SCALE
    SCALE, x = full(device, 1.0), full(device, 1.0)
    capture = segue.BreakableCapture(device=device, pool=device.new_pool())
    with capture:
        out = add(x * 2, SCALE) * 1
    SCALE.fill_(4)
    capture.replay()
    assert out.tolist() == [[6.0]] * 2
    SCALE = full(device, 10.0)
    with pytest.raises(segue.ReplayError, match=r"SCALE was replaced since the capture, and break add .*go on with the old one"):
        capture.replay()


def test_a_tensor_from_beyond_what_is_looked_at_of_a_context_is_refused_by_name(device: Device) -> None:
    def chain(levels: int) -> tuple[Any, Any]:
        inner = outer = SimpleNamespace(slots=full(device, 1.0))
        for _ in range(levels):
            outer = SimpleNamespace(inner=outer)
        return outer, inner

    x, held = full(device, 1.0), SimpleNamespace(w=full(device, 3.0))
    ctx, inner = chain(20)
    refused = pytest.raises(segue.CaptureError, match=r"add .* as 'given' .* whether the live context holds it can't be told")
    with segue.active_forward(ctx):
        with refused, segue.BreakableCapture(device=device, pool=device.new_pool()):
            add(x * 2, inner.slots) * 1
        runner = GraphRunner(lambda x: add(x * 2, held.w) * 1, {"x": Input(0, 0.0)}, [2], device=device, pool=device.new_pool())
        for _ in range(3):  # what the function holds by a name is looked at there
            assert runner(x).tolist() == [[5.0]] * 2
