"""What a captured break hands on, and where it was called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from segue.capture.break_points import Break
from segue.capture.handoff import Handoff
from segue.capture.nested import Branch


def handoffs(step: Break) -> Iterator[Handoff]:
    """Every tensor that later segments read of its result."""
    yield from step._clears
    todo: list[Any] = [] if step._clears else [step._take]
    while todo:
        take = todo.pop()
        if isinstance(take, Branch):
            todo.extend(take.children)
        elif isinstance(owner := getattr(take, "__self__", None), Handoff):
            yield owner


def called_at(step: Break) -> str:
    """``file.py:12 in forward`` of the call."""
    return step.where.rpartition(" called at ")[2]
