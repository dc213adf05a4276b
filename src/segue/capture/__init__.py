"""Capturing a forward as segments and breaks, and replaying it."""

from segue.capture.break_points import break_here, break_point
from segue.capture.capture import BreakableCapture
from segue.capture.compiled import compile_dynamic
from segue.capture.externals import External
from segue.capture.thread_state import (
    active_forward,
    capture_phase,
    current_forward_ctx,
    current_valid_rows,
    is_breakable_capture_active,
    reference_frame,
)
from segue.capture.views import scrub_padding_tail, slice_to_real_tokens, weak_ref_tensor

__all__ = [
    "BreakableCapture",
    "External",
    "active_forward",
    "break_here",
    "break_point",
    "capture_phase",
    "compile_dynamic",
    "current_forward_ctx",
    "current_valid_rows",
    "is_breakable_capture_active",
    "reference_frame",
    "scrub_padding_tail",
    "slice_to_real_tokens",
    "weak_ref_tensor",
]
