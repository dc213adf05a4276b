"""The plots of ``segue bench ttft``, of ``growth``, and of both as they were written down before."""

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


_WAYS = {  # what the summary shows, with its label, colour and line
    "eager": ("eager", "0.45", "-"),
    "torch.compile": ("torch.compile*", "tab:olive", "--"),
    "breakable-cuda-graphs": ("breakable-cuda-graphs*", "tab:green", "--"),
    "segue": ("segue", "tab:blue", "-"),
    "reduce-overhead": ("reduce-overhead", "tab:orange", "-"),
    "segue compiled": ("segue, compile=True", "navy", "-"),
}


def draw_summary(
    path: Path, ways: Sequence[Row], others: Sequence[Row], startup: Sequence[Row], buckets: Sequence[Row]
) -> None:
    """Draw three panels into the file ``path``: time to first token, start-up by lengths, memory by buckets.

    ``ways`` and ``startup``: those tables of :class:`~segue.bench.ttft.FirstToken`. ``others``: a row for each number of tokens
    with a column for each way, of another run, whose rivals that ``ways`` hasn't are drawn dashed. ``buckets``: that table of
    :class:`~segue.bench.growth.Growth`.

    Raises:
        UsageError: as :func:`draw`.
    """
    figure, canvas = _figure(width=13)
    time, start, memory = figure.subplots(1, 3)
    for way, (label, colour, style) in _WAYS.items():
        points = [(row["tokens"], row["ms"]) for row in ways if row["way"] == way]
        points = points or [(row["tokens"], row[way]) for row in others if way in row]
        if points:
            time.plot(*zip(*sorted(points), strict=True), style, marker="o", markersize=4, label=label, color=colour)
        for row in startup:
            if row["way"] == way and way != "eager":
                counts = [(int(count), seconds) for count, seconds in row.items() if count != "way"]
                start.plot(*zip(*counts, strict=True), style, marker="o", markersize=4, label=label, color=colour)
    time.set(xlabel="tokens of the prompt", ylabel="ms", xscale="log", yscale="log", title="time to first token", ylim=(2, 200))
    start.set(xlabel="lengths ready", ylabel="s", title="start-up", ylim=(0, None))
    for what, colour in (("pool MiB", "tab:blue"), ("driver MiB", "tab:cyan")):
        points = [(row["buckets"], row[what]) for row in buckets]
        memory.plot(*zip(*points, strict=True), marker="o", markersize=4, label=what.removesuffix(" MiB"), color=colour)
    memory.set(xlabel="buckets up to 2,048 tokens", ylabel="MiB", xscale="log", title="memory of the graphs", ylim=(0, None))
    for axes, marks in ((time, sorted({row["tokens"] for row in ways})), (memory, [row["buckets"] for row in buckets])):
        axes.set_xticks(marks, map(str, marks))
        axes.minorticks_off()
    time.set_yticks(marks := [2, 5, 10, 20, 40], map(str, marks))
    start.set_xticks([int(count) for count in startup[0] if count != "way"])
    for axes in (time, start, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(fontsize="small", frameon=False)
    _save(canvas, path)


def _figure(width: float) -> tuple[Any, Any]:
    """An empty figure, ``width`` inches wide, and its canvas."""
    backend, figures = require_matplotlib()
    figure = figures.Figure(figsize=(width, 4), layout="constrained")
    return figure, backend.FigureCanvasAgg(figure)


def _save(canvas: Any, path: Path) -> None:
    try:
        # The same file each time: without a date, and with names of parts that don't depend on chance.
        with importlib.import_module("matplotlib").rc_context({"svg.hashsalt": "segue"}):
            canvas.print_figure(path, metadata={"Date": None} if path.suffix == ".svg" else {})
    except (OSError, ValueError) as e:
        raise UsageError(f"--plot {path.name}: {e}") from None
