"""A captured forward as a flat program: segments and breaks, in the order of the capture."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from operator import index
from typing import Any

import torch

from segue import _torch
from segue._torch import PROFILER
from segue.capture.break_points import Break
from segue.capture.externals import Externals
from segue.capture.modes import CallerModes, OtherMode
from segue.capture.named_ranges import range_of
from segue.capture.nested import Take
from segue.capture.thread_state import state
from segue.devices import Pool, Segment
from segue.errors import ReplayError, UsageError

Step = Segment | Break
# What to call; what takes its result, or None where the result must be None; and what refuses any other result there.
Run = tuple[Callable[[], Any], Take | None, Take]


class Program:
    """Runs the steps of one capture. Holds its segments and hand-offs, and no reference to the capture itself."""

    def __init__(
        self, steps: list[Step], externals: Externals, modes: CallerModes, pool: Pool, rows: int | None, name: str
    ) -> None:
        self.externals, self.closed, self._other_mode = externals, False, modes.other
        self._pool, self._rows, self._name, self._inference = pool, rows, name, torch.is_inference_mode_enabled()
        self._most = float("inf") if rows is None else rows
        self._state = {"pools": (pool,), "rows": rows, "inside_break": True, "reference": False, "phase": None}
        self._all = [s.runs() if isinstance(s, Break) else _launches(s) for s in steps]
        self._labels = dict(zip(map(id, self._all), _labels(steps), strict=True))
        live = [run for run, step in zip(self._all, steps, strict=True) if isinstance(step, Break) or not step.empty]
        # The first segment alone, if the device may run it while the host checks the modes, and the externals of the others.
        early = externals.early and not isinstance(steps[0], Break) and not steps[0].empty
        self._first, self._others = (live[:1], live[1:]) if early else ([], live)

    @property
    def callables(self) -> list[Callable[[], None]]:
        """Every step as a callable of its own. They are made at each call: a program that kept them would be in a reference
        cycle, and would outlive its capture."""
        return [self._callable(run) for run in self._all]

    def run(self, valid_rows: int | None, step: Run | None = None) -> None:
        """Launch the segments and run the breaks between them, with ``valid_rows`` real rows (None: all). ``step``: this one
        only.

        Raises:
            UsageError: ``valid_rows`` is no number of the program's rows, or this is inside a forward of the same pool.
            ReplayError: it was closed, the caller's modes or what it reads are not those of the capture, or a break's result
                changed.
        """
        if valid_rows is not None:
            if type(valid_rows) is not int:
                valid_rows = row_count(valid_rows, f"{self._name}: valid_rows")
            if not 0 <= valid_rows <= self._most:
                raise UsageError(f"{self._name}: valid_rows={valid_rows} is not between 0 and its {self._rows} rows")
        if self._pool in state.pools:
            raise self._nested()
        with self._pool.turn():
            if torch.is_inference_mode_enabled() or not (self._inference or torch.is_grad_enabled()):
                self.run_in_turn(valid_rows, step)
            elif self._inference:
                with _torch.inference_guard(True):
                    self.run_in_turn(valid_rows, step)
            else:
                with torch.no_grad():
                    self.run_in_turn(valid_rows, step)

    def check(self) -> None:
        """Raise what :meth:`run_in_turn` would raise before a break returns something else: all that it checks by itself."""
        if self.closed:
            raise self._was_closed()
        with self._pool.turn():
            self.externals.check()
        if (other := self._other_mode()) is not None:
            raise self._under_another(other)

    def run_in_turn(self, valid_rows: int | None, step: Run | None = None) -> None:
        """Do what :meth:`run` does, for a caller that holds the pool's turn, is in the capture's grad mode, and gives a row count
        from 0 to the program's rows.

        Raises:
            as :meth:`run`.
        """
        pool, mine = self._pool, state.__dict__  # the dict of this thread: it is looked up once for all fields
        if self.closed:
            raise self._was_closed()
        outer: tuple[Pool, ...] = mine.get("pools", ())
        if pool in outer:
            raise self._nested()
        if mine.get("phase") == "segment":
            raise UsageError(
                f"{self._name} was replayed while a segment of another capture is recorded, which can't hold a launch: the outer "
                "graph would go on without it. Replay it in a break, or let the outer capture record the forward itself."
            )
        before = mine.copy()
        try:
            mine.update(self._state)
            mine["valid"] = valid_rows
            if outer:
                mine["pools"] = (*outer, pool)
            self.externals.check_first()
            self._run(step)
        finally:
            mine.clear()
            mine.update(before)

    def _run(self, step: Run | None) -> None:
        run = self._run_named if PROFILER._is_profiler_enabled else _run
        if step is None:
            run(self._first)
        if (other := self._other_mode()) is not None:
            raise self._under_another(other)
        self.externals.check_rest()
        run(self._others if step is None else [step])

    def _run_named(self, steps: list[Run]) -> None:
        for step in steps:
            with range_of(self._labels[id(step)]):
                _run([step])

    def _was_closed(self) -> ReplayError:
        return ReplayError(f"{self._name} can't be replayed: it was closed.")

    def _nested(self) -> UsageError:
        return UsageError(
            f"{self._name} was replayed inside a forward of the same pool, whose memory it would overwrite. "
            "Give one of the two a pool of its own."
        )

    def _under_another(self, mode: OtherMode) -> ReplayError:
        return ReplayError(
            f"{self._name} was captured under {mode.name} {mode.then} and is replayed under {mode.name} {mode.now}. Its segments "
            "would compute as they did then, its breaks as now: keep the mode as it was, let the forward set it by itself, or "
            "recapture()."
        )

    def _callable(self, step: Run) -> Callable[[], None]:
        return lambda: self.run(None, step)


def _run(steps: list[Run]) -> None:
    for call, take, refuse in steps:
        result = call()
        if take is not None:
            take(result)
        elif result is not None:
            refuse(result)


def _labels(steps: list[Step]) -> list[str]:
    """``segment 0``, ``break mix (model.py:12)``, ``segment 1``: what each step is called."""
    number = count()
    return [f"break {s.spec.label}" if isinstance(s, Break) else f"segment {next(number)}" for s in steps]


def _launches(segment: Segment) -> Run:
    return segment.launch, None, _ignore_result


def _ignore_result(_: Any) -> None:
    """Refuse nothing: a segment's launch returns None, so it has no result that could be wrong."""


def row_count(n: Any, what: str) -> int:
    """``n`` as a number of rows: any whole number that isn't a bool.

    Raises:
        UsageError: it is no whole number, or it is negative.
    """
    try:
        count = -1 if isinstance(n, bool) else index(n)
    except TypeError:
        count = -1
    if count < 0:
        raise UsageError(f"{what}={n!r} is not a number of rows")
    return count
