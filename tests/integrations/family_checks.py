"""Measures what an accelerated model of a family gives beside the untouched one: one cell for each column of the table."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import segue
from integrations.families import Family
from integrations.family_flows import BUCKETS, Flow, Seen, flows_of
from segue.runner import Stats

COLUMNS = ("mechanism", "prefill", "padded", "chunk", "decode", "batch", "beams", "cache", "prime", "steps", "compile")

_TOLERANCE = 1e-5  # relative to the largest value where that is above 1
_COMPILED = ("padded", "decode", "batch")  # flows that the column compile repeats
_OTHER = {"prime": "prime", "steps": "full"}  # columns of other strategies, whose flows repeat those of the columns before
_TO_ROUNDING = ("padded", "beams", "prime", "steps", "compile")  # columns in which dense families need not be bit-equal
_RUNS = 3  # at most: the first call of a bucket warms it up, the second captures it
_LONGEST = 110  # characters of a cell


@dataclass(frozen=True)
class Cell:
    """``text`` for the table; ``ok``: the column holds. ``note``: the whole text where the table has room for a part only."""

    text: str
    ok: bool = True
    note: str = ""

    @staticmethod
    def fault(what: str, note: str) -> Cell:
        """``what`` went wrong; the table says so, and the note says how."""
        return Cell(what, False, note)


class Mismatch(Exception):
    """Two results that no rounding makes equal. The text says where."""


def check(family: Family) -> dict[str, Cell]:
    """All columns of one family on the emulator. A column that makes no sense for it has no cell."""
    with torch.no_grad():
        return _Checks(family).cells()


class _Checks:
    """One model of a family, what it gives untouched, and what its handle gives then."""

    def __init__(self, family: Family) -> None:
        self.family, self.flows = family, flows_of(family)
        self.model = family.make()
        self._new = Kept(self.model)
        self.wanted: dict[str, Seen] = {}
        self._cannot: dict[str, Cell] = {}
        for column, flow in self.flows.items():
            self._new.put_back()
            try:
                self.wanted[column] = flow(self.model)
            except Exception as e:  # whatever keeps this family from it
                self._cannot[column] = Cell("n/a", note=f"the untouched model raises {_said(e)}")

    def cells(self) -> dict[str, Cell]:
        cells = self._accelerated()
        if cells["mechanism"].ok:
            cells["compile"] = self._compiled()
        return cells | self._cannot

    def _accelerated(self) -> dict[str, Cell]:
        handle = self._handle()
        if isinstance(handle, Cell):
            return {"mechanism": handle}
        with handle:
            cells = {"mechanism": Cell("; ".join(handle.boundaries) or "nothing live")}
            for column in self.wanted:
                with nullcontext() if column in _OTHER else handle.breakable_only():
                    cells[column] = self._measure(column, column, handle)
            for column, strategy in _OTHER.items():
                if column in cells and cells[column].ok and not handle.stats.strategies.get(strategy):
                    cells[column] = Cell("no", note=handle.strategies.get(strategy) or "no call was served so")
        return cells

    def _compiled(self) -> Cell:
        handle = self._handle(compile=True)
        if isinstance(handle, Cell):
            return handle
        with handle:
            return max((self._measure("compile", flow, handle) for flow in _COMPILED if flow in self.wanted), key=_badness)

    def _handle(self, compile: bool = False) -> Any:
        """The accelerated model, or a cell that says why there is none."""
        self._new.put_back()
        buckets = BUCKETS[1:] if compile else BUCKETS
        try:
            return segue.accelerate(self.model, buckets=buckets, device="emulator", compile=compile)
        except segue.SegueError as e:
            return Cell("refused", compile, str(e))
        except Exception as e:
            return Cell.fault("WRONG: accelerate raised", _said(e))

    def _measure(self, column: str, flow: str, handle: Any) -> Cell:
        exact = self.family.dense and column not in _TO_ROUNDING
        runs = self.flows[flow], handle, self.wanted[flow], self._new
        return measure(*runs, tolerance=0.0 if exact else _TOLERANCE, at_least=_RUNS if column in _OTHER else 1)


class Kept:
    """What the modules of a new model keep beside parameters and buffers. Some keep something of a call for the next one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tables = [
            (vars(module), {name: value for name, value in vars(module).items() if value is None or isinstance(value, Tensor)})
            for module in model.modules()
        ]

    def put_back(self) -> None:
        """Let the model be as it was when it was new."""
        for table, new in self._tables:
            table.update(new)


