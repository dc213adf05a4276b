"""What a capture sees of each op, where its short cut for operands in memory of its own could miss something."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import segue
from segue import _torch
from segue.capture.op_watch import OpWatch
from segue.devices import Device


def _watching() -> tuple[Any, Any]:
    """A watch, and a recording of no device."""
    recording: Any = SimpleNamespace(run=lambda func, args, kwargs: func(*args, **kwargs))
    pool: Any = SimpleNamespace(owns=lambda t, look=True: False, blocks=list)
    watching = OpWatch(pool, "watch")
    watching.begin_segment(recording, 0)
    return watching, recording


@pytest.mark.usefixtures("inference")
def test_results_without_storage_pass() -> None:
    """The emulator refuses them, CUDA doesn't."""
    watching, _ = _watching()
    sparse = torch.eye(3).to_sparse()
    with watching:
        twice = sparse * 2
        dense = (twice.detach() * 2).to_dense()
    assert dense.diagonal().tolist() == [4.0] * 3


@pytest.mark.usefixtures("inference")
def test_what_a_forward_has_just_put_into_pinned_memory_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph on another device reads it at each replay, while it reads any other number of the host's once."""
    watching, _ = _watching()
    watching.pool.device = SimpleNamespace(torch_device=torch.device("meta"))
    with watching:
        torch.tensor([1.0, 2.0])
        assert not watching.externals
        monkeypatch.setattr(Tensor, "is_pinned", lambda t: True)
        pinned = torch.tensor([1.0, 2.0])
    assert [e.tensor.data_ptr() for e in watching.externals.values()] == [pinned.data_ptr()]


