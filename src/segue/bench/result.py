"""What every benchmark returns: tables with their titles, notes, and whether all that was measured computed the right thing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

Row = dict[str, Any]  # a cell by its column's name; None where nothing was measured
SAME = "bit for bit"  # the verdict of a run that gives what its reference gives


@dataclass(frozen=True, kw_only=True)
class BenchResult(ABC):
    """What one run of a benchmark measured.

    ``right``: whether every run was equal to its reference. ``notes``: what was measured and how, and what the columns mean,
    in Markdown.
    """

    title: ClassVar[str]

    right: bool
    notes: Sequence[str] = ()

    @property
    @abstractmethod
    def tables(self) -> Mapping[str, Sequence[Row]]:
        """Tables by their titles. Those without rows were not measured."""
