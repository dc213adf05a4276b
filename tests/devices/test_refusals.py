"""What no graph can hold is refused with the same class, words and line on every device."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue.devices import Device, resolve
from segue.devices.cuda.op_checks import clearer_error

from .conftest import Checking
from .snippets import ALLOWED, REFUSED

# Torch copies these to the device unseen. CUDA refuses the copy, and nobody knows then what was copied.
COPIED_UNSEEN = {"list", "list index", "new tensor", "new scalar", "scalar on the device"}
# On tensors without memory torch does something else than on CUDA.
OTHERWISE_WITHOUT_MEMORY = COPIED_UNSEEN | {"format", "repr", "element write", "index write of a number", "matrix inverse"}


def _operands(place: torch.device) -> tuple[Tensor, ...]:
    x = torch.tensor([1.0, -2.0, 3.0, -4.0], device=place)
    m = torch.arange(12.0, device=place).reshape(3, 4) / 7
    return x, m, x > 0, torch.tensor([1, 0, 2], device=place)


def _refused(device: Device, name: str) -> str:
    operands = _operands(device.torch_device)
    with pytest.raises(segue.CaptureError) as caught, segue.BreakableCapture(device=device):
        REFUSED[name][0](*operands)
    return str(caught.value)


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("name", REFUSED)
def test_a_capture_refuses_it_in_the_same_words_on_every_device(device: Device, name: str) -> None:
    text, expected = _refused(device, name), _refused(resolve("emulator"), name)
    assert re.search(r" at devices.snippets\.py:\d+ in \S+ can't be in a segment: ", text)
    if device.name != "emulator" and name in COPIED_UNSEEN:
        assert "pageable host memory, which CUDA refuses while it records" in text and "before the capture" in text
        assert text.partition(" at ")[2].partition(" ")[0] == expected.partition(" at ")[2].partition(" ")[0]
    else:
        assert text == expected and REFUSED[name][1] in text
    x = torch.ones(4, device=device.torch_device)
    with segue.BreakableCapture(device=device, root=test_a_capture_refuses_it_in_the_same_words_on_every_device) as capture:
        y = x + 1
    x.fill_(3)
    capture.replay()
    assert y.tolist() == [4.0] * 4 and torch.rand(3, device=device.torch_device).max() < 1


def _run(name: str, snippets: dict[str, Any]) -> str:
    with torch.inference_mode():
        operands = [t.to("meta") for t in _operands(torch.device("cpu"))]
        try:
            with Checking():
                snippets[name](*operands)
        except segue.CaptureError as e:
            return str(e)
        except Exception as e:
            return str(clearer_error(e) or "")
    return ""


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("name", sorted(REFUSED.keys() - OTHERWISE_WITHOUT_MEMORY))
def test_the_checks_for_cuda_say_what_the_emulator_says(name: str) -> None:
    assert _run(name, {n: s for n, (s, _) in REFUSED.items()}) == _refused(resolve("emulator"), name)


@pytest.mark.parametrize("name", sorted(ALLOWED.keys() - {"deep copy", "mask write of a number"}))
def test_the_checks_for_cuda_pass_what_a_graph_can_hold(name: str) -> None:
    assert _run(name, ALLOWED) == ""


def _checked(forward: Any, *operands: Tensor) -> str:
    with pytest.raises(segue.CaptureError) as caught, torch.inference_mode(), Checking():
        forward(*operands)
    return str(caught.value)


def test_work_on_the_host_alone_is_no_business_of_the_checks_for_cuda() -> None:
    x = torch.ones(4, device="meta")
    with torch.inference_mode(), Checking():
        lengths = torch.tensor([1, 2]).cumsum(0)
        assert (x * lengths.max().item()).shape == (4,)
        assert lengths.tolist() == [1, 3] and torch.zeros(3).nonzero().shape == (0, 1) and bool(torch.tensor(1))


def test_a_tensor_of_the_host_that_a_device_op_takes_is_refused_where_it_was_made() -> None:
    x = torch.ones(4, device="meta")

    def forward(t: Tensor) -> Tensor:
        scale = torch.ones(4)
        return t * scale

    text = _checked(forward, x)
    assert text.startswith("torch.ones(...) at ") and f":{forward.__code__.co_firstlineno + 1} in forward" in text


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_between_pageable_memory_and_the_device_are_refused(non_blocking: bool) -> None:
    x, host = torch.ones(4, device="meta"), torch.ones(4)
    for forward in (
        lambda t: t.copy_(host, non_blocking=non_blocking),
        lambda t: host.to(t.device, non_blocking=non_blocking) + t,
        lambda t: t + host.to(t, non_blocking=non_blocking),
    ):
        assert "it copies from pageable host memory" in _checked(forward, x)
    assert "on the host" in _checked(lambda t: host.copy_(t, non_blocking=non_blocking), x)
    assert _checked(lambda t: t.to("cpu", non_blocking=non_blocking), x).startswith('Tensor.to("cpu") at ')


def test_device_memory_of_others_is_taken_as_it_is() -> None:
    x = torch.ones(4, device="meta")
    with torch.inference_mode(), Checking():
        assert torch.ops.aten.lift_fresh(x).shape == (4,)


def test_a_host_draw_is_refused_at_once() -> None:
    assert _checked(lambda: torch.rand(())).startswith("torch.rand(...) at devices")


def test_an_op_that_cuda_alone_knows_to_refuse_is_named_with_its_line_and_cudas_words() -> None:
    @torch.library.custom_op("segue_test::synchronises", mutates_args=())
    def synchronises(x: Tensor) -> Tensor:
        raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing\nSearch for it")

    text = _checked(lambda x: torch.ops.segue_test.synchronises(x + 1), torch.ones(4))
    assert re.match(r"segue_test::synchronises at devices/test_refusals\.py:\d+ in ", text)
    assert "(CUDA error: operation not permitted when stream is capturing)" in text and "Move it into a break point" in text


def _fails_as_torch_would() -> Any:
    """A function that is torch's as far as anybody can see, and raises what torch raises for a host read while it records."""
    names: dict[str, Any] = {"error": torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")}
    exec(compile("def fails(*_): raise error", torch.__file__, "exec"), names)
    return names["fails"]


def test_a_python_kernel_that_reads_the_host_is_named_by_its_own_line() -> None:
    value = SimpleNamespace(item=_fails_as_torch_would())

    @torch.library.custom_op("segue_test::reads", mutates_args=())
    def reads(x: Tensor) -> Tensor:
        return x * value.item()

    text = _checked(lambda x: torch.ops.segue_test.reads(x), torch.ones(4))
    assert re.match(r"Tensor\.item\(\) at devices/test_refusals\.py:\d+ in reads can't be in a segment: it reads", text)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda fails: SimpleNamespace(tensor=fails).tensor([1.0]), "torch.tensor(...)"),
        (lambda fails: SimpleNamespace(new_tensor=fails).new_tensor(1.0), "Tensor.new_tensor()"),
        (lambda fails: type("Rows", (), {"__getitem__": fails})()[[0, 2]], "an index"),
    ],
)
def test_a_copy_that_no_op_shows_is_named_by_the_call(call: Any, name: str) -> None:
    with pytest.raises(torch.AcceleratorError) as caught:
        call(_fails_as_torch_would())
    assert str(clearer_error(caught.value)).startswith(f"{name} at devices/test_refusals.py:")
    assert "by a copy from pageable host memory" in str(clearer_error(caught.value))


def test_other_errors_of_an_op_pass_as_they_are() -> None:
    with pytest.raises(RuntimeError) as caught, torch.inference_mode(), Checking():
        torch.ones(2, 3, device="meta") @ torch.ones(2, 3, device="meta")
    assert not isinstance(caught.value, segue.SegueError)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), "not permitted when stream"),
        (RuntimeError("Offset increment outside graph capture encountered unexpectedly."), "Offset increment"),
        (RuntimeError("I can't capture that"), None),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), None),
        (torch.OutOfMemoryError("CUDA out of memory while capturing"), None),
    ],
)
def test_an_error_that_no_op_raised_is_explained_if_it_is_about_the_recording(error: Exception, said: str | None) -> None:
    try:
        raise error
    except Exception as e:
        named = clearer_error(e)
    if said is None:
        assert named is None
    else:
        assert said in str(named) and "break point" in str(named)
