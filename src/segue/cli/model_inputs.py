"""Inputs for any transformers model: random ones of a chosen length, in batches with padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from segue.errors import UsageError

_MOST_SAMPLES = 4000  # of sound, a quarter of a second


class ModelInputs:
    """Makes the inputs of one model. Equal arguments give equal inputs.

    Raises:
        UsageError: the model's main input is of a kind that isn't known here.
    """

    def __init__(self, model: Any) -> None:
        self.main = str(getattr(model, "main_input_name", "input_ids"))
        self.config = getattr(model, "config", None)
        self.device = next(model.parameters()).device
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self._make = {
            "input_ids": self._ids,
            "pixel_values": self._images,
            "input_values": self._sound,
            "input_features": self._features,
        }.get(self.main)
        if self._make is None:
            raise UsageError(
                f"{type(model).__name__} takes {self.main}, of which no example can be made here: let the target be a function "
                "that returns (model, args, kwargs) with the arguments of an example call"
            )

    @property
    def of_text(self) -> bool:
        """Whether the main input is token ids, so that its length and padding can be chosen."""
        return self.main == "input_ids"

    @property
    def longest(self) -> int:
        """The most tokens that the model has positions for."""
        text = self._text_config
        return int(getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 2**30)

    def one(self, length: int, batch: int = 1, seed: int = 0) -> dict[str, Tensor]:
        """The main input alone: ``batch`` rows of ``length`` tokens; of images and sound, ``batch`` of the model's own size."""
        assert self._make is not None
        draw = torch.Generator().manual_seed(1000 * seed + 10 * length + batch)
        return {self.main: self._make(batch, length, draw).to(self.device)}

    def padded(self, lengths: list[int], left: bool) -> dict[str, Tensor]:
        """A batch of texts of these lengths, ``input_ids`` and ``attention_mask`` [B, longest], padded on one side."""
        longest = max(lengths)
        rows = self.one(longest, len(lengths), seed=1)[self.main]
        places = torch.arange(longest, device=self.device)
        real = torch.tensor(lengths, device=self.device)[:, None]
        mask = places >= longest - real if left else places < real
        return {self.main: rows.masked_fill(~mask, self._pad), "attention_mask": mask.long()}

    @property
    def _text_config(self) -> Any:
        get = getattr(self.config, "get_text_config", None)
        return self.config if get is None else get()

    @property
    def _pad(self) -> int:
        pad = getattr(self._text_config, "pad_token_id", None)
        return pad if isinstance(pad, int) and 0 <= pad < self._vocabulary else 0

    @property
    def _vocabulary(self) -> int:
        return int(self._text_config.vocab_size)

    def _ids(self, batch: int, length: int, draw: torch.Generator) -> Tensor:
        """Tokens without a special meaning, such as padding, an end, or the place of an image."""
        named = {**vars(self._text_config), **vars(self.config)}
        special = {v for key, v in named.items() if key.endswith(("_token_id", "_token_index")) and isinstance(v, int)}
        plain = torch.tensor([i for i in range(self._vocabulary) if i not in special])
        return plain[torch.randint(0, len(plain), (batch, length), generator=draw)]

    def _images(self, batch: int, length: int, draw: torch.Generator) -> Tensor:
        size = getattr(self.config, "image_size", 224)
        height, width = size if isinstance(size, tuple | list) else (size, size)
        return torch.randn(batch, getattr(self.config, "num_channels", 3), height, width, generator=draw).to(self.dtype)

    def _sound(self, batch: int, length: int, draw: torch.Generator) -> Tensor:
        return torch.randn(batch, _MOST_SAMPLES + 320 * length, generator=draw).to(self.dtype)

    def _features(self, batch: int, length: int, draw: torch.Generator) -> Tensor:
        frames = 2 * getattr(self.config, "max_source_positions", 1500)
        return torch.randn(batch, getattr(self.config, "num_mel_bins", 80), frames, generator=draw).to(self.dtype)
