"""Arguments: bound like the function's own signature."""

from __future__ import annotations

import enum
import functools
import queue

import pytest
import torch

import segue
from runner.rows import close
from segue.errors import InputError, NoBucketError, UsageError
from segue.runner import Input
from segue.runner.calls import Binder

X = {"x": Input(0, 0.0)}


class Mode(enum.Enum):
    A = 1
    B = 2


def key(fn, *args, inputs=X, **kwargs):
    binder = Binder(fn, inputs)
    binder.place(torch.device("cpu"))
    return binder.read(args, kwargs, kwargs.pop("ctx", None)).key


def test_positions_names_and_defaults_are_the_functions_own(make, model):
    def fn(a, /, x, b=2, *, c=3):
        return x * a + b - c

    runner = make(fn, X, [8], max_variants=9)
    x = model.x(5)
    for _ in range(3):
        assert close(runner(4, x), fn(4, x)) and close(runner(4, x, 5, c=6), fn(4, x, 5, c=6))
        assert close(runner(4, c=6, b=5, x=x), fn(4, x, 5, c=6))
    assert runner.stats.captured == 2


def test_the_context_may_stand_anywhere_in_the_signature(make, model):
    seen = queue.SimpleQueue()

    def fn(ctx, x, scale=1):
        seen.put(ctx)
        return x * scale

    runner = make(fn, X, [8])
    x = model.x(5)
    runner("first", x), runner(x=x, ctx="second")
    assert [*dict.fromkeys(seen.get() for _ in range(seen.qsize()))] == ["first", "second"]


def test_a_module_a_method_and_a_partial_are_bound_by_their_parameters(make, device):
    module = torch.nn.Linear(4, 4).to(device.torch_device).eval().requires_grad_(False)
    x = torch.randn(3, 4, device=device.torch_device)

    def scaled(x, by):
        return x * by

    for fn, name in ((module, "input"), (module.forward, "input"), (functools.partial(scaled, by=3), "x")):
        runner = make(fn, {name: Input(0, 0.0)}, [4])
        for _ in range(3):
            assert close(runner(x), fn(x)) and close(runner(**{name: x}), fn(x))


def test_declared_names_may_go_into_keyword_arguments(make, model):
    def fn(x, **more):
        return x + more["y"]

    runner = make(fn, {"x": Input(0, 0.0), "y": Input(0, 0.0)}, [8])
    for i in range(3):
        assert close(runner(model.x(5), y=model.x(5, i)), model.x(5) + model.x(5, i))
    with pytest.raises(InputError, match="argument 'z' is a tensor that inputs doesn't declare"):
        runner(model.x(5), y=model.x(5), z=model.x(5))


def test_further_keyword_arguments_are_plain_flags_of_the_variant(make, model):
    def fn(x, **more):
        return x * more.get("scale", 1.0) + len(more)

    runner = make(fn, {"x": Input(0, 0.0)}, [8])
    for i in range(3):
        x = model.x(5, i)
        for flags in ({}, {"scale": 2.0}, {"scale": 2.0, "also": "this"}):
            assert close(runner(x, **flags), fn(x, **flags))
    assert runner.stats.captured == 3
    with pytest.raises(InputError, match="argument 'x' twice"):
        runner(model.x(5), x=model.x(5))


def test_floats_that_compare_equal_but_compute_otherwise_are_variants_and_nan_is_one(make, model):
    runner = make(lambda x, by=1.0: x * by, {"x": Input(0, 0.0)}, [8])
    ones = torch.ones(5, 4, device=model.device)
    for by in (0.0, -0.0, float("nan")):
        for _ in range(3):
            assert torch.equal(1 / runner(ones, by), 1 / (ones * by)) or by != by
    assert runner.stats.captured == 3 and runner.stats.replayed == 3


def test_flags_are_part_of_the_variant_with_their_type():
    def fn(x, flag=None):
        return x

    x = torch.zeros(3)
    flags = [None, True, 1, 1.0, "a", Mode.A, Mode.B, torch.float32, (1, "a"), (True, "a")]
    assert len({key(fn, x, flag) for flag in flags}) == len(flags)
    assert key(fn, x, 2.5) == key(fn, x, flag=2.5)


