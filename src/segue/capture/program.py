"""A captured forward as a flat program: segments and breaks, in the order of the capture."""

from __future__ import annotations

from collections.abc import Callable

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

    def __init__(
        self, steps: list[Step], ownership: Ownership, pool: Pool, rows: int | None, name: str
    ) -> None:
        self.ownership = ownership
        self._pool, self._rows, self._name, self._inference = pool, rows, name, torch.is_inference_mode_enabled()
        self._kind = pool.device.torch_device.type
        self._autocast = _torch.autocast_state(self._kind)
        self._all = [(isinstance(s, Break), s.runner() if isinstance(s, Break) else s.launch) for s in steps]
        self._steps = tuple(
            run for (_, run), step in zip(self._all, steps, strict=True) if isinstance(step, Break) or not step.empty
        )

    @property
    def callables(self) -> list[Callable[[], None]]:
        """Every step as a callable of its own. Made anew, or the program would hold itself and outlive its capture."""
        return [self._alone(run) if is_break else run for is_break, run in self._all]

    def run(self, valid_rows: int | None) -> None:
        """Launch the segments and run the breaks between them, of which ``valid_rows`` rows are real."""
        if valid_rows is not None and not 0 <= valid_rows <= (valid_rows if self._rows is None else self._rows):
            raise UsageError(f"{self._name}: valid_rows={valid_rows} is not between 0 and its {self._rows} rows")
        self._within(self._steps, valid_rows, self.ownership.check)

    def _within(self, steps: tuple[Callable[[], None], ...], valid_rows: int | None, check: Callable[[], None]) -> None:
        s, pool = state, self._pool
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
        def run_break() -> None:
            self._within((step,), None, _nothing)

        return run_break


def _run(steps: tuple[Callable[[], None], ...]) -> None:
    for step in steps:
        step()


def _say(autocast: torch.dtype | None) -> str:
    return "off" if autocast is None else f"to {autocast}"


def _nothing() -> None:
    return None
