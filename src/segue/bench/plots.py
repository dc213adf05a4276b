"""The plots of ``segue bench ttft``: time against tokens, and start-up against the number of lengths."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from segue.bench.result import Row
from segue.errors import UsageError


def require_matplotlib() -> tuple[Any, Any]:
    """matplotlib's modules ``backends.backend_agg`` and ``figure``.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.backends.backend_agg"), importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'segue-graphs[plot]'") from None


def draw(path: Path, ways: Sequence[Row], startup: Sequence[Row]) -> None:
    """Draw the tables ``ways`` and ``startup`` of a :class:`~segue.bench.ttft.FirstToken` into the file ``path``.

    Raises:
        UsageError: matplotlib is missing, can't write that format, or can't write there.
    """
    backend, figures = require_matplotlib()
    figure = figures.Figure(figsize=(11, 4), layout="constrained")
    canvas = backend.FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(row["way"] for row in ways):
        points = sorted((row["tokens"], row["ms"]) for row in ways if row["way"] == name)
        left.plot(*zip(*points, strict=True), marker="o", label=name)
    left.set(xlabel="tokens", ylabel="ms", xscale="log", yscale="log", title="time to first token")
    left.legend(fontsize="small")
    for row in startup:
        points = [(int(count), seconds) for count, seconds in row.items() if count != "way"]
        right.plot(*zip(*points, strict=True), marker="o", label=row["way"])
    right.set(xlabel="lengths ready", ylabel="s", title="start-up", ylim=(0, None))
    try:
        canvas.print_figure(path)
    except (OSError, ValueError) as e:
        raise UsageError(f"--plot {path}: {e}") from None
