"""Tiny random models of the supported families."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    # Importing transformers and what it imports is not what these tests are about.
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from integrations import families
from integrations.twins import tokens
from segue.devices import Device
from segue.integrations.transformers import accelerate

_SIZE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WINDOW = 8
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {}),
    "mistral": (MistralForCausalLM, {"sliding_window": None}),
    "mistral, sliding": (MistralForCausalLM, {"sliding_window": _WINDOW}),
    "qwen2": (Qwen2ForCausalLM, {}),
    "qwen2, some layers sliding": (
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 32}),
}


def build(family: str, device: torch.device, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of ``family`` with random weights, the same ones each time, in eval mode."""
    cls, own = FAMILIES[family]
    torch.manual_seed(0)
    return cls(cls.config_class(**{**_SIZE, **own, **changes})).to(device=device, dtype=dtype).eval()


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(device: Device) -> Callable[..., Any]:
    """``make(family, **config)``: a model on the test's device."""
    return lambda family="llama", **changes: build(family, device.torch_device, **changes)


@pytest.fixture
def graphed(device: Device) -> Iterator[Callable[..., Any]]:
    """``graphed(model, max_tokens)``: its handle, restored at the test's end."""
    handles: list[Any] = []

    def start(model: Any, max_tokens: int = 64, **options: Any) -> Any:
        handles.append(accelerate(model, max_tokens=max_tokens, device=device, **options))
        return handles[-1]

    yield start
    for handle in handles:
        handle.restore()


@pytest.fixture
def ids(device: Device) -> Callable[..., torch.Tensor]:
    """``ids(batch, length, seed)``: random tokens, none of them padding."""

    def draw(batch: int, length: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + length)
        return torch.randint(1, _SIZE["vocab_size"], (batch, length), generator=generator).to(device.torch_device)

    return draw


@pytest.fixture
def cache_name() -> str:
    """What this release of transformers calls the KV cache."""
    from segue.integrations.transformers import names

    return names.cache_name(LlamaForCausalLM.forward)


@pytest.fixture
def start(device: Device) -> Iterator[Callable[..., Any]]:
    """``start(family, dtype, **options)``: the handle of a tiny model, restored at the test's end."""
    handles: list[Any] = []

    def make(family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        model = families.FAMILIES[family].make().to(device.torch_device, dtype)
        if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
            model.set_experts_implementation("batched_mm")  # a grouped product of float32 can't be in a CUDA graph
        handles.append(accelerate(model, device=device, **{"max_tokens": 64, **options}))
        return handles[-1]

    yield make
    for handle in handles:
        handle.restore()


@pytest.fixture
def said(device: Device) -> Callable[..., torch.Tensor]:
    """``said(batch, length, seed)``: random ids, none of them special in any tiny model."""
    return lambda batch=1, length=11, seed=0: tokens(device.torch_device, batch, length, seed)
