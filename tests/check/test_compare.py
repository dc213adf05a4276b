"""Comparing forwards of different numbers of rows, and the memory that padded rows may write."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from segue.check.compare import RowCounts, real_difference, tensors_in, value_difference
from segue.check.oplog import InPlaceWrite, OpLog
from segue.check.outcome import Outcome, OutcomeValue, PaddedWrites, differing, state_of, whole

NAN = float("nan")


def test_values_are_compared_bit_for_bit_or_to_rounding_and_nan_equals_nan():
    x = torch.tensor([1.0, NAN, 100.0])
    assert value_difference(x, x.clone(), True) is None
    assert value_difference(x, torch.tensor([1.0001, NAN, 100.0]), True) == "differs in 1 of 3 elements, by at most 0.0001"
    assert value_difference(x, torch.tensor([1.0001, NAN, 100.0]), False) is None
    assert value_difference(x, torch.tensor([1.0, NAN, NAN]), False) == "differs in 1 of 3 elements, by at most inf"
    assert value_difference(torch.tensor([1, 2]), torch.tensor([1, 3]), False) == "differs in 1 of 2 elements"
    assert "has dtype torch.float64" in value_difference(x, x.double(), True)
    assert value_difference(x.to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn), True) is None


def test_only_real_rows_count_along_whatever_dimension_they_are():
    rows = RowCounts(8, 8, 5, exact=True)
    for dim in (0, 1):
        x = torch.zeros(8, 8 if dim else 3)
        y = x.clone()
        y.select(dim, 5).fill_(1)
        assert real_difference(x, y, rows) is None
        y.select(dim, 4).fill_(1)
        assert real_difference(x, y, rows)


def test_padded_and_unpadded_tensors_are_compared_on_what_they_share():
    rows = RowCounts(8, 5, 5, exact=True)
    x = torch.arange(24.0).view(8, 3)
    assert real_difference(x, x[:5], rows) is None and real_difference(x, x[1:6], rows)
    assert real_difference(x.view(24), x[:5].reshape(15), rows) is None, "tokens flattened with something else"
    assert real_difference(x, torch.zeros(4, 3), rows) is None, "not comparable"
    assert real_difference(torch.zeros(()), torch.ones(()), rows)
    flat, other = torch.zeros(16), torch.zeros(16)
    other[12:] = 1
    assert real_difference(flat, other, RowCounts(8, 8, 5, exact=True)) is None


def test_tensors_are_found_by_their_paths_at_every_place_and_to_a_depth():
    t, u = torch.ones(1), torch.zeros(1)
    held = SimpleNamespace(layers=[{"k": t}, t], u=u)
    held.again = held
    found = tensors_in(held)
    assert found.keys() == {"layers[0]['k']", "layers[1]", "u"} and found["layers[1]"] is t is found["layers[0]['k']"]
    assert tensors_in(held, "ctx", 2).keys() == {"ctx.layers[1]", "ctx.u"}
    assert tensors_in(t).keys() == {"itself"} and tensors_in(t, "ctx").keys() == {"ctx"} and not tensors_in(None)


def outcome(memory, written=()):
    address = 1
    found = Outcome(state={"1": OutcomeValue("a tensor", memory, address)}, log=OpLog())
    found.log.written[address] = list(written)
    return found


@pytest.mark.parametrize(
    "changed, views, harmless",
    [
        ([0], [], True),  # declared to take the trash
        ([9], [], False),
        ([0, 9], [], False),
        ([6, 7], [(2, 8)], True),  # rows past the real ones of a slice of 6 rows
        ([5], [(2, 8)], False),
        ([6, 9], [(2, 8)], False),
    ],
)
def test_what_padded_rows_wrote_is_harmless_in_trash_rows_and_past_the_real_ones(changed, views, harmless):
    base = torch.zeros(10, 3)
    now = base.clone()
    now[changed] = 1
    written = [InPlaceWrite(base[a:b], "m.py:1", cleared=False) for a, b in views]
    wrong, notes = differing(outcome(base), outcome(now, written), True, PaddedWrites([0], rows=6, real=4))
    assert bool(notes) is harmless and bool(wrong) is not harmless


@pytest.mark.parametrize("row, harmless", [(3, True), (5, False)])
def test_what_a_context_holds_as_a_part_of_a_larger_memory_is_measured_from_where_it_begins(row, harmless):
    arena = torch.zeros(16, 2)
    part = arena[2:16]  # of which rows 0 to 3 were written, 3 of them real
    written = [InPlaceWrite(part[:4], "m.py:1", cleared=False)]
    now = part.clone()
    now[row] = 1

    def outcome_of(ctx, memory):
        found = Outcome(state=state_of({}, ctx), log=OpLog())
        (value,) = found.state.values()
        found.log.written[value.storage] = written
        return Outcome(state={"ctx": replace(value, value=memory)}, log=found.log)

    ctx = SimpleNamespace(kv=part)
    wrong, notes = differing(outcome_of(ctx, now), outcome_of(ctx, part.clone()), True, PaddedWrites((), rows=4, real=3))
    assert bool(notes) is harmless and bool(wrong) is not harmless


def test_rows_that_segue_cleared_are_harmless():
    base, now = torch.zeros(10, 3), torch.zeros(10, 3)
    now[7:] = 1
    written = [InPlaceWrite(base[7:], "m.py:1", cleared=True)]
    assert not differing(outcome(base), outcome(now, written), True, PaddedWrites((), 6, 4))[0]


def test_the_whole_of_a_memory_is_seen_with_rows_like_those_of_its_part():
    base = torch.arange(24.0).view(2, 4, 3)
    assert whole(base).shape == (2, 4, 3) and whole(base[1]).shape == (2, 4, 3)
    assert whole(base[1, 1:3]).shape == (4, 2, 3) and whole(base[0, :3]).shape == (8, 3)
    assert whole(base[0, :, 1:]).shape == (8, 3), "a part that isn't contiguous"
    assert torch.equal(whole(base[0, :, 1:]).flatten(), base.flatten())
