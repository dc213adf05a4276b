"""The page of ``segue inspect --html``: one file of HTML that needs no network, filled from ``inspect_page.html``."""

from __future__ import annotations

import importlib.resources
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from string import Template
from typing import Any

from segue.check.summary import NOBODY, BucketSummary, HandoffSummary, OutsideSummary, StepSummary
from segue.runner import Stats
from segue.runner.reasons import remedy_of

_OWNERS = {
    "an input": "the runner (input buffer)",
    "the function": "the function",
    "the context": "the live context",
    NOBODY: NOBODY,
}
_NUMBER = re.compile(r"(?<=[.\[])\d+(?=[.\]]|$)")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 360, 170, 34, 30  # of the chart, in its own units
_FEW = 3  # breaks that repeat so often are shown once
_CORNERS = 6  # points of a bucket's curve


@dataclass(frozen=True)
class Checked:
    """What ``segue check`` said: its sentence, and a finding and a note a line."""

    summary: str
    findings: Sequence[str]
    notes: Sequence[str]


@dataclass(frozen=True)
class Inspection:
    """What the page shows. ``subject``: what the target is, and on which device. ``ladder``: all buckets, of which ``buckets``
    were captured. ``facts``: further counters. ``checked``: None where no check ran. ``calls``: what was called, in words, before
    ``stats`` was read. ``footer``: versions and date.
    """

    target: str
    subject: str
    buckets: Sequence[BucketSummary]
    ladder: Sequence[int]
    stats: Stats
    facts: Sequence[tuple[str, object]]
    calls: Sequence[str]
    checked: Checked | None
    footer: str


def page(seen: Inspection) -> str:
    """The whole page."""
    template = Template(importlib.resources.files(__package__).joinpath("inspect_page.html").read_text("utf-8"))
    return template.substitute(
        title=escape(f"segue inspect {seen.target}"),
        subtitle=escape(seen.subject),
        program="\n".join(_bucket(b, is_open=b is seen.buckets[0]) for b in seen.buckets),
        outside=_outside(seen.buckets),
        memory=_memory(seen.buckets),
        padding=_padding(seen.ladder),
        counters=_counters(seen),
        check=_check(seen),
        footer=escape(seen.footer),
    )


def _bucket(b: BucketSummary, is_open: bool) -> str:
    what = f"{_count(len(b.segments), 'segment')}, {_count(len(b.breaks), 'break')}"
    most = max((s.ops for s in b.segments), default=1) or 1
    parts = "".join(
        '<i class="break"></i>' if s.kind == "break" else f'<i style="flex:{max(s.ops / most, 0.02):.3f}"></i>' for s in b.steps
    )
    return (
        f"<details{' open' if is_open else ''}><summary><strong>Bucket {b.bucket}</strong>: {what}</summary>"
        f'<div class="strip" role="img" aria-label="Bucket {b.bucket} in the order of a replay: {what}, which are listed '
        f'below">{parts}</div>'
        f'<ol class="steps">{"".join(_folded(b.steps))}</ol></details>'
    )


