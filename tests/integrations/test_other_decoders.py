"""Decoders that aren't captured as they are: layers alone, whole modules as breaks, and what a probe must not be fooled by."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import segue
from integrations.families import FAMILIES
from integrations.family_flows import flows_of
from integrations.family_flows import ids as flow_ids
from segue.devices import Device
from segue.integrations.transformers import accelerate, decoder_parts
from segue.integrations.transformers.argument_names import ArgumentNames
from segue.integrations.transformers.layer_calls import LayerArguments, NotSeen, Seen
from segue.integrations.transformers.probe import jittered

Make = Callable[..., Any]


def _model(name: str, device: Device) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        return FAMILIES[name].make().to(device.torch_device)


@pytest.mark.parametrize(
    ("name", "path", "kinds"),
    [
        ("gpt2", "transformer", {"attn"}),
        ("opt", "model.decoder", {"self_attn"}),
        ("qwen3_next", "model", {"linear_attn", "self_attn"}),
        ("mamba2", "backbone", {"mixer"}),
    ],
)
def test_signatures_tell_the_decoder_and_its_mixers(name: str, path: str, kinds: set[str], device: Device) -> None:
    parts = decoder_parts.parts_of(_model(name, device))
    assert parts is not None and parts.path == path and {mixer.kind for mixer in parts.mixers} == kinds


def test_a_model_with_two_decoders_names_both(make: Make) -> None:
    class Two(type(make())):  # type: ignore[misc]
        def get_decoder(self) -> None:
            return None

    model = make()
    model.second = make("qwen2").model
    model.__class__ = Two
    text = r"several decoders with a cache \(model\.model, model\.second\).*one of them alone"
    with pytest.raises(segue.UsageError, match=text):
        accelerate(model, max_tokens=16, device="emulator" if model.device.type == "cpu" else None)


def test_layers_that_are_given_positions_of_another_dtype(device: Device) -> None:
    model = _model("opt", device)
    ids, positions = flow_ids(1, 6).to(device.torch_device), torch.arange(6, dtype=torch.int32, device=device.torch_device)[None]
    with torch.no_grad(), accelerate(model, max_tokens=16, device=device) as handle:
        for given in (positions.long(), positions, positions.long()):
            with handle.untouched():
                want = model(ids, position_ids=given).logits
            torch.testing.assert_close(model(ids, position_ids=given).logits, want, rtol=1e-4, atol=1e-4)
        assert handle.stats.reasons == {"layer 0 is given position_ids that isn't in torch.int64": 1}


def test_dynamic_rotary_embeddings_are_a_break(make: Make, graphed: Make, ids: Make) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = make(rope_parameters=rope, max_position_embeddings=16)
    with torch.inference_mode():
        lengths = (9, 30, 9)  # the second is longer than what the frequencies were made for
        want = [model(ids(1, n)).logits for n in lengths]
        handle = graphed(model, max_tokens=32)
        for _ in range(3):
            got = [model(ids(1, n)).logits for n in lengths]
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))
    assert handle.stats.replayed and any("LlamaRotaryEmbedding" in name for name in handle.boundaries)


def test_constant_parameters_hide_nothing_from_the_probe(make: Make, device: Device) -> None:
    """A gate of zeros switches the mixing of tokens off, until the weights are others."""
    model = make()

    class Gated(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.gate * x.cumsum(dim=1)

    model.model.layers[0].mlp.__class__ = Gated
    model.model.layers[0].mlp.gate = nn.Parameter(torch.zeros(64, device=model.device))
    with pytest.raises(segue.UsageError, match="differs from the untouched model's"):
        accelerate(model, max_tokens=16, device=device)


def test_a_probe_writes_no_tensor_of_the_models(make: Make, graphed: Make) -> None:
    model = make()
    before = {name: (p, p._version, p.detach().clone()) for name, p in model.named_parameters()}
    graphed(model)
    for name, p in model.named_parameters():
        same, version, value = before[name]
        assert p is same and p._version == version and torch.equal(p, value)


def test_jitter_ends_with_its_block(make: Make) -> None:
    norm = make().model.norm
    before = norm.weight
    with pytest.raises(KeyError), jittered(norm):
        assert norm.weight is not before and len(norm.weight.unique()) > 1
        raise KeyError
    assert norm.weight is before


def test_a_forward_between_layers_is_refused_by_name(device: Device) -> None:
    model = _model("opt", device)



    layers = model.model.decoder.layers
    first = layers[0].forward

    class Shifting(type(layers[1])):  # type: ignore[misc]
        def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(hidden_states * 2, *args, **kwargs)

    layers[1].__class__ = Shifting
    with pytest.raises(segue.UsageError, match="does something with the hidden states between layers 0 and 1"):
        accelerate(model, max_tokens=16, device=device)
    assert layers[0].forward == first and "forward" not in vars(layers[0])


def test_a_call_that_gives_the_layers_something_else_runs_untouched(device: Device, graphed: Make) -> None:
    model = _model("opt", device)
    ids = torch.arange(2, 9, device=device.torch_device)[None]
    handle = graphed(model, max_tokens=16)
    with torch.inference_mode():
        want = model.model.decoder(ids).last_hidden_state
        for _ in range(3):
            model.model.decoder(ids)
        got = model.model.decoder(ids, sliding_window=3).last_hidden_state
        model.model.decoder(ids, nobody_reads_this=3)
    assert torch.allclose(got, want, atol=1e-5) and handle.stats.replayed >= 2
    assert dict(handle.stats.reasons) == {"layer 0 is given sliding_window too": 1}


@pytest.mark.parametrize("name", ["llava, image", "qwen2_5_vl, image"])
def test_an_image_in_the_prompt_is_seen(name: str) -> None:
    """Only the outer model reads the image; the tokens of the second have three positions each."""
    model, flow = FAMILIES[name].make(), flows_of(FAMILIES[name])["decode"]
    handle = accelerate(model, buckets=[1, 8, 16, 32], device="emulator")
    with torch.no_grad():
        with handle.untouched():
            want = flow(model)
        for _ in range(3):
            assert torch.equal(flow(model)["tokens"], want["tokens"])
    assert handle.stats.replayed and not handle.stats.eager


def test_early_exit_runs_untouched(device: Device, graphed: Make) -> None:
    model = _model("deepseek_v3", device)
    ids = torch.arange(2, 9, device=device.torch_device)[None]
    handle = graphed(model, max_tokens=16)
    with torch.inference_mode():
        model.config.num_hidden_layers -= 1
        with handle.untouched():
            want = model.model(ids, use_cache=False).last_hidden_state
        assert torch.equal(model.model(ids, use_cache=False).last_hidden_state, want)
        model.config.num_hidden_layers += 1
    assert handle.stats.eager == 1


def test_the_state_of_a_recurrent_layer_is_that_of_the_real_tokens(device: Device, graphed: Make) -> None:
    """A bucket of 16 and 9 tokens, then a chunk: padding would have reached convolution and state."""
    model = _model("qwen3_next", device)
    ids = torch.randint(2, 60, (1, 14), generator=torch.Generator().manual_seed(0)).to(device.torch_device)
    handle = graphed(model, buckets=[8, 16])
    name = handle._reader.cache_name

    def conversation() -> list[Tensor]:
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            return [model(part, **{name: cache}, use_cache=True).logits for part in (ids[:, :9], ids[:, 9:13], ids[:, 13:])]

    with handle.untouched():
        want = conversation()
    for _ in range(3):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(conversation(), want, strict=True))
    assert handle.stats.replayed and not handle.stats.eager


@pytest.mark.parametrize(
    ("name", "given", "changes"),
    [
        ("t5", "decoder_input_ids", {}),  # the first layer's attention returns the bias that the others take
        ("switch_transformers", "decoder_input_ids", {"expert_capacity": 6}),  # so many tokens of a sequence, not of the batch
        ("recurrent_gemma", "input_ids", {}),  # its recurrent blocks keep their states themselves, and take no cache
    ],
)
def test_what_passes_between_tokens_or_layers_beside_the_cache_is_live(
    name: str, given: str, changes: dict[str, Any], device: Device, graphed: Make
) -> None:
    family, place = FAMILIES[name], device.torch_device
    model, own = (family.make(**changes).to(place) for _ in range(2))
    handle = graphed(model, buckets=[1, 2, 4, 8, 16, 32])
    rest = {"input_ids": flow_ids(4, 6).to(place)} if given != "input_ids" else {}
    prompts = {**rest, given: flow_ids(4, 8).to(place)}
    text = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        want, tokens = own(**prompts).logits, own.generate(flow_ids(2, 5).to(place), **text)
        for _ in range(3):
            torch.testing.assert_close(model(**prompts).logits, want, atol=1e-4, rtol=1e-4)
            assert torch.equal(model.generate(flow_ids(2, 5).to(place), **text), tokens)
    assert handle.stats.replayed and not handle.stats.eager


def test_a_mixer_break_is_named_among_what_runs_live(device: Device, graphed: Make) -> None:
    handle = graphed(_model("mamba2", device), max_tokens=16)
    assert any("Mamba2Mixer" in name for name in handle.boundaries)
    assert "compiled layers" not in handle.strategies


def test_compile_is_left_out_where_layers_run_alone(device: Device, graphed: Make, caplog: pytest.LogCaptureFixture) -> None:
    handle = graphed(_model("mamba2", device), max_tokens=16, compile=True)
    assert "compiled layers" in handle.report() and "runs unfused" in caplog.text
    assert handle.runner.ladder[0] == 1  # a single row is a constant to compiled code alone


def test_what_has_a_row_a_token_is_told_from_two_forwards() -> None:
    def seen(batch: int, length: int, kept: int) -> Seen:
        rows, mask = torch.zeros(batch, length, 4), torch.zeros(batch, 1, length, kept)
        rope = torch.zeros(1, length, 2), torch.zeros(batch, length, 2)
        call = {"rope": rope, "mask": mask, "states": torch.zeros(batch, 6, 4)}
        return Seen(rows, [{**call, "flag": True}], batch, length)

    arguments = LayerArguments(seen(2, 5, 5), seen(3, 4, 9))
    assert [(name, path) for _, name, path, _ in arguments.places] == [("rope", (0,)), ("rope", (1,))]
    given = arguments.given(0, [torch.ones(7, 2), torch.ones(7, 2)])
    assert given["mask"] is None and given["flag"] is True and given["states"].shape == (2, 6, 4)
    assert [t.shape for t in given["rope"]] == [(1, 7, 2)] * 2
    odd = seen(2, 5, 5)
    with pytest.raises(NotSeen, match="hasn't one row a token"):
        LayerArguments(Seen(torch.zeros(3, 3), odd.calls, 2, 5), seen(3, 4, 9))


def test_names_that_code_could_read(make: Make) -> None:
    read = ArgumentNames(make().model)
    assert "sliding_window" in read and "attention_mask" in read
    assert "tokenizer" not in read and "my_own_note" not in read
