"""A transformers model with and without segue: the same tokens."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import segue


def main() -> None:
    """Generate the same text untouched, then three times with segue."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1000, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device).eval()
    prompt = torch.randint(1, 1000, (1, 20), device=device)
    untouched = model.generate(prompt, max_new_tokens=16, do_sample=False)
    with segue.accelerate(model, max_tokens=64, device="emulator" if device == "cpu" else None) as graphed:
        for _ in range(3):
            print("identical:", torch.equal(graphed.generate(prompt, max_new_tokens=16, do_sample=False), untouched))
        print(graphed.report())


if __name__ == "__main__":
    main()