def test_presence_of_a_context_argument_is_part_of_the_variant():
    def fn(x, ctx=None):
        return x

    x, binder = torch.zeros(3), Binder(fn, X)
    binder.place(torch.device("cpu"))
    assert binder.read((x,), {}, None).key != binder.read((x,), {}, object()).key == binder.read((x,), {}, 5).key


def test_a_default_that_is_no_plain_value_is_left_alone(make, model):
    marker = object()

    def fn(x, how=marker):
        return x * 2 if how is marker else x

    runner = make(fn, X, [8])
    for _ in range(3):
        assert close(runner(model.x(5)), model.x(5) * 2)


def test_tensors_from_inference_mode_are_taken_outside_it(make, model):
    with torch.inference_mode():
        x = model.x(5)
        y = x + 0
    runner = make(lambda x: x * 2, X, [8])
    for _ in range(3):
        assert close(runner(y), model.x(5) * 2)


def test_strided_inputs_are_taken_as_they_are(make, model):
    runner = make(lambda x: x * 2, X, [8])
    wide = model.x(12)
    for view in (wide[::3], wide.t()[:4].t()[:4], wide[:1].expand(5, 4)):
        for _ in range(3):
            assert close(runner(view), view * 2)


def test_a_call_that_looks_like_an_accepted_one_but_for_one_thing_is_still_refused():
    binder = Binder(lambda x, y: x, {"x": Input(0, 0.0), "y": Input(0, 0.0)})
    binder.place(torch.device("cpu"))
    x, y = torch.ones(3, 4), torch.ones(3, 2)
    for _ in range(3):
        binder.keep(call := binder.read((x, y), {}, None))
        assert (call.tokens, call.requests, call.foreign) == (3, -1, False)
    bad = {
        "dtype torch.float64": y.double(),
        "is on meta": y.to("meta"),
        "layout torch.sparse_coo": y.to_sparse(),
        "requires grad while": y.clone().requires_grad_(),
        "must agree": y[:2],
        "has shape": y[:, :1],
        "is a int": 3,
    }
    for words, value in bad.items():
        for _ in range(2):
            with pytest.raises(InputError, match=words):
                binder.read((x, value), {}, None)
    with torch.no_grad():
        assert binder.read((x, y.clone().requires_grad_()), {}, None).tokens == 3
    with pytest.raises(InputError, match="requires grad while"):
        binder.read((x, y.clone().requires_grad_()), {}, None)


def test_what_a_call_looked_like_is_not_accepted_for_good_before_it_has_succeeded():
    binder = Binder(lambda x: x, X)
    binder.place(torch.device("cpu"))
    binder.read((torch.ones(3, 4, dtype=torch.float64),), {}, None)  # and fails
    binder.keep(binder.read((torch.ones(3, 4),), {}, None))
    with pytest.raises(InputError, match=r"dtype torch.float64"):
        binder.read((torch.ones(3, 4, dtype=torch.float64),), {}, None)


def test_optional_inputs_that_are_there_and_not_are_told_apart():
    binder = Binder(lambda x=None, y=None: x, {n: Input(0, 0.0, optional=True) for n in "xy"})
    binder.place(torch.device("cpu"))
    binder.keep(binder.read((torch.ones(3, 4), torch.ones(3, 4)), {}, None))
    for _ in range(3):
        assert [binder.read(a, {}, None).tokens for a in ((torch.ones(2, 4), None), (None, torch.ones(1, 4)))] == [2, 1]
        with pytest.raises(InputError, match="no token-shaped input was given"):
            binder.read((None, None), {}, None)


def test_keyword_only_parameters_are_not_taken_by_position():
    binder = Binder(lambda x, *, flag=False: x, X)
    binder.place(torch.device("cpu"))
    with pytest.raises(InputError, match="takes 1 positional arguments; the call gives 2"):
        binder.read((torch.ones(3, 4), True), {}, None)


