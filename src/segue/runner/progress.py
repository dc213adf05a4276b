"""What an explicit capture shows while it lasts, and the summary that it returns."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from segue.runner.memory_budget import Cost, mib

log = logging.getLogger("segue")


@dataclass(frozen=True)
class CaptureSummary:
    """What ``capture()`` did. ``segments``, ``breaks``: of all buckets together. ``cost``: bytes that graphs take now.

    ``left_out``: buckets beyond the memory budget, with their predicted cost, and those that don't hold a request-shaped example,
    with that reason. ``changed``: Python attributes that the warm-up or capture changed, as (before, after); they are not put
    back. ``compile_seconds``: of ``seconds``, those in which layers were compiled. ``watched``: names of what the forward's code
    decides by, which every replay compares with what was there at capture; ``unwatched``: containers too large for that.
    """

    buckets: tuple[int, ...]
    segments: int
    breaks: int
    seconds: float
    cost: Cost
    left_out: Mapping[int, Cost | str] = field(default_factory=dict)
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    compile_seconds: float = 0.0
    watched: tuple[str, ...] = ()
    unwatched: tuple[str, ...] = ()

    def __str__(self) -> str:
        buckets, segments = _count(len(self.buckets), "bucket"), _count(self.segments, "segment")
        text = (
            f"captured {buckets}{_span(self.buckets)}, {segments} and {_count(self.breaks, 'break')} "
            f"in {self.seconds:.1f} s; {mib(self.cost.pool)} pool, {mib(self.cost.driver)} driver"
        )
        if self.left_out:
            text += f". Left out: {', '.join(f'{b} ({why})' for b, why in self.left_out.items())}"
        if self.changed:
            text += f". Python attributes that it changed: {', '.join(self.changed)}"
        if self.buckets and not self.breaks:
            text += ". No break point was met: everything, attention included, runs on the padded rows"
        return text


class Progress:
    """Shows progress on stderr as one line that is rewritten: bucket, free memory, seconds. It shows none if stderr is no
    terminal.

    Args:
        total: buckets to capture. ``shown``: False to show nothing.
    """

    def __init__(self, total: int, shown: bool) -> None:
        self._total, self._shown = total, shown
        self._start = time.perf_counter()
        self._bar: Any = None
        self._task: Any = None

    @contextmanager
    def showing(self) -> Iterator[Progress]:
        """Show the line within this block."""
        if not self._shown:
            yield self
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("capturing"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=self._total)
        with self._bar:
            yield self
        self._bar = None

    def bucket(self, bucket: int, free: int | None) -> None:
        """Show which bucket is being captured, and the device's free bytes (None: not known)."""
        if self._bar is not None:
            memory = "" if free is None else f", {mib(free)} free"
            self._bar.update(self._task, description=f"bucket {bucket}{memory}")

    def done(self) -> None:
        """Count one bucket as captured."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def close(self, summary: object) -> None:
        """Write the closing line, ``summary`` as text, to stderr and the log."""
        log.info("%s", summary)
        if self._shown:
            from rich.console import Console

            Console(stderr=True, highlight=False).print(f"segue: {summary}", soft_wrap=True)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _span(buckets: tuple[int, ...]) -> str:
    return "" if not buckets else f" ({buckets[0]})" if len(buckets) == 1 else f" ({min(buckets)} to {max(buckets)})"
