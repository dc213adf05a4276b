"""Buckets: what a ladder holds, which bucket serves a length, and the ladder that wastes least."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.errors import SegueError
from segue.runner.ladder import Ladder


def test_an_unsorted_list_with_repeats_becomes_a_ladder():
    assert list(Ladder([32, 16, 32, 8])) == [8, 16, 32]
    assert Ladder([16, 8]) == Ladder((8, 16, 16)) and Ladder([8]).max == 8


@pytest.mark.parametrize("n, bucket", [(0, 4), (1, 4), (3, 4), (4, 4), (5, 9), (9, 9), (10, None)])
def test_a_length_gets_the_smallest_bucket_that_holds_it(n, bucket):
    assert Ladder([9, 4]).bucket_for(n) == bucket


@pytest.mark.parametrize("top", [1, 2, 3, 7, 8, 9, 100, 1000, 2048])
def test_a_geometric_ladder_has_the_small_buckets_and_the_largest(top):
    ladder = Ladder.geometric(top)
    assert ladder.max == top and all(b in ladder for b in (1, 2, 4, 8) if b <= top)


def test_a_geometric_ladder_doubles_by_default():
    assert list(Ladder.geometric(100)) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert len(Ladder.geometric(64, ratio=1.01)) <= 64


def test_a_relative_ladder_steps_by_an_eighth_within_its_limits():
    ladder = list(Ladder.relative(2048))
    assert ladder[:9] == [16, 32, 48, 64, 80, 96, 112, 128, 144] and ladder[-2:] == [1824, 2048]
    assert all(16 <= b - a <= max(16, a / 8) for a, b in pairwise(ladder[:-1]))
    assert max(b - a for a, b in pairwise(Ladder.relative(20_000))) == 512
    assert list(Ladder.relative(9)) == [9] and list(Ladder.relative(40, step=0.5, floor=8)) == [8, 16, 24, 32, 40]


def test_multiple_of_rounds_every_bucket_up():
    assert list(Ladder.geometric(100, multiple_of=8)) == [8, 16, 32, 64, 104]
    assert all(b % 6 == 0 for b in Ladder.fit([5, 13, 14, 40], k=2, multiple_of=6))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Ladder([]), "at least one bucket"),
        (lambda: Ladder([0]), "bucket 0 is not a positive whole number"),
        (lambda: Ladder([-3]), "bucket -3"),
        (lambda: Ladder([2.5]), "bucket 2.5"),
        (lambda: Ladder([True]), "bucket True"),
        (lambda: Ladder(["8"]), "bucket '8'"),
        (lambda: Ladder.geometric(0), "max_tokens 0"),
        (lambda: Ladder.geometric(8, ratio=1.0), "ratio=1.0 doesn't grow"),
        (lambda: Ladder.relative(0), "max_tokens 0"),
        (lambda: Ladder.relative(64, step=0), "step=0 must be a share above 0"),
        (lambda: Ladder.relative(64, floor=0), "floor 0"),
        (lambda: Ladder.relative(64, floor=32, cap=16), "cap=16 is below floor=32"),
        (lambda: Ladder.fit([], 3), "no lengths"),
        (lambda: Ladder.fit([3], 0), "k 0"),
        (lambda: Ladder.fit([3, -1], 1), "length -1"),
    ],
)
def test_what_is_not_a_ladder_is_refused_by_name(make, words):
    with pytest.raises(SegueError, match=words):
        make()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 4))
def test_fit_is_exact_against_brute_force(lengths, k, multiple_of):
    fitted = Ladder.fit(lengths, k, multiple_of)
    tops = sorted({-(-n // multiple_of) * multiple_of for n in lengths})
    best = min(
        Ladder(c).padding(lengths) for size in range(1, k + 1) for c in combinations(tops, size) if c[-1] == tops[-1]
    )
    assert fitted.padding(lengths) == best and len(fitted) <= k and fitted.max == tops[-1]


def test_fit_beats_every_geometric_ladder_of_as_many_buckets_on_a_skewed_sample():
    lengths = [17] * 500 + [130] * 300 + list(range(600, 1000, 7)) + [2000] * 3
    for ratio in (1.2, 1.5, 2.0, 3.0):
        geometric = Ladder.geometric(2048, ratio=ratio)
        assert Ladder.fit(lengths, len(geometric)).padding(lengths) < geometric.padding(lengths)


def test_fit_is_quick_on_thousands_of_distinct_lengths():
    assert len(Ladder.fit(range(1, 5000), 64)) == 64
