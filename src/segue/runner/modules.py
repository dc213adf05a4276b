"""What a module must be for its forward to be captured: in evaluation mode, and on the runner's device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from segue.errors import UsageError


class Module:
    """The ``nn.Module`` that a function is, or is a method of. ``root`` is None where there is none."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        while isinstance(fn, functools.partial):
            fn = fn.func
        owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
        self.root = owner if isinstance(owner, nn.Module) else None

    @property
    def device(self) -> torch.device | None:
        """Where its first parameter is."""
        first = None if self.root is None else next(self.root.parameters(), None)
        return None if first is None else first.device

    def check(self, place: torch.device) -> None:
        """Look at every submodule, parameter and buffer. For warm-up and capture; a call looks at the root only.

        Raises:
            UsageError: one is in training mode, or on another device than ``place``.
        """
        if self.root is None:
            return
        self.check_place(place)
        for name, child in self.root.named_modules():
            if child.training:
                raise in_training(child, name)

    def check_place(self, place: torch.device) -> None:
        """Look at every parameter and buffer."""
        if self.root is None:
            return
        for name, t in (*self.root.named_parameters(), *self.root.named_buffers()):
            if t.device != place:
                raise UsageError(
                    f"{name} is on {t.device}, and the runner is on {place}. Move the module: .to({str(place)!r})"
                )


def in_training(module: nn.Module, name: str = "") -> UsageError:
    """The error for a module in training mode."""
    who = type(module).__qualname__ + (f" {name!r}" if name else "")
    return UsageError(
        f"{who} is in training mode: dropout and batch statistics would be frozen into the graphs. "
        "Call .eval() on the model first"
    )
