"""What a break costs: on the host, against launching the same graphs bare, and on the device, against an uncut graph.

The program is 33 small graphs of elementwise kernels with 32 breaks between them. Every replay that is measured is
compared with an eager run first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from segue.bench import timing
from segue.bench.break_programs import (
    RIVAL,
    BreakProgram,
    ProgramSize,
    bare_loops,
    captured,
    go_on,
    launches,
    loop,
    no_op,
    off,
    rival_of,
)
from segue.bench.result import SAME, BenchResult, Row
from segue.bench.timing import Run, Spread
from segue.capture import BreakableCapture, break_point
from segue.devices import Device

_SMALL = ProgramSize(cuts=4, rows=16, valid=11, width=8, layers=2)


@dataclass(frozen=True, kw_only=True)
class BreakCost(BenchResult):
    """What breaks cost. On a device without timing, times are None and ``gaps`` is empty."""

    title = "What a break costs"

    cuts: int  # breaks of each program
    bare: list[Row]  # breaks that do nothing, against bare launches
    breaks: list[Row]  # one kind of break each: host microseconds per break
    looks: list[Row]  # what a replay adds to one graph by seeing that parameters are where they were
    gaps: list[Row]  # device time per boundary

    @property
    def tables(self) -> dict[str, list[Row]]:
        """The rows under the titles that are printed above them."""
        return {
            f"{self.cuts} breaks that do nothing, and the same graphs launched bare": self.bare,
            "One kind of break each. *host*: less the bare graphs; *added*: less the break's function too": self.breaks,
            "Seeing before each replay that parameters are where they were": self.looks,
            "Long segments, so that the device sets the pace: what a boundary costs it": self.gaps,
        }


def measure(
    device: Device,
    size: ProgramSize | None = None,
    times: int = 200,
    progress: Callable[[str], None] = lambda line: None,
) -> BreakCost:
    """Measure all parts.

    ``size``: by default a small one on a device without timing. ``times``: rounds, in each of which every program is measured
    once. ``progress``: gets a line for each part.
    """
    size = size or (ProgramSize() if device.traits.timing else _SMALL)
    notes = [f"size: {dataclasses.asdict(size)}, bf16"]
    if not device.traits.timing:
        notes.append(f"Device {device.name}: no time is meant, only the verdicts.")
    with torch.inference_mode():
        progress(f"{size.cuts} breaks that do nothing")
        bare = _bare(device, size, times, notes)
        progress("breaks that hand something on")
        breaks = _breaks(device, size, times)
        progress("looking after parameters")
        looks = _looks(device, size, times)
        progress("the device's time per boundary")
        gaps = _gaps(device, size, max(1, times // 5))
    right = all(row["replay = eager"] == SAME for row in (*bare, *breaks, *looks, *gaps))
    notes.append(
        f"Medians of {times} rounds, all of one table in turns, with the quartiles beside them. *host*: how long the "
        "call keeps the host."
    )
    return BreakCost(cuts=size.cuts, bare=bare, breaks=breaks, looks=looks, gaps=gaps, right=right, notes=notes)


def _bare(device: Device, size: ProgramSize, times: int, notes: list[str]) -> list[Row]:
    program = BreakProgram(device, size, size.rows, no_op, size.steps)
    capture = captured(device, program)
    runs: dict[str, Run] = {**bare_loops(capture), "segue": capture.replay}
    rival = rival_of(device, program_of=lambda join: BreakProgram(device, size, size.rows, join, size.steps), notes=notes)
    verdicts = {name: program.verdict(run, capture) for name, run in runs.items()}
    if rival is not None:
        other, runs[RIVAL] = rival
        verdicts[RIVAL] = other.verdict(runs[RIVAL], None)
    taken = timing.host_in_turns(runs, times) if device.traits.timing else {}
    first = next(iter(runs))
    rows = []
    for name in runs:
        breaks = 0 if name.startswith("bare") else capture.breaks
        row: Row = {"program": name, "graphs": capture.graphs, "breaks": breaks}
        row |= {"host us": None, "quartiles us": None, "against bare": None, "added us a break": None}
        if taken:
            t, bare = taken[name], taken[first]
            row["host us"], row["quartiles us"] = f"{t.median * 1e6:.1f}", str(t)
            row["against bare"] = f"{t.median / bare.median:.3f}x"
            row["added us a break"] = f"{(t.median - bare.median) / size.cuts * 1e6:.3f}"
        rows.append({**row, "replay = eager": verdicts[name]})
    capture.close()
    return rows


def _scale(q: Tensor) -> Tensor:
    return q.mul(0.5)


def _scale_into(q: Tensor, dst: Tensor) -> None:
    torch.mul(q, 0.5, out=dst)


_hand_on = break_point(_scale)
_hand_on_trimmed = break_point(trim=("q",))(_scale)
_fill_out = break_point(out="dst")(_scale_into)


def _join_out(y: Tensor) -> None:
    dst = torch.empty_like(y)
    _fill_out(y, dst)
    y.add_(dst)


@dataclass(frozen=True)
class _Kind:
    """A kind of break."""

    name: str
    join: Callable[[Tensor], object]  # what the program calls between two segments
    tail: bool  # some rows are padded, and cleared after the break
    alone: Callable[[BreakProgram, int], Run]  # the break's function by itself, on so many real rows


def _alone_full(program: BreakProgram, _: int) -> Run:
    return lambda: _scale(program.y)


def _alone_trimmed(program: BreakProgram, n: int) -> Run:
    cut = program.y[:n]
    return lambda: _scale(cut)


def _alone_out(program: BreakProgram, _: int) -> Run:
    dst = torch.empty_like(program.y)
    return lambda: _scale_into(program.y, dst)


_KINDS = (
    _Kind("no-op", no_op, False, lambda program, n: lambda: None),
    _Kind("hand-off", lambda y: y.add_(_hand_on(y)), False, _alone_full),
    _Kind("hand-off, tail cleared", lambda y: y.add_(_hand_on(y)), True, _alone_full),
    _Kind("trim, hand-off, tail cleared", lambda y: y.add_(_hand_on_trimmed(y)), True, _alone_trimmed),
    _Kind("out=", _join_out, False, _alone_out),
    _Kind("out=, tail cleared", _join_out, True, _alone_out),
)


def _breaks(device: Device, size: ProgramSize, times: int) -> list[Row]:
    runs: dict[str, Run] = {}
    verdicts: dict[str, str] = {}
    captures = []
    for kind in _KINDS:
        program = BreakProgram(device, size, size.rows, kind.join, size.steps)
        valid = size.valid if kind.tail else None
        capture = captured(device, program, valid)
        captures.append(capture)
        runs |= {
            kind.name: lambda capture=capture, valid=valid: capture.replay(valid),  # type: ignore[misc]
            f"{kind.name}: graphs": launches(capture),
            f"{kind.name}: alone": loop([kind.alone(program, size.valid)] * size.cuts),
        }
        verdicts[kind.name] = program.verdict(runs[kind.name], capture, valid)
    taken = timing.host_in_turns(runs, times) if device.traits.timing else {}
    for capture in captures:
        capture.close()
    return [
        {"break": kind.name, **_per_break(taken, kind.name, size), "replay = eager": verdicts[kind.name]}
        for kind in _KINDS
    ]


def _per_break(taken: dict[str, Spread], name: str, size: ProgramSize) -> Row:
    """Columns of one kind: a replay without its bare launches, per break; and that without the function's own work."""
    if not taken:
        return {"host us a break": None, "quartiles us": None, "its function alone us": None, "added us": None}
    whole, graphs, alone = (taken[key] for key in (name, f"{name}: graphs", f"{name}: alone"))

    def per_break(seconds: float) -> float:
        return (seconds - graphs.median) / size.cuts * 1e6

    own = alone.median / size.cuts * 1e6
    return {
        "host us a break": f"{per_break(whole.median):.2f}",
        "quartiles us": f"{per_break(whole.low):.2f} to {per_break(whole.high):.2f}",
        "its function alone us": f"{own:.2f}",
        "added us": f"{per_break(whole.median) - own:.2f}",
    }


