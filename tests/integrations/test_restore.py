"""A handle gives the model back as it was, also after something went wrong."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import segue
from segue.integrations.transformers import accelerate
from segue.integrations.transformers.attention import AttentionName

Make = Callable[..., Any]
_GREEDY = {"max_new_tokens": 5, "do_sample": False}


def test_restore_gives_the_model_back(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 6)
    want = model.generate(prompt, **_GREEDY)
    handle = graphed(model)
    model.generate(prompt, **_GREEDY)
    handle.restore()
    handle.restore()
    assert "forward" not in vars(model.model) and model.config._attn_implementation != "segue"
    assert torch.equal(model.generate(prompt, **_GREEDY), want)
    model.train()(prompt, labels=prompt).loss.backward()
    with pytest.raises(segue.SegueError, match="restored"):
        handle.eval()
        handle.capture()


def test_leaving_the_with_restores_and_a_new_handle_works(make: Make, ids: Make, device: Any) -> None:
    model, prompt = make(), ids(1, 6)
    want = model.generate(prompt, **_GREEDY)
    for _ in range(2):
        with accelerate(model, max_tokens=16, device=device) as handle:
            assert all(torch.equal(handle.generate(prompt, **_GREEDY), want) for _ in range(3))
        assert "forward" not in vars(model.model)


def test_a_forward_that_was_replaced_before_is_put_back(make: Make, graphed: Make, ids: Make) -> None:
    model = make()
    own = model.model.forward
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    counted.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    model.model.forward = counted
    graphed(model).restore()
    assert model.model.forward is counted


def test_a_copy_of_an_accelerated_model_runs_on_its_own_weights(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 6)
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(3):
            model(prompt)
        before = handle.stats
        other = copy.deepcopy(model)
        for p in other.parameters():
            p.mul_(1.5)
        with handle.untouched():
            assert not torch.equal(other(prompt).logits, model(prompt).logits)
            want = other(prompt).logits
        assert torch.equal(other(prompt).logits, want)
    assert handle.stats == before


@pytest.mark.parametrize("explicit", [False, True])
def test_an_interrupt_while_capturing_leaves_a_working_model(
    explicit: bool, make: Make, graphed: Make, ids: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = make(), ids(1, 6)
    with torch.inference_mode():
        want = model(prompt).logits.clone()
    mlp, over = model.model.layers[1].mlp, threading.Event()
    own = type(mlp).forward

    def interrupted(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self is mlp and segue.is_breakable_capture_active() and not over.is_set():
            raise KeyboardInterrupt
        return own(self, x)  # type: ignore[no-any-return]

    monkeypatch.setattr(type(mlp), "forward", interrupted)
    over.set()
    handle = graphed(model, max_tokens=16)  # which captures a few tokens to see what can't be
    over.clear()
    with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
        if explicit:
            handle.capture()
        else:
            model(prompt), model(prompt)
    assert model.config._attn_implementation != "segue"
    over.set()
    for _ in range(3):
        with torch.inference_mode():
            torch.testing.assert_close(model(prompt).logits, want, rtol=1e-5, atol=1e-5)
    assert handle.stats.replayed >= 1
    handle.restore()
    with torch.inference_mode():
        assert torch.equal(model(prompt).logits, want)


def test_the_name_of_the_attention_is_segues_only_while_a_body_runs() -> None:
    class Config:
        _attn_implementation = "sdpa"

    config = Config()
    switch = AttentionName([config, config])
    with switch.segue():
        assert config._attn_implementation == "segue" and switch.name == "sdpa"
        with switch.own():
            assert config._attn_implementation == "sdpa"
        assert config._attn_implementation == "segue"
    with pytest.raises(KeyboardInterrupt), switch.segue():
        raise KeyboardInterrupt
    assert config._attn_implementation == "sdpa" and not switch.swapped
