"""A check finds nothing in forwards that are right, says what it tried, and leaves no trace."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

import segue
from segue.check import Finding, Report
from segue.errors import InputError, NoBucketError, UsageError
from segue.runner import GraphRunner, Input

WIDTH = 4


@segue.break_point(trim=("x",))
def mix(x):
    return x + x.mean(0) if len(x) else x


@pytest.fixture
def weight(device):
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).to(device.torch_device)


@pytest.fixture
def make(device):
    def runner(fn, inputs=None, buckets=(4, 8), **options):
        inputs = inputs or {"x": Input(0, 0.0)}
        return GraphRunner(fn, inputs, buckets, device=device, progress=False, **options)

    return runner


def rows(n, device):
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n)).to(device.torch_device)


def healthy(report):
    assert report.ok, str(report)
    assert report.replays > 0
    return report


def test_a_forward_whose_rows_mix_in_a_trimmed_break_is_right(make, weight, device):
    runner = make(lambda x: mix(torch.relu(x @ weight)) * 2, buckets=(4, 8, 16, 32))
    report = healthy(runner.check(rows(5, device)))
    assert report.buckets == (4, 8, 32) and report.lengths == (32, 31, 16, 8, 7, 4, 3, 2)
    assert report.replays == 18 and report.notes == () and report.variants == ("as given",)
    assert str(report).startswith("check of test_a_forward") and ": ok. " in str(report)
    assert report.table() == "No finding."


def test_a_forward_of_single_rows_needs_no_break_and_is_told_so(make, weight, device):
    report = healthy(make(lambda x: torch.relu(x @ weight)).check(rows(5, device)))
    assert [note for note in report.notes if note.startswith("no break point was met")]


def test_breaks_may_use_the_context_the_valid_rows_and_counters_of_their_own(make, weight, device):
    calls = []

    class Model:
        def __init__(self):
            self.count = 0

        def __call__(self, x, ctx):
            return self.attend(x @ weight, ctx) * 2

        @segue.break_point
        def attend(self, q, ctx):
            self.count += 1
            calls.append(1)
            n = segue.current_valid_rows() or len(q)
            out = torch.zeros_like(q)
            out[:n] = q[:n].cumsum(0) * ctx.scale + self.count
            ctx.cache[: ctx.tokens].copy_(q[:n])
            ctx.steps.append(n)
            return out

    model = Model()

    def make_ctx(n):
        return SimpleNamespace(
            scale=1.0 / n, tokens=n, steps=[], cache=torch.zeros(16, WIDTH, device=device.torch_device)
        )

    runner = make(model)
    report = healthy(runner.check(rows(5, device), ctx=make_ctx))
    assert report.notes == () and model.count == 0
    ctx = make_ctx(5)
    report = healthy(runner.check(rows(5, device), ctx=ctx))
    assert report.lengths == (5,) and "the context is one object" in report.notes[0]
    assert ctx.steps == [] and not ctx.cache.any(), "a context that is given is left as it was"


def test_optional_inputs_are_tried_there_and_not(make, weight, device):
    def forward(x, bias=None):
        y = x @ weight
        if bias is not None:
            y = y + bias
        return mix(y)

    inputs = {"x": Input(0, 0.0), "bias": Input(optional=True)}
    with_bias = make(forward, inputs).check(rows(5, device), bias=torch.ones(WIDTH, device=device.torch_device))
    assert healthy(with_bias).variants == ("as given", "without bias")
    assert "variants: as given, without bias" in str(with_bias)
    unknown = make(forward, inputs).check(rows(5, device))
    assert healthy(unknown).variants == ("as given",)
    assert "with bias was not tried: its shape isn't known" in unknown.notes[0]
    declared = {"x": Input(0, 0.0), "bias": Input(optional=True, shape=(WIDTH,), dtype=torch.float32)}
    assert healthy(make(forward, declared).check(rows(5, device))).variants == ("as given", "with bias")


def test_a_fault_of_one_variant_only_is_found(make, weight, device):
    def forward(x, bias=None):
        y = mix(x @ weight)
        return y if bias is None else y + (x * bias).amax()

    inputs = {"x": Input(0, 0.0), "bias": Input(optional=True, shape=(WIDTH,), dtype=torch.float32)}
    report = make(forward, inputs).check(rows(5, device))
    assert [f.kind for f in report.findings] == ["padding"] and "with bias" in report.findings[0].text


def test_masks_and_integers_keep_their_padding(make, weight, device):
    table = torch.randn(3, WIDTH).to(device.torch_device)

    def forward(x, keep, kind):
        y = (x @ weight + table[kind]) * keep
        return mix(y) + y.sum(0) * 0

    inputs = {"x": Input(0, 0.0), "keep": Input(0, 0.0), "kind": Input(0, 2)}
    keep = torch.ones(5, 1, device=device.torch_device)
    kind = torch.tensor([0, 1, 2, 0, 1], device=device.torch_device)
    healthy(make(forward, inputs).check(rows(5, device), keep, kind))


def test_a_row_that_padding_is_declared_to_write_is_a_note_and_the_last_row_is_not(make, weight, device):
    cache = torch.zeros(40, WIDTH, device=device.torch_device)

    def forward(x, slots):
        y = x @ weight + 1
        cache.index_copy_(0, slots, y)
        return mix(y)

    slots = torch.tensor([5, 3, 7, 1, 2], device=device.torch_device)

    def run(pad, n=5):
        inputs = {"x": Input(0, 0.0), "slots": Input(0, pad)}
        return make(forward, inputs, buckets=(8,), capture_ctx=None).check(
            rows(n, device), slots[:n], ctx=SimpleNamespace()
        )

    report = healthy(run(0))
    assert any("holds in row 0 what padded rows wrote, as their pad= says" in note for note in report.notes), (
        report.notes
    )
    assert not cache.any()

    def wrapped(x, slots):
        return forward(x, slots % 40)

    forward_wrapped = make(wrapped, {"x": Input(0, 0.0), "slots": Input(0, -1)}, buckets=(8,))
    report = forward_wrapped.check(rows(5, device), slots, ctx=SimpleNamespace())
    assert [f.kind for f in report.findings] == ["padding"] and "a tensor [40, 4]" in report.findings[0].text


def test_an_example_isnt_needed_where_shapes_are_declared(make, weight):
    report = healthy(
        make(lambda x: mix(x @ weight), {"x": Input(0, 0.0, shape=(None, WIDTH), dtype=torch.float32)}).check()
    )
    assert "no example was given" in report.notes[0]


def test_request_shaped_inputs_keep_the_examples_lengths(make, weight, device):
    @segue.break_point(trim=("q",))
    def attend(q):
        return q.cumsum(0)

    def forward(x, lens):
        return attend(x @ weight) + 0 * lens.sum()

    inputs = {"x": Input(0, 0.0), "lens": Input(request_dim=0, pad=0)}
    lens = torch.tensor([3, 2], device=device.torch_device)
    report = healthy(make(forward, inputs, request_buckets=[2, 4]).check(rows(5, device), lens))
    assert report.lengths == (5,) and report.buckets == (8,)


def test_random_ops_advance_as_in_the_reference(make, weight, device):
    healthy(make(lambda x: mix(x @ weight) + torch.rand_like(x[:1])).check(rows(5, device)))


def test_what_only_a_replay_does_is_traced_to_its_op(make, weight, device):
    def forward(x):
        y = mix(x @ weight)
        return y * (2 if segue.capture_phase() is None else 3)

    report = make(forward).check(rows(5, device))
    (finding,) = report.findings
    assert (
        finding.kind == "replay" and f"test_check.py:{forward.__code__.co_firstlineno + 2} in forward" in finding.where
    )
    assert "aten::mul.Tensor in segment 1" in finding.text and "is the first to differ" in finding.text


def test_what_only_a_captured_break_does_is_traced_to_the_break(make, weight, device):
    @segue.break_point
    def odd(x):
        return x * (2 if segue.capture.thread_state.state.reference else 3)

    report = make(lambda x: odd(x @ weight) + 1).check(rows(5, device))
    (finding,) = report.findings
    assert finding.kind == "replay" and "the result of the break" in finding.text and "odd" in finding.text


def test_eager_that_isnt_repeatable_is_named(make, weight, device):
    numbers = iter(range(10**6))

    @segue.break_point
    def count(x):
        return x + next(numbers)

    def forward(x):
        return count(x @ weight)

    report = make(forward).check(rows(5, device))
    assert {f.kind for f in report.findings} == {"unrepeatable"}, str(report)
    assert (
        "two eager forwards of the same call differ" in report.findings[0].text
        and "in count" in report.findings[0].where
    )


def test_a_capture_that_is_refused_is_a_finding(make, weight, device):
    def forward(x):
        y = x @ weight
        return mix(y) * y[0, 0].item()

    report = make(forward).check(rows(5, device))
    assert not report.ok and all(
        f"test_check.py:{forward.__code__.co_firstlineno + 2}" in f.where for f in report.findings
    )
    assert "capturing bucket 8, 8 tokens" in str(report)


def test_a_context_whose_tensor_is_baked_is_refused(make, weight, device):
    def forward(x, ctx):
        return mix(x @ weight) * ctx["scale"]

    def make_ctx(n):
        return {"scale": torch.full((), 1.0 + n, device=device.torch_device)}

    report = make(forward).check(rows(5, device), ctx=make_ctx)
    assert {f.kind for f in report.findings} == {"refused"} and "ctx['scale'] is another tensor than at capture" in str(
        report
    )
    healthy(make(forward).check(rows(5, device), ctx=make_ctx(5)))


def test_a_check_leaves_no_trace(make, weight, device, caplog):
    runner = make(lambda x: mix(x @ weight))
    runner.capture(rows(5, device))
    before, state = runner.stats, torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "segue"):
        healthy(runner.check(rows(5, device)))
    assert runner.stats == before and torch.equal(torch.get_rng_state(), state) and not caplog.records
    x = rows(3, device)
    assert torch.equal(runner(x), runner.reference(x)) and runner.stats.replayed == 1


def test_calls_that_cant_be_checked_are_refused(make, weight, device, monkeypatch):
    runner = make(lambda x: mix(x @ weight))
    with pytest.raises(InputError, match="has no argument 'y'"):
        runner.check(rows(5, device), y=1)
    with pytest.raises(NoBucketError, match="check: 9 tokens: eager, no bucket fits: the largest bucket is 8"):
        runner.check(rows(9, device), ctx=object())
    assert healthy(runner.check(rows(9, device))).buckets == (4, 8), "without a context the example is cut"

    def broken(x):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as raised:
        make(broken).check(rows(5, device))
    assert "run eagerly at the call's own shape" in raised.value.__notes__[0]
    monkeypatch.setenv("SEGUE", "off")
    with pytest.raises(UsageError, match="SEGUE=off was set when this runner was made"):
        make(lambda x: x).check(rows(5, device))


def test_a_report_reads_as_text_and_as_a_table():
    report = Report(
        "forward (m.py:1)", "emulator", (Finding("frozen", "m.py:3 in forward", "a|b"),), ("a note",), (4,),
        (4, 2), ("as given",),
        10, 4, 0.25,
    )  # fmt: skip
    assert not report.ok
    assert str(report) == (
        "check of forward (m.py:1) on emulator: 1 finding. 10 forwards compared, 4 of them replays, in 0.2 s; "
        "buckets 4; lengths 4, 2\n"
        "1. frozen at m.py:3 in forward: a|b\n"
        "note: a note"
    )
    assert report.table() == "| kind | where | finding |\n| --- | --- | --- |\n| frozen | m.py:3 in forward | a\\|b |"
