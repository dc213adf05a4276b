"""A model that transformers has split between ranks, accelerated on each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import segue
from runner.two_ranks import two_ranks

transformers = pytest.importorskip("transformers")


def _generate(place: torch.device, folder: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    ids = torch.arange(1, 20, device=place)[None]
    want = model.generate(ids, max_new_tokens=5, do_sample=False)
    handle = segue.accelerate(model, max_tokens=32)
    for _ in range(3):
        assert torch.equal(handle.generate(ids, max_new_tokens=5, do_sample=False), want)
    return type(model.model.layers[0].self_attn.q_proj.weight).__name__, handle.stats.replayed, want.tolist()


@pytest.mark.parametrize("device", ["emulator", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_model_split_by_its_plan_gives_the_same_tokens_from_graphs_on_each_rank(device: str, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("no two CUDA devices")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(num_hidden_layers=2, max_position_embeddings=64, **sizes)
    whole = transformers.AutoModelForCausalLM.from_config(config).eval()
    whole.save_pretrained(tmp_path)
    tokens = whole.generate(torch.arange(1, 20)[None], max_new_tokens=5, do_sample=False).tolist()
    with two_ranks(device) as ranks:
        assert ranks(_generate, str(tmp_path)) == [("DTensor", 11, tokens)] * 2
