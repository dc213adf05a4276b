"""Models, handles and what goes wrong, for the tests of the commands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import segue

_SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EMULATOR = None if torch.cuda.is_available() else "emulator"
not_ready = None


def model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SIZE)).to(DEVICE, dtype).eval()


def with_call() -> Any:
    return model(), (), {"input_ids": torch.ones(1, 3, dtype=torch.long, device=DEVICE)}


def with_wrong_call() -> Any:
    return model(), (), {"input_ids": "no tensor"}


def handle() -> Any:
    return segue.accelerate(model(), max_tokens=8, device=EMULATOR)


def encoder() -> Any:
    torch.manual_seed(0)
    size = {key: value for key, value in _SIZE.items() if key not in ("num_key_value_heads", "bos_token_id", "eos_token_id")}
    return BertModel(BertConfig(**size)).to(DEVICE).eval()


def trained() -> Any:
    return model().train()


def refused() -> Any:
    return segue.accelerate(nn.Linear(2, 2))


def raising() -> Any:
    return _deeper()


def _deeper() -> Any:
    raise ValueError("no weights here")


def raising_from() -> Any:
    try:
        _deeper()
    except ValueError as e:
        raise RuntimeError("can't build it") from e


def torch_raising() -> Tensor:
    return torch.ones(2) @ torch.ones(3)


def needy(path: str, *, size: int, name: str = "a") -> Any: ...


def forgetful() -> Any: ...


def leaving() -> Any:
    raise SystemExit(0)


def untidy() -> Any:
    return model(), ()
