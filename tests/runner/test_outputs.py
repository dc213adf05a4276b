"""Outputs: real rows only, through any structure, and nothing ambiguous in silence."""

from __future__ import annotations

import collections
import dataclasses
import gc
from typing import Any, NamedTuple

import pytest
import torch

import segue
from runner.rows import close
from segue.errors import CaptureError, ReplayError, SegueError, UsageError
from segue.runner import Input

INPUTS = {"x": Input(0, 0.0)}


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    y: torch.Tensor
    label: str = "frozen"


@dataclasses.dataclass
class Holder:
    y: torch.Tensor
    rest: Any


STRUCTURES = {
    "tensor": lambda y: y,
    "none": lambda y: (y, None),
    "tuple": lambda y: (y, y + 1),
    "namedtuple": lambda y: Pair(y, y * 3),
    "list": lambda y: [y, [y + 1]],
    "ordered dict": lambda y: collections.OrderedDict(a=y, b={"c": y * 2}),
    "defaultdict": lambda y: collections.defaultdict(list, a=y),
    "dataclass": lambda y: Holder(y, (y + 1, 2.5, True)),
    "frozen dataclass": lambda y: Frozen(y),
}


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return [t for v in value.values() for t in leaves(v)]
    return [t for v in value for t in leaves(v)] if isinstance(value, tuple | list) else [value]


@pytest.mark.parametrize("kind", STRUCTURES)
def test_every_structure_comes_back_with_its_real_rows(make, model, kind):
    build = STRUCTURES[kind]
    runner = make(lambda x: build(x * 2), INPUTS, [8])
    for i in range(4):
        x = model.x(5, i)
        got, want = runner(x), build(x * 2)
        assert type(got) is type(want)
        for a, b in zip(leaves(got), leaves(want), strict=True):
            assert close(a, b) if isinstance(b, torch.Tensor) else a == b


def test_a_model_output_comes_back_as_one(make, model):
    outputs = pytest.importorskip("transformers.modeling_outputs")
    runner = make(lambda x: outputs.BaseModelOutput(last_hidden_state=x * 2), INPUTS, [8])
    for i in range(4):
        got = runner(model.x(5, i))
        assert isinstance(got, outputs.BaseModelOutput) and close(got[0], model.x(5, i) * 2) and got.attentions is None


def test_tokens_may_be_on_another_dimension_of_each_output(make, model):
    runner = make(lambda x: (x * 2, x.t() + 0, x.sum(0)), INPUTS, [8, 16], output_token_dim=(0, 1, None))
    for n in (5, 5, 5, 12, 12, 12):
        x = model.x(n)
        a, b, c = runner(x)
        assert close(a, x * 2) and close(b, x.t()) and close(c, x.sum(0))


def test_an_output_without_token_rows_comes_back_whole(make, model):
    runner = make(lambda x: x.sum(0, keepdim=True), INPUTS, [8])
    for _ in range(3):
        assert close(runner(model.x(5)), model.x(5).sum(0, keepdim=True))


def test_an_output_that_has_a_bucket_size_by_chance_is_refused_by_name(make, model):
    runner = make(lambda x: (x * 2, x.new_zeros(8)), INPUTS, [8, 16])
    with pytest.raises(
        UsageError, match=r"output\[1\] is ambiguous: it has the bucket's size in bucket 8 and not in bucket 16"
    ):
        runner.capture(model.x(3))
    exact = make(lambda x: (x * 2, x.new_zeros(8)), INPUTS, [8, 16], output_token_dim=(0, None))
    exact.capture(model.x(3))
    assert exact(model.x(5))[1].shape == (8,)


def test_an_output_whose_size_follows_the_bucket_elsewhere_is_refused_by_name(make, model):
    runner = make(lambda x: x[1:] * 2, INPUTS, [8, 16])
    with pytest.raises(
        UsageError, match=r"dimension 0 of output follows the bucket \(7 in bucket 8, 15 in bucket 16\)"
    ):
        runner.capture(model.x(3))


def test_an_output_with_the_bucket_size_on_another_dimension_only_is_refused_at_the_first_call(make, model):
    runner = make(lambda x: (x * 2, x.t() + 0), INPUTS, [8, 16])
    for _ in range(2):
        with pytest.raises(UsageError, match=r"output\[1\] is ambiguous: of its shape \[4, 8\] dimension 1 .* with 1 or None"):
            runner(model.x(5))
    exact = make(lambda x: (x * 2, x.t() + 0), INPUTS, [8, 16], output_token_dim=(0, 1))
    for _ in range(3):
        assert close(exact(model.x(5))[1], model.x(5).t())


@pytest.mark.parametrize("kind", ["computed", "itself", "a fixed input"])
def test_a_constant_output_with_the_bucket_size_is_refused_at_the_first_call(make, model, kind):
    weight = torch.ones(8, 4, device=model.device)
    fn = {
        "computed": lambda x, fixed: (x * 2, (weight * 1 + 0.5).relu()),
        "itself": lambda x, fixed: (x * 2, weight),
        "a fixed input": lambda x, fixed: (x * 2, fixed * 1),
    }[kind]
    inputs, calls = {**INPUTS, "fixed": Input()}, (model.x(5), torch.ones(8, 4, device=model.device))
    runner = make(fn, inputs, [8, 16])
    for _ in range(2):
        with pytest.raises(UsageError, match=r"output\[1\] is ambiguous: its shape \[8, 4\] .* with None for output\[1\]"):
            runner(*calls)
    exact = make(fn, inputs, [8, 16], output_token_dim=(0, None))
    for _ in range(3):
        assert close(exact(*calls)[1], fn(*calls)[1])


