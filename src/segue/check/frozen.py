"""Plain values that Python decided at capture and would decide otherwise in another forward, found by two captures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segue.capture.break_points import Break
from segue.check.oplog import LoggedOp, OpLog
from segue.check.origin import align
from segue.runner.check_report import Finding

_LONGEST = 60  # characters of a value that are shown
_REMEDY = (
    "A graph goes on with the captured value. Make it a tensor that is a declared input, a plain argument of the "
    "forward (then it is part of the variant), or compute what depends on it in a break"
)


@dataclass(frozen=True)
class CaptureRecord:
    """What one capture of a bucket showed.

    ``label``: the values it was made with, in words. ``log``: its ops. ``breaks``: its breaks. ``attributes``: the plain
    values that the function holds afterwards, by name. ``left``: what it left behind in the user's objects, in words.
    """

    label: str
    log: OpLog
    breaks: Sequence[Break]
    attributes: Mapping[str, Any]
    left: Sequence[str] = ()


def frozen_values(one: CaptureRecord, two: CaptureRecord, bucket: int) -> list[Finding]:
    """A finding for every line where Python decided differently in two captures of one bucket."""
    findings = {f.where: f for f in reversed([*_in_ops(one, two, bucket), *_in_breaks(one, two, bucket)])}
    return list(findings.values())[::-1]


def changed_attributes(one: CaptureRecord, two: CaptureRecord) -> str:
    """The plain attributes that differ at the second capture, in words: ``, and meanwhile step went from 2 to 4``."""
    changed = [
        f"{name} went from {value!r} to {two.attributes[name]!r}"
        for name, value in one.attributes.items()
        if name in two.attributes and two.attributes[name] != value
    ]
    return ", and meanwhile " + ", ".join(changed[:4]) if changed else ""


def _in_ops(one: CaptureRecord, two: CaptureRecord, bucket: int) -> list[Finding]:
    findings: list[Finding] = []
    also = changed_attributes(one, two)
    counted = [Counter(op.where for op in record.log.ops) for record in (one, two)]
    reshaped = False

    def add(op: LoggedOp, what: str) -> None:
        findings.append(Finding("frozen", op.where, f"bucket {bucket}: {op.name} {what}. {_REMEDY}."))

    for a, b in align(one.log.ops, two.log.ops):
        op = a or b
        assert op is not None
        if a is None or b is None:
            times, others = (counts[op.where] for counts in counted)
            why = "a loop bound or a branch was decided by a value that varies"
            add(op, f"ran here {_times(times, one)} and {_times(others, two)}{also}; {why}")
        elif differing := [name for name in a.plain if b.plain.get(name) != a.plain[name]]:
            name = differing[0]
            values = f"{_short(a.plain[name])} {one.label} and {_short(b.plain.get(name, 'absent'))} {two.label}"
            add(op, f"got {name}={values}{also}")
        elif a.shapes != b.shapes and not reshaped and not findings:
            reshaped = True
            add(op, f"got tensors of {_sizes(a)} {one.label} and {_sizes(b)} {two.label}{also}")
    return findings


def _in_breaks(one: CaptureRecord, two: CaptureRecord, bucket: int) -> list[Finding]:
    findings = []
    for x, y in zip(one.breaks, two.breaks, strict=False):
        if x.spec is not y.spec:
            break
        for name, value in x.bound.plain.items():
            now = y.bound.plain.get(name, value)
            if type(now) is not type(value) or now != value:
                findings.append(
                    Finding(
                        "frozen",
                        x.called_at,
                        f"bucket {bucket}: break {x.spec.label} got {name}={_short(repr(value))} {one.label} and "
                        f"{_short(repr(now))} {two.label}. A replay calls it with the captured value. Have the break "
                        "read it from the live context, or pass it as a tensor.",
                    )
                )
    return findings


def _times(count: int, record: CaptureRecord) -> str:
    return f"{count} time{'' if count == 1 else 's'} {record.label}"


def _sizes(op: LoggedOp) -> str:
    return ", ".join(str(list(shape)) for shape in op.shapes)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
