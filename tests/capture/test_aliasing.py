"""Whether tensors share bytes is told exactly."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from segue.capture.aliasing import first_overlap, overlap


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
