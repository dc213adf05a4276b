"""The modules and tensors of a trunk: held for its graphs, in evaluation mode, without gradients."""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from segue.errors import UsageError

_METHODS = ("embed", "new_cache", "reset", "forward", "head", "state", "get_length", "set_length")
_training, _requires_grad = itemgetter("training"), attrgetter("requires_grad")


def check_trunk(trunk: Any, name: str) -> None:
    """Raise UsageError if ``trunk`` lacks a part of the protocol."""
    missing = [f"{method}()" for method in _METHODS if not callable(getattr(trunk, method, None))]
    missing += [] if hasattr(trunk, "min_tokens") else ["min_tokens"]
    if missing:
        raise UsageError(f"{name}: a {type(trunk).__qualname__} is no trunk: it lacks {', '.join(missing)}. See segue.Trunk")
    least = trunk.min_tokens
    if not isinstance(least, int) or isinstance(least, bool) or least < 1:
        raise UsageError(f"{name}: trunk.min_tokens={least!r} must be at least 1, and whole: a prompt has tokens")


class Modules:
    """The modules that a trunk is or has, and its tensors.

    ``held``: aliases of all parameters and buffers, since compiled code and C++ ops read them where no watching sees it.
    """

    def __init__(self, trunk: Any, name: str) -> None:
        own = list(getattr(trunk, "__dict__", {}).values())
        roots = [m for m in (trunk, *own) if isinstance(m, nn.Module)]
        found = {id(m): (path, m) for root in reversed(roots) for path, m in root.named_modules()}
        self._name, self._paths = name, list(found.values())
        self._states = [vars(m) for _, m in self._paths if "training" in vars(m)]  # their own look-up takes twice as long
        weights = [t for root in roots for t in (*root.parameters(), *root.buffers())]
        self.held = [t.detach() for t in weights]
        self._tensors = list({id(t): t for t in (*weights, *own) if isinstance(t, Tensor)}.values())

    def check(self) -> None:
        """Look whether a run may go on. About 5 us for 28 layers.

        Raises:
            UsageError: a module is in training mode, or gradients would have to be recorded.
        """
        if any(map(_training, self._states)):
            path, module = next((path, m) for path, m in self._paths if m.training)
            who = type(module).__qualname__ + (f" {path!r}" if path else "")
            raise UsageError(
                f"{self._name}: {who} is in training mode, whose dropout and statistics would be frozen. Call .eval() on the "
                "model first"
            )
        if torch.is_grad_enabled() and any(map(_requires_grad, self._tensors)):
            raise UsageError(
                f"{self._name}: it was run with gradients required: graphs record none, and a loss would have no way back. "
                "Run it under torch.inference_mode() or torch.no_grad(), or call .requires_grad_(False) on the model"
            )
