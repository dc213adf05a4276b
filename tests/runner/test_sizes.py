"""Sizes that follow the tokens without equalling them, or equal the bucket by chance, are told by a second run or refused."""

from __future__ import annotations

import random

import pytest
import torch

import segue
from runner.rows import close
from segue.capture.rehearsal import IndexChecks
from segue.errors import UsageError
from segue.runner import Input

X = {"x": Input(0, 0.0)}


@segue.break_point(trim=("x",))
def mix(x):
    return x + x.mean(0)


FOLLOW = {
    "twice": (lambda x: mix(x).repeat_interleave(2, 0), 0),
    "two copies": (lambda x: torch.cat([x, mix(x)]), 0),
    "every other": (lambda x: mix(x)[::2] * 1, 0),
    "one less": (lambda x: mix(x)[:-1] * 1, 0),
    "pairs": (lambda x: mix(x).view(-1, 2, 4).mean(1), 0),
    "among others": (lambda x: {"y": x * 2, "pairs": mix(x).view(-1, 2, 4).sum(1)}, 0),
    "by a break": (lambda x: (mix(x), mix(x).t().repeat(1, 3)), 1),
}


@pytest.mark.parametrize("buckets", [[8], [8, 16]])
@pytest.mark.parametrize("case", FOLLOW)
def test_a_size_that_follows_the_tokens_is_refused_while_one_bucket_has_been_seen(make, model, case, buckets):
    fn, dim = FOLLOW[case]
    for explicit in (False, True):
        runner = make(fn, X, buckets)
        with pytest.raises(UsageError, match=rf"dimension {dim} of output.* follows the bucket .* comes back whole"):
            runner.capture(model.x(5)) if explicit else runner(model.x(5))


def test_declared_as_no_tokens_such_an_output_comes_back_whole(make, model):
    runner = make(FOLLOW["twice"][0], X, [8], output_token_dim=None)
    for i in range(3):
        assert runner(model.x(5, i)).shape == (16, 4)


def test_a_table_that_ends_at_the_largest_bucket_is_cut_to_the_tokens(make, model):
    table = torch.randn(16, 4, device=model.x(1).device)
    runner = make(lambda x: (mix(x), table[: x.shape[0]] * 1), X, [16])
    for i in range(4):
        _, rows = runner(model.x(5, i))
        assert torch.equal(rows, table[:5])


def gram(x):
    y = mix(x)
    return y.t() @ y


@pytest.mark.parametrize("buckets", [[4], [4, 8], [2, 4]])
def test_a_width_that_is_the_bucket_by_chance_is_not_cut(make, model, buckets):
    runner = make(gram, X, buckets)
    with pytest.raises(UsageError, match=r"output is ambiguous: its shape \[4, 4\] .*by chance.* with None for output"):
        runner(model.x(3))
    exact = make(gram, X, buckets, output_token_dim=None)
    for i in range(4):
        assert close(exact(model.x(3, i)), gram(model.x(3, i)))


def test_a_width_that_is_no_buckets_size_replays(make, model):
    runner = make(lambda x: (gram(x), mix(x), x.sum(0)), X, [8, 16])
    for n in (5, 12, 5, 12, 7, 16):
        for got, want in zip(runner(model.x(n)), (gram(model.x(n)), mix(model.x(n)), model.x(n).sum(0)), strict=True):
            assert close(got, want)
    assert runner.stats.replayed == 2


@segue.break_point(trim=("y",))
def product(y):
    return y.t() @ y


@pytest.mark.parametrize("order", [(4, 8), (8, 4)])
def test_a_breaks_result_with_the_bucket_size_by_chance_is_refused_when_another_bucket_shows_it(make, model, order):
    runner = make(lambda x: x @ product(x), X, [4, 8])
    runner(model.x(order[0])), runner(model.x(order[0])), runner(model.x(order[1]))
    with pytest.raises(UsageError, match=r"break product .*ambiguous: its shape \[4, 4\] .* bucket 4 by chance"):
        runner(model.x(order[1]))
    exact = make(lambda x: x @ fixed(x), X, [4, 8])
    for n in (3, 7, 3, 7, 3, 7):
        assert close(exact(model.x(n)), model.x(n) @ (model.x(n).t() @ model.x(n)))


@segue.break_point(trim=("y",), token_dim=None)
def fixed(y):
    return y.t() @ y


