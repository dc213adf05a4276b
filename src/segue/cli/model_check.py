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

# In the first round buckets are warmed up, in the second captured, and in the third all calls replay. Lengths go up and
# down, so that short calls follow long ones.
_ROUNDS = 3
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
        for one in checked:
            progress(f"{one.case.name}, without segue")
            one.expect(handle)
        for i in range(_ROUNDS):
            for one in checked[:: -1 if i % 2 else 1]:
                if one.want is not None:
                    progress(f"{one.case.name}, round {i + 1} of {_ROUNDS}")
                    one.compare(handle)
    for one in checked:
        if one.want is None:
            report.notes.append(f"{one.case.name}: left out, as the model without segue raises {one.failed}")
        else:
            report.rows.append(one.row())
            report.findings += one.findings
    stats = handle.stats
    report.notes += [f"forwards without graphs: {count}, because of: {reason}" for reason, count in sorted(stats.reasons.items())]
    return report


class _Checked:
    """A case, what it must give, and how its runs compared so far."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.want: CallResult | None = None
        self.failed = ""
        self.findings: dict[str, None] = {}
        self.off = {part: 0.0 for part in _PARTS}  # the largest difference of all runs, as a part of the largest value
        self.wrong: set[str] = set()
        self.part_ways = 0  # greedy tokens that differ because two logits are as good as equal
        self.ran = ""

    def expect(self, handle: Any) -> None:
        """Run the case without segue."""
        with handle.untouched() as model:
            try:
                self.want = self.case.run(model)
            except Exception as e:
                self.failed = f"{type(e).__name__}: {e}"

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
            self._find("outputs", f"raised {said}")
            return
        self.ran = _ran(before, handle.stats)
        self._compare(self.want, got)

    def row(self) -> dict[str, Any]:
        """The case in the table of verdicts."""
        assert self.want is not None
        cells = {part: self._cell(part) if getattr(self.want, part) else None for part in _PARTS}
        if self.want.tokens:
            cells["tokens"] = _WRONG if "tokens" in self.wrong else self._ties() or "same"
        verdict = _WRONG if self.wrong else "equal to rounding" if any(self.off.values()) else "equal"
        return {"case": self.case.name, "last round": self.ran, **cells, "verdict": verdict}

    def _ties(self) -> str:
        return f"{self.part_ways} near tie{'s' if self.part_ways > 1 else ''}" if self.part_ways else ""

    def _compare(self, want: CallResult, got: CallResult) -> None:
        for part in _PARTS:
            mine, theirs = getattr(got, part), getattr(want, part)
            if part == "outputs" and want.generated is not None and got.generated is not None:
                together = _together(want.generated, got.generated)
                mine, theirs = ({name: t[together[:, i]] for i, (name, t) in enumerate(d.items())} for d in (mine, theirs))
            for name in theirs.keys() | mine.keys():
                self._compare_tensor(part, name, mine.get(name), theirs.get(name))
        if not self.wrong:  # logits are equal to rounding, so that other tokens are as good
            pairs = [(got.tokens.get(name), t) for name, t in want.tokens.items()]
            self.part_ways = max(self.part_ways, sum(int((a != b).sum()) for a, b in pairs if a is not None))

    def _compare_tensor(self, part: str, name: str, got: Tensor | None, want: Tensor | None) -> None:
        if got is None or want is None:
            self._find(part, f"{name} is given only {'without' if got is None else 'with'} segue")
        elif got.shape != want.shape:
            self._find(part, f"{name} has shape {list(got.shape)} instead of {list(want.shape)}")
        elif (text := value_difference(want, got, exact=False)) is not None:
            self._find(part, f"{name} {text}")
        elif difference(got, want) is not None:
            self.off[part] = max(self.off[part], distance(got, want))

    def _find(self, part: str, text: str) -> None:
        self.wrong.add(part)
        self.findings[f"{self.case.name}: {text}"] = None

    def _cell(self, part: str) -> str:
        return _WRONG if part in self.wrong else f"off by {self.off[part]:.1g}" if self.off[part] else "equal"


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
