"""Serves calls of any length from graphs of a few padded lengths."""

from segue.runner.admission import Decision
from segue.runner.full import Full
from segue.runner.inputs import Input
from segue.runner.ladder import Ladder
from segue.runner.outputs import Lease
from segue.runner.progress import CaptureSummary
from segue.runner.runner import GraphRunner
from segue.runner.stats import Stats
from segue.runner.strategy import Breakable, CapturedForward, Job, Strategy

__all__ = [
    "Breakable",
    "CaptureSummary",
    "CapturedForward",
    "Decision",
    "Full",
    "GraphRunner",
    "Input",
    "Job",
    "Ladder",
    "Lease",
    "Stats",
    "Strategy",
]
