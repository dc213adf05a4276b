"""Compares what an accelerated model gives with what it gives without segue, call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.check.compare import difference, distance, value_difference
from segue.cli import handles
from segue.cli.model_cases import CallResult, Case
from segue.errors import SegueError
from segue.runner import Stats

# Without segue each case runs up and down the list, which tells whether the model repeats itself, and is as after any other case.
# With segue, buckets are warmed up in the first round and captured in the second, and in the third all calls replay. Lengths
# go up and down, so that short calls follow long ones.
_BARE_ROUNDS, _ROUNDS = 2, 3
_WRONG = "WRONG"
_PARTS = ("outputs", "caches")


@dataclass
class ModelReport:
    """``rows``: one for each case. ``findings``: a sentence for each difference. ``notes``: what is no fault."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every call gave what the model gives without segue."""
        return not self.findings


def check_model(handle: Any, cases: Sequence[Case], progress: Callable[[str], None]) -> ModelReport:
    """Run each case without segue, and then three times with it, and compare.

    ``progress``: is called with a line before each run.
    """
    checked = [_Checked(case) for case in cases]
    report = ModelReport()
    with torch.inference_mode():
        for i in range(_BARE_ROUNDS):
            for one in checked[:: -1 if i % 2 else 1]:
                progress(f"{one.case.name}, without segue")
                one.expect(handle)
        for i in range(_ROUNDS):
            for one in checked[:: -1 if i % 2 else 1]:
                if not one.left_out:
                    progress(f"{one.case.name}, round {i + 1} of {_ROUNDS}")
                    one.compare(handle)
    for one in checked:
        if one.left_out:
            report.notes.append(f"{one.case.name}: left out, as the model without segue {one.left_out}")
        else:
            report.rows.append(one.row())
            report.findings += [f"{one.case.name}: {text}" for text in one.differences.findings]
    for reason, count in sorted(handle.stats.reasons.items()):
        report.notes.append(f"forwards without graphs: {count}, because of: {reason}")
    return report


class _Checked:
    """A case, what it must give, and how its runs compared so far."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.want: CallResult | None = None
        self.left_out = ""  # why it can't be compared
        self.differences = _Differences()
        self.ran = ""

    def expect(self, handle: Any) -> None:
        """Run the case without segue. What the first run gives is what all must give."""
        if self.left_out:
            return
        with handle.untouched() as model:
            try:
                got = self.case.run(model)
            except Exception as e:
                self.left_out = f"raises {type(e).__name__}: {e}"
                return
        if self.want is None:
            self.want = got
        again = _Differences()
        again.add(self.want, got)
        if again.findings:
            self.left_out = f"doesn't repeat itself: {next(iter(again.findings))}"

    def compare(self, handle: Any) -> None:
        """Run the case with segue, and note how what it gives differs."""
        assert self.want is not None
        before = handle.stats
        try:
            got = self.case.run(handles.model_of(handle))
        except Exception as e:
            if _torch.device_is_lost(e):
                raise
            said = str(e) if isinstance(e, SegueError) else f"{type(e).__name__}: {e}"
            self.differences.find("outputs", f"raised {said}")
            return
        self.ran = _ran(before, handle.stats)
        self.differences.add(self.want, got)

    def row(self) -> dict[str, Any]:
        """The case in the table of verdicts."""
        differences = self.differences
        cells = {part: differences.cell(part) if getattr(self.want, part) else None for part in _PARTS}
        if self.want is not None and self.want.tokens:
            cells["tokens"] = differences.tokens()
        return {"case": self.case.name, "last round": self.ran, **cells, "verdict": differences.verdict()}


class _Differences:
    """How results of a case differ from what the first gave. ``findings``: a sentence for each that is no rounding."""

    def __init__(self) -> None:
        self.findings: dict[str, None] = {}
        self._wrong: set[str] = set()
        self._off = {part: 0.0 for part in _PARTS}  # the largest difference of all, as a part of the largest value
        self._ties = 0  # greedy tokens that differ because two logits are as good as equal

    def add(self, want: CallResult, got: CallResult) -> None:
        """Compare one more result."""
        for part in _PARTS:
            mine, theirs = getattr(got, part), getattr(want, part)
            if part == "outputs" and want.generated is not None and got.generated is not None:
                together = _together(want.generated, got.generated)
                mine, theirs = ({name: t[together[:, i]] for i, (name, t) in enumerate(d.items())} for d in (mine, theirs))
            for name in theirs.keys() | mine.keys():
                self._compare(part, name, mine.get(name), theirs.get(name))
        if not self._wrong:  # logits are equal to rounding, so that other tokens are as good
            pairs = [(got.tokens.get(name), t) for name, t in want.tokens.items()]
            self._ties = max(self._ties, sum(int((a != b).sum()) for a, b in pairs if a is not None))

    def find(self, part: str, text: str) -> None:
        """Note that something is wrong."""
        self._wrong.add(part)
        self.findings[text] = None

    def cell(self, part: str) -> str:
        """The part in the table of verdicts."""
        return _WRONG if part in self._wrong else f"off by {self._off[part]:.1g}" if self._off[part] else "equal"

    def tokens(self) -> str:
        """The greedy tokens in the table of verdicts."""
        if self._wrong:
            return "not compared"
        return f"{self._ties} near tie{'s' if self._ties > 1 else ''}" if self._ties else "same"

    def verdict(self) -> str:
        """All of them together."""
        return _WRONG if self._wrong else "equal to rounding" if any(self._off.values()) else "equal"

    def _compare(self, part: str, name: str, got: Tensor | None, want: Tensor | None) -> None:
        if got is None or want is None:
            self.find(part, f"{name} is given only {'without' if got is None else 'with'} segue")
        elif got.shape != want.shape:
            self.find(part, f"{name} has shape {list(got.shape)} instead of {list(want.shape)}")
        elif (text := value_difference(want, got, exact=False)) is not None:
            self.find(part, f"{name} {text}")
        elif difference(got, want) is not None:
            self._off[part] = max(self._off[part], distance(got, want))


def _ran(before: Stats, after: Stats) -> str:
    """What ran between two snapshots: ``5 breakable, 1 prime, 1 eager``."""
    counts = Counter(after.strategies)
    counts.subtract(before.strategies)
    counts.update({"warm-up": after.warmed - before.warmed, "captured": after.captured - before.captured})
    counts["eager"] = after.eager - before.eager
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _together(want: Tensor, got: Tensor) -> Tensor:
    """Up to which tokens two greedy texts [B, n] and [B, m] have the same words before them: bool [B, max(n, m)].

    What comes after the first token that differs continues another text.
    """
    n = min(want.shape[1], got.shape[1])
    differs = (want[:, :n] != got[:, :n]).long()
    same = differs.cumsum(1) - differs == 0
    rest = same.new_zeros(len(want), max(want.shape[1], got.shape[1]) - n)
    return torch.cat([same, rest], 1)
