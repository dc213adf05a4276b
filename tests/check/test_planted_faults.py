"""Each planted fault is found, and the line that is to blame is named."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue.check import Report
from segue.devices import Device
from segue.runner import GraphRunner, Input

WIDTH = 4


@pytest.fixture
def weight(device: Device) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).to(device.torch_device)


@pytest.fixture
def x(device: Device) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).to(device.torch_device)


@pytest.fixture
def make(device: Device) -> Callable[..., GraphRunner]:
    def runner(fn: Any, buckets: Any = (4, 8), **inputs: Input) -> GraphRunner:
        return GraphRunner(fn, {"x": Input(0, 0.0), **inputs}, buckets, device=device, progress=False)

    return runner


def here(word: str) -> str:
    """``file.py:12`` of the line of the calling test that has ``word`` as a comment."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    lines, first = inspect.getsourcelines(frame.f_back.f_code)
    (at,) = (i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {word}"))
    return f"check/test_planted_faults.py:{first + at} in"


def found(report: Report, kind: str, where: str) -> str:
    """The text of the one finding of this kind, which must be at this line."""
    assert not report.ok
    matching = [f for f in report.findings if f.kind == kind]
    assert matching, str(report)
    assert matching[0].where.startswith(where), str(report)
    return matching[0].text


def context(n: int) -> SimpleNamespace:
    return SimpleNamespace(tokens=n, lens=[n - n // 2, n // 2])


@segue.break_point(trim=("x",))
def mix(x: Tensor) -> Tensor:
    return x + x.mean(0) if len(x) else x


def test_fault_3_a_break_leaves_its_padded_rows_unwritten_and_the_next_segment_mixes_rows(make, weight, x):
    @segue.break_point(token_dim=None)
    def attention(q: Tensor) -> Tensor:
        n = segue.current_valid_rows()
        out = torch.empty_like(q)  # allocates
        out[:n] = q[:n] * 2
        return out

    def forward(x):
        y = attention(x @ weight)
        return y - y.mean(0)  # mixes

    report = make(forward).check(x)
    text = found(report, "uninitialised", here("mixes"))
    assert "real rows depend on memory that nobody wrote" in text and "aten::mean" in text
    assert f"aten::empty_like at {here('allocates')}" in text
    assert "Write all rows, or allocate zeros" in text


def test_fault_3_with_nan_in_the_padded_rows(make, weight, x):
    @segue.break_point(token_dim=None)
    def attention(q: Tensor) -> Tensor:
        out = torch.full_like(q, float("nan"))
        n = segue.current_valid_rows()
        out[:n] = q[:n] * 2
        return out

    def forward(x):
        y = attention(x @ weight)
        return y.softmax(0)  # mixes

    text = found(make(forward).check(x), "padding", here("mixes"))
    assert (
        "the padded forward isn't what eager gives" in text and "aten::softmax" in text and "bucket 8, 7 tokens" in text
    )


def test_fault_6_the_function_that_needed_a_break_was_never_marked(make, weight, x):
    def attention(q, k, v):
        scores = q @ k.T
        return scores.softmax(-1) @ v  # unmarked

    def forward(x):
        y = x @ weight
        return attention(y, y, y)

    report = make(forward).check(x)
    text = found(report, "padding", here("unmarked"))
    assert "aten::softmax" in text and "Move it into a break point that trims its arguments" in text
    assert any(note.startswith("no break point was met") for note in report.notes) and "no break point" in str(report)


def test_fault_8_a_loop_bound_from_live_lengths(make, weight, x):
    def forward(x):
        for _ in range(segue.current_forward_ctx().tokens):
            x = x + 1  # loop
        return mix(x @ weight)

    text = found(make(forward).check(x, ctx=context), "frozen", here("loop"))
    assert "ran here 8 times when captured with 8 tokens and 4 times when captured with 4 tokens" in text


def test_fault_8_a_slice_from_live_lengths(make, weight, x):
    def forward(x):
        y = x @ weight
        y[: segue.current_forward_ctx().tokens] += 1  # slice
        return mix(y)

    text = found(make(forward).check(x, ctx=context), "frozen", here("slice"))
    assert "aten::slice.Tensor got end=8 when captured with 8 tokens and 4" in text and "A graph goes on with" in text


def test_fault_8_a_plain_argument_of_a_break_from_live_lengths(make, weight, x):
    @segue.break_point(trim=("q",))
    def attention(q: Tensor, max_seqlen: int) -> Tensor:
        return q * max_seqlen

    def forward(x):
        lens = segue.current_forward_ctx().lens
        return attention(x @ weight, max_seqlen=max(lens))  # bound

    text = found(make(forward).check(x, ctx=context), "frozen", here("bound"))
    assert "attention" in text and "got max_seqlen=4 when captured with 8 tokens and 2" in text


def test_fault_8_a_host_read_of_live_lengths(make, weight, x):
    def forward(x, lens):
        y = x @ weight
        return mix(y * int(lens.max()))  # read

    runner = make(forward, lens=Input())
    report = runner.check(x, lens=torch.tensor([3, 2], device=x.device))
    assert not report.ok and report.findings[0].where.startswith(here("read")), str(report)


def test_fault_9_a_counter(make, weight, x):
    class Model:
        step = 0

        def __init__(self):
            self.step = 0

        def __call__(self, x):
            self.step += 1
            return mix(x @ weight) + self.step  # counter

    model = Model()
    text = found(make(model).check(x), "frozen", here("counter"))
    assert "aten::add.Tensor got other=" in text and "meanwhile" in text and "step went from" in text
    assert model.step == 0, "plain values are put back"


def test_fault_12_a_scale_over_the_whole_tensor(make, weight, x):
    def forward(x):
        scale = x.abs().max() / 448  # scale
        return mix((x / scale).round() * scale @ weight)

    text = found(make(forward).check(x), "padding", here("scale"))
    assert "real rows depend on what padded rows hold" in text and "aten::max" in text


def test_fault_13_attention_that_needs_exactly_the_real_rows(make, weight, x):
    @segue.break_point
    def attention(q: Tensor) -> Tensor:
        return q.cumsum(0).flip(0)  # rows

    text = found(make(lambda x: attention(x @ weight) * 2).check(x), "padding", here("rows"))
    assert "in a break" in text and "aten::flip" in text


def test_fault_13_attention_that_refuses_other_rows(make, weight, x):
    @segue.break_point
    def attention(q: Tensor) -> Tensor:
        if q.shape[0] != segue.current_forward_ctx().tokens:
            raise ValueError("cu_seqlens doesn't end at the rows of q")  # rows
        return q

    text = found(make(lambda x: attention(x @ weight) * 2).check(x, ctx=context), "error", here("rows"))
    assert "bucket 4, 2 tokens: ValueError: cu_seqlens doesn't end at the rows of q" in text


def test_fault_16_padded_rows_advance_a_recurrent_state_of_a_segment(make, weight, x):
    state = torch.zeros(WIDTH, device=x.device)

    def forward(x):
        y = x @ weight + 1
        state.mul_(0.5).add_(y.sum(0))  # state
        return mix(y)

    text = found(make(forward).check(x), "padding", here("state"))
    assert "aten::sum" in text and "a tensor [4] of torch.float32 that is written at" in text
    assert torch.equal(state, torch.zeros_like(state)), "tensors are put back"


def test_fault_16_padded_rows_advance_a_recurrent_state_of_the_context(make, weight, x):
    @segue.break_point
    def scan(y: Tensor) -> Tensor:
        ctx = segue.current_forward_ctx()
        for row in y:
            ctx["state"].mul_(0.5).add_(row + 1)  # state
        return y

    report = make(lambda x: scan(x @ weight) * 2).check(x, ctx=lambda n: {"state": torch.zeros(WIDTH, device=x.device)})
    text = found(report, "padding", here("state"))
    assert "ctx['state']" in text