def test_sizes_that_come_from_the_call_are_no_constants(make, model):
    table = torch.arange(8.0 * 4, device=model.device).view(8, 4)

    def fn(x):
        n = len(x)
        rows = torch.arange(n + 1, device=x.device)[1:] * 1
        return x * 2, table[:n] * 1, rows, table[0].expand(n, 4) * 1, table[rows - 1]

    runner = make(fn, INPUTS, [8])
    for i in range(4):
        for got, want in zip(runner(model.x(5, i)), fn(model.x(5, i)), strict=True):
            assert close(got, want)


def test_a_width_that_equals_the_bucket_by_chance_is_no_matter(make, model):
    wide = torch.ones(4, 8, device=model.device)
    runner = make(lambda x: (x @ wide, x.new_ones(3, 1)), INPUTS, [1, 8])
    for n in (5, 5, 5, 1, 1, 1):
        assert close(runner(model.x(n))[0], model.x(n) @ wide)
    summed = make(lambda x: (x @ wide).sum(0, keepdim=True), INPUTS, [8, 16])
    summed(model.x(12))  # bucket 16 has shown that 8 is its width
    assert close(summed(model.x(8)), (model.x(8) @ wide).sum(0, keepdim=True))


@pytest.mark.parametrize("how", ["close", "recapture", "del"])
def test_a_lease_outlives_its_runner_or_says_by_name_that_its_memory_is_gone(make, model, how):
    runner = make(model, buckets=[8], outputs="lease")
    for i in range(3):
        lease = runner(model.x(5, i))
    if how == "del":
        del runner
        gc.collect()
        assert close(lease.value, model(model.x(5, 2)))
        return
    getattr(runner, how)()
    gc.collect()
    with pytest.raises(ReplayError, match=r"lease has ended: its graph was dropped by close\(\), recapture\(\)"):
        lease.value  # noqa: B018


def test_the_padded_size_as_a_number_is_refused_by_name(make, model):
    with pytest.raises(UsageError, match=r"output\[1\] is the int 8, ambiguous"):
        make(lambda x: (x * 2, len(x)), INPUTS, [8])(model.x(3))


def test_a_declared_structure_that_does_not_fit_is_refused_by_name(make, model):
    with pytest.raises(UsageError, match=r"output_token_dim doesn't fit .* 1 entries for the 2 values of output"):
        make(lambda x: (x, x), INPUTS, [8], output_token_dim=(0,))(model.x(3))
    with pytest.raises(
        UsageError, match=r"output\[1\] is declared to have its tokens along dimension 0, and has shape \[4\]"
    ):
        make(lambda x: (x * 1, x.sum(0)), INPUTS, [8], output_token_dim=(0, 0))(model.x(3))


def test_an_object_among_the_outputs_is_refused_by_name(make, model):
    with pytest.raises(CaptureError, match=r"output\[1\] is a object, neither a tensor nor a plain value"):
        make(lambda x: (x, object()), INPUTS, [8])(model.x(3))


def test_a_plain_output_that_changes_between_warm_up_and_capture_is_refused(make, model):
    count = iter(range(10))
    runner = make(lambda x: (x * 2, f"call {next(count)}"), INPUTS, [8])
    runner(model.x(3))
    with pytest.raises(
        CaptureError, match=r"changed between the warm-up and the capture \(plain values: .*call 0.*call [1-9]"
    ):
        runner(model.x(3))


def test_an_external_tensor_returned_is_copied(make, model):
    runner = make(lambda x: (x * 2, model.weight), INPUTS, [8])
    for _ in range(3):
        kept = runner(model.x(3))[1]
    before = kept.clone()
    model.weight.add_(1)
    assert torch.equal(kept, before) and torch.equal(runner(model.x(3))[1], model.weight)


def test_an_input_returned_is_copied(make, model):
    runner = make(lambda x: x, INPUTS, [8])
    x = model.x(3)
    outs = [runner(x) for _ in range(4)]
    runner(model.x(3, 1))
    assert all(torch.equal(y, x) and y.data_ptr() != x.data_ptr() for y in outs)


def test_a_break_result_returned_has_its_real_rows(make, model):
    @segue.break_point(trim=("x",))
    def last(x):
        return x * 3

    runner = make(lambda x: last(x * 2), INPUTS, [8])
    for n in (5, 5, 5, 3, 8):
        assert close(runner(model.x(n)), model.x(n) * 6)


def test_errors_of_outputs_leave_the_runner_working(make, model):
    bad = [True]
    runner = make(lambda x: (x, object()) if bad else (x, 1.5), INPUTS, [8])
    with pytest.raises(SegueError):
        runner(model.x(3))
    bad.clear()
    for _ in range(3):
        assert runner(model.x(3))[1] == 1.5


def test_a_single_row_of_a_break_that_was_taken_for_one_a_token_is_named(device, make):
    @segue.break_point(trim=("y",))
    def total(y):
        return y.sum(0, keepdim=True)

    runner = make(lambda x: x + total(x * 2), {"x": segue.Input(0, 0.0)}, [4])
    for n in (3, 1):  # it is captured with one real row
        runner(torch.ones(n, 2, device=device.torch_device))
    with pytest.raises(segue.ReplayError, match=r"total .*has 1 rows where 3 are valid.*token_dim=None"):
        runner(torch.ones(3, 2, device=device.torch_device))
