"""What is done to a model's modules after its capture is noticed: refused by name, or run untouched and counted."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import segue
from segue.devices import Device
from segue.integrations.transformers import accelerate, names

Make = Callable[..., Any]


def _doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _halved(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0] / 2,)


def _patch(mlp: Any, layer: Any) -> None:
    own = mlp.forward
    mlp.forward = lambda x: own(x) * 2


def _epsilon(mlp: Any, layer: Any) -> None:
    layer.post_attention_layernorm.variance_epsilon = 0.5


def _bias(mlp: Any, layer: Any) -> None:
    mlp.up_proj.bias = nn.Parameter(torch.ones_like(mlp.up_proj.weight[:, 0]), requires_grad=False)


CHANGES: dict[str, tuple[Callable[..., Any], str]] = {
    "hook": (lambda mlp, layer: mlp.register_forward_hook(_doubled), "a forward hook on layers.1.mlp: _doubled"),
    "hook before": (lambda mlp, layer: mlp.up_proj.register_forward_pre_hook(_halved), "layers.1.mlp.up_proj: _halved"),
    "forward": (_patch, "another forward on layers.1.mlp: recapture() takes it in"),
    "epsilon": (_epsilon, "layers.1.post_attention_layernorm.variance_epsilon: "),
    "scaling": (lambda mlp, layer: setattr(layer.self_attn, "scaling", 3.0), "layers.1.self_attn.scaling: "),
    "class": (lambda mlp, layer: setattr(mlp.act_fn, "__class__", nn.Tanh), "another module at layers.1.mlp.act_fn"),
    "bias": (_bias, "layers.1.mlp.up_proj.bias: None -> a tensor"),
    "module": (lambda mlp, layer: setattr(mlp, "act_fn", nn.ReLU().eval()), "another module at layers.1.mlp.act_fn: recapture()"),
}


@pytest.mark.parametrize("strategy", ["auto", "breakable"])
@pytest.mark.parametrize("what", list(CHANGES))
def test_a_change_after_capture_counts_at_once_and_is_counted(
    what: str, strategy: str, make: Make, graphed: Make, ids: Make
) -> None:
    model, prompt = make(), ids(1, 6)
    handle = graphed(model, strategy=strategy)
    change, reason = CHANGES[what]
    with torch.inference_mode():
        before = [model(prompt).logits for _ in range(4)][-1]
        change(model.model.layers[1].mlp, model.model.layers[1])
        got = model(prompt).logits
        with handle.untouched():
            want = model(prompt).logits
    assert torch.equal(got, want) and not torch.allclose(got, before)
    ((found, count),) = handle.stats.reasons.items()
    assert reason in found and count == 1 and reason in handle.report()


@pytest.mark.parametrize("what", ["forward", "module", "epsilon", "scaling", "class", "bias"])
def test_recapture_takes_the_change_in(what: str, make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 6)
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(4):
            model(prompt)
        CHANGES[what][0](model.model.layers[1].mlp, model.model.layers[1])
        handle.recapture()
        replayed = handle.stats.replayed
        for _ in range(4):
            got = model(prompt).logits
            with handle.untouched():
                torch.testing.assert_close(got, model(prompt).logits, rtol=1e-5, atol=1e-5)
    assert handle.stats.eager == 0 and handle.stats.replayed == replayed + 2


@pytest.mark.parametrize("what", ["layers", "rope", "method"])
def test_a_config_a_helper_and_a_class_count_too(
    what: str, make: Make, graphed: Make, ids: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = make(), ids(1, 6)
    modeling = sys.modules[type(model).__module__]
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(4):
            before = model(prompt).logits
        replayed = handle.stats.replayed
        if what == "layers":
            monkeypatch.setattr(model.config, "num_hidden_layers", 2)
        elif what == "rope":
            monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))
        else:
            own = modeling.LlamaMLP.forward
            monkeypatch.setattr(modeling.LlamaMLP, "forward", lambda self, x: own(self, x) * 2)
        for use_cache in (True, False):
            got = model(prompt, use_cache=use_cache).logits
            with handle.untouched():
                assert torch.equal(got, model(prompt, use_cache=use_cache).logits)
            assert not torch.allclose(got, before)
        monkeypatch.undo()
        assert torch.equal(model(prompt).logits, before)
    assert handle.stats.eager == 2 and handle.stats.replayed == replayed + 1


def test_what_decides_nothing_in_the_decoder_changes_nothing(make: Make, graphed: Make, ids: Make) -> None:
    from transformers import AttentionInterface

    model, prompt = make(), ids(1, 6)
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(4):
            before = model(prompt).logits
        replayed = handle.stats.replayed
        model.config.temperature, model.config.use_cache = 0.5, True
        model.generation_config.max_new_tokens = 3
        model.model.layers[0].remark = "hello"
        AttentionInterface.register("of somebody else", lambda *_, **__: None)
        model.lm_head.weight.mul_(1.0)
        assert torch.equal(model(prompt).logits, before)
    assert handle.stats.eager == 0 and handle.stats.replayed == replayed + 1


def test_a_hook_that_is_gone_again_leaves_the_graphs_in_use(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 6)
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(3):
            model(prompt)
        for hook in (
            model.model.norm.register_forward_hook(_doubled),
            nn.modules.module.register_module_forward_hook(lambda *_: None),
        ):
            model(prompt)
            with pytest.raises(segue.SegueError, match=r"nothing is captured, as no graph would run a forward hook"):
                handle.capture()
            hook.remove()
        model.model.layers[0].note = "an attribute like any other"
        model(prompt)
        model(prompt, output_hidden_states=True)  # transformers registers its recorders now
        model(prompt)
    assert handle.stats.replayed == 3 and handle.stats.warmed == handle.stats.eager == 2


def test_hooks_of_the_decoder_and_its_embedding_run_live(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt, seen = make(), ids(1, 6), []
    model.model.embed_tokens.register_forward_hook(lambda *_: seen.append("embedding"))
    handle = graphed(model)
    model.model.register_forward_hook(lambda *_: seen.append("decoder"))
    seen.clear()
    with torch.inference_mode():
        for _ in range(4):
            model(prompt)
    assert seen == ["embedding", "decoder"] * 4 and handle.stats.eager == 0


@pytest.mark.parametrize("where", ["layers.0", "layers.1.self_attn"])
def test_a_part_in_training_mode_is_named(where: str, make: Make, graphed: Make, ids: Make, device: Device) -> None:
    model = make()
    model.model.get_submodule(where).train()
    with pytest.raises(segue.SegueError, match=f"LlamaModel's {where} is in training mode"):
        accelerate(model, device=device)
    handle = graphed(model.eval())
    model.model.get_submodule(where).train()
    with torch.inference_mode():
        handle(ids(1, 3))
    assert handle.stats.reasons == {f"LlamaModel's {where} is in training mode": 1}


def test_a_cache_with_an_update_of_its_own_is_updated_by_it(make: Make, graphed: Make, ids: Make, cache_name: str) -> None:
    model = make()
    handle = graphed(model)

    class Louder(names.cache_type()):  # type: ignore[misc]
        def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(key * 2, value, *args, **kwargs)

    with torch.inference_mode():
        for seed in range(3):
            prompt = ids(1, 9, seed)
            got = model(prompt, **{cache_name: Louder(config=model.config)}).logits
            with handle.untouched():
                want = model(prompt, **{cache_name: Louder(config=model.config)}).logits
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert handle.stats.strategies == {"breakable": 1}


@pytest.mark.parametrize("strategy", ["auto", "breakable"])
@pytest.mark.parametrize("where", ["config", "modules", "config, later", "modules, later"])
def test_a_model_that_is_not_causal_is_served_breakable_only(
    where: str, strategy: str, make: Make, graphed: Make, ids: Make
) -> None:
    model = make()

    def turn() -> None:
        if "config" in where:
            model.config.is_causal = False
        for layer in model.model.layers if "modules" in where else ():
            layer.self_attn.is_causal = False

    if "later" not in where:
        turn()
    handle = graphed(model, strategy=strategy)
    with torch.inference_mode():
        for seed in range(3):
            model(ids(1, 9, seed))
        turn()
        primes = handle.stats.strategies.get("prime", 0)
        for seed in range(3):
            got = model(ids(1, 9, seed)).logits
            with handle.untouched():
                torch.testing.assert_close(got, model(ids(1, 9, seed)).logits, rtol=1e-5, atol=1e-5)
    assert handle.stats.strategies.get("prime", 0) == primes == ("later" in where and strategy == "auto")


def test_looking_at_the_modules_of_28_layers_costs_no_more_than_submitting_a_kernel_or_two(make: Make, graphed: Make) -> None:
    import timeit

    from segue.integrations.transformers.training_modes import TrainingModes

    handle = graphed(make("qwen3", num_hidden_layers=28))
    changed, modes = handle.runner.fn.places.decisions.changed, TrainingModes(handle.module.model)
    assert changed() is None and modes.training() is None
    for look, most in ((changed, 300e-6), (modes.training, 50e-6)):  # 30 and 3 on a quick host; the bounds are for a busy one
        assert min(timeit.repeat(look, number=100, repeat=20)) / 100 < most


def test_a_walk_from_an_accelerated_model_doesnt_enter_what_serves_it(make: Make, graphed: Make, ids: Make) -> None:
    from segue.capture.object_graph import visits

    model = make()
    own = len(list(visits(model)))
    graphed(model)
    with torch.inference_mode():
        for _ in range(3):
            model(ids(1, 6))
    assert len(list(visits(model))) < own + 20


@pytest.mark.parametrize("strategy", ["breakable", "auto"])
@pytest.mark.parametrize("what", ["attention", "kernel", "decoder's class", "model's class"])
def test_what_is_replaced_for_all_models_is_what_runs(
    what: str, strategy: str, make: Any, graphed: Any, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = make("llama"), make("llama")
    graphed(model, strategy=strategy)
    tokens = ids(1, 12)
    with torch.inference_mode():
        for _ in range(3):
            before = model(tokens, logits_to_keep=1).logits
    if what == "attention":
        function = sys.modules[type(model).__module__].ALL_ATTENTION_FUNCTIONS
        monkeypatch.setitem(function._local_mapping, "sdpa", lambda m, q, k, v, mask, **_: (q.transpose(1, 2).contiguous(), None))
    elif what == "kernel":
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, **_: q * 0.5)
    else:
        cls = type(model.model if what == "decoder's class" else model)
        own, field = cls.forward, "last_hidden_state" if what == "decoder's class" else "logits"

        def louder(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = own(self, *args, **kwargs)
            out[field] = out[field] * 2
            return out

        monkeypatch.setattr(cls, "forward", louder)
    with torch.inference_mode():
        for _ in range(3):
            got, want = model(tokens, logits_to_keep=1).logits, twin(tokens, logits_to_keep=1).logits
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
            assert not torch.allclose(got, before, rtol=1e-3, atol=1e-4)


def test_a_handle_that_sleeps_has_given_its_memory_back_and_wakes_with_the_weights_that_are_there(
    make: Make, graphed: Make, ids: Make
) -> None:
    model, prompt = make(), ids(1, 6)
    handle = graphed(model, buckets=[8])
    with torch.inference_mode():
        handle.capture()
        for _ in range(3):
            model(prompt)
    replayed = handle.stats.replayed
    handle.sleep()
    assert not handle.stats.buckets and handle.scratch_bytes == 0
    gone = []
    for p in model.parameters():
        gone.append(weakref.ref(p.data.untyped_storage()))
        p.data = p.data * 0.5
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * len(gone)
    want = model(prompt).logits
    assert handle.stats.reasons["asleep"] == 1 and handle.stats.replayed == replayed
    with pytest.raises(segue.UsageError, match=r"asleep. Call wake\(\)"):
        handle.capture()
    assert handle.wake().buckets == (8,) and handle.wake() is None
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(model(prompt).logits, want, rtol=1e-4, atol=1e-4)
    assert handle.stats.reasons["asleep"] == 1 and handle.stats.replayed > replayed
