"""Fresh prompts of an accelerated model run as prime graphs, steps as full ones, everything else breakable: the same tokens."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import segue
from integrations.conftest import build
from segue.devices import Device
from segue.integrations.transformers import accelerate, names


def _prompt(n: int, model: Any) -> torch.Tensor:
    draw = torch.Generator().manual_seed(n)
    return torch.randint(1, 97, (1, n), generator=draw).to(model.device)


@pytest.mark.parametrize("known", ["llama", "qwen3"])
def test_fresh_prompts_go_to_prime_and_steps_to_full(
    device: Device, known: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(known, device.torch_device)
    prompts = [_prompt(n, model) for n in (5, 6, 7, 30, 31, 30)]
    wanted = [model.generate(p, max_new_tokens=4, do_sample=False) for p in prompts]
    with accelerate(model, max_tokens=64, device=device) as graphed, caplog.at_level(logging.WARNING):
        for p, want in zip(prompts, wanted, strict=True):
            assert torch.equal(model.generate(p, max_new_tokens=4, do_sample=False), want)
        assert graphed.stats.strategies == {"prime": 2, "full": 6 * 3 - 2}
        assert graphed.stats.eager == 0
    assert "without meeting a break point" not in caplog.text


def test_a_prime_forward_equals_its_reference_and_fills_the_callers_cache(device: Device) -> None:
    model = build("qwen2", device.torch_device)
    name = names.cache_name(model.forward)

    def forward(n: int) -> tuple[torch.Tensor, Any]:
        cache = names.new_cache(model.config)
        with torch.no_grad():
            return model(_prompt(n, model), use_cache=True, **{name: cache}).logits, cache

    with accelerate(model, max_tokens=32, device=device) as graphed:
        for n in (9, 13, 16, 10):
            got, mine = forward(n)
            with graphed.reference():
                want, other = forward(n)
            assert torch.equal(got, want) and mine.get_seq_length() == n
            for a, b in zip(mine.layers, other.layers, strict=True):
                assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        assert graphed.stats.strategies == {"prime": 2}


def test_other_positions_and_forwards_without_a_cache_go_to_breakable(device: Device) -> None:
    model = build("llama", device.torch_device)
    ids = _prompt(8, model)
    shifted = torch.arange(3, 11, device=ids.device)[None]
    with accelerate(model, max_tokens=32, device=device) as graphed, torch.no_grad():
        for _ in range(3):
            model(ids, use_cache=False)
            model(ids, use_cache=True, position_ids=shifted)
        assert set(graphed.stats.strategies) == {"breakable"}


def test_fresh_prompts_and_steps_go_to_breakable_where_that_is_asked_for(device: Device) -> None:
    model = build("llama", device.torch_device)
    with accelerate(model, max_tokens=32, device=device) as graphed, torch.no_grad():
        graphed.capture()
        with graphed.breakable_only():
            model(_prompt(8, model), use_cache=True, logits_to_keep=1)
        assert graphed.stats.strategies == {"breakable": 1}
        model(_prompt(8, model), use_cache=True, logits_to_keep=1)
        assert graphed.stats.strategies == {"breakable": 1, "prime": 1}


def test_strategies_can_be_chosen(device: Device) -> None:
    model, sliding = build("llama", device.torch_device), build("mistral, sliding", device.torch_device)
    with accelerate(model, max_tokens=32, strategy="breakable", device=device) as graphed, torch.no_grad():
        for _ in range(3):
            model(_prompt(8, model), use_cache=True)
        assert graphed.stats.strategies == {"breakable": 1}
    with accelerate(sliding, max_tokens=32, strategy="auto", device=device) as graphed, torch.no_grad():
        for _ in range(3):
            sliding(_prompt(8, sliding), use_cache=True)
        assert graphed.stats.strategies == {"breakable": 1}
    with pytest.raises(segue.SegueError, match="DynamicSlidingWindowLayer: it forgets tokens"):
        accelerate(sliding, max_tokens=32, strategy="prime", device=device)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_hook_is_heard_where_only_breakable_has_the_bucket(batch: int, device: Device) -> None:
    model = build("llama", device.torch_device)
    ids = _prompt(8, model).expand(batch, -1)
    heard: list[int] = []
    with accelerate(model, max_tokens=32, device=device) as graphed, torch.no_grad():
        for _ in range(3):
            model(ids, use_cache=False)
        model.model.layers[1].register_forward_hook(lambda module, args, out: heard.append(1))
        for _ in range(4):
            model(ids, use_cache=True)
        assert len(heard) == 4 and graphed.stats.strategies == {"breakable": 1}
