"""CUDA graphs for PyTorch forwards whose shape changes: eager's answers at graph speed, or an error that names the cause."""

from segue._torch import UnsupportedTorchError
from segue.capture import (
    BreakableCapture,
    active_forward,
    break_here,
    break_point,
    capture_phase,
    compile_dynamic,
    current_forward_ctx,
    current_valid_rows,
    is_breakable_capture_active,
    scrub_padding_tail,
    slice_to_real_tokens,
    weak_ref_tensor,
)
from segue.devices import new_pool
from segue.errors import (
    CaptureError,
    GraphMemoryError,
    InputError,
    LeftBehindError,
    NoBucketError,
    RankError,
    ReplayError,
    SegueError,
    StateChangedError,
    UsageError,
)
from segue.integrations.transformers import accelerate
from segue.prime import PrimeGraph, Rows, Trunk, Whole
from segue.runner import Breakable, Decision, Full, GraphRunner, Input, Ladder, Lease, Stats
from segue.runner.check_report import Checker, use_checker

__all__ = [
    "Breakable",
    "BreakableCapture",
    "CaptureError",
    "Decision",
    "Full",
    "GraphMemoryError",
    "GraphRunner",
    "Input",
    "InputError",
    "Ladder",
    "Lease",
    "LeftBehindError",
    "NoBucketError",
    "PrimeGraph",
    "RankError",
    "ReplayError",
    "Rows",
    "SegueError",
    "StateChangedError",
    "Stats",
    "Trunk",
    "UnsupportedTorchError",
    "UsageError",
    "Whole",
    "accelerate",
    "active_forward",
    "break_here",
    "break_point",
    "capture_phase",
    "compile_dynamic",
    "current_forward_ctx",
    "current_valid_rows",
    "is_breakable_capture_active",
    "new_pool",
    "scrub_padding_tail",
    "slice_to_real_tokens",
    "weak_ref_tensor",
]


def _load_checker() -> Checker:
    from segue.check import check_runner

    return check_runner


use_checker(_load_checker)
