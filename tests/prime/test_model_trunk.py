"""Transformers models as trunks: the gate passes, the caller's cache is filled, and the model goes on from it."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch

import segue
from prime.prompts import prompt
from segue.check.prime_gate import check_prime
from segue.devices import Device

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers")
    from transformers import (
        DynamicCache,
        LlamaForCausalLM,
        LlamaModel,
        MistralForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        StaticCache,
    )

from segue.integrations.transformers import names
from segue.integrations.transformers.prime_trunk import ModelTrunk

_SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
BUCKET = 24


def build(family: str, device: Device, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    cls = FAMILIES[family]
    torch.manual_seed(0)
    own = {"sliding_window": None} if family == "mistral" else {}
    return cls(cls.config_class(**{**_SIZE, **own, **changes})).to(device.torch_device, dtype).eval().requires_grad_(False)


def cache_of(model: Any) -> Any:
    return DynamicCache(config=model.config)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_each_family_passes_the_gate(device: Device, family: str) -> None:
    with segue.PrimeGraph(ModelTrunk(build(family, device)), BUCKET, device=device) as prime:
        report = check_prime(prime, (1, 20, 24), steps=4)
    assert report.ok, report.findings
    assert report.rows[0]["cache"] == "4 tensors same"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_prompts_pass_the_gate_with_either_attention(device: Device, attention: str, dtype: torch.dtype) -> None:
    model = build("qwen3", device, dtype)
    model.set_attn_implementation(attention)
    with segue.PrimeGraph(ModelTrunk(model), BUCKET, requests=3, device=device) as prime:
        report = check_prime(prime, (1, 20), steps=4)
    assert report.ok, report.findings
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("with_config", [True, False])
def test_the_model_goes_on_from_the_callers_cache_as_from_its_own(device: Device, with_config: bool) -> None:
    model = build("llama", device)
    with segue.PrimeGraph(ModelTrunk(model), BUCKET, device=device) as prime:
        for n in (1, 24, 13):
            tokens = prompt(n, device)
            mine = cache_of(model) if with_config else DynamicCache()
            first = prime.run(tokens, mine).logits
            name = names.cache_name(model.forward)
            with torch.no_grad():
                own = cache_of(model)
                want = model(tokens[None], use_cache=True, **{name: own}).logits[:, -1]
                torch.testing.assert_close(first, want, rtol=1e-4, atol=1e-5)
                assert mine.get_seq_length() == n and len(mine.layers) == 2
                for a, b in zip(mine.layers, own.layers, strict=True):
                    torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-5)
                    torch.testing.assert_close(a.values, b.values, rtol=1e-4, atol=1e-5)
                    assert not a.keys.is_inference() and type(a) is type(b)
                for _ in range(5):
                    token = want.argmax(-1)
                    got = model(token[None], use_cache=True, **{name: mine}).logits[:, -1]
                    want = model(token[None], use_cache=True, **{name: own}).logits[:, -1]
                    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inference", [False, True])
def test_the_callers_cache_holds_tensors_like_those_of_an_eager_forward(device: Device, inference: bool) -> None:
    model = build("qwen3", device, torch.bfloat16)
    name = names.cache_name(model.forward)
    with segue.PrimeGraph(ModelTrunk(model), BUCKET, device=device) as prime:
        for n in (BUCKET, 7):
            mine, own = cache_of(model), cache_of(model)
            with torch.inference_mode(inference), torch.no_grad():
                prime.run(prompt(n, device), mine)
                model(prompt(n, device)[None], use_cache=True, **{name: own})
            for a, b in zip(mine.layers, own.layers, strict=True):
                for got, want in ((a.keys, b.keys), (a.values, b.values)):
                    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
                    assert got.is_inference() is want.is_inference() is inference
                    assert not got._is_view() and not got.requires_grad
    if not inference:
        first, *others = [t for layer in mine.layers for t in (layer.keys, layer.values)]
        before = [t.clone() for t in others]
        first.zero_()  # outside no_grad too
        assert first._version == 1 and not any(t._version for t in others)
        assert all(map(torch.equal, others, before))


def test_attention_that_is_no_longer_causal_is_seen_in_any_layer_before_a_run(device: Device) -> None:
    model = build("llama", device)
    with segue.PrimeGraph(ModelTrunk(model), BUCKET, device=device) as prime:
        prime.run(prompt(5, device), cache_of(model))
        attention = model.model.layers[1].self_attn
        attention.is_causal = False
        with pytest.raises(segue.SegueError, match=r"layers\.1\.self_attn\.is_causal is False"):
            prime.run(prompt(5, device), cache_of(model))
        attention.is_causal = True
        prime.run(prompt(5, device), session := cache_of(model))
        assert session.get_seq_length() == 5


def test_all_layers_are_copied_out_at_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", device)
    with segue.PrimeGraph(ModelTrunk(model), BUCKET, device=device) as prime:
        seen: list[int] = []
        copy = prime.copies.copy
        monkeypatch.setattr(prime.copies, "copy", lambda pairs: (seen.append(len(pairs)), copy(pairs)))
        prime.run(prompt(9, device), cache_of(model))
    assert seen == [1]


def test_a_session_that_is_no_fresh_cache_of_this_model_is_refused_and_left_as_it_was(device: Device) -> None:
    model, other = build("llama", device), build("llama", device, num_hidden_layers=3)
    sliding = build("mistral", device, sliding_window=8)
    with segue.PrimeGraph(ModelTrunk(model), BUCKET, device=device) as prime:
        used = cache_of(model)
        prime.run(prompt(9, device), used)
        keys = used.layers[0].keys
        cases: list[tuple[Any, str]] = [
            (used, "holds 9 tokens already"),
            (cache_of(other), "a session with 3 layers is of another model"),
            (cache_of(sliding), "a session with layers of type DynamicSlidingWindowLayer"),
            (
                StaticCache(config=model.config, max_cache_len=32),
                "is a StaticCache, and this trunk's caches are DynamicCache",
            ),
            (None, "is a NoneType"),
        ]
        for session, message in cases:
            before = session and [layer.is_initialized for layer in session.layers]
            with pytest.raises(segue.SegueError, match=message):
                prime.run(prompt(5, device), session)
            assert before == (session and [layer.is_initialized for layer in session.layers])
        assert used.layers[0].keys is keys and used.get_seq_length() == 9


def test_a_model_that_no_prime_graph_serves_is_refused_by_name(device: Device) -> None:
    with pytest.raises(segue.SegueError, match="MistralForCausalLM has layers whose cache is a DynamicSlidingWindowLayer"):
        ModelTrunk(build("mistral", device, sliding_window=8))
    with pytest.raises(segue.SegueError, match="LlamaModel has no language-model head"):
        ModelTrunk(LlamaModel(LlamaForCausalLM.config_class(**_SIZE)).to(device.torch_device).eval())
    with pytest.raises(segue.SegueError, match="training mode"):
        ModelTrunk(build("llama", device).train())
    model = build("llama", device)
    trunk = ModelTrunk(model)
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(segue.SegueError, match=r"computes attention by 'flex_attention'.*set_attn_implementation\('sdpa'\)"):
        segue.PrimeGraph(trunk, BUCKET, device=device)
    assert model.config._attn_implementation == "flex_attention"


def test_a_trunk_of_a_model_that_is_accelerated_later_runs_the_untouched_decoder(device: Device) -> None:
    from segue.integrations.transformers import accelerate

    model = build("qwen2", device)
    trunk = ModelTrunk(model)
    tokens = prompt(9, device)
    with (
        accelerate(model, max_tokens=32, device=device) as graphed,
        segue.PrimeGraph(trunk, BUCKET, device=device) as prime,
    ):
        got = prime.run(tokens, cache_of(model)).logits
        with torch.no_grad(), graphed.untouched():
            want = model(tokens[None]).logits[:, -1]
        assert graphed.stats.replayed == graphed.stats.captured == 0
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_benchmark_measures_prime_beside_its_correctness(device: Device) -> None:
    from segue.bench import prime_latency as bench
    from segue.bench.ttft import Shape

    shape = Shape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48, vocabulary=61)
    result = bench.measure(device, shape, torch.float32, lengths=(16, 3), times=2)
    assert result.right and [row["tokens"] for row in result.rows] == [3, 16]
    for row in result.rows:
        assert row["prime = reference"] == "bit for bit" and row["copied MB"] > 0
        assert min(row["eager ms"], row["breakable ms"], row["prime ms"], row["recording ms"]) > 0
        assert (row["kernel sum ms"] is not None) is device.traits.timing


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)  # too much, emulated
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_shape_of_qwen3_passes_the_gate(device: Device, dtype: str) -> None:
    from segue.bench import prime_latency as bench

    with segue.PrimeGraph(getattr(bench, dtype)(), 512, device=device) as prime:
        report = check_prime(prime, steps=4)
    assert report.ok, report.findings


@pytest.mark.parametrize("where", ["config", "layer"])
def test_a_model_that_is_not_causal_is_refused(device: Device, where: str) -> None:
    model = build("llama", device)
    with segue.PrimeGraph(ModelTrunk(model), BUCKET, device=device) as prime:
        if where == "config":
            model.config.is_causal = False
        else:
            model.model.layers[1].self_attn.is_causal = False
        said = "config.is_causal is False" if where == "config" else "layers.1.self_attn.is_causal is False"
        with pytest.raises(segue.SegueError, match=said):
            prime.run(prompt(9, device), cache_of(model))
    with pytest.raises(segue.SegueError, match=said):
        ModelTrunk(model)