def _folded(steps: Sequence[StepSummary]) -> Iterator[str]:
    """The steps as list items. Breaks that repeat, each with the segment after it, as in equal layers, are one item."""
    first, rest = list(steps), list[StepSummary]()
    if len(steps) > 1 and [s.kind for s in steps] == ["segment", "break"] * (len(steps) // 2) + ["segment"]:
        first, rest = first[:1], first[1:]
    yield from map(_step, first)
    pairs = list(zip(rest[::2], rest[1::2], strict=True))
    for _, run in itertools.groupby(pairs, key=lambda pair: (pair[0], replace(pair[1], what=""))):
        same = list(run)
        if len(same) < _FEW:
            yield from (_step(step) for pair in same for step in pair)
            continue
        shown = "".join(map(_step, (same[0][0], replace(same[0][1], what="a segment"))))
        last = same[-1][1].what.removeprefix("segment ")
        yield f'<li class="times">{len(same)} times, up to segment {last}:<ol class="steps">{shown}</ol></li>'


def _step(step: StepSummary) -> str:
    where = f'<br><span class="soft">{"called at" if step.kind == "break" else "from"} <code>{escape(step.where)}</code></span>'
    if step.kind == "segment":
        name = f"<strong>{escape(step.what.capitalize())}</strong>, {_count(step.ops, 'op')}"
        return f'<li class="segment">{name}{where if step.ops else ""}</li>'
    lines = [_handoff(h) for h in step.handoffs] or ["hands nothing on"]
    if step.frozen:
        lines.append(f"given again at each replay: <code>{escape(', '.join(step.frozen))}</code>")
    listed = "".join(f"<li>{line}</li>" for line in lines)
    return f'<li class="break"><strong>Break</strong> <code>{escape(step.what)}</code>{where}<ul>{listed}</ul></li>'


def _handoff(h: HandoffSummary) -> str:
    tokens = "no token dimension" if h.token_dim is None else f"tokens in dimension {h.token_dim}"
    return f"hands on <code>{escape(h.name)}</code>: {list(h.shape)} {h.dtype}, {tokens}, {_size(h.nbytes)}"


def _outside(buckets: Sequence[BucketSummary]) -> str:
    """One row for each kind of tensor: those whose names differ in numbers alone are one kind."""
    found: dict[tuple[str, ...], OutsideSummary] = {}
    for b in buckets:
        for t in b.outside:
            found.setdefault((t.owner, t.name or str(t)), t)
    kinds: dict[tuple[Any, ...], list[OutsideSummary]] = {}
    for t in found.values():
        shape = () if t.owner == "an input" else t.shape
        kinds.setdefault((t.owner, _NUMBER.sub("N", t.name), shape, t.dtype, t.written), []).append(t)
    rows = []
    for (owner, pattern, *_), tensors in kinds.items():
        t = tensors[0]
        name = _code(t.name if len(tensors) == 1 else pattern) if t.name else "<em>no name</em>"
        use = f"{'written' if t.written else 'read'} by {_code(t.op)}" + (f" at {_code(t.where)}" if t.where else "")
        times = "" if len(tensors) == 1 else f" &times; {len(tensors)}"
        size = _size(sum(each.nbytes for each in tensors))
        rows.append([name + times, escape(_OWNERS[owner]), f"{list(t.shape)} {t.dtype}", size, use])
    if not rows:
        return "<p>Nothing lies outside the pool.</p>"
    head = ["tensor", "who owns it", "shape", "size", "first used"]
    return _table("Tensors outside the pool, and who owns them", head, rows, numbers={2, 3}, long={4})


def _memory(buckets: Sequence[BucketSummary]) -> str:
    most = max((sum(h.nbytes for h in b.handoffs) for b in buckets), default=0) or 1
    rows, before = [], 0
    for b in buckets:
        handoffs = sum(h.nbytes for h in b.handoffs)
        inputs = sum(t.nbytes for t in b.outside if t.owner == "an input")
        bar = f'<span class="bar" style="--part:{handoffs / most:.0%}">{_size(handoffs)}</span>'
        added = _size(b.pool_bytes - before)
        rows.append([str(b.bucket), added, _size(b.pool_bytes), bar, _size(inputs), _size(b.driver_bytes)])
        before = b.pool_bytes
    head = ["bucket", "added to the pool", "pool so far", "of it hand-offs", "input buffers used", "taken by the driver"]
    return _table("Memory by bucket, in the order of capture", head, rows, numbers=range(1, 6))


def _padding(ladder: Sequence[int]) -> str:
    """A chart of the padded share by length, and a table of the same."""
    spans = [(last + 1, b) for last, b in zip([0, *ladder], ladder, strict=False)]
    right, top = _WIDTH - 8, 8
    reach = math.log2(ladder[-1]) or 1.0
    worst = max((b - low) / b for low, b in spans)
    highest = max(0.25, math.ceil(4 * worst) / 4)

    def at(n: float, share: float) -> str:
        x = _LEFT + (right - _LEFT) * (math.log2(n) / reach)
        return f"{x:.1f} {_HEIGHT - _BOTTOM - share / highest * (_HEIGHT - _BOTTOM - top):.1f}"

    curve = " L".join(at(n, (b - n) / b) for low, b in spans for n in _between(low, b))
    lines = "".join(
        f'<path d="M{at(1, share)} H{right}" stroke="currentColor" stroke-opacity=".35"/>'
        f'<text x="{_LEFT - 5}" y="{at(1, share).split()[1]}" text-anchor="end" dominant-baseline="middle">{share:.0%}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
        if share <= highest
    )
    marks = "".join(
        f'<text x="{at(n, 0).split()[0]}" y="{_HEIGHT - _BOTTOM + 14}" text-anchor="middle">{n}</text>'
        for n in _marks(ladder[-1])
    )
    label = f"Padded share by length, from 1 to {ladder[-1]} tokens: at most {worst:.0%}, and none at a bucket's own length"
    chart = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{lines}{marks}'
        f'<path d="M{curve}" fill="none" stroke="var(--segment)" stroke-width="2" stroke-linejoin="round"/>'
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 2}" text-anchor="middle">tokens of a call</text></svg>'
    )
    rows = [
        [str(b), str(b) if low == b else f"{low} to {b}", f"{(b - low) / b:.0%}", f"{(b - low) / 2 / b:.0%}"] for low, b in spans
    ]
    head = ["bucket", "lengths", "padded, at most", "on average"]
    return chart + _table("Padding by bucket", head, rows, numbers={1, 2, 3})


