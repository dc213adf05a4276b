"""The plots of ``segue bench ttft``: time against tokens, and start-up against the number of lengths; and of ``growth``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
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
    figure, canvas = _figure(width=11)
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
    _save(canvas, path)


def draw_growth(path: Path, panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]) -> None:
    """Draw the panels of a :class:`~segue.bench.growth.Growth` into the file ``path``, all axes logarithmic.

    Raises:
        UsageError: matplotlib is missing, can't write that format, or can't write there.
    """
    figure, canvas = _figure(width=5.5 * len(panels))
    for axes, (what, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        axes.set(xlabel=what, xscale="log", yscale="log", title=f"by {what}; dotted: linear")
        drawn = {label: points for label, points in lines.items() if points}
        measured = [axes.plot(*zip(*points, strict=True), marker="o", label=label)[0] for label, points in drawn.items()]
        heights = axes.get_ylim()  # linear growth may leave them
        for line, points in zip(measured, drawn.values(), strict=True):
            (size, value), (last, _) = points[0], points[-1]
            axes.plot([size, last], [value, value * last / size], linestyle=":", linewidth=1, color=line.get_color())
        axes.set_ylim(heights)
        if drawn:
            axes.legend(fontsize="small")
    _save(canvas, path)


def _figure(width: float) -> tuple[Any, Any]:
    """An empty figure, ``width`` inches wide, and its canvas."""
    backend, figures = require_matplotlib()
    figure = figures.Figure(figsize=(width, 4), layout="constrained")
    return figure, backend.FigureCanvasAgg(figure)


def _save(canvas: Any, path: Path) -> None:
    try:
        canvas.print_figure(path)
    except (OSError, ValueError) as e:
        raise UsageError(f"--plot {path.name}: {e}") from None
