"""From a run into its sessions: everything is checked before anything is written, and lengths are set last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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
    with torch.inference_mode(inference), torch.no_grad():
        if reserve is not None:
            for r in real:
                reserve(sessions[r], lengths[r])
        states = [trunk.state(sessions[r]) for r in real]
    with torch.inference_mode():
        pairs = [copies.pairs(s, r, offsets[r], lengths[r]) for r, s in zip(real, states, strict=True)]
        copies.check_apart(states, real)
        copies.copy([pair for of_one in pairs for pair in of_one])
    with torch.inference_mode(inference), torch.no_grad():
        for r in real:
            trunk.set_length(sessions[r], lengths[r])
