"""Runners that share input buffers give what each gives alone, in whatever order they are captured and called."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import segue
from runner.rows import close
from segue.errors import InputError, UsageError
from segue.runner import Input

X = {"x": Input(0, 0.0)}


def buffers(runner):
    return [b.flat.data_ptr() for b in runner.prepare().recorder.buffers if b is not None]


def writes(x, extra):
    x.add_(1)
    return x.cumsum(0) + extra


def test_two_runners_of_one_model_take_the_memory_of_one(make, model):
    first = make(model, X, [4, 8, 16])
    second = make(lambda x: model(x) * 3, X, [4, 8], pool=None, buffers_of=first)
    for i, n in enumerate((8, 8, 3, 3, 16, 16, 2, 7, 1, 8, 5, 3)):
        x = model.x(n, i)
        assert close(first(x), model(x))
        if n <= 8:
            x = model.x(9 - n, i)
            assert close(second(x), model(x) * 3), (n, i)
    assert buffers(first) == buffers(second) and first.pool is second.pool
    assert first.stats.replayed > 3 < second.stats.replayed


@pytest.mark.parametrize("slept", [False, True], ids=["new", "awake first"])
def test_the_runner_with_the_smaller_buckets_may_make_the_buffers(make, model, slept):
    first = make(model, X, [4, 16])
    second = make(lambda x: model(x) * 3, X, [4, 8], pool=None, buffers_of=first)
    if slept:
        for runner in (first, second):
            runner.capture(model.x(3))
            runner.sleep()
        gc.collect()
    second.wake()
    for _ in range(2):
        assert close(second(model.x(7)), model(model.x(7)) * 3)
    first.wake()
    for _ in range(3):
        assert close(first(model.x(15)), model(model.x(15)))
    assert buffers(first) == buffers(second)


def test_a_runner_whose_forward_writes_its_input_pads_the_other_ones_tail_anew(make, model):
    first = make(lambda x: x.cumsum(0) + x.sum(0), X, [4, 8])  # the tail counts
    second = make(writes, {**X, "extra": Input(0, 0.0)}, [4, 8], pool=None, buffers_of=first)
    for i, n in enumerate((8, 8, 3, 3, 3, 7, 2)):
        for m in (n, 9 - n):
            x, extra = model.x(m, i), model.x(m, i + 1)
            want, changed = model.x(m, i), model.x(m, i)
            assert close(second(x, extra), writes(changed, extra)) and close(x, changed)
            assert close(first(want), want.cumsum(0) + want.sum(0))
    assert first.stats.replayed and second.stats.replayed


def test_a_call_of_one_in_a_break_of_the_other_cannot_overwrite_its_input(make, model):
    inner: list[segue.GraphRunner] = []
    calls = [True]

    @segue.break_point
    def ask(y):
        return inner[0](y * 1) if calls[0] else y * 2

    outer = make(lambda x: ask(x + 1) + x, X, [4])
    inner.append(make(lambda x: x * 2, X, [4], pool=None, buffers_of=outer))
    x = model.x(4)
    assert close(outer(x), (x + 1) * 2 + x)
    calls[0] = False
    outer(x)
    for _ in range(3):
        inner[0](x)
    assert close(outer(x), (x + 1) * 2 + x)
    calls[0] = True
    with pytest.raises(UsageError, match="inside a forward of the same pool"):
        outer(x)


def test_buffers_stay_as_long_as_one_of_the_runners_is_awake(make, model):
    first = make(model, X, [4, 8])
    second = make(model, X, [4, 8], pool=None, buffers_of=first)
    for runner in (first, second):
        runner.capture(model.x(3))
    buffer = weakref.ref(first.prepare().recorder.buffers[0].flat)
    first.sleep()
    gc.collect()
    assert close(second(model.x(3)), model(model.x(3))) and buffer() is not None
    first.wake()
    assert close(first(model.x(3, 1)), model(model.x(3, 1))) and buffers(first) == buffers(second)
    first.sleep()
    second.close()
    del second, runner
    gc.collect()
    assert buffer() is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"buffers_of": 3}, "buffers_of=3 is a int; give a segue.GraphRunner"),
        ({"inputs": {"y": Input(0, 0.0)}}, "shares inputs of the same name, and that runner's are x"),
        ({"inputs": {"x": Input(0, 1.0)}}, "input 'x' is declared as .*pad=0.0.* there, and as .*pad=1.0.* here"),
        ({"buckets": [4, 32]}, "hold 16 tokens and 0 requests, and this one's 32 and 0. Make the runner with the larger"),
        ({"pool": "own"}, "means the pool of that runner too"),
    ],
)
def test_what_cannot_share_is_refused_by_name(make, model, device, options, error):
    first = make(model, X)
    options = {"inputs": X, "buckets": [4], "pool": None, "buffers_of": first, **options}
    if options["pool"]:
        options["pool"] = device.new_pool()
    fn = (lambda y: y) if "y" in options["inputs"] else model
    with pytest.raises(UsageError, match=error):
        make(fn, **options)


def test_tensors_of_another_kind_are_refused_by_name(make, model):
    first = make(lambda x: x * 2, X)
    for _ in range(2):
        first(model.x(3))
    second = make(lambda x: x * 2, X, pool=None, buffers_of=first)
    with pytest.raises(
        InputError, match=r"input 'x' is .* torch.float64, and .* torch.float32 in the runner whose"
    ):
        second(model.x(3).double())
    assert torch.equal(second(model.x(3)), model.x(3) * 2)
