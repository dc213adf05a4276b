"""The padding helpers."""

from __future__ import annotations

import pytest
import torch

import segue


def test_scrub_zeroes_the_tail_along_a_dimension_and_leaves_all_for_none() -> None:
    a, b = torch.ones(4, 2), torch.ones(4)
    segue.scrub_padding_tail(None, a, b)
    assert a.sum() == 8 and b.sum() == 4
    segue.scrub_padding_tail(3, a, b)
    assert a.sum(1).tolist() == [2, 2, 2, 0] and b.tolist() == [1, 1, 1, 0]
    segue.scrub_padding_tail(1, a, dim=1)
    assert a.tolist() == [[1, 0]] * 3 + [[0, 0]]
    segue.scrub_padding_tail(9, b)
    assert b.tolist() == [1, 1, 1, 0]


def test_slice_gives_views_of_the_real_rows() -> None:
    a, b = torch.arange(4), torch.arange(8).reshape(4, 2)
    assert segue.slice_to_real_tokens(None, a)[0] is a and segue.slice_to_real_tokens(4, a)[0] is a
    (one,) = segue.slice_to_real_tokens(2, a)
    assert one is not None and one.tolist() == [0, 1] and one.data_ptr() == a.data_ptr()
    first, nothing, second = segue.slice_to_real_tokens(1, a, None, b)
    assert first is not None and second is not None
    assert first.tolist() == [0] and nothing is None and second.tolist() == [[0, 1]]
    (column,) = segue.slice_to_real_tokens(1, b, dim=1)
    assert column is not None and column.shape == (4, 1)


def test_scrub_skips_none_and_clears_nothing_if_an_argument_is_wrong() -> None:
    a = torch.ones(4)
    segue.scrub_padding_tail(3, None, a, None)
    assert a.tolist() == [1, 1, 1, 0]
    for wrong, text in ((3, "argument 1 is a int"), (torch.ones(()), r"argument 1 has shape \(\), and no dimension 0")):
        with pytest.raises(segue.UsageError, match=text):
            segue.scrub_padding_tail(1, a, wrong)  # type: ignore[arg-type]
        with pytest.raises(segue.UsageError, match=text):
            segue.slice_to_real_tokens(1, a, wrong)  # type: ignore[arg-type]
    assert a.tolist() == [1, 1, 1, 0]


def test_a_weak_reference_of_what_is_no_tensor_is_that_thing() -> None:
    thing = object()
    assert segue.weak_ref_tensor(thing) is thing and segue.weak_ref_tensor(None) is None
    with pytest.raises(segue.UsageError, match="strided"):
        segue.weak_ref_tensor(torch.eye(2).to_sparse())


def test_a_weak_view_has_the_same_memory_and_layout() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn):
        t = torch.zeros(3, 4).to(dtype).t()[1:]
        w = segue.weak_ref_tensor(t)
        assert (w.shape, w.stride(), w.dtype, w.data_ptr()) == (t.shape, t.stride(), t.dtype, t.data_ptr())
