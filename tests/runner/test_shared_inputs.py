"""Inputs that share memory with something that the forward writes are refused; what is only read may be shared."""

from __future__ import annotations

import pytest
import torch

import segue
from runner.rows import close
from segue.errors import InputError
from segue.runner import Input

TWO = {"a": Input(0, 0.0), "b": Input(0, 0.0)}


@segue.break_point
def _add(x):
    x.add_(1)


def by_segments(a, b):
    a.add_(1)
    return a + b.mul(2)


def by_the_second(a, b):
    y = a * 1
    b.mul_(2)
    return y + a


def by_a_break(a, b):
    _add(a)
    return a + b * 2


def reads(a, b):
    return a * 2 + b


@pytest.mark.parametrize(("fn", "writes"), [(by_segments, "a"), (by_the_second, "b"), (by_a_break, "a")])
@pytest.mark.parametrize("captured", [False, True])
def test_two_inputs_that_share_memory_are_refused_where_one_is_written(make, model, fn, writes, captured):
    runner = make(fn, TWO, [4, 8])
    if captured:
        for n in (3, 3, 7, 7):
            runner(model.x(n), model.x(n))
    t = model.x(3)
    before = t.clone()
    with pytest.raises(InputError, match=rf"input '{writes}' shares memory with input .*, and the forward writes '{writes}'"):
        runner(t, t)
    assert torch.equal(t, before)
    halves, apart = model.x(8), model.x(8)
    assert close(runner(halves[:4], halves[4:]), fn(apart[:4], apart[4:])) and close(halves, apart)
    with pytest.raises(InputError, match="shares memory with input"):
        runner(halves[:4], halves[3:7])


def test_a_capture_on_shared_inputs_is_refused_and_the_next_call_is_captured(make, model):
    runner = make(by_segments, TWO, [4])
    runner(model.x(3), model.x(3, 1))
    with pytest.raises(InputError, match="shares memory"):
        runner(t := model.x(3), t)
    for i in range(3):
        assert close(runner(model.x(3, i), model.x(3)), by_segments(model.x(3, i), model.x(3)))
    assert runner.stats.replayed == 2


@pytest.mark.parametrize("n", [3, 4])
def test_inputs_that_are_only_read_may_share_memory(make, model, n):
    runner = make(reads, TWO, [4])
    t = model.x(n)
    for _ in range(4):
        assert close(runner(t, t), reads(t, t))
    assert runner.stats.replayed == 2


class Cache:
    def __init__(self, device):
        self.rows = torch.zeros(8, 4, device=device)

    def __call__(self, x):
        self.rows[:4].add_(1)
        return x + self.rows[:4].sum(0)


def test_an_input_that_is_a_view_of_what_the_forward_writes_is_refused(make, model):
    cache, eager = Cache(model.device), Cache(model.device)
    runner = make(cache, {"x": Input(0, 0.0)}, [4])
    with pytest.raises(InputError, match="input 'x' shares memory with a tensor that the forward writes"):
        runner(cache.rows[2:5])
    eager(model.x(3))
    for n in (3, 3, 4, 2):
        assert close(runner(model.x(n)), eager(model.x(n)))
    with pytest.raises(InputError, match="input 'x' shares memory with a tensor that the forward writes"):
        runner(cache.rows[3:7])
    assert close(cache.rows, eager.rows)
    assert close(runner(cache.rows[4:]), eager(eager.rows[4:])), "other rows of the same memory"


def test_a_written_input_that_is_a_view_of_a_weight_is_refused(make, model):
    weight = torch.ones(4, 4, device=model.device)

    def forward(x):
        x.mul_(2)
        return x @ weight

    runner = make(forward, {"x": Input(0, 0.0)}, [4])
    for n in (3, 3, 4):
        runner(model.x(n))
    for _ in range(2):
        with pytest.raises(InputError, match="input 'x' shares memory with a tensor that the forward uses besides"):
            runner(weight[:2])
    with pytest.raises(InputError, match="uses besides"):
        make(forward, {"x": Input(0, 0.0)}, [4])(weight[:2])
    assert (weight == 1).all()


def test_an_eager_call_from_the_cpu_keeps_a_tensor_that_is_given_twice_one(make, model):
    runner = make(by_segments, TWO, [4])
    t = model.x(6).cpu()
    want = by_segments(mine := model.x(6), mine)
    assert close(runner(t, t).cpu(), want.cpu()) and close(t, mine.cpu())
