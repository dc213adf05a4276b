"""Random generators of Python and numpy. What a segment's Python draws from them is in its graph for good."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import BuiltinMethodType, MethodType
from typing import Any

State = tuple[Callable[[], Any], Callable[[Any], object]]  # gets it, and sets it


def generator_of(value: Any) -> tuple[Any, State] | None:
    """The generator that ``value`` is or draws from, with its state; None if there is none.

    ``value``: a generator, a method of one such as ``random.random``, or the module ``random``.
    """
    if value is random:
        value = random.random
    owner = value.__self__ if isinstance(value, BuiltinMethodType | MethodType) else value
    if isinstance(owner, random.Random):
        return None if isinstance(owner, random.SystemRandom) else (owner, (owner.getstate, owner.setstate))
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(owner, numpy.Generator):
        bits = owner.bit_generator
        return owner, (lambda: bits.state, lambda state: setattr(bits, "state", state))
    if numpy is not None and isinstance(owner, numpy.RandomState):
        return owner, (owner.get_state, owner.set_state)
    return None
