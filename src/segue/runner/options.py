"""Checks of a runner's options, when it is made. Each raises UsageError, with the option's name, for a value without meaning."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from segue.errors import UsageError
from segue.runner.inputs import Leaf
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


def shares_buffers(other: Any, kind: type, leaves: Sequence[Leaf], most: tuple[int, int], pool: Any) -> None:
    """Check that inputs of the names of ``other``'s, a runner, can lie in its buffers.

    ``leaves``, ``most``: the declared inputs, and the most padded tokens and requests, of the runner that would share them.
    """
    if not issubclass(type(other), kind):
        raise UsageError(f"buffers_of={other!r} is a {type(other).__qualname__}; give a segue.GraphRunner")
    if pool is not None:
        raise UsageError("buffers_of= means the pool of that runner too, since its graphs read the buffers; leave pool= out")
    theirs = {leaf.name: leaf.declared for leaf in other._binder.leaves}
    if not any(leaf.name in theirs for leaf in leaves):
        raise UsageError(f"buffers_of= shares inputs of the same name, and that runner's are {', '.join(theirs)}")
    for leaf in leaves:
        if (declared := theirs.get(leaf.name, leaf.declared)) != leaf.declared:
            raise UsageError(f"buffers_of=: input {leaf.name!r} is declared as {declared} there, and as {leaf.declared} here")
    if any(mine > there for mine, there in zip(most, other.admission.most, strict=True)):
        raise UsageError(
            f"buffers_of=: that runner's buffers hold {other.admission.most[0]} tokens and {other.admission.most[1]} requests, "
            f"and this one's {most[0]} and {most[1]}. Make the runner with the larger buckets first, and give it to the other"
        )
