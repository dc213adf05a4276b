"""Whether tensors share bytes is told exactly, and slices of one tensor are none the worse for being slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import segue
from prime.prompts import prompt
from segue.check import tiny_trunk
from segue.devices import Device
from segue.prime.aliasing import first_overlap, overlap


def _bytes(t: Tensor) -> set[int]:
    places = torch.zeros((), dtype=torch.int64)
    for dim, (step, size) in enumerate(zip(t.stride(), t.shape, strict=True)):
        places = places + (torch.arange(size) * step).view(-1, *([1] * (t.dim() - dim - 1)))
    start = t.data_ptr()
    return {start + place * t.element_size() + i for place in places.flatten().tolist() for i in range(t.element_size())}


_view = st.tuples(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=3),
    st.integers(0, 20),
    st.sampled_from([torch.int8, torch.int16, torch.float32]),
)


@settings(max_examples=300, deadline=None)
@given(_view, _view)
def test_overlap_is_that_of_the_sets_of_bytes(one: object, other: object) -> None:
    base = torch.zeros(1024, dtype=torch.int8)

    def view(spec: tuple[list[tuple[int, int]], int, torch.dtype]) -> Tensor:
        dims, offset, dtype = spec
        return base.view(dtype).as_strided([n for n, _ in dims], [s for _, s in dims], offset)

    a, b = view(one), view(other)  # type: ignore[arg-type]
    assert overlap(a, b) is bool(_bytes(a) & _bytes(b))


def test_slots_of_one_tensor_are_apart_whichever_way_it_is_cut() -> None:
    cache = torch.zeros(4, 3, 8, 16, 4)  # layers, slots, heads, rows, size
    assert first_overlap([(i, cache[:, i]) for i in range(3)]) is None
    assert first_overlap([(i, cache[i]) for i in range(4)]) is None
    assert first_overlap([(0, cache[:, 0]), (1, cache[:, 1]), (2, cache[1:, 1:2])]) == (1, 2)
    assert not overlap(torch.zeros(2), torch.zeros(2)) and not overlap(cache, cache[:, :, :0])


@pytest.mark.parametrize("slots", ["kv[i]", "kv[:, i]"])
def test_sessions_that_are_slots_of_one_tensor_are_served(device: Device, dense_trunk: tiny_trunk.Dense, slots: str) -> None:
    one = dense_trunk.new_cache(16).kv
    whole = torch.stack([one, one], 0 if slots == "kv[i]" else 1)
    sessions = [tiny_trunk.DenseCache(whole[i] if slots == "kv[i]" else whole[:, i]) for i in range(2)]
    with segue.PrimeGraph(dense_trunk, 16, requests=2, device=device) as prime:
        prime.run([prompt(4, device), prompt(5, device)], sessions)
        apart = [dense_trunk.new_cache(16) for _ in sessions]
        prime.run([prompt(4, device), prompt(5, device)], apart)
    for n, session, own in zip((4, 5), sessions, apart, strict=True):
        assert torch.equal(session.kv[..., :n, :], own.kv[..., :n, :]) and own.kv[..., :n, :].any()


def test_sessions_that_share_memory_are_refused_and_left_as_they_were(device: Device, dense_trunk: tiny_trunk.Dense) -> None:
    with segue.PrimeGraph(dense_trunk, 16, requests=2, device=device) as prime:
        long = dense_trunk.new_cache(20).kv
        sessions = [tiny_trunk.DenseCache(long[..., :16, :]), tiny_trunk.DenseCache(long[..., 4:, :])]
        with pytest.raises(segue.SegueError, match="sessions of requests 0 and 1 share the memory of keys and values"):
            prime.run([prompt(4, device), prompt(5, device)], sessions)
        part = tiny_trunk.DenseCache(prime.scratch.kv[..., 1:, :])
        with pytest.raises(segue.SegueError, match="request 0 shares the memory of keys and values with the scratch cache"):
            prime.run(prompt(4, device), part)
        expanded = tiny_trunk.DenseCache(long[..., :1, :].expand(*long.shape))
        with pytest.raises(segue.SegueError, match=r"request 0 has keys and values as an expanded tensor.*one and the same"):
            prime.run(prompt(4, device), expanded)
        assert not long.any() and all(s.length == 0 for s in (*sessions, part, expanded))
