"""Models without a decoder: their whole forward is one graph a bucket, equal to the untouched one on every real token."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import segue
from segue.devices import Device
from segue.errors import UsageError
from segue.integrations.transformers import encoder_buckets, encoder_probe
from segue.integrations.transformers.encoder_forward import as_while_capturing

_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 80,
    "type_vocab_size": 2,
    "pad_token_id": 1,
}
_SPECIAL = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3, "mask_token_id": 4}
_BODY = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_IMAGE = {**{name: _TEXT[name] for name in _BODY}, "image_size": 16, "patch_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _TEXT,
    "roberta": _TEXT,
    "xlm-roberta": _TEXT,
    "electra": {**_TEXT, "embedding_size": 24},
    "albert": {**_TEXT, "embedding_size": 24},
    "mpnet": _TEXT,
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 61, "max_position_embeddings": 80},
    "modernbert": {**_TEXT, **_SPECIAL, "local_attention": 8, "global_attn_every_n_layers": 2},
    "eurobert": {**_TEXT, **_SPECIAL, "num_key_value_heads": 2, "head_dim": 8},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 61, "pad_token_id": 1},
    "vit": _IMAGE,
    "dinov2": {**_IMAGE, "mlp_ratio": 2},
    "wav2vec2": {
        **{k: v for k, v in _TEXT.items() if k not in ("max_position_embeddings", "type_vocab_size")},
        **{"conv_dim": (16, 16), "conv_kernel": (8, 4), "conv_stride": (8, 4), "num_feat_extract_layers": 2},
        **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4},
    },
}
HEADS = [
    ("bert", "AutoModelForSequenceClassification"),
    ("roberta", "AutoModelForTokenClassification"),
    ("distilbert", "AutoModelForQuestionAnswering"),
    ("modernbert", "AutoModelForMaskedLM"),
    ("vit", "AutoModelForImageClassification"),
]


def build(family: str, device: Device, kind: str = "AutoModel", **changes: Any) -> Any:
    """A tiny random model, none of whose parameters is constant."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**CONFIGS[family], **changes})
    kind = "T5EncoderModel" if family == "t5" else kind
    cls = getattr(transformers, kind)
    model = getattr(cls, "from_config", cls)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.to(device.torch_device)


def text(device: Device, batch: int, length: int, seed: int = 0, left: bool = False) -> dict[str, Tensor]:
    """Random ids, and a mask that leaves rows of several lengths."""
    draw = torch.Generator().manual_seed(100 * seed + 10 * batch + length)
    ids = torch.randint(5, 61, (batch, length), generator=draw)
    real = torch.randint(1, length + 1, (batch, 1), generator=draw)
    real[0] = length
    at = torch.arange(length)
    mask = at >= length - real if left else at < real
    given = {"input_ids": ids.masked_fill(~mask, 1), "attention_mask": mask.long()}
    return {name: t.to(device.torch_device) for name, t in given.items()}


def inputs(model: Any, device: Device, batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """What the model takes: text, an image, or sound."""
    draw = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=draw).to(device.torch_device)}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(batch, 32 * length, generator=draw).to(device.torch_device)}
    return text(device, batch, length, seed, left=seed % 2 == 1)


def real_rows(t: Tensor, given: dict[str, Tensor]) -> Tensor:
    mask = given.get("attention_mask")
    return t[mask.bool()] if mask is not None and t.shape[:2] == mask.shape else t


def compare(handle: Any, given: dict[str, Tensor]) -> None:
    """Compare a call with the untouched model's: the same fields, types and shapes, and 1e-5 on real tokens."""
    with torch.no_grad():
        ours = handle(**given)
        with handle.untouched():
            want = handle.module(**given)
    assert type(ours) is type(want) and list(ours) == list(want)
    for name, t in want.items():
        if not isinstance(t, Tensor):
            continue
        assert ours[name].shape == t.shape and ours[name].dtype is t.dtype and ours[name].is_contiguous()
        torch.testing.assert_close(real_rows(ours[name], given), real_rows(t, given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "kind"), [*((name, "AutoModel") for name in CONFIGS), *HEADS])
def test_the_whole_forward_is_one_graph_a_bucket(
    device: Device, graphed: Callable[..., Any], family: str, kind: str
) -> None:
    model = build(family, device, kind)
    handle = graphed(model, buckets=[8, 16])
    for seed, (batch, length) in enumerate([(1, 8), (1, 5), (1, 7), (3, 15), (4, 11), (3, 16)]):
        compare(handle, inputs(model, device, batch, length, seed))
    stats = handle.stats
    assert (stats.warmed, stats.captured, stats.replayed, stats.eager) == (2, 2, 2, 0)
    if model.main_input_name == "pixel_values":
        assert stats.buckets == (1, 4)
    else:
        assert stats.buckets == (8, 64) and handle.graphs_of(5) == (8, 1, 0)


