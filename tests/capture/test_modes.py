"""Modes: a replay under others than the capture's is refused by name, and breaks run under those that the forward enters."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import segue
from segue.devices import Device
from segue.runner import GraphRunner, Input

pytestmark = [pytest.mark.usefixtures("inference"), pytest.mark.filterwarnings("ignore:Please use the new API")]

Under = Callable[[], AbstractContextManager[Any]]
VARIABLE: ContextVar[Any] = ContextVar("scale")


@contextlib.contextmanager
def setting(write: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    write(value)
    try:
        yield
    finally:
        write(before)


class Negated(TorchFunctionMode):
    """Calls of ``torch.abs`` give the negative value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return -result if func is torch.abs else result


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def double() -> AbstractContextManager[None]:
    return setting(torch.set_default_dtype, torch.float64, torch.float32)


def tf32() -> AbstractContextManager[None]:
    return setting(torch.set_float32_matmul_precision, "high", torch.get_float32_matmul_precision())


def deterministic() -> AbstractContextManager[None]:
    return setting(torch.use_deterministic_algorithms, True, False)


def math_only() -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.MATH)


def no_cudnn() -> AbstractContextManager[None]:
    return torch.backends.cudnn.flags(enabled=False)


@segue.break_point
def plus_one(y: Tensor) -> Tensor:
    return y + 1


def makes_tensors(x: Tensor) -> Tensor:
    y = plus_one(x * 2)
    return y * torch.arange(4, device=x.device).mul(0.1).to(x.dtype)


def no_defaults(x: Tensor) -> Tensor:
    ones = torch.ones(4, device=x.device, dtype=torch.float16)
    return plus_one(x @ x.t()) + ones + torch.arange(4, device=x.device).to(torch.float32)


def attends(x: Tensor) -> Tensor:
    y = plus_one(x)[None, None]
    return scaled_dot_product_attention(y, y, y)[0, 0]


def convolves(x: Tensor) -> Tensor:
    return torch.nn.functional.conv1d(plus_one(x)[None], x[:, :, None])[0]


def negates(x: Tensor) -> Tensor:
    return torch.abs(plus_one(x))


def fp16_sums() -> AbstractContextManager[None]:
    matmul = torch.backends.cuda.matmul
    return setting(lambda on: setattr(matmul, "allow_fp16_accumulation", on), True, False)


MATTERS = [
    (makes_tensors, double, "default dtype torch.float32 .* default dtype torch.float64"),
    (no_defaults, tf32, "float32 matmul precision ieee on CUDA .* float32 matmul precision tf32 on CUDA"),
    (makes_tensors, deterministic, "deterministic algorithms off .* deterministic algorithms on"),
    (no_defaults, fp16_sums, "reduced precision in matmuls .* fp16 accumulation True"),
    (attends, math_only, "backends of scaled_dot_product_attention flash, .*_attention math"),
    (convolves, no_cudnn, "cuDNN flags enabled True.* cuDNN flags enabled False"),
    (negates, Negated, "function modes none .* function modes Negated"),
    (negates, Watching, "dispatch modes none .* dispatch modes Watching"),
]


@pytest.mark.parametrize(("forward", "under", "named"), MATTERS)
def test_a_replay_under_another_mode_than_the_captures_is_refused_by_name(
    device: Device, forward: Callable[[Tensor], Tensor], under: Under, named: str
) -> None:
    x = torch.ones(4, 4, device=device.torch_device)
    forward(x)  # libraries set themselves up at their first call
    capture = segue.BreakableCapture(device=device, name="bucket 4")
    with capture:
        out = forward(x)
    want = out.clone()
    with under(), pytest.raises(segue.SegueError, match=rf"(?s)bucket 4 was captured under {named}.*recapture\(\)"):
        capture.replay()
    out.zero_()
    capture.replay()
    assert torch.equal(out, want)


