"""torch chooses its order of attention backends at a process's first attention, which is no change of anybody's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

FIRST_ATTENTION = """
import torch, transformers
import segue

torch.manual_seed(0)
config = transformers.Qwen3Config(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=64,
)
model = transformers.Qwen3ForCausalLM(config).to("cuda", torch.bfloat16).eval()
handle = segue.accelerate(model, buckets=[16])
handle.capture()
x = torch.arange(12, device="cuda")[None]
with torch.inference_mode():
    for _ in range(2):
        model(x, past_key_values=transformers.DynamicCache(config=config), logits_to_keep=1)
print(*next(iter(handle.stats.strategies.items())))
"""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_process_that_has_never_attended_gets_its_prime_graphs() -> None:
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", FIRST_ATTENTION], capture_output=True, text=True, env=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["prime", "2"], done.stdout