def test_the_second_run_leaves_no_trace(make, model):
    """Its breaks don't run, and what it changes in Python, in tensors and in generators is put back."""
    calls, table = [], {}
    total = torch.zeros(4, device=model.device)

    @segue.break_point(trim=("x",))
    def noted(x):
        calls.append(len(x))
        return x * 2

    def forward(x, index):
        if x.shape[0] not in table:
            table[x.shape[0]] = torch.arange(x.shape[0], device=x.device)
        total.add_(1)
        y = noted(x) + table[x.shape[0]][:, None]
        return y + torch.rand_like(y) * 0 + y.index_select(0, index)

    runner = make(forward, {**X, "index": Input()}, [8, 32])
    torch.manual_seed(3)
    random.seed(3)
    index = torch.tensor([4], device=model.device)
    runner(model.x(5), index)
    assert calls == [5] and list(table) == [8] and total.tolist() == [1.0] * 4
    after = torch.rand(3, device=model.device)
    torch.manual_seed(3)
    torch.rand(8, 4, device=model.device)
    assert torch.equal(after, torch.rand(3, device=model.device))


def test_a_forward_that_can_not_run_at_another_size_is_served_as_before(make, model):
    weight = torch.ones(8, 8, device=model.device)
    runner = make(lambda x: weight @ mix(x), X, [8])
    for i in range(3):
        assert runner(model.x(8, i)).shape == (8, 4)
    assert runner.stats.replayed == 1


INDEXED = {
    "index": lambda t, i: t[i],
    "index, the second": lambda t, i: t[:, i],
    "index, behind a mask": lambda t, i: t[None][torch.ones(1, 4, dtype=torch.bool, device=t.device)][i],
    "put": lambda t, i: t.index_put_((i,), t[:1].sum()),
    "gather": lambda t, i: t.gather(0, i[:, None]),
    "scatter": lambda t, i: t.scatter(0, i[:, None], 1.0),
    "select": lambda t, i: t.index_select(1, i),
    "add": lambda t, i: t.index_add(0, i, t[: len(i)]),
    "embedding": lambda t, i: torch.nn.functional.embedding(i, t),
    "take": lambda t, i: t.take(i + 12),
    "a loss": lambda t, i: torch.nn.functional.nll_loss(t, i.expand(4)),
}


@pytest.mark.parametrize("what", list(INDEXED))
def test_an_index_that_is_out_of_range_is_found_before_its_op_runs(what, model):
    """On CUDA the op would end all work of the process."""
    table, op = torch.zeros(4, 4, device=model.device), INDEXED[what]
    inside, outside = (torch.tensor([i], device=model.device) for i in (3, 4))
    with IndexChecks():
        op(table, inside)
        with pytest.raises(IndexError, match=r"an index from \d+ to \d+ into \d+ rows"):
            op(table, outside)


ROUNDED = {
    "up": lambda x: torch.nn.functional.pad(mix(x), (0, 0, 0, -len(x) % 4)),
    "limited": lambda x: mix(x)[:6],
    "in bits": lambda x: mix(x).sum(0)[None].repeat(len(x).bit_length(), 1),
}


@pytest.mark.parametrize("buckets", [[8], [8, 16]])
@pytest.mark.parametrize("how", ROUNDED)
def test_a_size_that_is_the_same_at_a_like_number_of_rows_is_refused(make, model, how, buckets):
    named = r"dimension 0 of output follows the bucket|has the bucket's size along dimension 0 by chance"
    for explicit in (False, True):
        runner = make(ROUNDED[how], X, buckets)
        with pytest.raises(UsageError, match=named):
            runner.capture(model.x(5)) if explicit else runner(model.x(5))
        for n in (5, 12)[: len(buckets)]:
            with pytest.raises(UsageError, match=named):
                runner(model.x(n))


@pytest.mark.parametrize("value", [lambda x: x.numel(), lambda x: float(len(x)), lambda x: len(x) > 4])
def test_a_number_that_follows_the_rows_is_refused(make, model, value):
    runner = make(lambda x: (mix(x), value(x)), X, [8])
    with pytest.raises(UsageError, match=r"output\[1\] is the plain value .* follows the padded size"):
        runner(model.x(5))
    runner = make(lambda x: (mix(x), 3, 0.5, "rows"), X, [8])
    for i in range(3):
        assert runner(model.x(5, i))[1:] == (3, 0.5, "rows")
    assert runner.stats.replayed == 1
