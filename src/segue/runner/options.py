"""Checks of a runner's options, when it is made. Each raises UsageError, with the option's name, for a value without meaning."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from segue.errors import UsageError
from segue.runner.ladder import Ladder


def ladder(name: str, buckets: Any) -> Ladder:
    """``buckets`` as a ladder: it is one, or lists one's token counts."""
    if isinstance(buckets, Ladder):
        return buckets
    if not isinstance(buckets, Iterable) or isinstance(buckets, str | bytes | Tensor):
        raise UsageError(f"{name}={buckets!r} is neither a segue.Ladder nor a list of token counts, as in [16, 32, 64]")
    return Ladder(buckets)


def one_of(name: str, value: Any, first: str, second: str) -> bool:
    """Whether ``value`` is the second of the two words that it may be."""
    if value not in (first, second):
        raise UsageError(f'{name}={value!r} is neither "{first}" nor "{second}"')
    return bool(value == second)


def whole_number(name: str, value: Any, least: int, unit: str = "") -> int:
    """``value`` as an int; it must be a whole number of at least ``least``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise UsageError(f"{name}={value!r} must be a whole number{unit}, at least {least}")
    return number


def tensors(name: str, value: Any) -> list[Tensor]:
    """The tensors that ``value`` lists, as a list."""
    found = list(value) if isinstance(value, Iterable) and not isinstance(value, str | Tensor | Mapping) else None
    if found is None or not all(isinstance(t, Tensor) for t in found):
        raise UsageError(f"{name}={value!r} must be a list of tensors, as in [cache.keys, cache.values]")
    return found


def function(name: str, value: Any, takes: str) -> Any:
    """``value``, which must be a function or None. ``takes``: what the function is given, for the error."""
    if value is not None and not callable(value):
        raise UsageError(f"{name}={value!r} must be a function of {takes}")
    return value
