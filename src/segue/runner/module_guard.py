"""What the modules behind a forward must be: in evaluation mode, on the runner's device, and without gradients to record."""

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

    ``root`` is None where there is none. Of modules that the function only reaches, those matter whose code asks for their
    mode: a ``Linear`` that was never put in evaluation mode computes the same.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._modules: list[tuple[str, nn.Module]] = []
        self._tensors: list[tuple[str, Tensor]] = []
        self._modes: list[dict[str, Any]] | None = None  # of modules, where they keep it: read at every call
        self._held: list[Tensor] = []
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
        modes = self._modes
        if modes is None:
            modes = self._find()
        if modes and any(map(_in_training, modes)):
            raise next(self._trains(m, name) for name, m in self._modules if m.training)
        if self._held and torch.is_grad_enabled() and any(map(_requires_grad, self._held)):
            name = next(name for name, t in self._tensors if t.requires_grad)
            raise InputError(
                f"{name} requires grad while grad mode is on, and graphs record no gradients. Call the runner under "
                "torch.inference_mode(), or freeze it: requires_grad_(False)"
            )

    def check(self, place: torch.device) -> None:
        """Look at every submodule, parameter and buffer anew. For warm-up and capture; a call takes a quick :meth:`look`.

        Raises:
            UsageError: one is in training mode, or on another device than ``place``.
        """
        self.check_place(place)
        for name, child in () if self.root is None else self.root.named_modules():
            if child.training:
                raise _training(child, name)
        self._find()
        for name, child in self._modules:
            if child.training:
                raise self._trains(child, name)

    def forget(self) -> None:
        """Hold nothing any more."""
        self._modules, self._tensors, self._modes, self._held = [], [], None, []

    def _trains(self, module: nn.Module, name: str) -> UsageError:
        return _training(module, "" if module is self.root else name)

    def _find(self) -> list[dict[str, Any]]:
        found = list(reached(self._fn))
        self._modules = [(name, m) for name, m in found if isinstance(m, nn.Module) and (m is self.root or _asks(m))]
        self._tensors = [(name, t) for name, t in found if isinstance(t, Tensor)]
        self._held = [t for _, t in self._tensors]
        self._modes = modes = [m.__dict__ for _, m in self._modules if "training" in m.__dict__]
        return modes

    def check_place(self, place: torch.device) -> None:
        """Look at every parameter and buffer."""
        if self.root is None:
            return
        for name, t in (*self.root.named_parameters(), *self.root.named_buffers()):
            if t.device != place:
                raise UsageError(
                    f"{name} is on {t.device}, and the runner is on {place}. Move the module: .to({str(place)!r})"
                )


def _asks(module: nn.Module) -> bool:
    """Whether the mode of a module can make a difference: its class looks at ``training``, or its forward was replaced."""
    cls: Any = type(module)
    return "forward" in module.__dict__ or _class_asks(cls)


@functools.lru_cache(maxsize=4096)
def _class_asks(cls: type[nn.Module]) -> bool:
    own = cls.__mro__[: cls.__mro__.index(nn.Module)]
    functions = [inspect.unwrap(f) for c in own for f in vars(c).values() if isinstance(f, FunctionType)]
    return any(_mentions(f.__code__) for f in functions if isinstance(f, FunctionType))


def _mentions(code: CodeType) -> bool:
    return "training" in code.co_names or any(
        _mentions(c) if isinstance(c, CodeType) else isinstance(c, str) and c == "training" for c in code.co_consts
    )


def _training(module: nn.Module, name: str) -> UsageError:
    who = type(module).__qualname__ + (f" {name!r}" if name else "")
    return UsageError(
        f"{who} is in training mode: dropout and batch statistics would be frozen into the graphs. "
        "Call .eval() on the model first"
    )
