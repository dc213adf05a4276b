"""A captured forward as a flat program: segments and breaks, in the order of the capture."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any

import torch

from segue import _torch
from segue.capture.breaks import Break
from segue.capture.ownership import Ownership
from segue.capture.state import state
from segue.devices import Pool, Segment
from segue.errors import ReplayError, UsageError

Step = Segment | Break


class Program:
    """Runs the steps of one capture. Holds its segments and hand-offs, and no reference to the capture itself."""

    def __init__(self, steps: list[Step], ownership: Ownership, pool: Pool, rows: int | None, name: str) -> None:
        self.ownership, self.closed = ownership, False
        self._pool, self._rows, self._name, self._inference = pool, rows, name, torch.is_inference_mode_enabled()
        self._kind = pool.device.torch_device.type
        self._autocast = _torch.autocast_state(self._kind)
        self._all = [s.runner() if isinstance(s, Break) else s.launch for s in steps]
        self._steps = tuple(
            run for run, step in zip(self._all, steps, strict=True) if isinstance(step, Break) or not step.empty
        )

    @property
    def callables(self) -> list[Callable[[], None]]:
        """Every step as a callable of its own. Made anew, or the program would hold itself and outlive its capture."""
        return [self._alone(run) for run in self._all]

    def run(self, valid_rows: int | None) -> None:
        """Launch the segments and run the breaks between them, of which ``valid_rows`` rows are real."""
        if type(valid_rows) is not int and valid_rows is not None:
            valid_rows = row_count(valid_rows, f"{self._name}: valid_rows")
        if valid_rows is not None and not 0 <= valid_rows <= (valid_rows if self._rows is None else self._rows):
            raise UsageError(f"{self._name}: valid_rows={valid_rows} is not between 0 and its {self._rows} rows")
        self._within(self._steps, valid_rows, self.ownership.check)

    def _within(self, steps: tuple[Callable[[], None], ...], valid_rows: int | None, check: Callable[[], None]) -> None:
        s, pool = state, self._pool
        if self.closed:
            raise ReplayError(f"{self._name} can't be replayed: it was closed.")
        if s.pool is pool:
            raise UsageError(
                f"{self._name} was replayed inside a forward of the same pool, whose memory it would overwrite. "
                "Give one of the two a pool of its own."
            )
        before = (s.pool, s.rows, s.valid, s.inside_break, s.reference, s.phase)
        with pool.turn():
            s.pool, s.rows, s.valid, s.inside_break, s.reference, s.phase = pool, self._rows, valid_rows, True, False, None
            try:
                if _torch.autocast_state(self._kind) != self._autocast:
                    raise self._cast_otherwise()
                check()
                if self._inference and not torch.is_inference_mode_enabled():
                    with _torch.inference_guard(True):
                        _run(steps)
                elif torch.is_grad_enabled():
                    with torch.no_grad():
                        _run(steps)
                else:
                    _run(steps)
            finally:
                s.pool, s.rows, s.valid, s.inside_break, s.reference, s.phase = before

    def _cast_otherwise(self) -> ReplayError:
        return ReplayError(
            f"{self._name} was captured under autocast {_say(self._autocast)} and is replayed under autocast "
            f"{_say(_torch.autocast_state(self._kind))}. Its segments would cast as they did, its breaks otherwise: keep "
            "autocast as it was, or capture a forward that turns it on by itself."
        )

    def _alone(self, step: Callable[[], None]) -> Callable[[], None]:
        def run_alone() -> None:
            self._within((step,), None, self.ownership.check)

        return run_alone


def _run(steps: tuple[Callable[[], None], ...]) -> None:
    for step in steps:
        step()


def row_count(n: Any, what: str) -> int:
    """``n`` as a number of rows: any whole number that isn't a flag.

    Raises:
        UsageError: it is none, or negative.
    """
    try:
        count = -1 if isinstance(n, bool) else index(n)
    except TypeError:
        count = -1
    if count < 0:
        raise UsageError(f"{what}={n!r} is not a number of rows")
    return count


def _say(autocast: torch.dtype | None) -> str:
    return "off" if autocast is None else f"to {autocast}"
