"""From a run into its sessions: everything is checked before anything is written, and lengths are set last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from segue import _torch
from segue.prime.copyout import CopyOut
from segue.prime.trunk import Trunk


def deliver(
    trunk: Trunk,
    copies: CopyOut,
    sessions: Sequence[Any],
    lengths: Sequence[int],
    offsets: Sequence[int],
    inference: bool,
) -> None:
    """Copy the state of each request that has tokens into its session.

    Args:
        offsets: where each request's rows begin in the scratch cache.
        inference: whether memory that the trunk reserves for a session is made in inference mode.

    Raises:
        InputError: a session isn't like the scratch cache, or shares memory with it or another. No session was touched.
    """
    real = [r for r, n in enumerate(lengths) if n]
    reserve = getattr(trunk, "reserve", None)
    with without_gradients(inference):
        if reserve is not None:
            for r in real:
                reserve(sessions[r], lengths[r])
        states = [trunk.state(sessions[r]) for r in real]
    with _torch.inference_guard(True):
        pairs = [pair for r, s in zip(real, states, strict=True) for pair in copies.pairs(s, r, offsets[r], lengths[r])]
        copies.check_apart(states, real)
        copies.copy(pairs)
    with without_gradients(inference):
        for r in real:
            trunk.set_length(sessions[r], lengths[r])


def without_gradients(inference: bool) -> Any:
    """Context: in inference mode or not, and either way without gradients. In force from its making on."""
    guard = _torch.inference_guard(inference)
    torch.set_grad_enabled(False)  # leaving inference mode turns them on; the guard puts them back with the mode
    return guard
