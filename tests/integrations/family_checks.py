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

COLUMNS = ("mechanism", "prefill", "padded", "chunk", "decode", "batch", "beams", "cache", "prime", "compile")

_TOLERANCE = 1e-5  # relative to the largest value where that is above 1
_COMPILED = ("padded", "decode", "batch")  # flows that the column compile repeats
_BREAKABLE = ("prefill", "padded", "cache")  # flows that the column prime repeats with prime graphs
_TO_ROUNDING = ("padded", "beams", "prime", "compile")  # columns in which dense families need not be bit-equal
_RUNS = 3  # at most: the first call of a bucket warms it up, the second captures it
_LONGEST = 60  # characters of a cell


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
    model = family.make()
    flows = flows_of(family)
    with torch.no_grad():
        wanted = {column: _attempt(flow, model) for column, flow in flows.items()}
        wanted = {column: want for column, want in wanted.items() if isinstance(want, dict)}
        cells = {column: Cell("n/a", note="the untouched model can't") for column in flows if column not in wanted}
        cells |= _accelerated(family, model, flows, wanted)
        if "compile" not in cells and cells["mechanism"].ok:
            cells["compile"] = _compiled(family, model, flows, wanted)
    return cells


def _attempt(flow: Flow, model: Any) -> Seen | Exception:
    try:
        return flow(model)
    except Exception as e:
        return e


def _accelerated(family: Family, model: Any, flows: dict[str, Flow], wanted: dict[str, Seen]) -> dict[str, Cell]:
    try:
        handle = segue.accelerate(model, buckets=BUCKETS, device="emulator")
    except segue.SegueError as e:
        return {"mechanism": Cell.fault("refused", str(e))}
    except Exception as e:
        return {"mechanism": Cell.fault("WRONG: accelerate raised", _said(e))}
    with handle:
        cells = {"mechanism": Cell(_mechanism(handle))}
        for column in (column for column in COLUMNS if column in wanted and column != "prime"):
            with handle.without_prime() if column in _BREAKABLE else nullcontext():
                cells[column] = measure(family, column, flows[column], handle, wanted[column])
        if "prime" in wanted:
            cells["prime"] = _prime(family, flows["prime"], handle, wanted["prime"])
    return cells


def _compiled(family: Family, model: Any, flows: dict[str, Flow], wanted: dict[str, Seen]) -> Cell:
    try:
        handle = segue.accelerate(model, buckets=BUCKETS[1:], device="emulator", compile=True)
    except segue.SegueError as e:
        return Cell("refused", note=str(e))
    except Exception as e:
        return Cell.fault("WRONG: accelerate raised", _said(e))
    with handle:
        measured = [measure(family, "compile", flows[name], handle, wanted[name]) for name in _COMPILED if name in wanted]
    return max(measured, key=_badness)


def _badness(cell: Cell) -> tuple[bool, bool, float]:
    """Orders cells from good to bad."""
    try:
        return not cell.ok, False, 0.0 if cell.text == "=" else float(cell.text)
    except ValueError:
        return not cell.ok, True, 0.0


def _prime(family: Family, flow: Flow, handle: Any, want: Seen) -> Cell:
    before = handle.stats.strategies.get("prime", 0)
    cell = measure(family, "prime", flow, handle, want)
    if handle.stats.strategies.get("prime", 0) == before:
        why = handle.strategies.get("prime") or "no fresh prompt was served so"
        return Cell("no", note=why) if cell.ok else cell
    return cell


def measure(family: Family, column: str, flow: Flow, handle: Any, want: Seen) -> Cell:
    """Run a flow until its buckets are captured; the last run must replay, and each must return what is wanted."""
    worst, before, after = 0.0, handle.stats, handle.stats
    for _ in range(_RUNS):
        before = handle.stats
        try:
            got = flow(handle)
        except Exception as e:
            return Cell.fault("WRONG: raised", _said(e))
        after = handle.stats
        try:
            worst = max(worst, difference(got, want))
        except Mismatch as e:
            return Cell.fault(f"WRONG: {e}", str(e))
        if column != "prime" and (after.warmed, after.captured) == (before.warmed, before.captured):
            break
    eager = after.eager - before.eager
    if eager:
        return Cell.fault(f"untouched: {_reasons(before, after)}", f"{eager} untouched forwards: {_reasons(before, after)}")
    if after.replayed == before.replayed:
        return Cell.fault("not replayed", f"warmed {after.warmed}, captured {after.captured}, replayed {after.replayed}")
    exact = family.dense and column not in _TO_ROUNDING
    text = "=" if worst == 0 else f"{worst:.0e}".replace("e-0", "e-")
    if worst > (0.0 if exact else _TOLERANCE):
        return Cell.fault(text if worst <= _TOLERANCE else f"WRONG: {text}", "not bit-equal" if exact else "differs")
    return Cell(text)


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


def _mechanism(handle: Any) -> str:
    """What runs live, outside the graphs."""
    return "; ".join(handle.boundaries) or "nothing live"


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
