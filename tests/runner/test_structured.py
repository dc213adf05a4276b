"""Structured arguments, request-shaped inputs, and shadow runs."""

from __future__ import annotations

import dataclasses
from array import array

import pytest
import torch

import segue
from runner.rows import close
from segue.errors import InputError, ReplayError, UsageError
from segue.runner import Input


@dataclasses.dataclass
class Meta:
    scale: torch.Tensor
    shift: torch.Tensor | None = None
    mode: str = "add"
    extra: dict | None = None


def fn(x, meta, pair=None):
    y = x * meta.scale
    if meta.shift is not None:
        y = y + meta.shift if meta.mode == "add" else y - meta.shift
    if pair is not None:
        y = y * pair[0] + pair[1]["w"]
    return y


INPUTS = {
    "x": Input(0, 0.0),
    "meta": {"scale": Input(0, 1.0), "shift": Input(optional=True)},
    "pair": [Input(optional=True), {"w": Input(optional=True)}],
}


def test_tensors_inside_dataclasses_dicts_and_lists_are_inputs(make, model):
    runner = make(fn, INPUTS, [4, 8], max_variants=8)
    for i in range(4):
        for mode in ("add", "subtract"):
            for n in (3, 7):
                x = model.x(n, i)
                meta = Meta(model.x(n, i + 50), model.x(1, i)[0], mode)
                pair = [model.x(1, i)[0], {"w": model.x(1, i + 1)[0]}]
                assert close(runner(x, meta, pair), fn(x, meta, pair))
                assert close(runner(x, Meta(x)), fn(x, Meta(x)))
    assert runner.stats.replayed > 12 and runner.stats.eager == 0


def test_what_does_not_fit_inside_a_structure_is_refused_by_its_path(make, model):
    runner = make(fn, INPUTS, [8])
    x = model.x(3)
    for _ in range(3):
        runner(x, Meta(x))
    with pytest.raises(InputError, match=r"input 'meta.scale' has dtype torch.float64"):
        runner(x, Meta(x.double()))
    with pytest.raises(InputError, match=r"input 'x' has 3 tokens and input 'meta.scale' has 2"):
        runner(x, Meta(x[:2]))
    with pytest.raises(InputError, match=r"argument 'meta.extra' is a tensor|'meta.extra' is a dict"):
        runner(x, Meta(x, extra={"a": x}))
    with pytest.raises(
        InputError, match=r"argument 'meta' is a int; its inputs are declared as a structure|'meta.scale' is None"
    ):
        runner(x, 3)
    assert close(runner(x, Meta(x)), fn(x, Meta(x)))


@segue.break_point(trim=("x",))
def per_request(x, cu, weight):
    """Adds to each row the weight of its request."""
    counts = (cu[1:] - cu[:-1]).long()
    return x + weight[: len(counts)].repeat_interleave(counts, dim=0)[: len(x)]


def batch(x, cu, weight):
    y = per_request(x * 2, cu, weight)
    return y, weight * 3


REQUESTS = {
    "x": Input(0, 0.0),
    "cu": Input(request_dim=0, extra=1, pad="edge"),
    "weight": Input(request_dim=0, pad=0.0),
}


def packed(model, lengths, seed=0):
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=model.device)
    return model.x(sum(lengths), seed), cu, model.x(len(lengths), seed + 1)


LENGTHS = [[3], [1, 1, 1], [5, 2], [1] * 4, [8], [2, 0, 2], [7, 1], [3]]


@pytest.mark.parametrize("explicit", [True, False])
def test_request_shaped_inputs_have_a_ladder_of_their_own(make, model, explicit):
    runner = make(
        batch, REQUESTS, [4, 8], request_buckets=[1, 2, 4], output_token_dim=(0, None), output_request_dim=(None, 0)
    )
    if explicit:
        runner.capture(*packed(model, [1]))
    for turn in range(3):
        for lengths in LENGTHS:
            call = packed(model, lengths, turn)
            runner.pool.poison()
            for got, want in zip(runner(*call), batch(*call), strict=True):
                assert close(got, want), lengths
    assert runner.stats.eager == 0
    d = runner.admit(7, 3)
    assert (d.bucket, d.requests) == (8, 4)
    assert close(runner(*packed(model, [2, 1]), decision=d)[0], batch(*packed(model, [2, 1]))[0])
    runner(*packed(model, [1] * 5))
    assert dict(runner.stats.reasons) == {"no request bucket fits": 1}
    assert "5 requests, and the largest request bucket is 4" in runner.explain(5, 5)


def test_request_counts_must_agree(make, model):
    runner = make(batch, REQUESTS, [8], request_buckets=[4], output_token_dim=(0, None), output_request_dim=(None, 0))
    x, cu, weight = packed(model, [2, 1])
    with pytest.raises(InputError, match=r"input 'cu' has 2 requests and input 'weight' has 1; they must agree"):
        runner(x, cu, weight[:1])


def test_a_shadow_run_finds_a_frozen_value(make, model):
    class Counter:
        step = array("d", [0.0])  # into which nobody looks

        def __call__(self, x):
            return x + self.step[0]

    frozen = Counter()
    runner = make(frozen, {"x": Input(0, 0.0)}, [8], verify_every=2)
    for _ in range(4):
        runner(model.x(5))
    frozen.step[0] = 3.0
    runner(model.x(5))
    with pytest.raises(
        ReplayError, match=r"verify_every: bucket 8 with 5 tokens: .*output differs in 20 of 20 elements"
    ):
        runner(model.x(5))


def test_a_shadow_run_changes_nothing_and_needs_a_context_it_can_copy(make, model):
    cache = torch.zeros(32, 4, device=model.device)

    @segue.break_point(trim=("x",))
    def append(x):
        ctx = segue.current_forward_ctx()
        cache[ctx["at"] : ctx["at"] + len(x)] = x
        ctx["at"] += len(x)
        return x + cache[: ctx["at"]].sum(0)

    runner = make(lambda x: append(x * 2), {"x": Input(0, 0.0)}, [8], verify_every=1)
    ctx, at, history = {"at": 0}, 0, torch.zeros(32, 4, device=model.device)
    for i in range(5):
        x = model.x(5, i)
        history[at : at + 5] = x * 2
        at += 5
        assert close(runner(x, ctx=ctx), x * 2 + history[:at].sum(0)) and ctx["at"] == at
    assert torch.equal(cache, history)

    class Stubborn(dict):
        def __deepcopy__(self, memo):
            raise TypeError("no copies")

    with pytest.raises(UsageError, match=r"verify_every: the context can't be copied .*no copies"):
        runner(model.x(5), ctx=Stubborn(at=0))


def test_buckets_too_small_for_a_request_shaped_example_are_said_to_be_left_out(make, model, caplog):
    options = {"request_buckets": [1, 2, 4], "output_token_dim": (0, None), "output_request_dim": (None, 0)}
    runner = make(batch, REQUESTS, [4, 8, 16], **options)
    with caplog.at_level("WARNING", "segue"):
        summary = runner.capture(*packed(model, [4, 3, 5]))
    why = "too small for the example of 12 tokens and 3 requests"
    assert summary.buckets == (16,) and summary.left_out == {8: why, 4: why}
    assert f"8 of 9 pairs of a token and a request bucket are {why}" in caplog.text and "buckets 8, 4" in caplog.text
    assert f"Left out: 8 ({why}), 4 ({why})" in str(summary)
    small = packed(model, [1, 1, 1])
    for _ in range(3):
        assert close(runner(*small)[0], batch(*small)[0])
    assert 4 in runner.stats.buckets, "calls capture what was left out"
