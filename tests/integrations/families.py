"""Tiny random models of many transformers families, by their ``model_type``, the same weights each time.

A configuration gets a small value for each field that it has and :data:`_SMALL` knows, and then what its family needs besides.
Parameters that are constant, as norms and many biases begin, are jittered, because a fault in them would not be seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal[
    "decoder", "encoder", "image encoder", "speech encoder", "encoder-decoder", "speech to text", "image and text", "image prompt"
]

VOCABULARY = 256
WINDOW = 8
_LAYERS = ("sliding_attention", "full_attention")
_LINEAR = ("linear_attention", "full_attention")

_SMALL: dict[str, Any] = {
    # sizes
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 64),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "global_head_dim", "d_kv", "query_pre_attn_scalar"), 16),
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "sliding_window": WINDOW,
    "rotary_dim": 8,
    "initializer_range": 0.15,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "shared_intermediate_size": 64,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # recurrent layers
    **dict.fromkeys(("state_size", "d_state", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("expand", "mamba_expand"), 2),
    **dict.fromkeys(("d_conv", "mamba_d_conv"), 4),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_headdim", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 1),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), 8),
    "n_mamba_heads": 2,
    "mamba_d_ssm": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "full_attn_idxs": [1],
    "block_ff_dim": 96,
    # per-layer embeddings
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
}
_SMALL_VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size"), 64),
    **dict.fromkeys(("depth", "num_hidden_layers"), 2),
    **dict.fromkeys(("num_heads", "num_attention_heads"), 4),
    **dict.fromkeys(("num_channels", "in_channels", "in_chans"), 3),
    "intermediate_size": 96,
    "image_size": 28,
    "patch_size": 14,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [1],
    "num_position_embeddings": 16,
}
_SPEECH = {
    "conv_dim": [32, 32],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
}


@dataclass(frozen=True)
class Family:
    """One family and how its tiny model is made.

    ``dense``: each layer is attention and a plain or gated network of each token, so that replays must be bit-equal.
    ``own``: fields of its configuration; ``vision``: of the part for images. What an image prompt gives the model for each
    image, by argument: ``image``, the shapes of floats, and ``numbers``.
    """

    name: str  # its model_type
    kind: Kind
    dense: bool = True
    own: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    image: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    numbers: Mapping[str, list[int]] = field(default_factory=dict)

    image_tokens = 4  # of one image, in the families whose prompts have one

    @property
    def known(self) -> bool:
        """Whether this release of transformers has the family."""
        from transformers import CONFIG_MAPPING

        return self.name in CONFIG_MAPPING

    def make(self, **changes: Any) -> Any:
        """The model in fp32, eval mode."""
        import transformers

        config = _config(self.name, {**self.own, **changes}, self.vision)
        auto = getattr(transformers, _AUTO[self.kind])
        torch.manual_seed(0)
        model = auto.from_config(config).float().eval()
        _jitter(model)
        return model

    def images(self, batch: int) -> dict[str, Tensor]:
        """What a model with eyes takes for ``batch`` prompts with an image each."""
        numbers = {name: torch.tensor([row] * batch) for name, row in self.numbers.items()}
        return {name: _drawn(shape, batch) for name, shape in self.image.items()} | numbers

    def pixels(self, batch: int) -> Tensor:
        """Images [batch, 3, 28, 28] for an image encoder."""
        return _drawn((1, 3, 28, 28), batch)

    def sound(self, batch: int, length: int) -> Tensor:
        """Spectra of ``2 * length`` steps, or of a fixed number of them, for a model that hears."""
        shape = (1, 16, 64) if self.name == "whisper" else (1, 4 * length, 16)
        return _drawn(shape, batch)


_AUTO: dict[Kind, str] = {
    "decoder": "AutoModelForCausalLM",
    "encoder": "AutoModel",
    "image encoder": "AutoModel",
    "speech encoder": "AutoModel",
    "encoder-decoder": "AutoModelForSeq2SeqLM",
    "speech to text": "AutoModelForSpeechSeq2Seq",
    "image and text": "AutoModelForImageTextToText",
    "image prompt": "AutoModelForImageTextToText",
}


def _drawn(shape: tuple[int, ...], batch: int) -> Tensor:
    """Random numbers for ``batch`` items whose first dimension is ``shape[0]`` for each."""
    return torch.randn(shape[0] * batch, *shape[1:], generator=torch.Generator().manual_seed(batch))


def _jitter(model: Any) -> None:
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() > 1 and bool((p == p.flatten()[0]).all()):
                p.add_(0.2 * torch.randn(p.shape, generator=draw).to(p.dtype))


def _config(name: str, own: Mapping[str, Any], vision: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[name]
    known = _fields(cls)
    given = {k: v for k, v in _SMALL.items() if k in known}
    parts = _parts(cls)
    if "text_config" in parts:
        text = own.get("text_config", {})
        given["text_config"] = _config(parts["text_config"].model_type, text, {}).to_dict()
    if "vision_config" in parts:
        part = parts["vision_config"]
        small = {k: v for k, v in _SMALL_VISION.items() if hasattr(part, k)}
        given["vision_config"] = {**part.to_dict(), **small, **vision}
    rest = {k: v for k, v in own.items() if k != "text_config"}
    return cls(**{**given, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, **rest})


def _fields(cls: Any) -> set[str]:
    annotated = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    return annotated | set(inspect.signature(cls.__init__).parameters)


def _parts(cls: Any) -> dict[str, Any]:
    """The configurations inside a default one of ``cls``, by name."""
    try:
        default = cls()
    except Exception:  # some can't be made without arguments, and those have no parts
        return {}
    found = {name: getattr(default, name, None) for name in ("text_config", "vision_config")}
    return {name: part for name, part in found.items() if part is not None}


def _all(kind: Kind, *names: str, dense: bool = True) -> Iterator[Family]:
    return (Family(name, kind, dense) for name in names)


def _families() -> Iterator[Family]:
    yield from _dense_decoders()
    yield from _mixtures()
    yield from _recurrent()
    yield from _encoders()
    yield from _encoder_decoders()
    yield from _image_and_text()


def _dense_decoders() -> Iterator[Family]:
    yield from _all("decoder", "llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "phi3", "olmo", "olmo2", "granite")
    yield from _all("decoder", "starcoder2", "cohere", "stablelm", "glm", "glm4", "ernie4_5", "seed_oss", "helium", "nemotron")
    yield from _all("decoder", "arcee", "apertus", "ministral", "ministral3", "hunyuan_v1_dense", "internlm3", "nanochat")
    yield from _all("decoder", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "xglm", "biogpt")
    yield from _all("decoder", "persimmon", "bitnet", "jais2", "cwm", "modernbert-decoder", "diffllama")
    for name in ("gemma2", "gemma3_text", "olmo3", "cohere2", "exaone4", "gemma4_text"):
        yield Family(name, "decoder", own={"layer_types": list(_LAYERS)})
    yield Family("smollm3", "decoder", own={"layer_types": None, "no_rope_layers": [1, 0]})
    yield Family("gpt_neo", "decoder", own={"attention_types": [[["global", "local"], 1]], "window_size": WINDOW})
    sparse = {"intermediate_size": [96, 96], "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 8}
    yield Family("gemma3n_text", "decoder", own={"layer_types": list(_LAYERS), **sparse})


def _mixtures() -> Iterator[Family]:
    names = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "granitemoeshared", "ernie4_5_moe", "minimax_m2")
    yield from _all("decoder", *names, "glm4_moe", "dots1", "phimoe", "hunyuan_v1_moe", "flex_olmo", "hy_v3", dense=False)
    yield Family("gpt_oss", "decoder", False, {"layer_types": list(_LAYERS)})
    chunked = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": WINDOW, "no_rope_layers": [1, 0]}
    yield Family("llama4_text", "decoder", False, {**chunked, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2})
    # Latent attention.
    yield Family("deepseek_v2", "decoder", False, {"head_dim": None, "num_key_value_heads": 4})
    for name in ("deepseek_v3", "glm4_moe_lite", "minicpm3"):
        yield Family(name, "decoder", False, {"head_dim": 8, "num_key_value_heads": 4})


def _recurrent() -> Iterator[Family]:
    for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "minimax", "granitemoehybrid"):
        yield Family(name, "decoder", False, {"layer_types": list(_LINEAR)})
    every_second = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    yield Family("jamba", "decoder", False, {"use_mamba_kernels": False, "num_experts": 2, **every_second})
    yield Family("bamba", "decoder", False, {"attn_layer_indices": [1]})
    yield Family("nemotron_h", "decoder", False, {"layers_block_type": ["mamba", "attention"], "conv_kernel": 4})
    shared = {"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "hybrid_layer_ids": [1], "adapter_rank": 8}
    yield Family("zamba2", "decoder", False, shared)
    yield Family("falcon_h1", "decoder", False)
    conv = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "num_dense_layers": 1}
    for name in ("lfm2", "lfm2_moe"):
        yield Family(name, "decoder", False, conv)
    blocks = {"block_types": ["recurrent", "attention"], "attention_window_size": WINDOW, "lru_width": 64}
    yield Family("recurrent_gemma", "decoder", False, blocks)
    yield Family("mamba", "decoder", False, {"intermediate_size": 128, "conv_kernel": 4})
    yield Family("mamba2", "decoder", False, {"num_heads": 8, "conv_kernel": 4})
    yield Family("falcon_mamba", "decoder", False, {"intermediate_size": 128, "conv_kernel": 4})
    yield Family("rwkv", "decoder", False, {"context_length": 512})


def _encoders() -> Iterator[Family]:
    yield from _all("encoder", "bert", "roberta", "xlm-roberta", "electra", "albert", "distilbert", "modernbert", "eurobert")
    yield from _all("encoder", "mpnet", "camembert", "nomic_bert", "esm", "deberta-v2", "roformer", "ernie", "convbert")
    image = {"image_size": 28, "patch_size": 14}
    for name in ("vit", "deit", "dinov2", "beit", "ijepa"):
        yield Family(name, "image encoder", own=image)
    yield Family("siglip_vision_model", "image encoder", False, image)  # its pooling layer attends by torch's own module
    for name in ("wav2vec2", "hubert", "wavlm"):
        yield Family(name, "speech encoder", own=_SPEECH)


def _encoder_decoders() -> Iterator[Family]:
    start = {"decoder_start_token_id": 2, "forced_eos_token_id": None}
    for name in ("bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot", "plbart", "t5", "mt5", "umt5"):
        yield Family(name, "encoder-decoder", own=start)
    sparse = {"num_decoder_layers": 2, "num_sparse_decoder_layers": 1}
    yield Family("switch_transformers", "encoder-decoder", False, {**start, **sparse})
    audio = {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64}
    nothing = {"suppress_tokens": None, "begin_suppress_tokens": None}
    yield Family("whisper", "speech to text", own={**start, **audio, **nothing})
    yield Family("speech_to_text", "speech to text", own={**start, **audio, "input_feat_per_channel": 16, "conv_channels": 32})


def _image_and_text() -> Iterator[Family]:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
    tokens = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
    for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        yield from _seeing(name, {"text_config": rope, **tokens}, {"pixel_values": (16, 1176)}, {"image_grid_thw": [1, 4, 4]})
    gemma = {"text_config": {"layer_types": list(_LAYERS)}, "image_token_id": 250, "image_token_index": 250}
    pixels = {"pixel_values": (1, 3, 28, 28)}
    yield from _seeing("gemma3", {**gemma, "mm_tokens_per_image": 4}, pixels)
    for name in ("llava", "paligemma"):
        yield from _seeing(name, {"image_token_id": 250, "image_token_index": 250, "projection_dim": 64}, pixels)
    for name in ("mistral3", "internvl", "smolvlm", "idefics3"):
        yield Family(name, "image and text", own={"image_token_id": 250, "image_token_index": 250})


def _seeing(
    name: str, own: Mapping[str, Any], image: Mapping[str, tuple[int, ...]], numbers: Mapping[str, list[int]] | None = None
) -> Iterator[Family]:
    """The same model with prompts of text, and with an image in them."""
    yield Family(name, "image and text", own=own)
    yield Family(name, "image prompt", own=own, image=image, numbers=numbers or {})


def _title(family: Family) -> str:
    return f"{family.name}, image" if family.kind == "image prompt" else family.name


FAMILIES: dict[str, Family] = {_title(family): family for family in _families()}
