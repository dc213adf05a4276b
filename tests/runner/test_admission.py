"""Which bucket a call gets: pure, explained, and on two axes."""

from __future__ import annotations

import pytest

from segue.errors import UsageError
from segue.runner import Decision, Ladder
from segue.runner.admission import Admission

TWO = Admission(Ladder([4, 8]), Ladder([1, 4]))


@pytest.mark.parametrize(
    "tokens, requests, decision",
    [
        (0, -1, Decision(4, "breakable", "smallest bucket that fits")),
        (4, -1, Decision(4, "breakable", "smallest bucket that fits")),
        (5, 1, Decision(8, "breakable", "smallest bucket that fits", 1)),
        (5, 2, Decision(8, "breakable", "smallest bucket that fits", 4)),
        (9, 1, Decision(None, "eager", "no bucket fits")),
        (8, 5, Decision(None, "eager", "no request bucket fits")),
    ],
)
def test_both_axes_take_the_smallest_bucket_that_fits(tokens, requests, decision):
    assert TWO.decide(tokens, requests) == decision == TWO.decide(tokens, requests)


def test_a_bucket_that_was_left_out_is_served_by_the_next():
    admission = Admission(Ladder([4, 8, 16]), left_out={8: "memory_budget", 16: "memory_budget"})
    assert admission.decide(3).bucket == 4 and admission.decide(7).bucket is None
    assert Admission(Ladder([4, 8]), left_out={4: "x"}).decide(3).bucket == 8
    assert admission.explain(7) == (
        "7 tokens: eager, memory_budget: the largest bucket is 16; left out: 8 (memory_budget), 16 (memory_budget)"
    )


@pytest.mark.parametrize("limit, bucket", [(3, 8), (2, None), (0.4, 8), (0.3, None), (0, None), (0.0, None)])
def test_padding_is_limited_in_rows_or_as_a_share(limit, bucket):
    admission = Admission(Ladder([8]), max_padding=limit)
    assert admission.decide(5).bucket == bucket
    assert admission.decide(8).bucket == 8


def test_every_decision_is_explained_with_its_numbers():
    assert TWO.explain(5, 2) == "5 tokens: bucket 8, 3 padded rows (38%), breakable, 2 requests in the request bucket 4"
    assert (
        TWO.explain(5, 9) == "5 tokens: eager, no request bucket fits: 9 requests, and the largest request bucket is 4"
    )
    assert Admission(Ladder([8]), max_padding=2).explain(5) == (
        "5 tokens: eager, max_padding: bucket 8 has 3 padded rows, more than max_padding=2"
    )


@pytest.mark.parametrize("limit", [-1, 1.0, 2.5, True])
def test_a_padding_limit_that_means_nothing_is_refused(limit):
    with pytest.raises(UsageError, match="neither a whole number of rows nor a share"):
        Admission(Ladder([8]), max_padding=limit)


def test_a_decision_made_elsewhere_names_a_request_bucket_of_this_runner_if_the_call_has_requests():
    for tokens, requests in ((5, 2), (4, 1), (3, -1)):
        TWO.check(TWO.decide(tokens, requests), tokens, requests)
    for odd in (3, 99):
        with pytest.raises(UsageError, match=f"requests={odd}.*names a request bucket this runner doesn't have"):
            TWO.check(Decision(8, "breakable", "", odd), 5, 2)
    with pytest.raises(UsageError, match="disagree on whether there is a request axis"):
        TWO.check(TWO.decide(5), 5, 2)
    with pytest.raises(UsageError, match="disagree on whether there is a request axis"):
        Admission(Ladder([8])).check(Decision(8, "breakable", "", 4), 5, -1)