@pytest.mark.parametrize(("forward", "under", "named"), MATTERS)
def test_captured_under_a_mode_it_replays_under_that_mode_only(
    device: Device, forward: Callable[[Tensor], Tensor], under: Under, named: str
) -> None:
    if under is deterministic and device.traits.streams and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        pytest.skip("cuBLAS itself refuses deterministic algorithms")
    x = torch.ones(4, 4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with under():
        with capture:
            out = forward(x)
        want = out.clone()
        out.zero_()
    with under():
        capture.replay()
    assert torch.equal(out, want)
    with pytest.raises(segue.SegueError, match=r"recapture\(\)"):
        capture.replay()


def test_a_mode_of_the_same_class_that_does_something_else_is_another(device: Device) -> None:
    class Scaled(TorchFunctionMode):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result * self.factor if func is torch.abs else result

    x = torch.ones(4, device=device.torch_device)
    capture, mode = segue.BreakableCapture(device=device), Scaled(2.0)
    with mode, capture:
        out = negates(x)
    with Scaled(2.0):
        capture.replay()
    assert out.tolist() == [4.0] * 4
    with Scaled(3.0), pytest.raises(segue.SegueError, match=r"Scaled\(factor=2\.0\) and .* Scaled\(factor=3\.0\)"):
        capture.replay()
    mode.factor = 3.0
    with mode, pytest.raises(segue.SegueError, match=r"Scaled\(factor=3\.0\)"):
        capture.replay()


@pytest.mark.parametrize(
    ("forward", "under"),
    [
        (no_defaults, double),  # every tensor has its own dtype
        (makes_tensors, math_only),
        (makes_tensors, no_cudnn),
        (makes_tensors, lambda: torch.device("meta")),  # every tensor says its device
        (makes_tensors, lambda: torch.autocast("cpu", enabled=False)),
        (makes_tensors, torch.enable_grad),
        (makes_tensors, lambda: setting(torch.set_num_threads, 2, 1)),
    ],
)
def test_a_mode_that_nothing_captured_has_read_may_change(
    device: Device, forward: Callable[[Tensor], Tensor], under: Under
) -> None:
    x = torch.ones(4, 4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = forward(x)
    want = out.clone()
    for _ in range(2):
        out.zero_()
        with under():
            capture.replay()
        assert torch.equal(out, want)


def test_a_default_device_that_placed_tensors_must_be_the_same(device: Device) -> None:
    place = device.torch_device
    x = torch.ones(4, device=place)
    capture = segue.BreakableCapture(device=device)
    with torch.device(place):
        with capture:
            out = plus_one(x) * torch.arange(4)
        capture.replay()
    with torch.device(place):
        capture.replay()
    assert out.tolist() == [0.0, 2.0, 4.0, 6.0]
    with pytest.raises(segue.SegueError, match=r"captured under default device .* replayed under default device None"):
        capture.replay()


def test_a_default_device_that_placed_nothing_may_go(device: Device) -> None:
    """It is one thread's own: what was captured ahead under it may be replayed by another."""
    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with torch.device(device.torch_device), capture:
        out = plus_one(x) * torch.arange(4, device=x.device) + torch.zeros_like(x)
    out.zero_()
    capture.replay()
    assert out.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_mode_that_the_forward_sets_for_good_is_its_own_doing(device: Device) -> None:
    before = torch.get_float32_matmul_precision()
    x = torch.ones(4, 4, device=device.torch_device)

    def forward() -> Tensor:
        torch.set_float32_matmul_precision("high")
        return plus_one(x @ x)

    capture = segue.BreakableCapture(device=device)
    try:
        with capture:
            out = forward()
        torch.set_float32_matmul_precision(before)
        capture.replay()
        assert out.tolist() == [[5.0] * 4] * 4
    finally:
        torch.set_float32_matmul_precision(before)


def test_precision_that_was_set_in_the_new_way_is_compared_too(device: Device) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    x = torch.ones(4, 4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        plus_one(x @ x)
    try:
        matmul.fp32_precision = "tf32"
        with pytest.raises(segue.SegueError, match="float32 matmul precision"):
            capture.replay()
        matmul.fp32_precision = "ieee"
        capture.replay()
    finally:
        matmul.fp32_precision = before


def seen(place: str) -> dict[str, Any]:
    """What a break can see of its call site."""
    return {
        "dtype": torch.ones(1).dtype,
        "device": torch.empty(1).device.type,
        "autocast": torch.is_autocast_enabled(place) and torch.get_autocast_dtype(place),
        "attention": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": torch.backends.cudnn.enabled,
        "modes": torch.abs(torch.ones(1, device="cpu")).item(),
        "variable": VARIABLE.get(None),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
    }


@contextlib.contextmanager
def variable(value: Any) -> Iterator[None]:
    token = VARIABLE.set(value)
    try:
        yield
    finally:
        VARIABLE.reset(token)


ENTERED: list[Callable[[str], AbstractContextManager[Any]]] = [
    lambda place: torch.autocast(place, dtype=torch.bfloat16),
    lambda place: math_only(),
    lambda place: double(),
    lambda place: torch.device("meta"),
    lambda place: setting(torch.set_default_device, "meta", None),
    lambda place: tf32(),
    lambda place: deterministic(),
    lambda place: no_cudnn(),
    lambda place: Negated(),
    lambda place: variable(3.5),
    lambda place: torch.enable_grad(),
    lambda place: torch.inference_mode(False),
]


@pytest.mark.parametrize("entered", ENTERED)
@pytest.mark.parametrize("runner", [False, True])
def test_a_break_runs_under_the_modes_that_the_forward_entered_around_it(
    device: Device, entered: Callable[[str], AbstractContextManager[Any]], runner: bool
) -> None:
    place = device.torch_device.type
    sites: list[dict[str, Any]] = []

    @segue.break_point
    def look(y: Tensor) -> Tensor:
        sites.append(seen(place))
        return y + 1

    def forward(x: Tensor) -> Tensor:
        y = look(x * 2)
        with entered(place):
            y = look(y)
        return look(y) * 2

    x = torch.ones(4, 2, device=device.torch_device)
    forward(x)
    eager, sites = sites, []
    assert eager[0] == eager[2] != eager[1]
    if runner:
        run = GraphRunner(forward, inputs={"x": Input(0, 0.0)}, buckets=[4], device=device, progress=False)
        for _ in range(4):
            assert torch.equal(run(x), forward(x))
        sites = sites[0:3] + sites[6:9] + sites[12:15] + sites[18:21]
    else:
        capture = segue.BreakableCapture(device=device)
        with capture:
            out = forward(x)
        for _ in range(3):
            capture.replay()
        assert out.tolist() == [[10.0] * 2] * 4
    assert sites == eager * 4
    assert seen(place) == eager[0]


def test_the_callers_own_modes_stay_live_in_breaks(device: Device) -> None:
    """What the forward didn't enter is the caller's, at each replay anew."""
    place = device.torch_device.type
    sites: list[dict[str, Any]] = []

    @segue.break_point
    def look(y: Tensor) -> Tensor:
        sites.append(seen(place))
        return y + 1

    x = torch.ones(4, 2, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with variable(1), math_only(), capture, double():
        look(x * 2)
    with variable(2):
        capture.replay()
    capture.replay()
    assert [s["variable"] for s in sites] == [1, 2, None]
    assert [s["attention"] for s in sites] == [(False, True), (True, True), (True, True)]
    assert [s["dtype"] for s in sites] == [torch.float64] * 3


def test_a_break_without_modes_of_its_own_is_called_as_it_is(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        plus_one(x)
    (step,) = [s for s in capture.steps if hasattr(s, "spec")]
    assert step.runs()[0].func is step.spec.fn  # type: ignore[union-attr, attr-defined]


def test_a_context_variable_set_to_what_may_change_is_refused(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)

    def factor() -> float:
        return float(VARIABLE.get()[0])

    @segue.break_point
    def scaled(y: Tensor) -> Tensor:
        return y * factor()

    capture, named = segue.BreakableCapture(device=device), r"scaled .*called at .*the context variable 'scale' to a list"
    with pytest.raises(segue.SegueError, match=named), capture, variable([1.0]):
        scaled(x)
    capture = segue.BreakableCapture(device=device)
    with variable([3.0]), capture:  # the caller's own
        out = scaled(x)
    with variable([5.0]):
        capture.replay()
    assert out.tolist() == [5.0] * 4
    with segue.BreakableCapture(device=device) as capture, variable([1.0]):  # a break that doesn't read it
        plus_one(x)
    capture.replay()


def test_a_context_variable_that_may_depend_on_the_callers_is_refused(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)

    @segue.break_point
    def scaled(y: Tensor) -> Tensor:
        return y * VARIABLE.get()

    capture = segue.BreakableCapture(device=device)
    with variable(2):
        with capture, variable(VARIABLE.get() + 1):
            out = scaled(x)
        capture.replay()
    assert out.tolist() == [3.0] * 4
    with variable(5), pytest.raises(segue.SegueError, match=r"'scale' is 5 and was 2 at capture, .* set it to 3.*recapture\(\)"):
        capture.replay()


def test_a_context_variable_that_differs_between_warm_up_and_capture_is_refused(device: Device) -> None:
    @segue.break_point
    def scaled(y: Tensor) -> Tensor:
        return y * VARIABLE.get()

    def forward(x: Tensor, ctx: dict[str, float]) -> Tensor:
        for layer in range(2):
            with variable(layer + ctx["scale"]):
                x = scaled(x) * 1
        return x

    x = torch.ones(4, 2, device=device.torch_device)
    runner = GraphRunner(forward, inputs={"x": Input(0, 0.0)}, buckets=[4], device=device, progress=False)
    runner(x, ctx={"scale": 1})
    with pytest.raises(segue.SegueError, match=r"scaled .*'scale' to 5, and to 1, 2 in its warm-up"):
        runner(x, ctx={"scale": 5})
    for _ in range(3):
        assert runner(x, ctx={"scale": 1}).tolist() == [[2.0] * 2] * 4


def test_a_break_inside_a_dispatch_mode_of_the_forwards_is_refused(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    capture, named = segue.BreakableCapture(device=device), "plus_one .*called at .*entered Watching, a dispatch mode, around"
    with pytest.raises(segue.SegueError, match=named), capture, Watching():
        plus_one(x * 2)
    assert (x + 1).tolist() == [2.0] * 4
    with segue.BreakableCapture(device=device) as capture:
        with Watching():
            y = x * 2
        out = plus_one(y) * 1
    capture.replay()
    assert out.tolist() == [3.0] * 4


def test_a_function_in_a_context_variable_that_no_break_reads_is_a_frameworks_own(device: Device) -> None:
    """Triton sets its allocator so, a new function at each launch."""
    allocator: ContextVar[Any] = ContextVar("allocator")

    def forward(x: Tensor) -> Tensor:
        allocator.set(lambda size: size)
        return plus_one(x * 2)

    runner = segue.GraphRunner(
        forward, {"x": segue.Input(0, 0.0)}, [4], device=device, pool=device.new_pool(), progress=False
    )
    x = torch.ones(4, 4, device=device.torch_device)
    with torch.inference_mode():
        for _ in range(4):
            assert torch.equal(runner(x), forward(x))
    assert runner.stats.replayed == 2
    runner.close()


def test_a_context_variable_with_a_default_is_set_and_reset(device: Device) -> None:
    default: ContextVar[float] = ContextVar("factor", default=1.0)

    @segue.break_point
    def scaled(y: Tensor) -> Tensor:
        return y * default.get()

    def forward(x: Tensor) -> Tensor:
        token = default.set(3.0)
        try:
            y = scaled(x * 2)
        finally:
            default.reset(token)
        return scaled(y) + 1

    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = forward(x)
    for _ in range(2):
        out.zero_()
        capture.replay()
        assert out.tolist() == [7.0] * 4
    token = default.set(2.0)
    with pytest.raises(segue.SegueError, match=r"'factor' is 2.0 and was 1.0 at capture"):
        capture.replay()
    default.reset(token)
