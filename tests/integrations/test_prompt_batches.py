"""Batches of fresh prompts as prime graphs: what the untouched model gives and leaves in the cache, and what runs otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from integrations.test_generation import padded
from segue.devices import Device
from segue.integrations.transformers import names, prime_admission

Make = Callable[..., Any]
_BATCHES = ((3, 40), (2, 5), (4, 32), (3, 7), (5, 9), (2, 61), (3, 40))  # long then short, sizes mixed
_GREEDY = {"max_new_tokens": 5, "do_sample": False}


def _prompts(ids: Make, batch: int, length: int, left: bool) -> dict[str, Tensor]:
    tokens = ids(batch, length)
    if not left:
        return {"input_ids": tokens}
    tokens, mask = padded(tokens, [max(1, length - 3 * row) for row in range(batch)])
    return {"input_ids": tokens, "attention_mask": mask}


def _assert_alike(got: Any, want: Any, cache_name: str, real: Tensor | None = None) -> None:
    torch.testing.assert_close(got.logits, want.logits, atol=1e-4, rtol=1e-4)
    assert got.logits.is_contiguous()
    for a, b in zip(got[cache_name].layers, want[cache_name].layers, strict=True):
        for mine, own in ((a.keys, b.keys), (a.values, b.values)):
            torch.testing.assert_close(mine, own, atol=1e-4, rtol=1e-4)  # those of the padding too
            assert mine.is_contiguous() and mine.is_inference() == own.is_inference()


@pytest.mark.parametrize("left", [False, True], ids=["one length", "left-padded"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_batch_leaves_the_hidden_states_and_the_cache_of_the_untouched_model(
    family: str, left: bool, make: Make, graphed: Make, ids: Make, cache_name: str
) -> None:
    model = make(family)
    handle = graphed(model, max_tokens=128)
    for _ in range(3):
        for batch, length in _BATCHES:
            given = {**_prompts(ids, batch, length, left), "use_cache": True}
            with torch.no_grad():
                with handle.untouched():
                    want = model(**given)
                handle.runner.pool.poison()
                got = model(**given)
                _assert_alike(got, want, cache_name)
                last = model(**given, logits_to_keep=2).logits
            torch.testing.assert_close(last, want.logits[:, -2:], atol=1e-4, rtol=1e-4)
    strategies = {name for name in handle.stats.strategies if name.endswith("padded") == left}
    assert len(strategies) >= 2 and not handle.stats.eager


@pytest.mark.parametrize("left", [False, True], ids=["one length", "left-padded"])
def test_generated_tokens_are_the_untouched_models(left: bool, make: Make, graphed: Make, ids: Make) -> None:
    model = make("qwen2")
    prompts = [_prompts(ids, batch, length, left) for batch, length in _BATCHES]
    want = [model.generate(**p, **_GREEDY) for p in prompts]
    handle = graphed(model, max_tokens=128)
    for _ in range(3):
        assert all(torch.equal(model.generate(**p, **_GREEDY), w) for p, w in zip(prompts, want, strict=True))
    assert any(name.startswith("prime, batches") for name in handle.stats.strategies)


def test_a_replay_equals_its_reference(make: Make, graphed: Make, ids: Make, cache_name: str) -> None:
    model = make()
    handle = graphed(model, max_tokens=64)
    given = {**_prompts(ids, 3, 13, left=True), "use_cache": True}
    with torch.no_grad():
        for _ in range(3):
            got = model(**given)
        with handle.reference():
            want = model(**given)
    assert torch.equal(got.logits, want.logits) and handle.stats.strategies == {"prime, batches of 4, padded": 1}
    for a, b in zip(got[cache_name].layers, want[cache_name].layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) and len(a.keys) == 3


def test_positions_are_live(make: Make, graphed: Make, ids: Make, cache_name: str) -> None:
    """Negative ones too, as some give them to their padding."""
    model = make()
    handle = graphed(model, max_tokens=64)
    given = {**_prompts(ids, 2, 12, left=True), "use_cache": True}
    with torch.no_grad():
        for shift in (0, 3, 40, -1):
            given["position_ids"] = given["attention_mask"].cumsum(1) - 1 + shift
            with handle.untouched():
                want = model(**given)
            _assert_alike(model(**given), want, cache_name)
    assert handle.stats.strategies == {"prime, batches of 2, padded": 2}


def test_what_is_no_batch_of_fresh_prompts_runs_breakable(make: Make, graphed: Make, ids: Make, cache_name: str) -> None:
    model, other = make(), make()
    handle = graphed(model, max_tokens=64)
    tokens = ids(2, 6)
    seen = torch.ones(2, 1, 6, 6, dtype=torch.bool, device=tokens.device).tril()
    with torch.no_grad():
        for _ in range(3):
            model(tokens, use_cache=False)
            model(tokens, use_cache=True, attention_mask=seen)
            model(ids(33, 1), use_cache=True)  # more sequences than a graph takes
            with handle.breakable_only():
                model(tokens, use_cache=True)
        assert set(handle.stats.strategies) == {"breakable"}
        for _ in range(3):
            caches = [names.new_cache(model.config) for _ in range(2)]
            for m, cache in zip((model, other), caches, strict=True):
                m(tokens, use_cache=True, **{cache_name: cache})
            got, want = (m(tokens, use_cache=True, **{cache_name: c}) for m, c in zip((model, other), caches, strict=True))
            _assert_alike(got, want, cache_name)  # a second chunk
    assert handle.stats.strategies["prime, batches of 2"] == 1


def test_filling_up_a_batch_that_takes_a_larger_bucket_is_left_to_breaks(make: Make, graphed: Make, ids: Make) -> None:
    model = make()
    handle = graphed(model, max_tokens=512)
    with torch.no_grad():
        for _ in range(3):
            model(ids(3, 60), use_cache=True)  # 240 rows instead of 180
        assert handle.stats.strategies == {"breakable": 1}
        for _ in range(3):
            model(ids(4, 60), use_cache=True)
    assert handle.stats.strategies == {"breakable": 1, "prime, batches of 4": 1}


def _serving(make: Make, graphed: Make, ids: Make, *batches: int) -> Any:
    """The handle of a model that has answered prompts of 8 tokens three times, in batches of these sizes."""
    model = make()
    handle = graphed(model, max_tokens=64)
    with torch.no_grad():
        for _ in range(3):
            for prompts in batches:
                model(ids(prompts, 8), use_cache=True)
    return handle


def test_there_are_only_so_many_graphs_of_batches(
    make: Make, graphed: Make, ids: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prime_admission, "_MOST", 1)
    handle = _serving(make, graphed, ids, 2, 4)
    assert handle.stats.strategies == {"prime, batches of 2": 1, "breakable": 1}


def test_batches_that_are_not_proven_run_breakable(make: Make, graphed: Make, ids: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime_admission, "place_numbers", lambda positions, real: torch.ones_like(positions).view(-1))
    handle = _serving(make, graphed, ids, 2, 1)
    assert handle.stats.strategies == {"breakable": 1, "prime": 1}
    assert "in 2 prompts of 7 tokens by a trunk the last hidden state differs" in handle.strategies["prime, batches"]


def test_all_graphs_of_prompts_fill_one_scratch_cache(make: Make, graphed: Make, ids: Make) -> None:
    model = make()
    handle = graphed(model, max_tokens=64)
    with torch.no_grad():
        for _ in range(3):
            model(ids(1, 20), use_cache=True)
        once = handle.scratch_bytes
        for _ in range(3):
            model(ids(2, 20), use_cache=True)
            model(**_prompts(ids, 4, 12, left=True), use_cache=True)
    assert handle.scratch_bytes == once > 0 and len(handle.stats.strategies) == 3


def test_a_batch_whose_capture_fails_runs_eagerly(device: Device, make: Make, graphed: Make, ids: Make, cache_name: str) -> None:
    """By the runner, on the filled up batch, of which the caller gets his own sequences: prime's warm-up, that of the breakable
    graph, whose capture fails too, and eager calls."""
    model = make()

    class Refusing(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.shape[1] < 32 or float(x.abs().max()) >= 0 else -x  # few tokens are captured

    first = model.model.layers[0]
    first.input_layernorm = torch.nn.Sequential(first.input_layernorm, Refusing()).eval()
    handle = graphed(model, max_tokens=64, on_failure="eager")
    given = {**_prompts(ids, 3, 9, left=True), "use_cache": True}
    with torch.no_grad():
        with handle.untouched():
            want = model(**given)
        for _ in range(4):
            _assert_alike(model(**given), want, cache_name)
    assert handle.stats.reasons["a failed capture"] == 2


@pytest.mark.parametrize("left", [False, True], ids=["one length", "left-padded"])
def test_compiled_layers_serve_batches_too(left: bool, make: Make, graphed: Make, ids: Make) -> None:
    model = make()
    given = _prompts(ids, 3, 13, left)
    want = model.generate(**given, **_GREEDY)
    handle = graphed(model, max_tokens=64, compile=True)
    for _ in range(3):
        assert torch.equal(model.generate(**given, **_GREEDY), want)
    assert any(name.startswith("prime, batches") for name in handle.stats.strategies)
