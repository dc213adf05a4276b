"""Draws the timeline of one traced call: what the host did, and below what the device did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from segue.bench.plots import require_matplotlib
from segue.cli.chrome_trace import REST, Span, Step, TracedCall
from segue.errors import UsageError

_COLOURS = {
    "staging": "tab:green",
    "segment": "tab:blue",
    "break": "tab:orange",
    "outputs": "tab:olive",
    "copy-out": "tab:purple",
}
_OTHER = "0.7"
_CLOSE = 0.002  # of the whole call: work of one step on the device with smaller gaps is drawn as one


def draw(path: Path, call: TracedCall) -> None:
    """Draw ``call`` into the file ``path``, in the format that its suffix names.

    Raises:
        UsageError: matplotlib is missing, or can't write that format.
    """
    backend, figures = require_matplotlib()
    lanes = ["device", "host"] if any(step.device for step in call.steps) else ["host"]
    figure = figures.Figure(figsize=(11, 1.6 + 0.8 * len(lanes)), layout="constrained")
    canvas = backend.FigureCanvasAgg(figure)
    axes = figure.subplots()
    start = call.host.start
    for step in call.steps:
        colour = _COLOURS.get(_kind(step), _OTHER)
        for lane, spans in (("host", step.host), ("device", _merged(step.device, _CLOSE * call.host.length))):
            if spans and lane in lanes:
                bars = [(span.start - start, span.length) for span in spans]
                axes.broken_barh(bars, (lanes.index(lane) - 0.35, 0.7), facecolors=colour, edgecolor="white", linewidth=0.3)
    axes.set(
        xlabel="us since the call began", title=f"{call.name}, under a profiler", yticks=range(len(lanes)), yticklabels=lanes
    )
    axes.set_ylim(-0.5, len(lanes) - 0.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _add_legend(axes, call.steps)
    try:
        canvas.print_figure(path)
    except (OSError, ValueError) as e:
        raise UsageError(f"--plot {path.name}: {e}") from None


def _add_legend(axes: Any, steps: Iterable[Step]) -> None:
    """One entry for each kind of step, in the order of the call."""
    kinds = dict.fromkeys(_kind(step) for step in steps)
    shown = [axes.barh(0, 0, color=_COLOURS.get(kind, _OTHER), label=kind) for kind in kinds]
    axes.legend(handles=shown, loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=len(shown), fontsize="small", frameon=False)


def _kind(step: Step) -> str:
    """``segment``, ``break``, ``staging`` and the like."""
    return REST if step.name == REST else step.name.split()[0].rstrip(",")


def _merged(spans: Sequence[Span], gap: float) -> list[Span]:
    """The spans, those that lie closer than ``gap`` as one."""
    merged: list[Span] = []
    for span in spans:
        if merged and span.start - merged[-1].end < gap:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged
