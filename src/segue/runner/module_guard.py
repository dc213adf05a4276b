"""Checks of the modules behind a runner's function: evaluation mode, the runner's device, and no gradients to record."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from segue.capture.object_graph import reached
from segue.errors import InputError, UsageError

_in_training = itemgetter("training")
_requires_grad = attrgetter("requires_grad")


class ModuleGuard:
    """The ``nn.Module`` that a function is, or is a method of, and the modules and tensors that it reaches by name.

    ``root``: the module that the function is, or is a method of; None if there is none. Of the other modules those matter whose
    code reads ``training``: a ``Linear`` that was never put in evaluation mode computes the same.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._modules: list[tuple[str, nn.Module]] = []
        self._tensors: list[tuple[str, Tensor]] = []
        self._modes: list[dict[str, Any]] | None = None  # the dicts of modules, which hold their modes and are read at every call
        self._held: list[Tensor] = []
        while isinstance(fn, functools.partial):
            fn = fn.func
        owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
        self.root = owner if isinstance(owner, nn.Module) else None

    @property
    def device(self) -> torch.device | None:
        """The device of the root's first parameter; None without one."""
        first = None if self.root is None else next(self.root.parameters(), None)
        return None if first is None else first.device

    def look(self) -> None:
        """Check quickly, at every call, the modules and tensors that the last :meth:`check` found.

        Raises:
            UsageError: one is in training mode. InputError: grad mode is on and one requires grad.
        """
        modes = self._modes
        if modes is None:
            modes = self._find()
        if modes and any(map(_in_training, modes)):
            raise next(self._mode_error(m, name) for name, m in self._modules if m.training)
        if self._held and torch.is_grad_enabled() and any(map(_requires_grad, self._held)):
            name = next(name for name, t in self._tensors if t.requires_grad)
            raise InputError(
                f"{name} requires grad while grad mode is on, and graphs record no gradients. Call the runner under "
                "torch.inference_mode(), or freeze it: requires_grad_(False)"
            )

    def check(self, place: torch.device) -> None:
        """Find every submodule, parameter and buffer anew, and check them. Warm-up and capture need this; a call takes
        :meth:`look`.

        Raises:
            UsageError: one is in training mode, or on another device than ``place``.
        """
        self.check_place(place)
        for name, child in () if self.root is None else self.root.named_modules():
            if child.training:
                raise _training_error(child, name)
        self._find()
        for name, child in self._modules:
            if child.training:
                raise self._mode_error(child, name)

    def forget(self) -> None:
        """Let go of all modules and tensors that were found."""
        self._modules, self._tensors, self._modes, self._held = [], [], None, []

    def _mode_error(self, module: nn.Module, name: str) -> UsageError:
        return _training_error(module, "" if module is self.root else name)

    def _find(self) -> list[dict[str, Any]]:
        found = list(reached(self._fn))
        self._modules = [(name, m) for name, m in found if isinstance(m, nn.Module) and (m is self.root or _mode_matters(m))]
        self._tensors = [(name, t) for name, t in found if isinstance(t, Tensor)]
        self._held = [t for _, t in self._tensors]
        self._modes = modes = [m.__dict__ for _, m in self._modules if "training" in m.__dict__]
        return modes

    def check_place(self, place: torch.device) -> None:
        """Check that every parameter and buffer of the root is on ``place``.

        Raises:
            UsageError: one is on another device.
        """
        if self.root is None:
            return
        for name, t in (*self.root.named_parameters(), *self.root.named_buffers()):
            if t.device != place:
                raise UsageError(
                    f"{name} is on {t.device}, and the runner is on {place}. Move the module: .to({str(place)!r})"
                )


def _mode_matters(module: nn.Module) -> bool:
    """Whether the mode of a module can make a difference: its class reads ``training``, or its forward was replaced."""
    cls: Any = type(module)
    return "forward" in module.__dict__ or _class_reads_mode(cls)


@functools.lru_cache(maxsize=4096)
def _class_reads_mode(cls: type[nn.Module]) -> bool:
    own = cls.__mro__[: cls.__mro__.index(nn.Module)]
    functions = [inspect.unwrap(f) for c in own for f in vars(c).values() if isinstance(f, FunctionType)]
    return any(_code_reads_mode(f.__code__) for f in functions if isinstance(f, FunctionType))


def _code_reads_mode(code: CodeType) -> bool:
    return "training" in code.co_names or any(
        _code_reads_mode(c) if isinstance(c, CodeType) else isinstance(c, str) and c == "training" for c in code.co_consts
    )


def _training_error(module: nn.Module, name: str) -> UsageError:
    who = type(module).__qualname__ + (f" {name!r}" if name else "")
    return UsageError(
        f"{who} is in training mode: dropout and batch statistics would be frozen into the graphs. "
        "Call .eval() on the model first"
    )
