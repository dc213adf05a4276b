"""The hidden states of all layers, out of graphs of their own, beside the untouched model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from integrations import families
from segue.devices import Device
from segue.integrations.transformers import accelerate, names

Make = Callable[..., Any]

ASKED = {"output_hidden_states": True}
# Whole forwards (with an embedding that is scaled, and layers of two kinds), and layers alone, recorded before and after them.
SERVED = ["llama", "gpt2", "gemma2", "mixtral", "bloom", "deepseek_v3", "qwen3_next", "mamba"]

NO_CHUNKS = {"bloom", "mamba", "qwen3_next"}  # of several tokens, by themselves


def same(got: Any, want: Any, real: Tensor) -> None:
    """Compare outputs where there is a real token, ``real`` [B, T], to rounding."""
    assert got.keys() == want.keys() and len(got.hidden_states) == len(want.hidden_states)
    for a, b in zip((got.logits, *got.hidden_states), (want.logits, *want.hidden_states), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a[real], b[real], rtol=1e-4, atol=1e-4)


@pytest.fixture
def family(device: Device) -> Iterator[Make]:
    """``family(name)``: a model of that family, and its handle, which is restored at the test's end."""
    handles: list[Any] = []

    def start(name: str, **options: Any) -> tuple[Any, Any]:
        model = families.FAMILIES[name].make().to(device.torch_device)
        handles.append(accelerate(model, max_tokens=64, device=device, **options))
        return model, handles[-1]

    yield start
    for handle in handles:
        handle.restore()


@pytest.mark.parametrize("name", SERVED)
def test_prompts_chunks_steps_and_padded_batches_give_the_untouched_hidden_states(
    name: str, family: Make, device: Device
) -> None:
    model, handle = family(name)
    field, place = names.cache_name(type(model).forward), device.torch_device
    with torch.inference_mode():
        for seed, (batch, missing) in enumerate([(1, 0), (2, 3), (1, 0), (2, 3), (1, 0), (2, 3)]):
            torch.manual_seed(seed)
            past, caches = 0, [None, None]
            for n in (11 - seed, 1, 1) if name in NO_CHUNKS else (11 - seed, 3, 1, 1):
                past += n
                mask = torch.ones(batch, past, dtype=torch.long, device=place)
                mask[0, :missing] = 0
                given = {"input_ids": torch.randint(1, 250, (batch, n)).to(place), "use_cache": True, **ASKED}
                if n == past or name != "mamba":  # whose state has left padding out
                    given["attention_mask"] = mask
                device.default_pool().poison()
                got = model(**given, **{field: caches[0]})
                with handle.untouched():
                    want = model(**given, **{field: caches[1]})
                same(got, want, mask[:, -n:].bool())
                caches = [got[field], want[field]]
    stats = handle.stats
    assert stats.replayed == stats.strategies["hidden states"] > 8 and not stats.eager
    assert "hidden states" in handle.strategies and "replayed: hidden states" in handle.report()
    handle.restore()
    with torch.inference_mode():
        assert len(model(given["input_ids"], **ASKED).hidden_states) == len(want.hidden_states)
    assert handle.stats.replayed == stats.replayed and not handle.stats.eager


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "bart", "gemma3"])
def test_generate_gives_the_untouched_hidden_states(name: str, family: Make, device: Device) -> None:
    model, handle = family(name)
    prompt = torch.randint(3, 200, (2, 7), generator=torch.Generator().manual_seed(0)).to(device.torch_device)
    given = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, **ASKED}
    outs = [model.generate(prompt, **given) for _ in range(3)]
    with handle.untouched():
        want = model.generate(prompt, **given)
    key = "decoder_hidden_states" if name == "bart" else "hidden_states"
    for got in outs:
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-4)
    assert handle.stats.replayed > 6 and not handle.stats.eager


def test_calls_that_ask_for_no_hidden_states_keep_their_graphs(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 9)
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(3):
            plain, asked = model(prompt), model(prompt, **ASKED)
        torch.testing.assert_close(plain.logits, asked.logits)
        assert plain.hidden_states is None and len(asked.hidden_states) == 4
        assert asked.hidden_states[-1] is not asked.hidden_states[-2]
        as_tuple = model.model(prompt, **ASKED, return_dict=False)
        with handle.untouched():
            want = model.model(prompt, **ASKED, return_dict=False)
        assert [type(part) for part in as_tuple] == [type(part) for part in want]
        torch.testing.assert_close(as_tuple[2], want[2])
        with handle.reference():
            assert all(map(torch.equal, model(prompt, **ASKED).hidden_states, asked.hidden_states))
    assert handle.stats.strategies == {"prime": 1, "hidden states": 2} and handle.stats.buckets == (16,)


def test_a_body_of_the_callers_own_gives_no_hidden_states(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 9)
    handle = graphed(model)
    with torch.inference_mode(), handle.with_body(lambda x, position_ids, ctx: x):
        assert len(model(prompt, **ASKED).hidden_states) == 4
    assert handle.stats.reasons == {"output_hidden_states was asked for": 1}