def measure(flow: Flow, handle: Any, want: Seen, new: Kept, tolerance: float, at_least: int = 1) -> Cell:
    """Run a flow until it only replays. It must return what is wanted each time.

    ``new``: puts the model back before each run. ``at_least``: so many runs, where no count of captures tells when all is done.
    """
    worst, before, after = 0.0, handle.stats, handle.stats
    for run in range(_RUNS):
        before = handle.stats
        new.put_back()
        try:
            got = flow(handle)
        except Exception as e:
            return Cell.fault("WRONG: raised", _said(e))
        after = handle.stats
        try:
            worst = max(worst, difference(got, want))
        except Mismatch as e:
            return Cell.fault(f"WRONG: {e}", str(e))
        if run + 1 >= at_least and (after.warmed, after.captured) == (before.warmed, before.captured):
            break
    eager = after.eager - before.eager
    if eager:
        why, all_of_them = _reasons(before, after), eager + after.replayed - before.replayed
        return Cell.fault(f"untouched: {why}", f"{eager} of {all_of_them} forwards ran untouched: {why}")
    if after.replayed == before.replayed:
        return Cell.fault("not replayed", f"warmed {after.warmed}, captured {after.captured}, replayed {after.replayed}")
    text = "=" if worst == 0 else f"{worst:.0e}".replace("e-0", "e-")
    if worst > _TOLERANCE:
        return Cell.fault(f"WRONG: {text}", "differs")
    return Cell(text) if worst <= tolerance else Cell.fault(text, "not bit-equal")


def _badness(cell: Cell) -> tuple[bool, bool, float]:
    """Orders cells from good to bad."""
    try:
        return not cell.ok, False, 0.0 if cell.text == "=" else float(cell.text)
    except ValueError:
        return not cell.ok, True, 0.0


def difference(got: Seen, want: Seen) -> float:
    """The largest difference, relative to the size of the tensor where that is above 1. Whole numbers must be equal.

    Raises:
        Mismatch: there are other tensors, of another shape or dtype, or with other whole numbers or NaNs.
    """
    if got.keys() != want.keys():
        raise Mismatch(f"{_some(got.keys() ^ want.keys())} in one of the two only")
    return max((_tensors_differ(name, got[name], want[name]) for name in want), default=0.0)


def _tensors_differ(name: str, a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        raise Mismatch(f"{name} is {list(a.shape)} {a.dtype} instead of {list(b.shape)} {b.dtype}")
    if torch.equal(a, b) or not b.numel():
        return 0.0
    if not b.is_floating_point():
        raise Mismatch(f"other {name}: {a.flatten().tolist()[-16:]} instead of {b.flatten().tolist()[-16:]}")
    if not torch.equal(a.isfinite(), b.isfinite()):
        raise Mismatch(f"{name} has other infinite values or NaNs")
    real = b.isfinite()
    a, b = a[real].double(), b[real].double()
    return ((a - b).abs().max() / b.abs().max().clamp(min=1.0)).item() if len(b) else 0.0


def _some(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:3])


def _reasons(before: Stats, after: Stats) -> str:
    counts = {reason: n - before.reasons.get(reason, 0) for reason, n in after.reasons.items()}
    return "; ".join(reason for reason, n in counts.items() if n) or "no reason given"


def _said(error: BaseException) -> str:
    """An error's text with the line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"


def shortened(cell: Cell) -> str:
    """A cell's text as the table has it."""
    text = " ".join(cell.text.split()).replace("|", "/")
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