def test_a_watch_that_was_left_goes_with_its_capture() -> None:
    watching, recording = _watching()
    recording.reenter = watching
    watching.leave()
    gone = weakref.ref(watching)
    gc.disable()
    try:
        del watching, recording
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("inference")
def test_an_external_first_met_through_a_view_is_held_once_and_known_as_written(device: Device) -> None:
    whole = torch.ones(8, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = whole[4:] * 2 + whole[:4]
        whole[2:4].add_(out[:2])
    (external,) = capture.externals
    assert external.written and external.tensor.untyped_storage().data_ptr() == whole.data_ptr()
    capture.replay()
    assert out.tolist() == [3.0, 3.0, 6.0, 6.0] and whole.tolist() == [1.0, 1.0, 7.0, 7.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("first", ["a list", "an optional list", "an argument by name"])
def test_an_external_met_only_in_an_argument_that_nests_is_kept_alive(device: Device, first: str) -> None:
    x = torch.ones(4, device=device.torch_device)
    other: Tensor | None = torch.arange(4, device=device.torch_device).flip(0).contiguous()
    capture = segue.BreakableCapture(device=device)
    with capture:
        y = x * 2
        if first == "a list":
            out = torch.cat([y, other])
        elif first == "an optional list":
            out = y.cumsum(0)[other]
        else:
            out = torch.bucketize(input=y, boundaries=other)
    expected = out.tolist()
    assert len(capture.externals) == 2 and all("test_op_watch.py" in e.where for e in capture.externals)
    other = None
    gc.collect()
    churn = [torch.zeros(4, dtype=torch.int64, device=device.torch_device) for _ in range(64)]
    capture.replay()
    assert out.tolist() == expected
    del churn


@pytest.mark.usefixtures("inference")
def test_two_storages_at_one_address_are_two_externals() -> None:
    memory = np.ones(4, dtype=np.float32)
    one, two = torch.from_numpy(memory), torch.from_numpy(memory)
    capture = segue.BreakableCapture(device="emulator")
    with capture:
        _ = one.view(2, 2) * 2, two.view(2, 2) * 3
        two.add_(1)
    assert [e.seen is t for e, t in zip(capture.externals, (one, two), strict=True)] == [True, True]
    assert [e.written for e in capture.externals] == [False, True]


@pytest.mark.parametrize("nested", [False, True])
def test_a_tensor_that_requires_grad_is_refused_though_its_memory_is_known(device: Device, nested: bool) -> None:
    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with pytest.raises(segue.SegueError, match=r"test_op_watch.*requires grad while grad mode is on"), torch.no_grad(), capture:
        y = x * 2
        y = y + y
        y.requires_grad_()
        with torch.enable_grad():
            _ = torch.cat([x, y]) if nested else y * 2


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("use", [lambda t: t[4:] * 2, lambda t: torch.cat([t, t]), lambda t: torch.add(input=t, other=1)])
def test_another_captures_memory_is_refused_however_it_is_handed_over(device: Device, use: Any) -> None:
    x = torch.ones(8, device=device.torch_device)
    first = segue.BreakableCapture(device=device, name="first")
    with first:
        out = x * 2
    second = segue.BreakableCapture(device=device, name="second")
    with pytest.raises(segue.SegueError, match=r"second.*first made it"), second:
        use(out)


@pytest.mark.usefixtures("inference")
def test_a_block_cut_up_again_is_the_captures_and_its_neighbour_still_is_not(device: Device) -> None:
    pool, x = device.new_pool(), torch.ones(64 * 1024, device=device.torch_device)
    first = segue.BreakableCapture(device=device, pool=pool, name="first")
    with first:
        big, kept = x * 2, x[:1024] * 3
    del big
    second = segue.BreakableCapture(device=device, pool=pool, name="second")
    with pytest.raises(segue.SegueError, match=r"second.*first made it"), second:
        whole = x * 4
        del whole
        parts = [x[:1024] * i for i in range(8)]
        _ = parts[3] + parts[5][512:].repeat(2)
        kept + parts[0]


@pytest.mark.usefixtures("inference")
def test_memory_that_the_pool_takes_while_a_segment_is_recorded_is_no_external(device: Device) -> None:
    """Nobody saw the allocation, as in compiled code, and the pool grew for it: only a look at the segment's end can tell."""
    pool, x = device.new_pool(), torch.ones(8, device=device.torch_device)
    capture = segue.BreakableCapture(device=device, pool=pool)
    with capture:
        y = x * 2
        with _torch.function_modes_off(), _torch.dispatch_modes_off():
            # While CUDA records, torch itself allocates from the pool.
            unseen = pool.empty((1 << 22,), (1,), torch.float32) if device.name == "emulator" else x.new_empty(1 << 22)
        out = torch.add(y, 1, out=unseen[:8]) * 2
    assert [e.seen is x for e in capture.externals] == [True]
    x.fill_(3)
    capture.replay()
    assert out.tolist() == [14.0] * 8


@pytest.mark.usefixtures("inference")
def test_an_operand_without_storage_is_left_to_the_device() -> None:
    sparse = torch.eye(4).to_sparse()
    capture = segue.BreakableCapture(device="emulator")
    with pytest.raises(segue.SegueError, match="dense tensors only"), capture:
        _ = sparse * 2


class _Wrapper(Tensor):
    """A tensor that holds another and has no memory."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Wrapper:
        made: _Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.inner if isinstance(a, _Wrapper) else a for a in args), **(kwargs or {}))


@pytest.mark.usefixtures("inference")
def test_what_a_wrapper_holds_is_the_external(device: Device) -> None:
    inner = torch.ones(4, device=device.torch_device)
    wrapper = _Wrapper(inner)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = wrapper * 2
    assert [e.seen is inner for e in capture.externals] == [True]
    inner.fill_(3)
    capture.replay()
    assert out.tolist() == [6.0] * 4


def test_statistics_that_batch_norm_writes_count_as_written_though_its_schema_is_silent(device: Device) -> None:
    x, mean, var = (torch.ones(4, 3, device=device.torch_device), *torch.zeros(2, 3, device=device.torch_device).unbind())
    mean, var = mean.clone(), var.clone()
    capture = segue.BreakableCapture(device=device, name="bare", pool=device.new_pool())
    with torch.inference_mode(), capture:
        functional.batch_norm(x, mean, var, training=True)
    found = {e.tensor.data_ptr(): e.written for e in capture.externals}
    assert found == {x.data_ptr(): False, mean.data_ptr(): True, var.data_ptr(): True}
