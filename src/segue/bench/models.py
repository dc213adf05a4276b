"""The language models that are measured, copies of them that share weights, and prompts with caches made ahead."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from segue.bench.decoder import SHAPES, Shape
from segue.errors import UsageError
from segue.integrations.transformers import names


def load(model: Shape | str, dtype: torch.dtype, device: torch.device) -> Any:
    """A transformers causal language model on ``device``, in eval mode, without gradients.

    ``model``: a shape or the name of one in :data:`~segue.bench.decoder.SHAPES`, for random weights; any other text is a name
    or a folder for ``from_pretrained``.

    Raises:
        UsageError: transformers can't load a model from that name or folder.
    """
    shape = SHAPES.get(model) if isinstance(model, str) else model
    if shape is not None:
        return shape.model(dtype, device).requires_grad_(False)
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    except (OSError, ValueError) as e:
        raise UsageError(f"--model {model}: neither one of {', '.join(SHAPES)} nor a model that transformers loads: {e}") from e
    return loaded.to(device).eval().requires_grad_(False)


def sharing_copy(model: Any) -> Any:
    """A copy of ``model`` with modules and configs of its own over the same parameters and buffers.

    What one way of running a model changes on its copy (the forward, the attention's name) then reaches no other way.
    """
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


class FreshPrompt:
    """A random prompt, ``ids`` [batch, n] int64, and empty caches for so many ``calls``.

    The caches are made before the clock starts, as generate() makes one before its forwards. Each call uses one up.
    """

    def __init__(self, model: Any, n: int, calls: int, *, batch: int = 1, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(n + seed)
        self.ids = torch.randint(0, model.config.vocab_size, (batch, n), generator=draw).to(model.device)
        self.caches = [names.new_cache(model.config) for _ in range(calls)]


def last_logits(model: Any, ids: Tensor, cache: Any, run: Any = None) -> Tensor:
    """The logits [batch, 1, V] of the last token of ``ids`` [batch, n]; ``cache`` is filled with all n tokens.

    ``run``: what is called in the place of ``model``, such as its compiled twin.
    """
    given = {names.cache_name(model.forward): cache}
    logits: Tensor = (model if run is None else run)(ids, use_cache=True, logits_to_keep=1, **given).logits
    return logits
