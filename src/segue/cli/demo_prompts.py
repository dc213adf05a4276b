"""The demo's prompts: eight single ones, a batch padded on the left, and one fed in two chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PASSAGE = (
    "The lighthouse at the end of the breakwater was built by people who did not trust the sea and trusted each "
    "other only a little more. Its keeper wrote down every ship: the hour, the wind, the colour of the hull, and "
    "whether it answered the lamp. On quiet nights she copied the old books into new ones, since salt eats paper "
    "as surely as it eats iron, and in copying she learned what the harbour had forgotten. There had been a year "
    "without herring, and a year with so many that the boats sank under them. There had been a captain who came "
    "in through fog by the smell of the bakery, and another who had the charts, the instruments and a pilot, and "
    "struck the rocks at noon. The keeper drew no morals from this. She kept the lamp clean, the wick trimmed and "
    "the lens turning, because the one thing a ship can do nothing about is a light that is sometimes there. When "
    "the electric lamp came, with a man from the ministry to explain it, she asked him how it failed. He said "
    "that it did not. She asked him again, more slowly, and he laughed, and wrote to the ministry that the keeper "
    "was old. In the first winter the cable parted in a gale, as cables do, and the harbour saw that the lamp "
    "burned all the same: she had kept the oil, the wick and the matches dry in a tin box, and had never told "
    "anyone, since nobody had asked her how she would fail. "
)

_CHAT = (
    "What is the capital of France?",
    "Write three short rules for keeping a bicycle in good order, and say for each one why it matters.",
    "Explain to a child of ten, in a few plain sentences and with one example from a kitchen, why water that is heated "
    "in a pot begins to move in circles long before it boils, and what that has to do with the wind outside.",
    _PASSAGE[: len(_PASSAGE) // 2] + "\n\nIn two sentences: what was the keeper's work?",
    _PASSAGE + "\n\nWhy did the lamp burn when the cable parted? Answer in one sentence.",
)
_RAW = ("The", "The tide tables say that", "Once upon a time, in a village by the sea, there lived a clockmaker who")
_BATCH = (_CHAT[0], "Name two rivers.", _CHAT[1], "Say hello in Spanish and in Portuguese. How do the two differ?")
_RANDOM_LENGTHS = (1, 6, 17, 40, 63, 96, 210, 390)


@dataclass(frozen=True)
class PromptCase:
    """Prompts that run together."""

    name: str
    ids: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] int64; 0 where a shorter prompt is padded on the left
    chunk: int = 0  # tokens of the first of two chunks; 0: the prompt is fed at once

    @property
    def tokens(self) -> int:
        """Real tokens, padding not counted."""
        return int(self.mask.sum())


def prompts(tokenizer: Any, device: torch.device) -> list[PromptCase]:
    """The demo's cases in the model's own tokens."""
    raw = [_encode(tokenizer, text) for text in _RAW]
    chat = [_chat(tokenizer, text) for text in _CHAT]
    return _cases([*raw, *chat], [_chat(tokenizer, text) for text in _BATCH], tokenizer.pad_token_id or 0, device)


def random_prompts(vocabulary: int, device: torch.device) -> list[PromptCase]:
    """The same kinds of cases for a model without a tokenizer, of random tokens from 1 to ``vocabulary`` - 1."""
    draw = torch.Generator().manual_seed(0)

    def ids(n: int) -> Tensor:
        return torch.randint(1, vocabulary, (n,), generator=draw)

    return _cases([ids(n) for n in _RANDOM_LENGTHS], [ids(n) for n in (31, 27, 44, 38)], 0, device)


def _cases(singles: list[Tensor], batch: list[Tensor], pad: int, device: torch.device) -> list[PromptCase]:
    cases = [PromptCase(f"{len(ids)} token{'s' if len(ids) > 1 else ''}", *_padded([ids], pad, device)) for ids in singles]
    long = singles[-1]
    cases.append(PromptCase(f"batch of {len(batch)}, padded left", *_padded(batch, pad, device)))
    cases.append(PromptCase("two chunks", *_padded([long], pad, device), chunk=len(long) // 3))
    return cases


def _padded(rows: list[Tensor], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    length = max(len(row) for row in rows)
    ids, mask = torch.full((len(rows), length), pad), torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :], mask[i, length - len(row) :] = row, 1
    return ids.to(device), mask.to(device)


def _encode(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text).input_ids)


def _chat(tokenizer: Any, text: str) -> Tensor:
    turn = [{"role": "user", "content": text}]
    return _encode(tokenizer, tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))
