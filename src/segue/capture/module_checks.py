"""What every forward in graphs needs of its modules: evaluation mode, and no gradients to record."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from segue.errors import SegueError, UsageError

_training, _requires_grad = itemgetter("training"), attrgetter("requires_grad")


class ModuleChecks:
    """Quick checks of the modules and tensors behind a forward, for every call: about 5 us for the modules of 28 layers.

    It reads the present state of the modules and tensors that it was given. It doesn't see modules that were added or replaced
    since: make a new one for those.

    Args:
        modules: name and module each. An empty name is that of the root.
        tensors: name and tensor each: parameters, buffers and whatever else the forward reads.
        owner: whom errors name, as in "prime graph of 512 rows".
        gradient_error: the class of the error about gradients.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        tensors: Iterable[tuple[str, Tensor]],
        owner: str,
        gradient_error: type[SegueError] = UsageError,
    ) -> None:
        self._modules, self._named_tensors = list(modules), list(tensors)
        self._owner, self._gradient_error = owner, gradient_error
        # Reading an attribute of a module takes twice as long as reading its dict.
        self._modes = [vars(m) for _, m in self._modules if "training" in vars(m)]
        self._tensors = [t for _, t in self._named_tensors]

    def check_modes(self) -> None:
        """Refuse training mode.

        Raises:
            UsageError: a module is in training mode; names it.
        """
        if not any(map(_training, self._modes)):
            return
        name, module = next((name, m) for name, m in self._modules if m.training)
        who = type(module).__qualname__ + (f" {name!r}" if name else "")
        raise UsageError(
            f"{self._owner}: {who} is in training mode: dropout and batch statistics would be frozen into the graphs. "
            "Call .eval() on the model first"
        )

    def check_gradients(self) -> None:
        """Refuse a call whose gradients would have to be recorded.

        Raises:
            ``gradient_error``: grad mode is on and a tensor requires grad; names it.
        """
        if not (torch.is_grad_enabled() and any(map(_requires_grad, self._tensors))):
            return
        name = next(name for name, t in self._named_tensors if t.requires_grad)
        raise self._gradient_error(
            f"{self._owner} was run with gradients required: {name} requires grad while grad mode is on, and graphs record no "
            "gradients, so a loss would have no way back. Run it under torch.inference_mode() or torch.no_grad(), or freeze "
            "the model: .requires_grad_(False)"
        )


def mode_matters(module: nn.Module) -> bool:
    """Whether training mode can make a difference to a module itself: its class, or a function that this calls, looks at
    ``training``, or its forward was replaced.
    """
    cls: Any = type(module)
    return "forward" in vars(module) or _asks(cls)


@functools.lru_cache(maxsize=4096)
def _asks(cls: type[nn.Module]) -> bool:
    own = cls.__mro__[: cls.__mro__.index(nn.Module)]
    methods = [inspect.unwrap(f) for c in own for f in vars(c).values() if isinstance(f, FunctionType)]
    functions = [f for f in methods if isinstance(f, FunctionType)]
    helpers = [f.__globals__.get(name) for f in functions for name in f.__code__.co_names]
    return any(_mentions(f.__code__) for f in (*functions, *(h for h in helpers if isinstance(h, FunctionType))))


def _mentions(code: CodeType) -> bool:
    return "training" in code.co_names or any(
        _mentions(c) if isinstance(c, CodeType) else isinstance(c, str) and c == "training" for c in code.co_consts
    )