def test_a_context_may_come_by_position_or_by_name():
    binder, x, ctx = Binder(lambda x, ctx: x, X), torch.ones(3, 4), object()
    binder.place(torch.device("cpu"))
    for args, named in (((x, ctx), None), ((x,), ctx), ((x, None), ctx)):
        assert binder.read(args, {}, named).ctx is ctx


def scaled_rows(x, lens, scale=None):
    y = x * 2 + lens[:, None, None]
    return y if scale is None else y * scale


ROWS = {"x": Input(1, 0.0), "lens": Input(), "scale": Input(optional=True)}


@pytest.mark.parametrize("captured", [False, True])
def test_a_batch_of_another_size_than_the_first_runs_eager_and_is_counted(make, model, captured):
    runner = make(scaled_rows, ROWS, [4], output_token_dim=1)

    def call(batch, *more):
        x = model.x(batch * 3).reshape(batch, 3, 4)
        lens = torch.arange(float(batch), device=model.device)
        assert close(runner(x, lens, *more), scaled_rows(x, lens, *more))

    for _ in range(3 if captured else 1):
        call(2)
    for batch in (3, 1, 5):
        call(batch)
        call(batch, torch.ones(batch, 1, 4, device=model.device))  # teaches nothing of an input that is new
    before = runner.stats.replayed
    call(2)
    for _ in range(3):
        call(2, torch.ones(2, 1, 4, device=model.device))
    assert dict(runner.stats.reasons) == {"an input of another size than in the first call": 6}
    assert runner.stats.replayed == before + 1 + captured


def test_another_batch_is_refused_where_a_shape_is_declared_or_nothing_may_run_eager(make, model):
    lens = torch.zeros(2, device=model.device)
    x = model.x(6).reshape(2, 3, 4)
    other = model.x(9).reshape(3, 3, 4)
    declared = make(scaled_rows, {**ROWS, "x": Input(1, 0.0, shape=(2, None, 4))}, [4], output_token_dim=1)
    strict = make(scaled_rows, ROWS, [4], output_token_dim=1, strict=True)
    plain = make(scaled_rows, ROWS, [4], output_token_dim=1)
    for runner in (declared, strict, plain):
        runner(x, lens)
    with pytest.raises(InputError, match=r"input 'x' has shape \[3, 3, 4\]"):
        declared(other, torch.zeros(3, device=model.device))
    with pytest.raises(NoBucketError, match=r"another size than in the first call\): input 'x' has shape \[3, 3, 4\]; the"):
        strict(other, torch.zeros(3, device=model.device))
    for run in (plain.reference, plain.capture, plain.check):
        with pytest.raises(InputError, match=r"input 'x' has shape \[3, 3, 4\]; the runner's buffers hold \[2, rows, 4\]"):
            run(other, torch.zeros(3, device=model.device))
    for bad in (other.double(), other[..., :3], other.to("meta")):
        with pytest.raises(InputError, match="input 'x'"):
            plain(bad, torch.zeros(3, device=model.device))


def test_calls_that_takes_does_not_want_run_eager_and_are_counted(make, model):
    asked = []

    def takes(args, kwargs, ctx):
        asked.append((len(args), sorted(kwargs), ctx))
        return ctx != "narrows"

    runner = make(model, takes=takes)
    x, bias = model.x(3), torch.ones(4, device=model.device)
    for ctx in ("all rows", "narrows", "all rows", "narrows", None):
        assert close(runner(x, bias=bias, ctx=ctx), model(x, bias))
    assert asked[:2] == [(1, ["bias"], "all rows"), (1, ["bias"], "narrows")]
    assert (runner.stats.replayed, dict(runner.stats.reasons)) == (1, {"takes= says that graphs don't serve it": 2})
    with segue.active_forward("narrows"):
        runner(x, bias=bias)
        assert runner.stats.eager == 3
        runner(x, bias=bias, decision=runner.admit(3))
    assert runner.stats.eager == 3 and runner.stats.replayed == 2
    with pytest.raises(UsageError, match="takes=3 must be a function of a call's args, kwargs and ctx"):
        make(model, takes=3)