@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert"])
def test_eager_attention_is_served_too(device: Device, graphed: Callable[..., Any], family: str) -> None:
    handle = graphed(build(family, device, attn_implementation="eager"), buckets=[16])
    for seed in range(4):
        compare(handle, text(device, 2, 9 + seed, seed, left=seed % 2 == 1))
    assert handle.stats.replayed == 2 and handle.stats.eager == 0


def test_token_types_and_positions_go_into_the_graph(device: Device, graphed: Callable[..., Any]) -> None:
    handle = graphed(build("bert", device), buckets=[16])
    for seed in range(4):
        given = text(device, 2, 9, seed)
        types = torch.arange(18, device=device.torch_device).view(2, 9) % 2
        positions = torch.arange(9, device=device.torch_device).flip(0)[None]
        compare(handle, {**given, "token_type_ids": types, "position_ids": positions})
    assert handle.stats.replayed == 2 and handle.stats.eager == 0


def test_without_a_mask_all_tokens_are_real(device: Device, graphed: Callable[..., Any]) -> None:
    handle = graphed(build("bert", device), buckets=[16])
    for batch in (1, 1, 1, 3, 3, 3):
        compare(handle, {"input_ids": text(device, batch, 9, batch)["input_ids"]})
    assert handle.stats.replayed == 2


def test_a_replay_gives_the_reference_bit_for_bit_and_later_calls_leave_it_alone(
    device: Device, graphed: Callable[..., Any]
) -> None:
    handle = graphed(build("bert", device), buckets=[16])
    with torch.inference_mode():
        for batch in (1, 3):
            first, second = text(device, batch, 9, 1), text(device, batch, 16, 2)
            handle(**first), handle(**second)
            kept = handle(**first)
            copied = kept.last_hidden_state.clone()
            handle(**second)
            with handle.reference():
                want = handle(**first)
            assert torch.equal(kept.last_hidden_state, copied) and torch.equal(kept.last_hidden_state, want.last_hidden_state)
            assert torch.equal(kept.pooler_output, want.pooler_output)


def test_a_batch_of_more_than_max_tokens_runs_in_pieces(device: Device, graphed: Callable[..., Any]) -> None:
    handle = graphed(build("bert", device), max_tokens=64)  # 4 rows of 16 tokens
    for seed in range(3):
        compare(handle, text(device, 11, 13, seed))
    assert handle.stats.buckets == (64,) and handle.stats.captured == 1
    assert handle.stats.eager == 0
    compare(handle, text(device, 5, 64))  # one row a piece
    assert 64 in handle.stats.buckets


def test_lengths_are_few_where_a_graph_takes_no_longer_for_padding() -> None:
    grid = encoder_buckets.EncoderGrid(None, 2048, 512)
    assert list(grid.lengths) == [16, 32, 64, 128, 192, 256, 384, 512]
    assert [grid.rows(n).max for n in grid.lengths] == [32, 32, 32, 16, 8, 8, 4, 4]
    assert list(encoder_buckets.EncoderGrid(None, 100, None).lengths) == [16, 32, 64, 100]
    assert list(grid.rows(0)) == [1, 2, 4, 8, 16, 32]


def test_capture_takes_a_single_row_and_the_most_rows_of_each_length(device: Device, graphed: Callable[..., Any]) -> None:
    handle = graphed(build("bert", device), max_tokens=32)
    summary = handle.capture()
    assert summary.buckets == (16, 32) and summary.segments == 3 and summary.breaks == 0  # 1 x 16, 2 x 16, 1 x 32
    given = text(device, 2, 9)
    compare(handle, {**given, "token_type_ids": torch.zeros_like(given["input_ids"])})
    assert handle.stats.replayed == 1


