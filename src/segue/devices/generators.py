"""Random generators of the user's own that forwards draw from. CUDA must know a generator before it records a draw from it.

An op gets a new object for a generator at each call, so they are told apart by what is behind it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Generator, Tensor

from segue import _source_lines, _torch
from segue.errors import CaptureError

_MOST = 16  # each costs every recording on CUDA two small kernels
_lock = threading.Lock()
_known: dict[int, Generator] = {}
_kept: list[dict[int, tuple[Generator, Tensor]]] = []  # states to put back, of each block of kept()


def note(kwargs: Mapping[str, Any]) -> None:
    """Make the generator among the arguments of an op that is about to run known to later recordings, if there is one."""
    generator = kwargs.get("generator")
    if generator is not None:
        _add(generator)
        for states in _kept:
            states.setdefault(_torch.generator_key(generator), (generator, generator.get_state()))


def known() -> list[Generator]:
    """The generators that a recording that begins now may draw from, beside the default ones: those last drawn from."""
    with _lock:
        return list(_known.values())


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Put back the state of each generator that is known, or is noted within this block."""
    states = {_torch.generator_key(g): (g, g.get_state()) for g in known()}
    _kept.append(states)
    try:
        yield
    finally:
        _kept[:] = [other for other in _kept if other is not states]
        for generator, state in states.values():
            generator.set_state(state)


def unknown(op: str, generator: Generator) -> CaptureError:
    """The error of an op that draws from a generator which was not known when its recording began. It is known from now on."""
    _add(generator)
    return CaptureError(
        f"{op} at {_source_lines.caller()} can't be in a segment: it draws from a random generator of its own, which must be "
        "known before the recording begins, as CUDA sets it at each replay. A runner's warm-up makes it known, and so has this "
        "attempt: capture again. Or draw from the default generator, or in a break point."
    )


def _add(generator: Generator) -> None:
    with _lock:
        key = _torch.generator_key(generator)
        _known[key] = _known.pop(key, generator)
        while len(_known) > _MOST:
            del _known[next(iter(_known))]