class _Leaf(torch.nn.Module):
    """One parameter in a module of its own, as models hold them."""

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, device=place), requires_grad=False)


class _Held(torch.nn.Module):
    """``layers`` times 11 parameters, and two: Qwen3-0.6B has 28 layers, so 310. The forward reads all of them."""

    def __init__(self, layers: int, place: torch.device) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.ModuleList(_Leaf(place) for _ in range(11)) for _ in range(layers))
        self.ends = torch.nn.ModuleList(_Leaf(place) for _ in range(2))

    def forward(self, y: Tensor) -> None:
        first, *others = self.parameters()
        joined = torch.cat([first])
        if (capture := BreakableCapture.current()) is not None and self.layers:
            capture.cut()
        torch.cat([joined, *others], out=y)


def _looks(device: Device, size: ProgramSize, times: int) -> list[Row]:
    """What a replay adds to its graphs by seeing that parameters are where they were.

    The forward is two graphs, of which the first reads one parameter. With ``defer_checks`` the first one runs while the host
    looks where the other parameters are.
    """
    runs: dict[str, Run] = {}
    rows: list[Row] = []
    captures = []
    for layers, deferred in ((0, False), (size.layers, False), (size.layers, True)):
        held = _Held(layers, device.torch_device)
        count = len(list(held.parameters()))
        name = f"{count}, checks deferred" if deferred else f"{count}"
        y = torch.empty(8 * count, device=device.torch_device)
        held(y)
        with BreakableCapture(device=device, root=held, defer_checks=deferred) as capture:
            held(y)
        captures.append(capture)
        externals_check = capture.externals_check
        runs |= {
            name: capture.replay,
            f"{name}: graphs": launches(capture),
            f"{name}: before": externals_check.check_first if externals_check.early else externals_check.check,
        }
        for p in held.parameters():
            p.normal_()  # in place, so that the graph must see it
        expected = torch.cat(list(held.parameters()))
        y.fill_(float("nan"))
        capture.replay()
        verdict = SAME if torch.equal(y, expected) else f"NO: off eager by {off(y, expected)}"
        row: Row = {"parameters": name, "host us": None, "its graphs alone us": None, "added us": None}
        rows.append({**row, "looking, before the first launch us": None, "replay = eager": verdict})
    taken = timing.host_in_turns(runs, times) if device.traits.timing else {}
    for row in rows if taken else ():
        whole, graphs, before = (taken[f"{row['parameters']}{what}"].median * 1e6 for what in ("", ": graphs", ": before"))
        row |= {"host us": f"{whole:.1f}", "its graphs alone us": f"{graphs:.1f}", "added us": f"{whole - graphs:.1f}"}
        row["looking, before the first launch us"] = f"{before:.1f}"
    for capture in captures:
        capture.close()
    return rows


