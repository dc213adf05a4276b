"""Calls that train run the model's own forward, with its gradients, and are counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

Make = Callable[..., Any]


def _gradients(model: Any) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("strategy", ["auto", "breakable"])
@pytest.mark.parametrize("captured", [False, True])
def test_a_plain_call_gives_the_gradients_of_the_untouched_model(
    strategy: str, captured: bool, make: Make, graphed: Make, ids: Make
) -> None:
    model, prompt = make(), ids(2, 6)
    twin = copy.deepcopy(model)
    handle = graphed(model, strategy=strategy)
    if captured:
        with torch.inference_mode():
            for _ in range(3):
                handle(prompt)
    want = twin(input_ids=prompt, labels=prompt)
    got = handle(input_ids=prompt, labels=prompt)
    assert torch.equal(got.logits, want.logits) and got.logits.requires_grad
    got.loss.backward(), want.loss.backward()
    assert len(grads := _gradients(model)) == len(list(twin.parameters()))
    assert all(map(torch.equal, grads, _gradients(twin)))
    assert handle.stats.reasons == {"gradients are required": 1}
    assert "| gradients are required | 1 | Call it under torch.inference_mode()" in handle.report()
    with torch.no_grad():
        before = handle.stats.eager
        handle(prompt)
    assert handle.stats.eager == before


def test_embeddings_that_require_gradients_get_them(make: Make, graphed: Make) -> None:
    model = make().requires_grad_(False)
    handle = graphed(model)
    embeds = torch.randn(1, 3, 64, device=model.device, requires_grad=True)
    handle(inputs_embeds=embeds).logits.sum().backward()
    assert embeds.grad is not None and handle.stats.reasons == {"gradients are required": 1}
    handle(inputs_embeds=embeds.detach())
    assert handle.stats.eager == 1 and handle.stats.warmed == 1


@pytest.mark.parametrize("what", ["hook", "another embedding"])
def test_embeddings_made_by_the_model_that_require_gradients_get_them(what: str, make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make().requires_grad_(False), ids(1, 6)
    handle = graphed(model)
    for _ in range(3):
        model(prompt)
    if what == "hook":
        handle.enable_input_require_grads()
    else:
        model.set_input_embeddings(torch.nn.Embedding(97, 64, device=model.device))
    assert model(prompt).logits.requires_grad and handle.stats.reasons == {"gradients are required": 1}
    with torch.no_grad():
        model(prompt)
    assert handle.stats.eager == 1


def test_a_head_that_is_trained_alone_gets_its_gradients(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 6)
    model.model.requires_grad_(False)
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(3):
            model(prompt, logits_to_keep=1)
    for _ in range(3):  # the decoder may be replayed: no gradient passes it
        model(prompt, logits_to_keep=1).logits.sum().backward()
        got = _gradients(model)
        with handle.untouched():
            model(prompt, logits_to_keep=1).logits.sum().backward()
        torch.testing.assert_close(got, _gradients(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["auto", "breakable"])
def test_a_model_that_trains_between_generations_is_served_again_in_eval_mode(
    strategy: str, make: Make, graphed: Make, ids: Make
) -> None:
    model, prompt = make(attention_dropout=0.5), ids(1, 6)
    twin = copy.deepcopy(model)
    handle = graphed(model, strategy=strategy)
    with torch.inference_mode():
        for _ in range(3):
            handle(prompt)
    for m in (twin, handle):
        optimizer = torch.optim.SGD(m.train().parameters(), lr=0.1)
        torch.manual_seed(0)
        m(input_ids=prompt, labels=prompt).loss.backward()
        optimizer.step()
    assert handle.stats.reasons == {"LlamaModel is in training mode": 1}
    replayed = handle.stats.replayed
    with torch.inference_mode():
        torch.testing.assert_close(handle.eval()(prompt).logits, twin.eval()(prompt).logits, rtol=1e-5, atol=1e-5)
    assert handle.stats.replayed == replayed + 1, "an optimizer's step changes the weights in place"


def test_training_without_gradients_draws_the_dropout_of_the_untouched_model(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(attention_dropout=0.5), ids(1, 6)
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(3):
            handle(prompt)
        model.train()
        torch.manual_seed(0)
        got = handle(prompt).logits
        torch.manual_seed(0)
        with handle.untouched():
            assert torch.equal(handle(prompt).logits, got)
    assert "Call model.eval()" in handle.report()
