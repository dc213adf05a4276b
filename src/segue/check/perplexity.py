"""The perplexity of a text by a prime graph, beside that by the trunk's eager run of each window at its own length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.errors import UsageError
from segue.prime import PrimeGraph
from segue.prime.reference import reference

# The part of the eager perplexity by which the graph's may be off: rounding of single logits mostly cancels out.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE = 1e-2


@dataclass(frozen=True)
class Perplexity:
    """``graph``, ``eager``: exp of the mean loss of the predicted tokens, of which there are ``tokens``. ``tolerance``: by which
    part of ``eager`` they may differ."""

    graph: float
    eager: float
    tokens: int
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether both are numbers that differ by no more than the tolerance."""
        return abs(self.graph - self.eager) <= self.tolerance * self.eager

    def __str__(self) -> str:
        return f"{self.graph:.6g} by the graph, {self.eager:.6g} eager, over {self.tokens} tokens"


def perplexity(prime: PrimeGraph, text: Tensor, new_session: Callable[[], Any]) -> Perplexity:
    """Run a text through the graph and eagerly, in windows of a bucket, each from a fresh session.

    ``text``: token ids [n]. A window predicts all its tokens but the first; one that is too short for the trunk is left out.

    Raises:
        UsageError: no window is long enough.
    """
    least = max(2, prime.trunk.min_tokens)
    windows = [w for w in text.split(prime.bucket) if w.shape[0] >= least]
    if not windows:
        raise UsageError(f"{prime.name}: a text of {text.shape[0]} tokens is too short: {least} make a window")
    losses = [0.0, 0.0]
    with torch.inference_mode():
        for window in windows:
            n = window.shape[0]
            ours = prime.run(window, new_session(), rows="all").logits
            theirs = reference(prime.trunk, prime.batch(window), n, 1, prime.name, every=True).logits
            for i, logits in enumerate((ours, theirs)):
                losses[i] += F.cross_entropy(logits[:-1].double(), window[1:].to(logits.device), reduction="sum").item()
    count = sum(w.shape[0] - 1 for w in windows)
    graph, eager = (math.exp(min(loss / count, 700.0)) for loss in losses)
    return Perplexity(graph, eager, count, _TOLERANCE.get(ours.dtype, _COARSE))
