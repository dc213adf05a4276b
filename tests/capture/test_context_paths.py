"""What a break gets from the live context, and what a capture refuses to freeze."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue.capture.break_points import Break
from segue.devices import Device
from segue.runner import GraphRunner, Input

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


class Innermost(SimpleNamespace):
    def get(self) -> Tensor:
        found: Tensor = self.cu
        return found


def _engine(device: Device, value: float, levels: int = 3, **more: Any) -> SimpleNamespace:
    """An engine's context: metadata some levels down, a way back to the top, and a list of much that no break asks for."""
    inner: Any = Innermost(cu=torch.full((2,), value, device=device.torch_device), n=int(value))
    for _ in range(levels - 1):
        inner = SimpleNamespace(inner=inner)
    ctx = SimpleNamespace(backend=inner, **more)
    inner.engine = SimpleNamespace(ctx=ctx, requests=[SimpleNamespace(id=i) for i in range(3_000)])
    return ctx


def _innermost(levels: int) -> Any:
    found = segue.current_forward_ctx().backend
    for _ in range(levels - 1):
        found = found.inner
    return found


@pytest.mark.parametrize("levels", [1, 3, 4, 8])
@pytest.mark.parametrize("what", ["tensor", "object", "method"])
def test_what_lies_deep_in_the_context_is_rebound_by_path(device: Device, levels: int, what: str) -> None:
    @segue.break_point
    def add(y: Tensor, given: Any) -> Tensor:
        return y + {"tensor": lambda: given, "object": lambda: given.cu, "method": lambda: given()}[what]()

    def forward(x: Tensor) -> Tensor:
        meta = _innermost(levels)
        return add(x * 2, {"tensor": lambda: meta.cu, "object": lambda: meta, "method": lambda: meta.get}[what]()) * 1

    x = torch.ones(2, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with segue.active_forward(_engine(device, 1.0, levels)), capture:
        out = forward(x)
    with segue.active_forward(_engine(device, 7.0, levels)):
        capture.replay()
    assert out.tolist() == [9.0, 9.0]


def test_a_view_of_a_tensor_deep_in_the_context_is_named_when_that_is_another(device: Device) -> None:
    @segue.break_point
    def add(y: Tensor, bias: Tensor) -> Tensor:
        return y + bias

    x, first = torch.ones(1, device=device.torch_device), _engine(device, 1.0, 8)
    capture = segue.BreakableCapture(device=device)
    with segue.active_forward(first), capture:
        add(x * 2, _innermost(8).cu[1:]) * 1
    with segue.active_forward(first):
        capture.replay()
    second = _engine(device, 2.0, 8)
    with segue.active_forward(second), pytest.raises(segue.ReplayError, match=r"inner\.cu is another tensor than at capture"):
        capture.replay()


def test_a_large_context_is_walked_once(device: Device) -> None:
    """Every object counts the times that it is asked for what it holds."""
    looks = [0]

    class Counting:
        def __getattribute__(self, name: str) -> Any:
            looks[0] += name == "__dict__"
            return object.__getattribute__(self, name)

    @segue.break_point
    def add(y: Tensor, w: Tensor) -> Tensor:
        return y + w

    x, ws = torch.ones(2, device=device.torch_device), [torch.ones(2, device=device.torch_device) for _ in range(20)]
    ctx = SimpleNamespace(requests=[Counting() for _ in range(10_000)])
    with segue.active_forward(ctx), segue.BreakableCapture(device=device):
        for w in ws:
            x = add(x * 1, w) * 1
    assert looks[0] <= 10_000 + 50 * 2_000


class Scale:
    def __init__(self, factor: float, meta: Any = None) -> None:
        self.factor, self.meta = factor, meta


@segue.break_point
def scaled_by(y: Tensor, scale: Any) -> Tensor:
    return y * (scale if isinstance(scale, float) else scale() if callable(scale) else scale.factor)


def test_any_object_may_be_an_argument_and_each_replay_gets_the_same(device: Device) -> None:
    x, scale = torch.ones(2, device=device.torch_device), Scale(2.0)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = scaled_by(scaled_by(x * 1, scale), lambda: scale.factor) * 1
    scale.factor = 5.0
    capture.replay()
    assert out.tolist() == [25.0, 25.0]
    (step, _) = (s for s in capture.steps if isinstance(s, Break))
    assert step.bound.frozen == {"scale": scale}


def test_an_object_of_the_engines_may_share_parts_with_the_context(device: Device) -> None:
    x, ctx = torch.ones(2, device=device.torch_device), _ctx(device, 1.0, 4)
    scale = Scale(2.0, ctx.meta)
    capture = segue.BreakableCapture(device=device)
    with segue.active_forward(ctx), capture:
        out = scaled_by(x * 2, scale) * 1
    scale.factor, scale.meta = 3.0, None
    with segue.active_forward(_ctx(device, 2.0, 4)):
        capture.replay()
    assert out.tolist() == [6.0, 6.0]


@pytest.mark.parametrize("how", ["an object", "a lambda", "a partial"])
def test_an_object_that_the_forward_makes_from_the_context_is_refused_by_name(device: Device, how: str) -> None:
    def forward(x: Tensor) -> Tensor:
        meta = segue.current_forward_ctx().meta
        given = {
            "an object": lambda: Scale(2.0, meta),
            "a lambda": lambda: lambda: len(meta.lengths),
            "a partial": lambda: functools.partial(lambda m: len(m.lengths), meta),
        }[how]()
        return scaled_by(x * 2, given) * 1

    x = torch.ones(2, device=device.torch_device)
    with (
        segue.active_forward(_ctx(device, 1.0, 4)),
        pytest.raises(segue.CaptureError) as error,
        segue.BreakableCapture(device=device, name="bucket 2"),
    ):
        forward(x)
    for part in ("bucket 2", "scaled_by", "'scale'", "ctx.meta", "active_forward", "test_context_paths.py"):
        assert part in str(error.value)


def test_an_object_that_may_lie_beyond_the_end_of_the_walk_is_refused(device: Device) -> None:
    x, ctx = torch.ones(2, device=device.torch_device), _engine(device, 1.0, 20)
    with (
        segue.active_forward(ctx),
        pytest.raises(segue.CaptureError, match=r"'scale'.*can't be told: only 12 levels and 20000 values"),
        segue.BreakableCapture(device=device),
    ):
        scaled_by(x * 2, Scale(2.0))


@segue.break_point
def maybe(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias


@pytest.mark.parametrize("how", ["as its name", "under another name", "deep", "in a dict", "as a keyword"])
def test_a_none_of_the_context_that_stops_being_none_is_named(device: Device, how: str) -> None:
    def ctx_of(extra: Any) -> Any:
        return {
            "as its name": SimpleNamespace(bias=extra),
            "under another name": SimpleNamespace(extra=extra),
            "deep": SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(extra=extra))),
            "in a dict": {"extra": extra},
            "as a keyword": SimpleNamespace(extra=extra),
        }[how]

    def forward(x: Tensor) -> Tensor:
        ctx = segue.current_forward_ctx()
        if how == "as a keyword":
            return maybe(x * 2, bias=ctx.extra) * 1
        if how == "deep":
            return maybe(x * 2, ctx.a.b.extra) * 1
        return maybe(x * 2, ctx["extra"] if how == "in a dict" else getattr(ctx, "extra", None)) * 1

    x = torch.ones(2, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with segue.active_forward(ctx_of(None)), capture:
        out = forward(x)
    with segue.active_forward(ctx_of(None)):
        capture.replay()
    assert out.tolist() == [2.0, 2.0]
    tensor = torch.ones(2, device=device.torch_device)
    with segue.active_forward(ctx_of(tensor)):
        with pytest.raises(segue.ReplayError, match=r"ctx.* was None at capture and is a Tensor now.*'bias'.*capture again"):
            capture.replay()
        again = segue.BreakableCapture(device=device)
        with again:
            out = forward(x)
        again.replay()
    assert out.tolist() == [3.0, 3.0] or how == "as its name"


def test_a_none_of_a_function_that_may_not_have_read_it_from_the_context_stays_one(device: Device) -> None:
    ctx = SimpleNamespace(mask=None)
    x = torch.ones(2, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with segue.active_forward(ctx), capture:
        out = maybe(x * 2, None) * 1
    ctx.mask = x
    with segue.active_forward(ctx):
        capture.replay()
    assert out.tolist() == [2.0, 2.0] and ctx.mask is x


def test_a_none_that_the_forward_never_took_from_the_context_stays_one(device: Device) -> None:
    @segue.break_point
    def add(y: Tensor, bias: Tensor | None) -> Tensor:
        mask = segue.current_forward_ctx().mask
        return y + (0 if mask is None else mask)

    def forward(x: Tensor) -> Tensor:
        return add(x * 2, None) * 1

    x = torch.ones(2, device=device.torch_device)
    runner = GraphRunner(forward, inputs={"x": Input(0, 0.0)}, buckets=[2], device=device, pool=device.new_pool())
    for _ in range(3):
        runner(x, ctx=SimpleNamespace(mask=None))
    out = runner(x, ctx=SimpleNamespace(mask=torch.ones(2, device=device.torch_device)))
    assert out.tolist() == [3.0, 3.0] and runner.stats.replayed == 2


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


@pytest.mark.parametrize("held", ["item", "attribute"])
def test_what_was_not_in_the_context_and_is_there_later_is_named(held: str, device: Device) -> None:
    @segue.break_point
    def biased(y: Tensor, given: Any) -> Tensor:
        return y if given is None else y + given

    def forward(x: Tensor) -> Tensor:
        ctx = segue.current_forward_ctx()
        return biased(x * 1, ctx.get("bias") if held == "item" else getattr(ctx, "bias", None)) * 2

    def context(**entries: Any) -> Any:
        return entries if held == "item" else SimpleNamespace(**entries)

    x = torch.ones(2, device=device.torch_device)
    with torch.inference_mode():
        with segue.active_forward(context(a=1)), segue.BreakableCapture(device=device, root=forward) as capture:
            forward(x)
        with segue.active_forward(context(a=1, other=x)):
            capture.replay()
        with segue.active_forward(context(a=1, bias=x)), pytest.raises(segue.ReplayError, match=r"bias.* was None at capture"):
            capture.replay()
