"""Reads a Chrome trace of torch's profiler: what segue's named ranges did on the host and set going on the device."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segue.capture.named_ranges import PREFIX

CALL = "call "  # how the name of a range around a whole call begins
REST = "the rest of the call"
LAUNCH = "its launch"
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, order=True)
class Span:
    """From ``start`` to ``end``, in microseconds of the trace's clock."""

    start: float
    end: float

    @property
    def length(self) -> float:
        """Microseconds."""
        return self.end - self.start


@dataclass
class Step:
    """A named range, or what lies between them. ``host``: where the host was in it. ``device``: what it launched, in order.

    ``idle``: how long the device had nothing to do before the first of that. ``waited``: for which step's host time, or for the
    launch itself, in microseconds.
    """

    name: str
    host: list[Span]
    device: list[Span] = field(default_factory=list)
    idle: float = 0.0
    waited: dict[str, float] = field(default_factory=dict)

    @property
    def host_time(self) -> float:
        """Microseconds of the host."""
        return sum(span.length for span in self.host)

    @property
    def device_time(self) -> float:
        """Microseconds in which the device worked at it."""
        return sum(span.length for span in self.device)


@dataclass(frozen=True)
class TracedCall:
    """One call: its whole range on the host, and its steps in the order of the host."""

    name: str
    host: Span
    steps: list[Step]


def read(path: Path) -> list[TracedCall]:
    """The calls in a trace that torch's profiler exported, in order."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    ranges = sorted((_span(e), e["tid"], e["name"].removeprefix(PREFIX)) for e in events if _is_range(e))
    launches = {e["args"]["correlation"]: _span(e) for e in events if e.get("cat") in _LAUNCHES and "correlation" in e["args"]}
    work = sorted((_span(e), e["args"].get("correlation")) for e in events if e.get("cat") in _DEVICE)
    found = []
    for span, thread, name in ranges:
        if name.startswith(CALL):
            inner = [(s, n) for s, t, n in ranges if t == thread and _holds(span, s) and not n.startswith(CALL)]
            call = TracedCall(name.removeprefix(CALL), span, _steps(span, inner))
            _add_device(call, [(at, launches[of]) for at, of in work if of in launches and _holds(span, launches[of])])
            found.append(call)
    return found


def _is_range(event: dict[str, Any]) -> bool:
    return event.get("cat") == "user_annotation" and str(event["name"]).startswith(PREFIX)


def _span(event: dict[str, Any]) -> Span:
    return Span(float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)))


def _holds(outer: Span, inner: Span) -> bool:
    return outer.start <= inner.start <= outer.end


def _steps(call: Span, ranges: Iterable[tuple[Span, str]]) -> list[Step]:
    """The outermost ranges as steps, and at the end what lies between them. ``ranges``: in order of their starts."""
    steps: list[Step] = []
    end, rest = call.start, []
    for span, name in ranges:
        if span.start < end:
            continue  # inside a break, which is a step as a whole
        rest.append(Span(end, span.start))
        steps.append(Step(name, [span]))
        end = span.end
    return [*steps, Step(REST, [*rest, Span(end, max(end, call.end))])]


def _add_device(call: TracedCall, work: Sequence[tuple[Span, Span]]) -> None:
    """Give each step what it launched on the device, and what the device waited for before it. ``work``: in order of the device,
    with the launch of each on the host.
    """
    busy_until = call.host.start
    for span, launch in work:
        step = next(s for s in reversed(call.steps) if any(_holds(host, launch) for host in s.host))
        if span.start > busy_until:
            step.idle += span.start - busy_until
            _add_waits(step, call, Span(busy_until, max(busy_until, min(launch.start, span.start))))
            step.waited[LAUNCH] = step.waited.get(LAUNCH, 0.0) + span.start - max(busy_until, min(launch.start, span.start))
        if step.device and span.start <= step.device[-1].end:
            step.device[-1] = Span(step.device[-1].start, max(step.device[-1].end, span.end))
        else:
            step.device.append(span)
        busy_until = max(busy_until, span.end)


def _add_waits(step: Step, call: TracedCall, gap: Span) -> None:
    """Divide the part of a gap before the launch among the steps in which the host was."""
    for other in call.steps:
        shared = sum(max(0.0, min(host.end, gap.end) - max(host.start, gap.start)) for host in other.host)
        if shared > 0:
            step.waited[other.name] = step.waited.get(other.name, 0.0) + shared
