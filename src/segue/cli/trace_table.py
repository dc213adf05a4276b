"""Sums up traced calls: host time, device time, how long the device had nothing to do, and what it waited for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from segue.cli.chrome_trace import Step, TracedCall

_MOST_WAITS = 2  # that a cell names


def by_kind(calls: Sequence[TracedCall]) -> list[dict[str, Any]]:
    """A row for each kind of step of each call, and one for the call; medians where a call was traced several times."""
    return [row for same in _alike(calls) for row in _rows(same, lambda step, i: _kind(step))]


def by_step(calls: Sequence[TracedCall]) -> list[dict[str, Any]]:
    """A row for each step of each call, in order, and one for the call; medians where a call was traced several times."""
    return [row for same in _alike(calls) for row in _rows(same, lambda step, i: i)]


def middle_call(calls: Sequence[TracedCall]) -> TracedCall:
    """Of the first kind of call that was traced, the one whose time is the median."""
    first = _alike(calls)[0]
    return sorted(first, key=lambda call: call.host.length)[len(first) // 2]


def notes(calls: Sequence[TracedCall], times: int) -> list[str]:
    """What the table's columns are."""
    told = [f"Microseconds, medians of {times}, under a profiler, which lengthens what the host does."]
    if _has_device(calls):
        told.append(
            "*device idle*: how long the device had nothing to do before it began with this; *waited for*: where the host was "
            "meanwhile. *its launch*: the launch was made, and the device had not begun."
        )
    else:
        told.append("There is no device here: the host does all the work, and the times say nothing about a GPU.")
    return told


def _alike(calls: Sequence[TracedCall]) -> list[list[TracedCall]]:
    """The calls by name, those with the steps of the last of that name."""
    last = {call.name: call for call in calls}
    names = {name: [step.name for step in call.steps] for name, call in last.items()}
    return [[call for call in calls if call.name == name and [s.name for s in call.steps] == names[name]] for name in last]


def _rows(same: Sequence[TracedCall], key: Callable[[Step, int], Any]) -> list[dict[str, Any]]:
    device = _has_device(same)
    groups: dict[Any, list[list[Step]]] = {}
    for call in same:
        mine: dict[Any, list[Step]] = {}
        for i, step in enumerate(call.steps):
            mine.setdefault(key(step, i), []).append(step)
        for name, steps in mine.items():
            groups.setdefault(name, []).append(steps)
    rows = [{"call": same[0].name, "what": _title(of[0]), **_cells(of, device)} for of in groups.values()]
    whole = {"call": same[0].name, "what": "the whole call", **_cells([call.steps for call in same], device), "times": 1}
    return [*rows, whole]


def _cells(groups: Sequence[Sequence[Step]], device: bool) -> dict[str, Any]:
    """The cells of steps that belong together, from as many calls as there are groups."""
    cells: dict[str, Any] = {"times": len(groups[0]), "host us": _median(groups, lambda step: step.host_time)}
    if device:
        cells["device us"] = _median(groups, lambda step: step.device_time)
        cells["device idle us"] = _median(groups, lambda step: step.idle)
        cells["waited for"] = _waits(groups)
    return cells


def _median(groups: Sequence[Sequence[Step]], value: Callable[[Step], float]) -> float:
    return _us(statistics.median(sum(map(value, steps)) for steps in groups))


def _waits(groups: Sequence[Sequence[Step]]) -> str | None:
    """What the device waited for longest, on the average of the calls."""
    total: dict[str, float] = {}
    for steps in groups:
        for step in steps:
            for what, waited in step.waited.items():
                total[_kind_of(what)] = total.get(_kind_of(what), 0.0) + waited / len(groups)
    longest = sorted(total.items(), key=lambda item: -item[1])[:_MOST_WAITS]
    return ", ".join(f"{what} {_us(waited):g}" for what, waited in longest if _us(waited)) or None


def _title(steps: Sequence[Step]) -> str:
    return steps[0].name if len(steps) == 1 else _kind(steps[0])


def _kind(step: Step) -> str:
    return _kind_of(step.name)


def _kind_of(name: str) -> str:
    """Segments are of one kind; breaks of one function are."""
    return "segments" if name.startswith("segment ") else name


def _has_device(calls: Iterable[TracedCall]) -> bool:
    return any(step.device for call in calls for step in call.steps)


def _us(value: float) -> float:
    return round(value, 1)
