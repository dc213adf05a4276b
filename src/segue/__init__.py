"""CUDA graphs for PyTorch forwards whose shape changes: eager's answers at graph speed, or an error that names the cause."""

from segue.capture import (
    BreakableCapture,
    active_forward,
    break_here,
    break_point,
    capture_phase,
    current_forward_ctx,
    current_valid_rows,
    is_breakable_capture_active,
    scrub_padding_tail,
    slice_to_real_tokens,
    weak_ref_tensor,
)
from segue.errors import SegueError
from segue.prime import PrimeGraph, Rows, Trunk, Whole

__all__ = [
    "BreakableCapture",
    "PrimeGraph",
    "Rows",
    "SegueError",
    "Trunk",
    "Whole",
    "active_forward",
    "break_here",
    "break_point",
    "capture_phase",
    "current_forward_ctx",
    "current_valid_rows",
    "is_breakable_capture_active",
    "scrub_padding_tail",
    "slice_to_real_tokens",
    "weak_ref_tensor",
]
