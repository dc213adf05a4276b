"""Whether an object is a trunk, and the checks of the modules and tensors that it has."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from segue import _torch
from segue.capture.module_checks import ModuleChecks, mode_matters
from segue.errors import UsageError

_METHODS = ("embed", "new_cache", "reset", "forward", "head", "state", "get_length", "set_length")


def check_trunk(trunk: Any, name: str) -> None:
    """Check that ``trunk`` keeps to the protocol. ``name`` is the graph's, for errors.

    Raises:
        UsageError: ``trunk`` lacks a method or ``min_tokens``, or ``min_tokens`` is no whole number from 1 on.
    """
    missing = [f"{method}()" for method in _METHODS if not callable(getattr(trunk, method, None))]
    missing += [] if hasattr(trunk, "min_tokens") else ["min_tokens"]
    if missing:
        raise UsageError(f"{name}: a {type(trunk).__qualname__} is no trunk: it lacks {', '.join(missing)}. See segue.Trunk")
    least = trunk.min_tokens
    if not isinstance(least, int) or isinstance(least, bool) or least < 1:
        raise UsageError(f"{name}: trunk.min_tokens={least!r} must be at least 1, and whole: a prompt has tokens")


def trunk_checks(trunk: Any, name: str) -> ModuleChecks:
    """The checks of the modules that ``trunk`` is or has, of their parameters and buffers, and of its own tensors.

    A layer that was made anew, as by a resized vocabulary, computes the same in training mode. What has layers in it counts
    whole: somebody has called its ``train()``.
    """
    roots = _roots(trunk)
    every = [(path, m) for root in reversed(roots) for path, m in root.named_modules()]
    modules = {id(m): (path, m) for path, m in every if m._modules or mode_matters(m)}
    named = [item for root in roots for item in (*root.named_parameters(), *root.named_buffers())]
    named += [(key, value) for key, value in _attributes(trunk).items() if isinstance(value, Tensor)]
    tensors = {id(t): (path, t) for path, t in reversed(named)}
    return ModuleChecks(modules.values(), tensors.values(), name)


def held_weights(trunk: Any) -> list[Tensor]:
    """Aliases of all parameters and buffers. They keep the memory alive that compiled code and C++ ops read, which no
    watching sees, also after a parameter was given other memory. A tensor that wraps others holds theirs, and inference mode
    makes no alias of it.
    """
    weights = (t for root in _roots(trunk) for t in (*root.parameters(), *root.buffers()))
    return [t if _torch.is_wrapper(t) else t.detach() for t in weights]


def _attributes(trunk: Any) -> dict[str, Any]:
    return getattr(trunk, "__dict__", {})


def _roots(trunk: Any) -> list[nn.Module]:
    return [m for m in (trunk, *_attributes(trunk).values()) if isinstance(m, nn.Module)]
