"""Which extra arguments of a forward some code could read, since they are handed down from module to module as ``**kwargs``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

# Beside the files of a model's own classes: what decorates their forwards, makes masks and computes attention and experts.
_CALLED = (
    "transformers.cache_utils",
    "transformers.masking_utils",
    "transformers.modeling_flash_attention_utils",
    "transformers.utils.generic",
    "transformers.utils.output_capturing",
)
_INTEGRATIONS = ("attention", "paged", "moe", "kernels")  # in the names of those that a forward calls
_OTHER = ("builtins", "torch.", "transformers.modeling_utils")


class ArgumentNames:
    """The names that code of ``model``'s modules, or that they call in transformers, has for arguments and keys."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: set[str] | None = None

    def __contains__(self, name: object) -> bool:
        """Whether some code could read an argument of this name. The code is looked through when this is asked first."""
        if self._names is None:
            classes = {cls for m in self._model.modules() for cls in type(m).__mro__ if not cls.__module__.startswith(_OTHER)}
            files = {cls.__module__ for cls in classes}
            called = [name for name in sys.modules if name.startswith(_CALLED) or _is_called(name)]
            held = [*classes, *(value for name in files for value in _functions(name))]
            held += [value for name in called for value in vars(sys.modules[name]).values()]
            self._names = {name for value in held for code in _code(value) for name in _read_by(code)}
        return name in self._names


def _is_called(file: str) -> bool:
    return file.startswith("transformers.integrations.") and any(part in file for part in _INTEGRATIONS)


def _functions(file: str) -> list[Any]:
    return [value for value in vars(sys.modules.get(file, sys)).values() if isinstance(value, FunctionType)]


def _code(value: Any) -> Iterator[CodeType]:
    for held in [value, *vars(value).values()] if isinstance(value, type) else [value]:
        found = getattr(held, "__func__", getattr(held, "fget", held))
        while isinstance(found, FunctionType):
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
