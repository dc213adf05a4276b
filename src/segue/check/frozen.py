"""Plain values that Python decided at capture and another forward decides otherwise: two captures, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segue.capture.break_points import Break
from segue.check.breaks import called_at
from segue.check.oplog import Op, OpLog
from segue.check.origin import align
from segue.check.report import Finding

_LONG = 60  # characters of a value shown
_MEND = (
    "A graph goes on with the captured value. Make it a tensor that is a declared input, a plain argument of the "
    "forward (then it is part of the variant), or compute what depends on it in a break"
)


@dataclass(frozen=True)
class Recorded:
    """One capture: what it was made with (in words), its ops, its breaks, and the plain attributes afterwards."""

    label: str
    log: OpLog
    breaks: Sequence[Break]
    attributes: Mapping[str, Any]


def frozen_values(one: Recorded, two: Recorded, bucket: int) -> list[Finding]:
    """Every line where the two captures of one bucket differ in what Python decided, each once."""
    findings = {f.where: f for f in reversed([*_in_ops(one, two, bucket), *_in_breaks(one, two, bucket)])}
    return list(findings.values())[::-1]


def changed_attributes(one: Recorded, two: Recorded) -> str:
    """Python attributes with another value at the second capture: ``, and meanwhile step went from 2 to 4``."""
    changed = [
        f"{name} went from {value!r} to {two.attributes[name]!r}"
        for name, value in one.attributes.items()
        if name in two.attributes and two.attributes[name] != value
    ]
    return ", and meanwhile " + ", ".join(changed[:4]) if changed else ""


def _in_ops(one: Recorded, two: Recorded, bucket: int) -> list[Finding]:
    findings: list[Finding] = []
    also = changed_attributes(one, two)
    counted = [Counter(op.where for op in r.log.ops) for r in (one, two)]
    reshaped = False
    for a, b in align(one.log.ops, two.log.ops):
        op = a or b
        assert op is not None
        if a is None or b is None:
            times, others = (counts[op.where] for counts in counted)
            what = f"bucket {bucket}: {op.name} ran here {_of(times, one)} and {_of(others, two)}{also}"
            why = "a loop bound or a branch was decided by a value that varies"
            findings.append(Finding("frozen", op.where, f"{what}; {why}. {_MEND}."))
        elif differing := [name for name in a.plain if b.plain.get(name) != a.plain[name]]:
            name = differing[0]
            values = f"{_short(a.plain[name])} {one.label} and {_short(b.plain.get(name, 'absent'))} {two.label}"
            findings.append(
                Finding("frozen", op.where, f"bucket {bucket}: {op.name} got {name}={values}{also}. {_MEND}.")
            )
        elif a.shapes != b.shapes and not reshaped and not findings:
            reshaped = True
            shapes = f"{_sizes(a)} {one.label} and {_sizes(b)} {two.label}"
            findings.append(
                Finding("frozen", op.where, f"bucket {bucket}: {op.name} got tensors of {shapes}{also}. {_MEND}.")
            )
    return findings


def _in_breaks(one: Recorded, two: Recorded, bucket: int) -> list[Finding]:
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
                        called_at(x),
                        f"bucket {bucket}: break {x.spec.label} got {name}={_short(repr(value))} {one.label} and "
                        f"{_short(repr(now))} {two.label}. A replay calls it with the captured value. Have the break "
                        "read it from the live context, or pass it as a tensor.",
                    )
                )
    return findings


def _of(times: int, recorded: Recorded) -> str:
    return f"{times} time{'' if times == 1 else 's'} {recorded.label}"


def _sizes(op: Op) -> str:
    return ", ".join(str(list(shape)) for shape in op.shapes)


def _short(text: str) -> str:
    return text if len(text) <= _LONG else text[: _LONG - 3] + "..."