def test_positions_that_end_before_the_largest_bucket_are_never_exceeded(device: Device, graphed: Callable[..., Any]) -> None:
    handle = graphed(build("roberta", device, max_position_embeddings=20), max_tokens=40)  # 18 tokens, as positions begin at 2
    assert handle.capture().buckets[-1] == 40
    compare(handle, text(device, 1, 18))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"labels": torch.tensor([0, 1])}, "the argument labels"),
        ({"output_hidden_states": [1]}, "output_hidden_states was asked for"),
        ({"output_attentions": True}, "output_attentions was asked for"),
        ({"inputs_embeds": torch.zeros(2, 9, 32), "input_ids": None}, "the argument inputs_embeds"),
        ({"attention_mask": torch.ones(2, 1, 9, 9)}, "attention_mask that is not [batch, tokens]"),
    ],
)
def test_what_a_graph_cant_serve_runs_untouched_and_is_counted(
    device: Device, graphed: Callable[..., Any], change: dict[str, Any], reason: str
) -> None:
    model = build("bert", device, "AutoModelForSequenceClassification", attn_implementation="eager")
    handle = graphed(model, buckets=[16])
    moved = {k: t.to(device.torch_device) if isinstance(t, Tensor) else t for k, t in change.items()}
    compare(handle, {k: t for k, t in {**text(device, 2, 9), **moved}.items() if t is not None})
    assert handle.stats.reasons == {reason: 1} and handle.stats.warmed == 0


def test_training_and_gradients_run_untouched_and_are_counted(device: Device, graphed: Callable[..., Any]) -> None:
    model = build("bert", device)
    handle = graphed(model, buckets=[16])
    given = text(device, 2, 9)
    handle(**given).last_hidden_state.sum().backward()
    assert next(model.parameters()).grad is not None
    model.train()
    with torch.no_grad():
        handle(**given)
    model.eval()
    assert handle.stats.reasons == {"gradients are required": 1, "BertModel is in training mode": 1}
    model.requires_grad_(False)
    handle(**given)
    assert handle.stats.warmed == 1


def test_a_row_longer_than_every_bucket_runs_untouched(device: Device, graphed: Callable[..., Any]) -> None:
    handle = graphed(build("bert", device), buckets=[8])
    compare(handle, text(device, 2, 9))
    assert handle.stats.reasons == {"no bucket fits": 1}


def test_what_changed_since_the_capture_is_noticed_and_recapture_takes_it_in(
    device: Device, graphed: Callable[..., Any]
) -> None:
    model = build("bert", device)
    handle = graphed(model, buckets=[16])
    given = text(device, 1, 9)
    for _ in range(3):
        compare(handle, given)
    model.encoder.layer[1].intermediate.intermediate_act_fn = nn.Tanh()
    compare(handle, given)
    (reason,) = handle.stats.reasons
    assert "encoder.layer.1.intermediate.intermediate_act_fn" in reason and "recapture()" in reason
    handle.recapture()
    for _ in range(3):
        compare(handle, given)
    assert handle.stats.eager == 1


def test_weights_that_moved_run_untouched_until_recapture(device: Device, graphed: Callable[..., Any]) -> None:
    model = build("bert", device)
    handle = graphed(model, buckets=[16])
    given = text(device, 1, 9)
    for _ in range(3):
        compare(handle, given)
    model.double()
    compare(handle, given)
    assert handle.stats.reasons == {
        "BertModel is in torch.float64, and was in torch.float32 before: recapture() takes it in": 1
    }
    handle.recapture()
    for _ in range(3):
        compare(handle, given)
    assert handle.stats.eager == 1


def test_other_modes_of_the_caller_run_untouched(device: Device, graphed: Callable[..., Any]) -> None:
    handle = graphed(build("bert", device), buckets=[16])
    given = text(device, 1, 9)
    for _ in range(3):
        compare(handle, given)
    with torch.autocast(device.torch_device.type, torch.bfloat16):
        compare(handle, given)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        compare(handle, given)
    assert [reason.split(" of ")[0] for reason in handle.stats.reasons] == ["autocast is on", "backends"]


def test_a_hook_inside_is_refused_and_one_on_the_model_is_called(device: Device, graphed: Callable[..., Any]) -> None:
    model, heard = build("bert", device), []
    hook = model.encoder.layer[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match=r"BertModel: a forward hook, .*, is registered on encoder.layer.0.*Remove it"):
        graphed(model)
    hook.remove()
    model.register_forward_hook(lambda *_: heard.append(1))
    handle = graphed(model, buckets=[16])
    for _ in range(3):
        handle(**text(device, 1, 9))
    assert len(heard) == 3


def test_restore_gives_the_forward_back_and_a_copy_has_its_own(device: Device, graphed: Callable[..., Any]) -> None:
    model = build("bert", device)
    handle = graphed(model, buckets=[16])
    assert graphed(model, buckets=[16]) is handle
    copied = copy.deepcopy(model)
    handle.restore()
    handle.restore()
    assert "forward" not in vars(model)
    with torch.no_grad():
        assert torch.equal(copied(**text(device, 1, 9)).pooler_output, model(**text(device, 1, 9)).pooler_output)
    with pytest.raises(UsageError, match="restored"):
        handle.capture()


