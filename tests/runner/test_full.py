"""The strategy full: a whole forward as one graph, break points inside it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.paged import PAGE, WIDTH, Batch, Paged, batch
from segue import Breakable, CaptureError, Full, GraphRunner, Input, NoBucketError, UsageError, break_point, current_forward_ctx
from segue.devices import Device

INPUTS = {"x": Input(0, 0.0), "lengths": Input(0, 0), "table": Input(0, 0)}


def decodes(args: Any, kwargs: Any, ctx: Any) -> bool:
    return "prefill" not in getattr(ctx, "label", "")


def runner_of(fn: Any, device: Device, full: Any = (1, 2, 4), inputs: Any = INPUTS, **options: Any) -> GraphRunner:
    options = {"buckets": [4, 8], "pool": device.new_pool(), **options}
    strategies = [Full(takes=decodes, buckets=full), Breakable()]
    return GraphRunner(fn, inputs, strategies=strategies, device=device, progress=False, **options)


@pytest.mark.parametrize("order", [(1, 2, 4), (4, 2, 1)])
def test_a_paged_decode_step_is_its_reference_and_touches_no_other_page(device: Device, order: tuple[int, ...]) -> None:
    model = Paged(device.torch_device)
    runner = runner_of(model, device)
    for turn in range(3):
        for n in (*order, 3, 1):
            given = batch(device.torch_device, n, seed=10 * turn + n)
            untouched = copy.deepcopy(model)
            runner.pool and runner.pool.poison()
            got, pages = runner(*given), model.pages()
            plain = untouched(*given)
            assert torch.allclose(got, plain, atol=1e-5)
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(pages, untouched.pages(), strict=True))
            assert torch.equal(got, runner.reference(*given))
    assert runner.stats.strategies == {"full": 15 - 2 * 3} and not runner.stats.declined
    assert all(c.program.graphs == 1 for c in runner.prepare().graphs.values())


def test_one_model_has_full_and_breakable_graphs(device: Device) -> None:
    model = Paged(device.torch_device)
    runner = runner_of(model, device)
    prefill = Batch(label="prefill")
    for seed in range(4):
        for n, ctx in ((3, Batch()), (3, prefill), (6, Batch())):
            given, untouched = batch(device.torch_device, n, seed), copy.deepcopy(model)
            got = runner(*given, ctx=ctx)
            with torch.inference_mode():
                want = with_context(untouched, given, ctx)
            assert torch.allclose(got, want, atol=1e-5)
    # Six requests are more than the largest full bucket holds.
    assert runner.stats.strategies == {"full": 2, "breakable": 4}


def with_context(model: Paged, given: tuple[Tensor, ...], ctx: Any) -> Tensor:
    from segue import active_forward

    with active_forward(ctx):
        return model(*given)


def test_requests_have_equally_many_tokens(device: Device) -> None:
    at = device.torch_device

    def forward(x: Tensor, scales: Tensor) -> Tensor:
        return scale_all(x, scales)

    @break_point
    def scale_all(x: Tensor, scales: Tensor) -> Tensor:
        return (x.view(scales.shape[0], -1, x.shape[1]) * scales[:, None, None]).reshape(x.shape)

    inputs = {"x": Input(0, 0.0), "scales": Input(request_dim=0, pad=0.0)}
    runner = runner_of(forward, device, inputs=inputs, request_buckets=[2, 4], buckets=[12])
    for _ in range(3):
        x, scales = torch.randn(6, 3, device=at), torch.randn(3, device=at)
        assert torch.equal(runner(x, scales), forward(x, scales))
    decision = runner.admit(6, 3, strategy="full")
    assert (decision.bucket, decision.requests) == (8, 4)
    assert torch.equal(runner(x, scales, decision=decision), forward(x, scales))
    assert runner.admit(7, 3, strategy="full").reason == "requests of unequal length"
    assert runner.admit(10, 5, strategy="full").reason == "no request bucket fits"
    assert runner.stats.strategies == {"full": 2}


def test_the_ladder_of_requests_is_that_of_the_full_graphs_where_none_is_given(device: Device) -> None:
    def forward(x: Tensor, scales: Tensor) -> Tensor:
        return x * scales.sum()

    inputs = {"x": Input(0, 0.0), "scales": Input(request_dim=0, pad=0.0)}
    runner = runner_of(forward, device, inputs=inputs)
    x, scales = torch.ones(3, 2, device=device.torch_device), torch.ones(3, device=device.torch_device)
    for ctx in (Batch(), Batch(label="prefill")) * 3:
        assert torch.equal(runner(x, scales, ctx=ctx), forward(x, scales))
    assert list(runner.request_ladder or ()) == [1, 2, 4] and runner.stats.strategies == {"full": 1, "breakable": 1}


def test_a_break_that_reads_the_host_is_named_with_its_line(device: Device) -> None:
    @break_point
    def longest(x: Tensor, lengths: Tensor) -> Tensor:
        return x * lengths.max().item()

    def forward(x: Tensor, lengths: Tensor) -> Tensor:
        return longest(x + 1, lengths)

    inputs = {"x": Input(0, 0.0), "lengths": Input(0, 0)}
    given = torch.ones(2, 3, device=device.torch_device), torch.tensor([1, 2], device=device.torch_device)
    runner = runner_of(forward, device, inputs=inputs)
    runner(*given)
    line = r"test_full.py:\d+"
    with pytest.raises(CaptureError, match=rf"(?s)break .*longest \(.*{line}\) called at .*{line} in forward.*item"):
        runner(*given)
    lenient = runner_of(forward, device, inputs=inputs, on_failure="eager")
    for _ in range(4):
        assert torch.equal(lenient(*given), forward(*given))
    assert lenient.stats.strategies == {"breakable": 1} and lenient.stats.eager == 0
    assert sum(lenient.stats.declined.values()) == 3


def test_a_context_with_other_values_is_left_to_the_breakable_graph(device: Device) -> None:
    model = Paged(device.torch_device)
    runner = runner_of(model, device)
    bias = torch.ones(WIDTH, device=device.torch_device)
    alike = [Batch(bias=bias)] * 3 + [Batch(bias=bias, label="of no matter")]
    served = []
    for seed, ctx in enumerate([*alike, *[Batch(0.5, bias=bias)] * 3, Batch(bias=bias.clone())]):
        given, untouched = batch(device.torch_device, 2, seed), copy.deepcopy(model)
        before = runner.stats.strategies.get("full", 0)
        got = runner(*given, ctx=ctx)
        assert torch.allclose(got, with_context(untouched, given, ctx), atol=1e-5)
        served.append(runner.stats.strategies.get("full", 0) - before)
    assert served == [0, 0, 1, 1, 0, 0, 0, 0]
    assert runner.stats.declined == {
        "ctx.scale is not what it was at the capture": 3,
        "ctx.bias is not what it was at the capture": 1,
    }


def test_what_lies_deep_in_a_context_and_how_long_its_lists_are_is_looked_at(device: Device) -> None:
    @break_point
    def scale(x: Tensor) -> Tensor:
        held = current_forward_ctx()
        for factor in held["factors"]:
            x = x * factor
        return x * held["a"]["b"]["c"]["d"]["e"]["f"]

    def made(factors: list[float], deep: float) -> Any:
        return {"factors": factors, "a": {"b": {"c": {"d": {"e": {"f": deep}}}}}}

    runner = runner_of(lambda x: scale(x + 1), device, inputs={"x": Input(0, 0.0)})
    x = torch.ones(2, 3, device=device.torch_device)
    for factors, deep, product in (([2.0], 1.0, 2.0),) * 3 + (([2.0, 3.0], 1.0, 6.0), ([2.0], 5.0, 10.0)):
        assert torch.equal(runner(x, ctx=made(factors, deep)), (x + 1) * product)
    assert runner.stats.strategies == {"full": 1} and sum(runner.stats.declined.values()) == 2
    deeper: Any = 1.0
    for _ in range(20):
        deeper = {"more": deeper}
    with pytest.raises(CaptureError, match="the live context holds more than"):
        for _ in range(2):
            runner_of(lambda x: x + 1, device, inputs={"x": Input(0, 0.0)}).capture(x, ctx=deeper)


def test_capture_takes_the_ladder_of_the_strategy_that_takes_the_example(device: Device) -> None:
    model = Paged(device.torch_device)
    runner = runner_of(model, device)
    pages = model.pages()
    assert runner.capture(*batch(device.torch_device, 1)).buckets == (4, 2, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.pages(), pages, strict=True))
    assert runner.capture(*batch(device.torch_device, 3), ctx=Batch(label="prefill")).buckets == (8, 4)
    for n in (1, 2, 3, 4):
        given, untouched = batch(device.torch_device, n, seed=n), copy.deepcopy(model)
        assert torch.allclose(runner(*given), untouched(*given), atol=1e-5)
    assert runner.stats.strategies == {"full": 4}


def test_padded_requests_neither_read_nor_write(device: Device) -> None:
    model = Paged(device.torch_device)
    runner = runner_of(model, device, full=(4,))
    for seed in range(3):
        given = batch(device.torch_device, 1, seed)
        _, lengths, table = given
        before = model.pages()
        runner(*given)
        slot = int(table[0, (int(lengths) - 1) // PAGE]) * PAGE + (int(lengths) - 1) % PAGE
        for was, now in zip(before, model.pages(), strict=True):
            assert {int(i) for i in (was != now).flatten(1).any(1).nonzero()} <= {slot}


def test_strict_runners_say_why_no_strategy_serves(device: Device) -> None:
    model = Paged(device.torch_device)
    runner = runner_of(model, device, strict=True)
    with pytest.raises(NoBucketError, match="9 tokens"):
        runner(*(torch.cat([t] * 3) for t in batch(device.torch_device, 3)))


def test_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="takes="):
        Full(takes=True, buckets=[1])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Full: buckets"):
        Full(takes=decodes, buckets=4)  # type: ignore[arg-type]


def test_a_trial_replay_of_a_full_graph_is_its_reference(device: Device) -> None:
    model = Paged(device.torch_device)
    runner, before = runner_of(model, device), [page.clone() for page in model.pages()]
    runner.capture(*batch(device.torch_device, 1, 0), verify=True)
    assert runner.stats.strategies == {"full": 3} and runner.stats.captured == 3
    assert all(torch.equal(a, b) for a, b in zip(model.pages(), before, strict=True))
