"""What graphs can't serve runs the model's own forward, and is counted with its reason."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from segue.errors import UsageError

Make = Callable[..., Any]


def test_more_tokens_than_the_largest_bucket_run_untouched_and_are_counted(
    make: Make, graphed: Make, ids: Make
) -> None:
    model, prompt = make(), ids(1, 40)
    with torch.inference_mode():
        want = model(prompt).logits
        handle = graphed(model, max_tokens=32)
        got = model(prompt).logits
    assert torch.equal(got, want)
    assert handle.stats.eager == 1
    ((reason, count),) = handle.stats.reasons.items()
    assert "no bucket fits" in reason and count == 1
    assert reason in handle.report()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"output_hidden_states": [1]}, "output_hidden_states was asked for"),
        ({"output_attentions": True}, "output_attentions was asked for"),
        ({"is_causal": False}, "the argument is_causal"),
        ({"attention_mask": torch.ones(1, 6, 6, dtype=torch.bool)}, "neither [batch, tokens]"),
    ],
)
def test_requests_about_the_inside_run_untouched(
    given: dict[str, Any], reason: str, make: Make, graphed: Make, ids: Make
) -> None:
    model = make(attn_implementation="eager")
    given = {k: v.to(model.device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    handle = graphed(model)
    with torch.inference_mode():
        out = None
        with suppress(Exception):  # what the model itself says to it
            out = model.base_model(ids(1, 6), **given)
    assert any(reason in r for r in handle.stats.reasons)
    assert handle.stats.eager == 1 and handle.stats.warmed == 0
    if "output_hidden_states" in given:
        assert any(t is not None for t in out.hidden_states)


def test_a_static_cache_is_served(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 9)
    given = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    want = model.generate(prompt, **given)
    handle = graphed(model)
    for _ in range(2):
        assert torch.equal(model.generate(prompt, **given), want)
    assert handle.stats.replayed > 5 and not handle.stats.eager


def test_arguments_that_no_code_reads_change_nothing(make: Make, graphed: Make, ids: Make) -> None:
    model = make()
    handle = graphed(model)
    with torch.inference_mode():
        want = model.model(ids(1, 6)).last_hidden_state
        for _ in range(3):
            assert torch.equal(model.model(ids(1, 6), my_own_note="x", output_router_logits=False).last_hidden_state, want)
        model.model(ids(1, 6), output_router_logits=True)
        model.model(ids(1, 6), sliding_window=2)
    assert set(handle.stats.reasons) == {"output_router_logits was asked for", "the argument sliding_window"}
    assert handle.stats.eager == 2


def test_a_cache_that_keeps_the_tensors_it_is_given_is_given_its_own(
    make: Make, graphed: Make, ids: Make, cache_name: str
) -> None:
    class Keeping(DynamicLayer):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.is_initialized:
                return super().update(key_states, value_states, *args, **kwargs)
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values

    model = make()

    def prefill() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        cache.layers = [Keeping() for _ in cache.layers]
        model(ids(1, 9), **{cache_name: cache}, use_cache=True)
        return cache

    graphed(model)
    with torch.inference_mode():
        caches = [prefill() for _ in range(3)]
        kept = [[layer.keys.clone() for layer in cache.layers] for cache in caches]
        model(ids(1, 9).flip(1), **{cache_name: DynamicCache(config=model.config)}, use_cache=True)
    for cache, keys in zip(caches, kept, strict=True):
        assert all(torch.equal(layer.keys, then) for layer, then in zip(cache.layers, keys, strict=True))


def test_no_tokens_run_untouched(make: Make, graphed: Make, ids: Make) -> None:
    handle = graphed(make())
    with torch.inference_mode(), suppress(Exception):  # what the model itself says to it
        handle.base_model(ids(1, 1)[:, :0], use_cache=True)
    assert handle.stats.reasons == {"no tokens": 1}


def test_the_models_own_errors_stay_its_own(make: Make, graphed: Make, ids: Make) -> None:
    handle = graphed(make())
    with torch.inference_mode(), pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        handle.base_model()
    assert handle.stats.reasons == {"not exactly one of input_ids and inputs_embeds": 1}


def test_ids_without_dimensions_are_the_models_own_error(start: Any) -> None:
    handle, errors = start(), []
    for how in (handle.untouched(), handle.breakable_only()):
        with how, torch.no_grad(), pytest.raises(IndexError) as raised:
            handle.module.model(torch.tensor(3, device=handle.device))
        errors.append(str(raised.value))
    assert errors[0] == errors[1] and handle.stats.reasons == {"inputs of 0 dimensions instead of [batch, tokens]": 1}


@pytest.mark.parametrize("name", ["input_ids", "position_ids"])
def test_lists_in_the_place_of_tensors_get_the_models_own_answer_or_error(
    make: Make, graphed: Make, ids: Make, name: str
) -> None:
    model = make()
    given = {"input_ids": ids(1, 3), "position_ids": torch.arange(3, device=ids(1, 3).device)[None]}
    given[name] = given[name].tolist()
    with torch.inference_mode(), pytest.raises(Exception) as untouched:
        model(**given)
    handle = graphed(model)
    with torch.inference_mode(), pytest.raises(untouched.type, match=re.escape(str(untouched.value))):
        model(**given)
    assert handle.stats.reasons == {"input_ids, inputs_embeds or position_ids that are no tensor": 1}


def test_segue_off_in_the_environment_runs_everything_untouched(
    make: Make, graphed: Make, ids: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = graphed(make())
    monkeypatch.setenv("SEGUE", "off")
    with torch.inference_mode():
        handle(ids(1, 3))
    assert handle.stats.reasons == {"SEGUE=off in the environment": 1}


def test_the_handle_passes_calls_and_attributes_on(make: Make, graphed: Make, ids: Make) -> None:
    model = make()
    handle = graphed(model)
    assert handle.config is model.config and handle.generate.__self__ is model and handle.device == model.device
    with torch.inference_mode():
        assert torch.equal(handle(ids(1, 3)).logits, model(ids(1, 3)).logits)
    handle.generation_config = other = copy.deepcopy(model.generation_config)
    assert model.generation_config is other
    with pytest.raises(AttributeError):
        _ = handle.nothing_of_that_name


def test_autocast_runs_untouched(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 5)
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(3):
            model(prompt)
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            got = model(prompt).logits
            with handle.untouched():
                assert torch.equal(model(prompt).logits, got)
    assert handle.stats.reasons == {"autocast is on": 1}


@pytest.mark.parametrize("strategy", ["auto", "breakable"])
def test_drafting_with_the_first_layers_runs_untouched_and_leaves_the_model_whole(
    strategy: str, make: Make, graphed: Make, ids: Make
) -> None:
    model, prompt = make(), ids(1, 9)
    draft = {"assistant_early_exit": 1, "max_new_tokens": 12, "do_sample": False}
    want, plain = model.generate(prompt, **draft), model.generate(prompt, max_new_tokens=12, do_sample=False)
    handle = graphed(model, strategy=strategy)
    for _ in range(3):
        assert torch.equal(model.generate(prompt, **draft), want)
        assert model.config.num_hidden_layers == 3
        assert torch.equal(model.generate(prompt, max_new_tokens=12, do_sample=False), plain)
    assert handle.stats.reasons["config.num_hidden_layers=1, and 3 when the model was accelerated"] > 0
    assert handle.stats.replayed > 0


@pytest.mark.parametrize("strategy", ["auto", "breakable"])
@pytest.mark.parametrize("when", ["before", "used before", "after", "wrapped"])
def test_a_model_that_is_compiled_too_is_served_and_counted(
    when: str, strategy: str, make: Make, graphed: Make, ids: Make
) -> None:
    model, prompt = make(), ids(1, 9)
    with torch.inference_mode():
        want, text = model(prompt).logits, model.generate(prompt, max_new_tokens=4, do_sample=False)
        if "before" in when:
            model.compile(backend="eager")
        if when == "used before":
            model(prompt)
        handle = graphed(model, strategy=strategy)
        if when == "after":
            model.compile(backend="eager")
        call = torch.compile(model, backend="eager") if when == "wrapped" else model
        for _ in range(3):
            torch.testing.assert_close(call(prompt).logits, want)
            assert torch.equal(call.generate(prompt, max_new_tokens=4, do_sample=False), text)
        assert handle.stats.warmed + handle.stats.captured + handle.stats.replayed >= 15 and handle.stats.replayed > 9
        call(ids(1, 65))
        assert handle.stats.reasons["no bucket fits"] == 1
        handle.restore()
        torch.testing.assert_close(call(prompt).logits, want)


def test_a_model_that_is_to_be_compiled_whole_says_what_stands_in_the_way(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 9)
    graphed(model, strategy="breakable")
    with torch.inference_mode(), pytest.raises(Exception, match=r"an accelerated model runs out of segue's graphs: restore\(\)"):
        torch.compile(lambda x: model.base_model(x)[0] + 1, backend="eager", fullgraph=True)(prompt)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strategy", ["breakable", "auto"])
@pytest.mark.parametrize(
    ("under", "reason"),
    [
        (lambda: _default_dtype(torch.float64), "default dtype torch.float64, and torch.float32 before: recapture"),
        (lambda: _matmul_precision("high"), "float32 matmul precision tf32 on CUDA and tf32 on the CPU, and ieee"),
        (_Mode, "function modes _Mode(), and none before: recapture"),
    ],
)
def test_calls_under_other_modes_than_the_captures_run_untouched(
    make: Make, graphed: Make, ids: Make, strategy: str, under: Make, reason: str
) -> None:
    model, prompt = make(), ids(1, 5)
    handle = graphed(model, strategy=strategy)
    with torch.inference_mode():
        for _ in range(3):
            model(prompt)
            model.generate(prompt, max_new_tokens=2, do_sample=False)
        replayed = handle.stats.replayed
        with under():
            got = model(prompt).logits
            with handle.untouched():
                assert torch.equal(model(prompt).logits, got)
            model.generate(prompt, max_new_tokens=2, do_sample=False)
            with pytest.raises(UsageError, match="nothing is captured, as no graph would run " + re.escape(reason)):
                handle.capture()
        assert handle.stats.replayed == replayed
        counted = {k: v for k, v in handle.stats.reasons.items() if k.startswith(reason)}
        assert sum(counted.values()) == handle.stats.eager == 3
        model(prompt)
        assert handle.stats.eager == 3
        with under():
            handle.recapture()
            for _ in range(3):
                model(prompt)
        assert handle.stats.eager == 3


def test_modes_that_are_set_before_anything_is_captured_are_those_of_the_capture(
    make: Make, graphed: Make, ids: Make
) -> None:
    model, prompt = make(), ids(1, 5)
    handle = graphed(model)
    with torch.inference_mode(), _matmul_precision("high"):
        for _ in range(3):
            model(prompt)
    assert handle.stats.replayed and not handle.stats.reasons


@pytest.mark.parametrize("strategy", ["breakable", "auto"])
def test_attention_in_breaks_takes_the_callers_backends(make: Make, graphed: Make, ids: Make, strategy: str) -> None:
    """Prime graphs hold attention, so calls under other backends go to the breakable ones."""
    model, prompt = make(), ids(1, 5)
    handle = graphed(model, strategy=strategy)
    with torch.inference_mode():
        for _ in range(3):
            model.generate(prompt, max_new_tokens=1, do_sample=False)
        with sdpa_kernel(SDPBackend.MATH):
            for _ in range(3):
                got = model.generate(prompt, max_new_tokens=2, do_sample=False)
            with handle.untouched():
                assert torch.equal(model.generate(prompt, max_new_tokens=2, do_sample=False), got)
    assert not handle.stats.reasons


@pytest.mark.parametrize("strategy", ["breakable", "auto"])
def test_a_default_device_changes_nothing(make: Make, graphed: Make, ids: Make, strategy: str) -> None:
    model, prompt = make(), ids(1, 5)
    handle = graphed(model, strategy=strategy)
    with torch.inference_mode():
        for _ in range(3):
            model.generate(prompt, max_new_tokens=2, do_sample=False)
        with torch.device(model.device):
            model.generate(prompt, max_new_tokens=2, do_sample=False)
            handle.recapture()
            handle.capture()
        replayed = handle.stats.replayed
        model.generate(prompt, max_new_tokens=2, do_sample=False)
    assert handle.stats.replayed == replayed + 2
    assert not handle.stats.reasons


@pytest.mark.parametrize("strategy", ["breakable", "auto"])
def test_prompts_given_as_embeddings_generate(make: Make, graphed: Make, ids: Make, strategy: str) -> None:
    model = make()
    with torch.inference_mode():
        embeds = model.get_input_embeddings()(ids(1, 7))
        want = model.generate(inputs_embeds=embeds, max_new_tokens=4)
        handle = graphed(model, strategy=strategy)
        for _ in range(3):
            assert torch.equal(model.generate(inputs_embeds=embeds, max_new_tokens=4), want)
    assert handle.stats.replayed > 0


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("strategy", ["breakable", "auto"])
@pytest.mark.parametrize("way", ["trace", "export"])
def test_a_traced_or_exported_model_is_the_untouched_one(
    make: Make, graphed: Make, ids: Make, strategy: str, way: str
) -> None:
    model = make().requires_grad_(False)  # a trace takes what it reads for constants
    handle = graphed(model, strategy=strategy)
    x, y = ids(1, 7), ids(1, 7, 1)

    def logits(x: torch.Tensor) -> Any:
        return model(x, use_cache=False).logits

    with torch.no_grad():
        for _ in range(3):
            logits(x)
        if way == "trace":
            other = torch.jit.trace(logits, (x,), check_trace=False)
            assert handle.stats.reasons == {"inside torch.jit.trace, which would record one replay's numbers": 1}
        else:
            exported = torch.export.export(model, (x,), {"use_cache": False}).module()
            other = lambda x: exported(x, use_cache=False).logits  # noqa: E731
        torch.testing.assert_close(other(y), logits(y), rtol=1e-4, atol=1e-5)