@pytest.mark.filterwarnings("default")  # inductor recommends TF32
def test_compiled_layers_run_in_the_graphs_alone(device: Device, graphed: Callable[..., Any]) -> None:
    model = build("bert", device)
    handle = graphed(model, compile=True, buckets=[16])
    for seed in range(4):
        compare(handle, text(device, 2, 9, seed))
    assert handle.stats.replayed == 2
    assert not any("forward" in vars(m) for m in model.modules() if m is not model)


@pytest.mark.filterwarnings("default")  # inductor recommends TF32
def test_compiled_layers_of_an_image_encoder(device: Device, graphed: Callable[..., Any]) -> None:
    model = build("vit", device)
    handle = graphed(model, compile=True)
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        compare(handle, {"pixel_values": torch.randn(2, 3, 16, 16, generator=draw).to(device.torch_device)})
    assert handle.stats.replayed == 1


def test_padding_that_only_jittered_constants_show_is_refused(device: Device) -> None:
    model = build("bert", device)

    class Leaking(nn.Module):
        """Adds the mean of all rows, padding included, with a weight that is initially zero."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.weight = inner, nn.Parameter(torch.zeros(48, device=device.torch_device))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = self.inner(*args, **kwargs)
            return out + out.mean(1, keepdim=True) * self.weight

    model.encoder.layer[0].intermediate = Leaking(model.encoder.layer[0].intermediate)
    with pytest.raises(UsageError, match=r"with padding last_hidden_state differs by up to .* Run it untouched"):
        segue.accelerate(model, device=device)


@pytest.mark.parametrize(
    ("family", "changes", "seen"),
    [
        ("fnet", {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 61}, "takes no attention_mask"),
        ("convbert", {**_TEXT, "embedding_size": 32}, "with padding last_hidden_state differs"),
    ],
)
def test_what_isnt_proven_equal_is_refused_with_what_was_seen(
    device: Device, family: str, changes: dict[str, Any], seen: str
) -> None:
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(family, **changes)).eval()
    with pytest.raises(UsageError, match=rf"\({family}\): no part of its forward .*{seen}.*Run it untouched"):
        segue.accelerate(model.to(device.torch_device), device=device)


def test_a_refusal_names_the_parts_that_can_be_accelerated(device: Device) -> None:
    text_config = {**_TEXT, "projection_dim": 16, "bos_token_id": 2, "eos_token_id": 3}
    config = transformers.CLIPConfig(text_config=text_config, vision_config={**_IMAGE, "projection_dim": 16}, projection_dim=16)
    model = transformers.CLIPModel(config).eval().to(device.torch_device)
    with pytest.raises(UsageError, match=r"segue\.accelerate\(model\.vision_model\)"):
        segue.accelerate(model, device=device)


def test_prime_graphs_are_refused(device: Device) -> None:
    with pytest.raises(UsageError, match=r"BertModel \(bert\) has no decoder, and prime graphs are for prompts"):
        segue.accelerate(build("bert", device), strategy="prime", device=device)


def test_models_with_a_cache_are_no_encoders(device: Device, make: Callable[..., Any]) -> None:
    decoder = make("llama")
    assert not encoder_probe.is_encoder(decoder) and not encoder_probe.is_encoder(decoder.model)
    config = transformers.AutoConfig.for_model("bert", **CONFIGS["bert"], is_decoder=True)
    assert not encoder_probe.is_encoder(transformers.BertModel(config).eval())
    assert not encoder_probe.is_encoder(transformers.T5Model(transformers.AutoConfig.for_model("t5", **CONFIGS["t5"])).eval())
    assert encoder_probe.is_encoder(build("bert", device, "AutoModelForMaskedLM"))


def test_transformers_takes_only_the_capturing_thread_to_be_capturing() -> None:
    from transformers.utils import import_utils

    seen: list[bool] = []
    with as_while_capturing():
        assert import_utils.is_tracing()
        other = threading.Thread(target=lambda: seen.append(import_utils.is_tracing()))
        other.start()
        other.join()
    assert seen == [False] and not import_utils.is_tracing()


def test_switched_off_nothing_is_captured(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = segue.accelerate(build("bert", device), device=device)
    monkeypatch.setenv("SEGUE", "off")
    compare(handle, text(device, 1, 9))
    assert handle.stats.reasons == {"SEGUE=off in the environment": 1} and handle.capture().buckets == ()
    handle.restore()
