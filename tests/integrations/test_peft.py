"""Adapters of real peft on an accelerated model: whatever is done to them, the answers are the model's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own, about merging and adapters that exist

Make = Callable[..., Any]


def _config(rank: int = 4) -> Any:
    return peft.LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)


class Tuned:
    """A tiny llama with one adapter, accelerated, and its replays compared with its own forward."""

    def __init__(self, make: Make, graphed: Make, ids: Make, strategy: str) -> None:
        self.base = make().requires_grad_(False)
        torch.manual_seed(1)
        self.tuned = peft.get_peft_model(self.base, _config()).eval().requires_grad_(False)
        self.handle = graphed(self.base, strategy=strategy)
        self.prompts = [ids(1, 6, seed) for seed in range(2)]

    def right(self, times: int = 1) -> torch.Tensor:
        """Check the answers, and return one."""
        with torch.inference_mode():
            for _ in range(times):
                for prompt in self.prompts:
                    got = self.tuned(input_ids=prompt).logits
                    with self.handle.untouched():
                        want = self.tuned(input_ids=prompt).logits
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        return got

    def counts(self) -> tuple[int, int]:
        stats = self.handle.stats
        return stats.replayed, stats.eager


@pytest.fixture(params=["auto", "breakable"])
def tuned(request: pytest.FixtureRequest, make: Make, graphed: Make, ids: Make) -> Tuned:
    return Tuned(make, graphed, ids, request.param)


def _add(t: Tuned) -> None:
    torch.manual_seed(2)
    t.tuned.add_adapter("second", _config(2))
    t.base.eval().requires_grad_(False)


def _switch(t: Tuned) -> None:
    t.tuned.set_adapter("second")
    t.base.requires_grad_(False)


def _scale(t: Tuned) -> None:
    for module in t.base.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 5.0)


OPERATIONS: dict[str, tuple[Callable[[Tuned], Any], Callable[[Tuned], Any]]] = {
    "switched": (_switch, lambda t: t.tuned.set_adapter("default")),
    "disabled": (lambda t: t.tuned.base_model.disable_adapter_layers(), lambda t: t.tuned.base_model.enable_adapter_layers()),
    "merged": (lambda t: t.tuned.merge_adapter(), lambda t: t.tuned.unmerge_adapter()),
}


@pytest.mark.parametrize("what", list(OPERATIONS))
def test_what_is_done_to_an_adapter_counts_at_once_is_counted_and_can_be_undone(what: str, tuned: Tuned) -> None:
    _add(tuned)
    tuned.handle.recapture()
    before = tuned.right(3)
    replayed, eager = tuned.counts()
    assert replayed and not eager
    do, undo = OPERATIONS[what]
    do(tuned)
    after = tuned.right(2)
    assert what == "merged" or not torch.allclose(before, after)
    assert tuned.counts() == (replayed, 4) and any("->" in reason or "another" in reason for reason in tuned.handle.stats.reasons)
    undo(tuned)
    tuned.base.requires_grad_(False)
    torch.testing.assert_close(tuned.right(2), before, rtol=1e-4, atol=1e-4)
    assert tuned.counts() == (replayed + 4, 4)


def test_the_context_manager_of_peft_disables_for_its_block(tuned: Tuned) -> None:
    before = tuned.right(3)
    replayed, _ = tuned.counts()
    with tuned.tuned.disable_adapter():
        assert not torch.allclose(tuned.right(), before)
    tuned.base.requires_grad_(False)
    assert torch.allclose(tuned.right(), before) and tuned.counts() == (replayed + 2, 2)


def test_adapters_added_scaled_switched_and_deleted(tuned: Tuned) -> None:
    tuned.right(3)
    for change in (_add, _scale, _switch):
        change(tuned)
        eager = tuned.counts()[1]
        tuned.right()
        assert tuned.counts()[1] == eager + 2
        tuned.handle.recapture()
        replayed = tuned.counts()[0]
        tuned.right(3)
        assert tuned.counts()[0] > replayed and tuned.counts()[1] == eager + 2
    tuned.tuned.delete_adapter("default")
    tuned.base.requires_grad_(False)
    tuned.right(2)
    tuned.handle.recapture()
    tuned.right(3)


def test_an_adapter_injected_into_an_accelerated_model(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make().requires_grad_(False), ids(1, 6)
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(3):
            before = model(prompt).logits
    torch.manual_seed(1)
    tuned = peft.get_peft_model(model, _config()).eval().requires_grad_(False)
    with torch.inference_mode():
        got = tuned(input_ids=prompt).logits
        with handle.untouched():
            assert torch.equal(got, tuned(input_ids=prompt).logits)
        assert not torch.allclose(got, before) and handle.stats.eager == 1
        plain = tuned.unload()
        assert plain is model
        torch.testing.assert_close(model(prompt).logits, before)


@pytest.mark.parametrize("strategy", ["auto", "breakable"])
def test_the_handle_of_a_peft_model_is_one(strategy: str, make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make().requires_grad_(False), ids(1, 6)
    torch.manual_seed(1)
    tuned = peft.get_peft_model(model, _config()).eval()
    handle = graphed(tuned, strategy=strategy)
    assert isinstance(handle, peft.PeftModel) and handle.module is tuned and handle.get_base_model() is model
    greedy = {"input_ids": prompt, "max_new_tokens": 4, "do_sample": False}

    def right() -> torch.Tensor:
        got = handle.generate(**greedy)
        with handle.untouched():
            assert torch.equal(handle.generate(**greedy), got)
        with torch.inference_mode():
            return handle(input_ids=prompt).logits  # type: ignore[no-any-return]

    for _ in range(3):
        before = right()
    replayed = handle.stats.replayed
    assert replayed > 0 and not handle.stats.reasons
    with handle.disable_adapter():
        assert not torch.allclose(right(), before)
    ((reason, _),) = handle.stats.reasons.items()
    assert reason == "layers.0.self_attn.q_proj._disable_adapters: False -> True: recapture() takes it in"
    torch.testing.assert_close(right(), before)
    assert handle.stats.replayed > replayed
    torch.manual_seed(2)
    handle.add_adapter("second", _config(2))
    handle.set_adapter("second")
    assert handle.eval() is handle and handle.active_adapter == "second"
    handle.recapture()
    replayed = handle.stats.replayed
    for _ in range(3):
        assert not torch.allclose(right(), before)
    assert handle.stats.replayed > replayed


def test_an_adapter_on_a_handle_is_counted_and_taken_in(make: Make, graphed: Make, ids: Make, device: Any) -> None:
    model, prompt = make(), ids(1, 6)
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(3):
            handle(prompt)
    torch.manual_seed(1)
    tuned = peft.get_peft_model(handle, _config()).eval()
    with torch.inference_mode():
        got = tuned(input_ids=prompt).logits
        with handle.untouched():
            assert torch.equal(tuned(input_ids=prompt).logits, got)
    assert handle.stats.eager == 1
    other = graphed(tuned)
    assert other is not handle and other.module is tuned
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(other(input_ids=prompt).logits, got, rtol=1e-5, atol=1e-5)
    assert other.stats.replayed == 1 and not other.stats.reasons
    with pytest.raises(RuntimeError, match="restored"):
        handle.capture()


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_learned_prompts_are_served(kind: str, make: Make, graphed: Make, ids: Make) -> None:
    torch.manual_seed(1)
    tuned = peft.get_peft_model(make(), getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")).eval()
    handle = graphed(tuned)
    with torch.inference_mode():
        for _ in range(3):
            got = handle(input_ids=ids(1, 6)).logits
            with handle.untouched():
                torch.testing.assert_close(got, tuned(input_ids=ids(1, 6)).logits, rtol=1e-5, atol=1e-5)
    assert handle.stats.replayed == 1 and not handle.stats.reasons


def test_an_adapter_is_trained_through_its_handle(make: Make, graphed: Make, ids: Make) -> None:
    torch.manual_seed(1)
    handle = graphed(peft.get_peft_model(make(), _config()).eval())
    prompt = ids(1, 6)
    with torch.inference_mode():
        for _ in range(3):
            before = handle(input_ids=prompt).logits
    handle(input_ids=prompt, labels=prompt).loss.backward()
    grads = [p.grad for p in handle.parameters() if p.requires_grad]
    assert grads and all(grad is not None and grad.any() for grad in grads)
    torch.optim.SGD(handle.parameters(), lr=1.0).step()
    with torch.inference_mode():
        got = handle(input_ids=prompt).logits
        with handle.untouched():
            torch.testing.assert_close(got, handle(input_ids=prompt).logits, rtol=1e-5, atol=1e-5)
    assert handle.stats.reasons == {"gradients are required": 1} and not torch.allclose(got, before)
    assert handle.stats.replayed == 2
