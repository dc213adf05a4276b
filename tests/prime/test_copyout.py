"""Copies carry the prompt's own rows and the whole states, as bytes, in few launches, and write nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue import _torch
from segue.check.compare import bits, difference
from segue.devices import Device
from segue.prime.copyout import CopyOut

DTYPES = [
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
]


def _random_bits(shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> Tensor:
    """Any bit pattern, NaNs with payloads among them."""
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype).to(device.torch_device)


def _copied(scratch: segue.Rows | segue.Whole, session: segue.Rows | segue.Whole, n: int, start: int = 0) -> None:
    copies = CopyOut({"s": scratch}, bucket=8, requests=1, name="g")
    copies.copy(copies.pairs({"s": session}, 0, start, n))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((8, 2, 6), 0), ((3, 8, 4), 1), ((3, 8, 4), -2), ((2, 3, 8), 2), ((1, 8, 5), 1)])
def test_rows_travel_bit_for_bit_whatever_the_type_and_the_place_of_the_dimension(
    device: Device, dtype: torch.dtype, shape: tuple[int, ...], dim: int
) -> None:
    scratch = _random_bits(shape, dtype, device)
    longer = tuple(11 if d == dim % 3 else s for d, s in enumerate(shape))
    session = _random_bits(longer, dtype, device)
    before = session.clone()
    _copied(segue.Rows(scratch, dim), segue.Rows(session, dim), n=5, start=2)
    assert difference(session.narrow(dim, 0, 5), scratch.narrow(dim, 2, 5)) is None
    assert difference(session.narrow(dim, 5, 6), before.narrow(dim, 5, 6)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_session_that_lies_otherwise_in_memory_is_filled_too(device: Device, dtype: torch.dtype) -> None:
    scratch = _random_bits((8, 2, 6), dtype, device)
    session = torch.zeros(9, 6, 4, dtype=dtype, device=device.torch_device).transpose(1, 2)[:, :2]
    _copied(segue.Rows(scratch), segue.Rows(session), n=7)
    assert difference(session[:7], scratch[:7]) is None and not bits(session[7:]).any()


def test_a_row_may_hold_a_token_of_each_sequence_of_a_batch(device: Device) -> None:
    scratch = torch.arange(2 * 4 * 3.0, device=device.torch_device).view(2, 4, 3)  # [sequences, steps, D]
    session = torch.zeros(2, 3, 3, device=device.torch_device)
    _copied(segue.Rows(scratch, 1, tokens=2), segue.Rows(session, 1, tokens=2), n=6)
    assert torch.equal(session, scratch[:, :3])
    with pytest.raises(segue.UsageError, match="has 3 rows"):
        CopyOut({"s": segue.Rows(session, 1, tokens=2)}, bucket=8, requests=1, name="g")


def test_whole_states_may_lack_the_dimension_of_requests(device: Device) -> None:
    scratch = torch.arange(24.0, device=device.torch_device).view(2, 3, 4)
    copies = CopyOut({"s": segue.Whole(scratch)}, bucket=8, requests=2, name="g")
    for shape in ((1, 3, 4), (3, 4)):
        session = torch.zeros(shape, device=device.torch_device)
        copies.copy(copies.pairs({"s": segue.Whole(session)}, 1, 0, 5))
        assert torch.equal(session.view(3, 4), scratch[1])


def test_contiguous_states_of_many_layers_and_types_take_a_handful_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    def counted(destinations: Any, sources: Any) -> None:
        launched.append(len(destinations))
        torch._foreach_copy_(destinations, sources)

    monkeypatch.setattr(_torch, "foreach_copy", counted)

    def state(rows: int, value: float) -> dict[str, segue.Rows | segue.Whole]:
        made: dict[str, segue.Rows | segue.Whole] = {}
        for i in range(28):
            made[f"{i}.k"] = segue.Rows(torch.full((rows, 2, 8), value, dtype=torch.bfloat16))
            made[f"{i}.v"] = segue.Rows(torch.full((rows, 2, 8), int(value), dtype=torch.int8))
            made[f"{i}.s"] = segue.Whole(torch.full((1, 2, 4, 4), value))
        return made

    copies, session = CopyOut(state(8, 1.0), bucket=8, requests=1, name="g"), state(20, 0.0)
    copies.copy(copies.pairs(session, 0, 0, 5))
    assert launched == [84]
    assert all(bool((s.tensor[:5] == 1).all()) for s in session.values())


def test_contiguous_states_are_fused_whatever_the_strides_of_their_sizes_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[bool] = []

    def looked_at(destinations: Any, sources: Any) -> None:
        fused.extend(a.stride() == b.stride() for a, b in zip(destinations, sources, strict=True))
        torch._foreach_copy_(destinations, sources)

    monkeypatch.setattr(_torch, "foreach_copy", looked_at)
    scratch = {name: segue.Whole(torch.randn(1, 3, 4)) for name in "ab"}
    session = {name: segue.Whole(torch.zeros(12).as_strided((1, 3, 4), (99, 4, 1))) for name in "ab"}
    copies = CopyOut(scratch, bucket=8, requests=1, name="g")
    copies.copy(copies.pairs(session, 0, 0, 5))
    assert fused == [True, True]
    assert all(torch.equal(session[name].tensor, scratch[name].tensor) for name in "ab")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s | {"more": segue.Whole(torch.zeros(1))},
            r"has the state \['k', 'more', 's'\] where the graph fills",
        ),
        (lambda s: {"k": s["k"]}, r"has the state \['k'\] where"),
        (lambda s: s | {"k": segue.Whole(s["k"].tensor)}, "says that k is Whole"),
        (lambda s: s | {"k": segue.Rows(torch.zeros(8, 4, dtype=torch.int8))}, r"has k as torch.int8 on cpu.*float32"),
        (lambda s: s | {"k": segue.Rows(torch.zeros(8, 4, device="meta"))}, r"has k as torch.float32 on meta"),
        (
            lambda s: s | {"k": segue.Rows(torch.zeros(8, 5))},
            r"has k of shape \(8, 5\), and the scratch cache \(8, 4\)",
        ),
        (lambda s: s | {"k": segue.Rows(torch.zeros(8, 4), dim=1)}, r"has k of shape \(8, 4\)"),
        (lambda s: s | {"k": segue.Rows(torch.zeros(4, 4))}, "has room for 4 rows in k, and the prompt has 5"),
        (
            lambda s: s | {"s": segue.Whole(torch.zeros(2, 3))},
            r"has s of shape \(2, 3\), and the scratch cache \(1, 3\)",
        ),
    ],
)
def test_a_session_unlike_the_scratch_cache_is_refused_by_name(change: Any, message: str) -> None:
    def state() -> dict[str, Any]:
        return {"k": segue.Rows(torch.zeros(8, 4)), "s": segue.Whole(torch.zeros(1, 3))}

    copies = CopyOut(state(), bucket=8, requests=1, name="prime graph of 8 rows")
    with pytest.raises(segue.SegueError, match=f"prime graph of 8 rows: the session of request 0 {message}"):
        copies.pairs(change(state()), 0, 0, 5)


def test_a_session_that_shares_memory_with_the_scratch_cache_is_refused() -> None:
    scratch = {"k": segue.Rows(torch.zeros(8, 4))}
    with pytest.raises(segue.SegueError, match="shares the memory of k with the scratch cache"):
        CopyOut(scratch, bucket=8, requests=1, name="g").pairs(scratch, 0, 0, 5)


@pytest.mark.parametrize(
    ("state", "requests", "message"),
    [
        ({}, 1, "is empty"),
        ({"k": torch.zeros(8, 4)}, 1, r"state\(\)\['k'\] is a Tensor; say segue.Rows"),
        ({"k": segue.Rows(torch.zeros(4, 8))}, 1, r"has 4 rows along dimension 0 of \(4, 8\), and new_cache\(8, 1\)"),
        ({"k": segue.Rows(torch.zeros(8, 4), dim=2)}, 1, "no dimension 2"),
        ({"s": segue.Whole(torch.zeros(1, 4))}, 3, "has 1 entries along dimension 0.*3 requests has one each"),
    ],
)
def test_a_state_that_is_none_of_this_graph_is_refused_by_name(state: Any, requests: int, message: str) -> None:
    with pytest.raises(segue.SegueError, match=message):
        CopyOut(state, bucket=8, requests=requests, name="g")