def test_a_config_that_asks_for_hidden_states_gets_them(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(output_hidden_states=True), ids(1, 9)
    handle = graphed(model)
    for _ in range(3):
        text = model.generate(prompt, max_new_tokens=3, do_sample=False, return_dict_in_generate=False)
    with torch.inference_mode():
        got = model(prompt, logits_to_keep=1).hidden_states
        with handle.untouched():
            torch.testing.assert_close(got, model(prompt).hidden_states)
            want = model.generate(prompt, max_new_tokens=3, do_sample=False, return_dict_in_generate=False)
            assert torch.equal(want, text)
    assert handle.stats.strategies["hidden states"] > 3 and not handle.stats.eager


def test_a_recapture_takes_in_a_change_for_hidden_states_too(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 9)
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(3):
            model(prompt, **ASKED)
        model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
        changed = model(prompt, **ASKED).hidden_states
        assert handle.stats.eager == 1 and handle.stats.replayed == 1
        handle.recapture()
        assert handle.stats.buckets == () and "hidden states" not in handle.strategies
        for _ in range(3):
            torch.testing.assert_close(model(prompt, **ASKED).hidden_states, changed)
    assert handle.stats.eager == 1 and handle.stats.strategies == {"hidden states": 2}


def test_hidden_states_that_graphs_cant_give_are_the_untouched_models_and_say_why(family: Make, device: Device) -> None:
    model, handle = family("gemma3n_text")
    prompt = torch.randint(1, 250, (1, 5)).to(device.torch_device)
    with torch.inference_mode():
        for _ in range(2):
            assert model(prompt, **ASKED).hidden_states[0].dim() == 4
    ((reason, count),) = handle.stats.reasons.items()
    assert count == 2 and "output_hidden_states, which graphs can't serve: hidden state 0 has shape [4, 2, 5, 64]" in reason
    assert "Leave out output_hidden_states" in handle.report() and "hidden state 0" in handle.strategies["hidden states"]
    assert handle.stats.warmed == 0


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("name", ["bert", "modernbert", "vit"])
def test_an_encoders_hidden_states_are_served_beside_its_plain_calls(
    name: str, config: bool, device: Device, graphed: Make
) -> None:
    model = families.FAMILIES[name].make(output_hidden_states=config).to(device.torch_device)
    handle = graphed(model)
    asked, plain = ({}, {"output_hidden_states": False}) if config else (ASKED, {})
    with torch.inference_mode():
        for seed, (batch, n) in enumerate([(1, 9), (2, 9), (1, 12), (2, 12), (1, 3), (2, 3), (5, 4), (5, 4), (5, 4)]):
            torch.manual_seed(seed)
            real = torch.ones(batch, n, dtype=torch.long)
            real[0, : n // 3 if seed % 2 else 0] = 0
            given = {"input_ids": torch.randint(5, 250, (batch, n)), "attention_mask": real}
            if name == "vit":
                given = {"pixel_values": torch.randn(batch, 3, 28, 28)}
            given = {k: t.to(device.torch_device) for k, t in given.items()}
            device.default_pool().poison()
            for asks in (asked, plain):
                got = model(**given, **asks)
                with handle.untouched():
                    want = model(**given, **asks)
                assert got.keys() == want.keys()
                rows = slice(None) if name == "vit" else real.bool().to(device.torch_device)
                for a, b in zip(got.get("hidden_states") or (), want.get("hidden_states") or (), strict=True):
                    torch.testing.assert_close(a[rows], b[rows], rtol=1e-4, atol=1e-4)
            as_tuple = model(**given, **asked, return_dict=False)
            assert [type(part) for part in as_tuple] == [type(part) for part in model(**given, **asked).to_tuple()]
    stats = handle.stats
    assert stats.strategies["hidden states"] > stats.strategies["breakable"] > 2 and not stats.eager
    assert handle.strategies == {"whole forward": "", "hidden states": ""}
    handle.recapture()
    assert handle.strategies == {"whole forward": ""} and not handle.stats.buckets


def test_hidden_states_that_only_the_forward_around_a_graph_records_run_untouched(device: Device, graphed: Make) -> None:
    model = families.FAMILIES["wav2vec2"].make().to(device.torch_device)
    handle, sound = graphed(model), torch.randn(1, 400, generator=torch.Generator().manual_seed(0)).to(device.torch_device)
    with torch.inference_mode():
        for _ in range(3):
            model(sound)
            got = model(sound, **ASKED).hidden_states
        with handle.untouched():
            torch.testing.assert_close(got, model(sound, **ASKED).hidden_states)
    assert handle.stats.reasons == {"output_hidden_states, which graphs can't serve: its forward gives none": 3}
    assert handle.stats.replayed == 1


def test_compiled_layers_give_their_hidden_states(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 9)
    handle = graphed(model, compile=True)
    with torch.inference_mode():
        for _ in range(3):
            got = model(prompt, **ASKED).hidden_states
        with handle.reference():
            assert all(map(torch.equal, got, model(prompt, **ASKED).hidden_states))
        with handle.untouched():
            torch.testing.assert_close(got, model(prompt, **ASKED).hidden_states, rtol=1e-4, atol=1e-4)
    assert handle.stats.strategies == {"hidden states": 1}