def _counters(seen: Inspection) -> str:
    s = seen.stats
    made = f"After {'; '.join(seen.calls)}." if seen.calls else "The ladder was captured privately, and no call was made."
    counts = [
        ("warm-ups, the first call of a bucket", s.warmed),
        ("captured, the second call", s.captured),
        ("replayed", s.replayed),
        *((f"replayed by {name}", count) for name, count in sorted(s.strategies.items())),
        ("ran eager", s.eager),
        ("buckets with a graph", ", ".join(map(str, s.buckets)) or "none"),
        ("padded rows", f"{s.padding_share:.1%}"),
        *seen.facts,
    ]
    rows = [[escape(str(cell)) for cell in row] for row in counts]
    parts = [f"<p>{escape(made)}</p>", _table("Counters", ["what", "value"], rows, long={1})]
    if s.reasons:
        by_count = sorted(s.reasons.items(), key=lambda item: -item[1])
        reasons = [[escape(reason), str(count), escape(remedy_of(reason))] for reason, count in by_count]
        parts.append("<h3>Why calls ran eager</h3>")
        parts.append(_table("Reasons", ["reason", "calls", "what to change"], reasons, numbers={1}, long={2}))
    else:
        parts.append("<p>No call ran eager.</p>")
    return "".join(parts)


def _check(seen: Inspection) -> str:
    if seen.checked is None:
        return f"<p>It has not run. <code>segue inspect {escape(seen.target)} --html FILE --check</code> runs it too.</p>"
    found = "".join(f"<li>{escape(text)}</li>" for text in seen.checked.findings)
    notes = "".join(f"<li>{escape(text)}</li>" for text in seen.checked.notes)
    verdict = f'<p class="bad">Replays may differ from eager.</p><ol>{found}</ol>' if found else "<p>No finding.</p>"
    return f"<p>{escape(seen.checked.summary)}</p>{verdict}" + (f"<h3>Notes</h3><ul>{notes}</ul>" if notes else "")


def _table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Iterable[int] = (),
    long: Iterable[int] = (),
) -> str:
    """A table of HTML cells, the first of each row its header. ``numbers``, ``long``: columns of numbers, and of long text."""
    kinds = {**dict.fromkeys(numbers, ' class="n"'), **dict.fromkeys(long, ' class="long"')}

    def row(cells: Sequence[str]) -> str:
        rest = "".join(f"<td{kinds.get(i, '')}>{cell}</td>" for i, cell in enumerate(cells[1:], 1))
        return f'<tr><th scope="row">{cells[0]}</th>{rest}</tr>'

    top = "".join(f'<th scope="col"{kinds.get(i, "")}>{cell}</th>' for i, cell in enumerate(head))
    body = "".join(map(row, rows))
    return (
        f'<div class="scroll" role="region" aria-label="{caption}" tabindex="0"><table><caption>{caption}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _between(low: int, high: int) -> Iterator[float]:
    for i in range(_CORNERS if high > low else 1):
        yield low + (high - low) * i / (_CORNERS - 1) if high > low else high


def _marks(most: int) -> list[int]:
    """Powers of two up to ``most``, at most six."""
    powers = [2**i for i in range(most.bit_length())]
    return powers[:: -(-len(powers) // 6)]


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes} B"
