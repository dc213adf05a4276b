"""What the modules behind a forward must be: in evaluation mode, on the runner's device, and without gradients to record."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from segue import _source_lines
from segue.capture.module_checks import ModuleChecks, mode_matters
from segue.capture.object_graph import reached
from segue.errors import InputError, UsageError


class ModuleGuard:
    """The ``nn.Module`` that a function is, or is a method of, and the modules and tensors that it reaches by name.

    ``root`` is None where there is none. Of all other modules those matter whose code asks for their mode: a ``Linear`` that was
    never put in evaluation mode computes the same.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._checks: ModuleChecks | None = None  # of what was found last
        while isinstance(fn, functools.partial):
            fn = fn.func
        owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
        self.root = owner if isinstance(owner, nn.Module) else None

    @property
    def device(self) -> torch.device | None:
        """Where its first parameter is."""
        first = None if self.root is None else next(self.root.parameters(), None)
        return None if first is None else first.device

    def look(self) -> None:
        """What every call looks at, quickly: the modules and tensors that the last :meth:`check` found.

        Raises:
            UsageError: one is in training mode. InputError: grad mode is on and one requires grad.
        """
        checks = self._checks
        if checks is None:
            checks = self._find()
        checks.check_modes()
        checks.check_gradients()

    def check(self, place: torch.device) -> None:
        """Look at every submodule, parameter and buffer anew. For warm-up and capture; a call takes a quick :meth:`look`.

        Raises:
            UsageError: one is in training mode, or on another device than ``place``.
        """
        self.check_place(place)
        if self.root is not None:
            modules = [(name, m) for name, m in self.root.named_modules() if m is self.root or mode_matters(m)]
            ModuleChecks(modules, (), self._label).check_modes()
        self._find().check_modes()

    def forget(self) -> None:
        """Hold nothing any more."""
        self._checks = None

    @property
    def _label(self) -> str:
        return f"the runner of {_source_lines.of(self._fn)}"

    def _find(self) -> ModuleChecks:
        found = list(reached(self._fn))
        modules = [(name, m) for name, m in found if isinstance(m, nn.Module) and (m is self.root or mode_matters(m))]
        tensors = [(name, t) for name, t in found if isinstance(t, Tensor)]
        named = [("" if m is self.root else name, m) for name, m in modules]
        self._checks = checks = ModuleChecks(named, tensors, self._label, gradient_error=InputError)
        return checks

    def check_place(self, place: torch.device) -> None:
        """Look at every parameter and buffer."""
        if self.root is None:
            return
        for name, t in (*self.root.named_parameters(), *self.root.named_buffers()):
            if t.device != place:
                raise UsageError(
                    f"{name} is on {t.device}, and the runner is on {place}. Move the module: .to({str(place)!r})"
                )
