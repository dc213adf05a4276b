"""One captured bucket of one variant, and its replay. Everything that a replay needs was made at capture."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from segue import _torch
from segue._torch import PROFILER
from segue.capture import BreakableCapture, active_forward
from segue.capture.named_ranges import named
from segue.capture.thread_state import state
from segue.devices import Pool
from segue.errors import UsageError
from segue.runner.calls import Call
from segue.runner.outputs import Layout, Lease
from segue.runner.shared_memory import SharedMemory
from segue.runner.staging import Stage
from segue.runner.stats import Counters
from segue.runner.strategy import CapturedForward

_in_inference = torch.is_inference_mode_enabled


class CapturedBucket:
    """Replays one bucket of one variant: stage the inputs, run the program, hand out the outputs."""

    def __init__(
        self,
        stage: Stage,
        program: CapturedForward,
        layout: Layout,
        pool: Pool,
        lock: AbstractContextManager[Any],
        counters: Counters,
        strategy: str,
        lease: bool,
        shared: SharedMemory,
    ) -> None:
        self.stage, self.program, self.layout, self.strategy = stage, program, layout, strategy
        self._pool, self._lock, self._lease = pool, lock, lease
        self._staging = f"staging, bucket {stage.tokens}"
        self._turn, self._fill, self._replay = pool.turn, stage.fill, program.replay
        self._count = counters.replays_of(strategy, stage.tokens)
        self._writes, self._shared, self._apart = bool(stage.written), shared, bool(shared)
        self._breaks = program.breaks > 0  # a break may write into the buffers
        self.closed = False
        self.driver_bytes = 0  # what the driver took while this was captured

    def run(self, call: Call) -> Any:
        """The forward's answer for ``call``, from the graphs.

        Raises:
            InputError: an input shares memory with something that the forward writes. ReplayError: a tensor that the graphs read
                was re-pointed, in which case nothing has run that outlives the call; or a break's result changed. UsageError: the
                call is made in a break of a forward of the same pool.
        """
        if self._pool in state.pools:  # the program would refuse too, but after the outer forward's inputs were overwritten
            raise self._nested()
        if self._apart:
            self._shared.check(call.tensors)
        tokens, requests, count = call.tokens, call.requests, self._count
        with self._lock, self._turn():
            if PROFILER._is_profiler_enabled:
                named(self._staging, self._fill)(call.tensors, tokens, requests, call.foreign)
            else:
                self._fill(call.tensors, tokens, requests, call.foreign)
            guard = None if _in_inference() else _torch.inference_guard(True)
            try:
                if call.ctx is None:
                    self._replay(tokens)
                else:
                    with active_forward(call.ctx):
                        self._replay(tokens)
                if self._writes or (self._breaks and self.stage.moved()):
                    self.stage.updates(call)
                    self._shared.check_late(call.tensors, [slot for slot, _ in call.updates])
                    call.write_back()
            finally:
                del guard  # what is given out below is of the caller's mode
            count.calls += 1
            count.tokens += tokens
            if self._lease:
                return Lease(self.layout.lend(tokens, requests), self._pool, lambda: self.closed)
            if PROFILER._is_profiler_enabled:
                return named("outputs", self.layout.give)(tokens, requests)
            return self.layout.give(tokens, requests)

    def check(self, call: Call) -> None:
        """Raise what :meth:`run` would raise before it has run anything. What breaks return only :meth:`run` can tell."""
        if self._pool in state.pools:
            raise self._nested()
        if self._apart:
            self._shared.check(call.tensors)
        check = getattr(self.program, "check", None)
        if check is not None:
            with _torch.inference_guard(True), nullcontext() if call.ctx is None else active_forward(call.ctx):
                check()

    def _nested(self) -> UsageError:
        return UsageError(
            f"bucket {self.stage.tokens} was replayed inside a forward of the same pool, whose memory it would overwrite. "
            "Give one of the two a pool of its own."
        )

    def close(self) -> None:
        """Forbid replays, and end the leases of its outputs."""
        self.closed = True
        self.program.close()

    @property
    def capture(self) -> BreakableCapture | None:
        """The capture that the program replays, with its steps; None where another strategy than breakable made the program."""
        capture = getattr(self.program, "capture", None)
        return capture if isinstance(capture, BreakableCapture) else None
