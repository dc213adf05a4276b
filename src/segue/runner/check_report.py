"""What a check found, as data and as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One way in which a replay can differ from eager.

    ``kind``: ``padding`` (real rows depend on padded rows), ``uninitialised`` (real rows depend on memory that nothing
    wrote), ``frozen`` (Python decided a plain value that varies between forwards), ``replay`` (a replay differs from the
    reference), ``stale`` (what the graphs were captured from has changed), ``unrepeatable`` (two eager forwards of one call
    differ), ``refused`` (segue raised an error of its own) or ``error`` (something else was raised). ``where``: the line,
    ``file.py:12 in forward``; of what has changed, its name. ``text``: what happened, why, and what mends it.
    """

    kind: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}: {self.text}"


@dataclass(frozen=True)
class Report:
    """The outcome of :meth:`GraphRunner.check`.

    ``forward``: the name and line of the function. ``notes``: what is worth knowing and no fault. ``buckets``, ``lengths``
    (in tokens), ``variants``: what was tried. ``comparisons``: how many forwards were compared; ``replays`` of them were
    replays. ``seconds``: how long the check took.
    """

    forward: str
    device: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    buckets: tuple[int, ...]
    lengths: tuple[int, ...]
    variants: tuple[str, ...]
    comparisons: int
    replays: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def rows(self) -> list[dict[str, str]]:
        """The findings as rows of a table, with the columns ``kind``, ``where`` and ``finding``."""
        return [{"kind": f.kind, "where": f.where, "finding": f.text} for f in self.findings]

    def table(self) -> str:
        """The findings as a Markdown table, or a sentence where there are none."""
        if self.ok:
            return "No finding."
        lines = [("kind", "where", "finding"), ("---",) * 3, *(tuple(map(_cell, row.values())) for row in self.rows)]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def summary(self) -> str:
        """One line that says what was checked, and how it ended."""
        verdict = "ok" if self.ok else f"{len(self.findings)} finding{'s' if len(self.findings) > 1 else ''}"
        variants = "" if len(self.variants) < 2 else f"; variants: {', '.join(self.variants)}"
        return (
            f"check of {self.forward} on {self.device}: {verdict}. {self.comparisons} forwards compared, "
            f"{self.replays} of them replays, in {self.seconds:.1f} s; buckets {_list(self.buckets)}; "
            f"lengths {_list(self.lengths)}{variants}"
        )

    def __str__(self) -> str:
        found = [f"{i}. {finding}" for i, finding in enumerate(self.findings, 1)]
        return "\n".join([self.summary(), *found, *(f"note: {note}" for note in self.notes)])


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


Checker = Callable[..., Report]  # of a runner, the arguments of an example call and its context
_loaders: list[Callable[[], Checker]] = []


def use_checker(load: Callable[[], Checker]) -> None:
    """Say which function checks runners. It belongs to a layer above this one, so ``segue/__init__.py`` calls this.

    Args:
        load: returns the checker. It is called when a check is asked for, so that importing segue doesn't import the checker.
    """
    _loaders[:] = [load]


def checker() -> Checker:
    """The function that checks runners."""
    return _loaders[0]()
