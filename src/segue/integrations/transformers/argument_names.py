"""Which extra arguments of a forward some code could read, since they are handed down from module to module as ``**kwargs``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

# Beside the files of a model's own classes: what decorates their forwards, makes masks and computes attention and experts.
_CALLED = (
    "transformers.cache_utils",
    "transformers.integrations.",
    "transformers.masking_utils",
    "transformers.modeling_flash_attention_utils",
    "transformers.utils.generic",
    "transformers.utils.output_capturing",
)


class ArgumentNames:
    """The names that code of ``model``'s modules, or that they call in transformers, has for arguments and keys."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: set[str] | None = None

    def __contains__(self, name: object) -> bool:
        """Whether some code could read an argument of this name. The code is looked through when this is asked first."""
        if self._names is None:
            files = {cls.__module__ for m in self._model.modules() for cls in type(m).__mro__}
            own = [name for name in files if not name.startswith(("torch.", "builtins", "transformers.modeling_utils"))]
            called = [name for name in sys.modules if name.startswith(_CALLED)]
            modules = [sys.modules[name] for name in {*own, *called} if name in sys.modules]
            self._names = {name for module in modules for code in _code(module) for name in _read_by(code)}
        return name in self._names


def _code(module: ModuleType) -> Iterator[CodeType]:
    for value in list(vars(module).values()):
        held: list[Any] = [value, *vars(value).values()] if isinstance(value, type) else [value]
        for found in held:
            found = getattr(found, "__func__", getattr(found, "fget", found))
            while found is not None:
                if isinstance(found, FunctionType) and found.__code__.co_filename:
                    yield from _with_inner(found.__code__)
                found = getattr(found, "__wrapped__", None)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _with_inner(const)


def _read_by(code: CodeType) -> Iterator[str]:
    """Parameters, and text that may be a key."""
    yield from code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for const in code.co_consts:
        if isinstance(const, str):
            yield const
        elif isinstance(const, tuple | frozenset):
            yield from (each for each in const if isinstance(each, str))
