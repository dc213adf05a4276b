"""What this thread is doing: capturing, replaying, or running the reference. One object holds it, which is quick to read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from segue.capture.allocations import Allocations
from segue.capture.rehearsal import Rehearsal
from segue.devices import Pool

Phase = Literal["segment", "break"]


class OpenCapture(Protocol):
    """A capture as break points and observers see it while its ``with`` lasts."""

    name: str
    breaks_inside: bool  # break points are recorded like everything else

    @property
    def graphs(self) -> int:
        """Segments recorded so far."""

    def run_break(self, spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any], into: Any) -> Any:
        """End the segment, run the break ``spec`` (a ``BreakSpec``) on real values, begin the next segment."""


class _ThreadState(threading.local):
    capture: OpenCapture | None = None  # the capture whose `with` this thread is in
    phase: Phase | None = None  # of that capture
    inside_break: bool = False  # a break is running: at capture, at a replay, or in the reference
    reference: bool = False  # breaks trim and clear, without a capture
    breaks_inside: bool = False  # in the reference: of a graph that holds its breaks
    rows: int | None = None  # the bucket
    valid: int | None = None  # of these, real ones
    pools: tuple[Pool, ...] = ()  # being captured into or replayed from, the innermost last
    made: Allocations | None = None  # in the reference: the memory that its forward has made
    rehearsal: Rehearsal | None = None  # in the reference: notes what breaks give, or stands in for them
    asked_rows: bool = False  # the break that is running has asked for its valid rows
    stubs: bool = False  # breaks run their capture stubs: nobody waits for the answer
    grad: bool = False  # gradients were on when the capture or the reference began
    variables: Context | None = None  # the context variables when the reference began
    ctx: Any = None


state = _ThreadState()


@contextmanager
def active_forward(ctx: Any) -> Iterator[Any]:
    """Make ``ctx``, any object, the live context that breaks read with :func:`current_forward_ctx`, for this thread and block."""
    before, state.ctx = state.ctx, ctx
    try:
        yield ctx
    finally:
        state.ctx = before


def current_forward_ctx() -> Any:
    """The context of the innermost :func:`active_forward` of this thread, or None."""
    return state.ctx


def current_valid_rows() -> int | None:
    """In a break: how many rows are real, the rest being padding. None in a plain call, and where no row count is known."""
    if not state.inside_break:
        return None
    state.asked_rows = True
    return state.rows if state.valid is None else state.valid


def is_breakable_capture_active() -> bool:
    """Whether this thread is recording a segment right now. False inside a break."""
    return state.phase == "segment"


def capture_phase() -> Phase | None:
    """``"segment"`` while recording one, ``"break"`` while a break runs at capture, None outside a capture."""
    return state.phase


@contextmanager
def capture_stubs() -> Iterator[None]:
    """Within this block breaks that have a capture stub run it instead of their body, in references and captures."""
    before, state.stubs = state.stubs, True
    try:
        yield
    finally:
        state.stubs = before


@contextmanager
def capture_frame(capture: OpenCapture, rows: int | None, valid_rows: int | None, pool: Pool, stubs: bool) -> Iterator[None]:
    """Within this block the thread's capture is ``capture``, into ``pool``, of ``rows`` rows, of which ``valid_rows`` are real.
    ``stubs``: breaks run their capture stubs.
    """
    before = state.capture, state.phase, state.rows, state.valid, state.pools, state.reference, state.grad, state.stubs
    state.capture, state.rows, state.valid, state.pools = capture, rows, valid_rows, (pool,)
    state.reference, state.grad, state.stubs = False, torch.is_grad_enabled(), stubs
    try:
        yield
    finally:
        state.capture, state.phase, state.rows, state.valid, state.pools, state.reference, state.grad, state.stubs = before


@contextmanager
def reference_frame(
    rows: int | None, valid_rows: int | None, inputs: Iterable[Tensor] = (), breaks_inside: bool = False
) -> Iterator[None]:
    """Within this block breaks are plain calls that trim and clear as a replay does. A replay of a bucket of ``rows`` rows, of
    which ``valid_rows`` are real, must equal what runs here. ``inputs``: of the forward, in memory made for this run.
    ``breaks_inside``: the graph holds its breaks, so they get and give all rows.
    """
    before = (state.reference, state.rows, state.valid, state.inside_break, state.made, state.grad, state.variables)
    inside, state.breaks_inside = state.breaks_inside, breaks_inside
    made = Allocations(inputs)
    state.reference, state.rows, state.valid, state.inside_break, state.made = True, rows, valid_rows, False, made
    state.grad, state.variables = torch.is_grad_enabled(), copy_context()
    try:
        with made:
            yield
    finally:
        made.keep()
        (state.reference, state.rows, state.valid, state.inside_break, state.made, state.grad, state.variables) = before
        state.breaks_inside = inside