def _gaps(device: Device, size: ProgramSize, times: int) -> list[Row]:
    if not device.traits.timing:
        return []

    def program_of(join: Callable[[Tensor], object]) -> BreakProgram:
        return BreakProgram(device, size, size.long_rows, join, size.long_steps)

    uncut, cut = program_of(go_on), program_of(no_op)
    whole, pieces = captured(device, uncut), captured(device, cut)
    runs: dict[str, Run] = {"one graph": whole.replay, "segue": pieces.replay, **bare_loops(pieces)}
    verdicts = dict(_verdicts(runs, uncut, cut, whole, pieces))
    rival = rival_of(device, program_of, notes=[])
    if rival is not None:
        other, runs[RIVAL] = rival
        verdicts[RIVAL] = other.verdict(runs[RIVAL], None)
    taken, launching = timing.device_in_turns(runs, times), timing.host_in_turns(runs, times)
    base = taken["one graph"]
    rows = []
    for name in runs:
        per_boundary = (taken[name].median - base.median) / size.cuts * 1e6
        rows.append({
            "program": name,
            "device us": f"{taken[name].median * 1e6:.1f}",
            "quartiles us": str(taken[name]),
            "host us": f"{launching[name].median * 1e6:.1f}",
            "device us a boundary": None if name == "one graph" else f"{per_boundary:.2f}",
            "replay = eager": verdicts[name],
        })  # fmt: skip
    whole.close()
    pieces.close()
    return rows


def _verdicts(
    runs: dict[str, Run], uncut: BreakProgram, cut: BreakProgram, whole: BreakableCapture, pieces: BreakableCapture
) -> Iterator[tuple[str, str]]:
    for name, run in runs.items():
        yield name, uncut.verdict(run, whole) if name == "one graph" else cut.verdict(run, pieces)
