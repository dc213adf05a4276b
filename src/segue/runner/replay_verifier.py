"""``verify_every``: the reference is run before every so many replays, and compared with the replay."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from segue.errors import ReplayError, UsageError
from segue.runner.bucket_recorder import BucketRecorder
from segue.runner.calls import Call
from segue.runner.captured_bucket import CapturedBucket
from segue.runner.strategy import Strategy
from segue.runner.write_log import WriteLog


class ReplayVerifier:
    """Runs the reference before every so many replays and compares the replay with it, bit for bit.

    The reference runs on a deep copy of the context, and what it wrote elsewhere is put back. A break that changes
    other Python state sees two calls.
    """

    def __init__(self, every: int, state: Sequence[Tensor]) -> None:
        self.every, self._count, self._state = every, 0, state

    def run(self, call: Call, captured: CapturedBucket, recorder: BucketRecorder, strategy: Strategy) -> Any:
        """Replay the call, and compare it with the reference if it is its turn. Returns the replay's answer.

        Raises:
            ReplayError: it differs from the reference. UsageError: the context can't be copied.
        """
        self._count += 1
        if self._count % self.every:
            return captured.run(call)
        return self.compare(call, self.copied("verify_every", call.ctx), captured, recorder, strategy, "verify_every")

    def copied(self, who: str, ctx: Any) -> Any:
        """A copy of a context, for the reference. ``who``: the option that asks for it.

        Raises:
            UsageError: it can't be copied.
        """
        try:
            return copy.deepcopy(ctx)
        except Exception as e:
            raise UsageError(
                f"{who}: the context can't be copied for the shadow run ({type(e).__name__}: {e}). "
                f"Give it a __deepcopy__, or leave {who} out"
            ) from e

    def compare(
        self, call: Call, ctx: Any, captured: CapturedBucket, recorder: BucketRecorder, strategy: Strategy, who: str
    ) -> Any:
        """Run the reference of a call on ``ctx``, put back what it wrote, replay the call, and return the replay's answer.

        Raises:
            ReplayError: they differ. ``who``: what errors call this comparison.
        """
        writes = WriteLog(recorder.owns, self._state)
        try:
            with writes:
                expected = recorder.reference(call, captured.stage, ctx, strategy)
                with torch.inference_mode():
                    kept = expected.kept()
        finally:
            writes.put_back()
        with recorder.lock, recorder.pool.turn():
            answer = captured.run(call)
            difference = captured.layout.difference(kept, call.tokens, call.requests)
        if difference:
            raise ReplayError(
                f"{who}: bucket {captured.stage.tokens} with {call.tokens} tokens: the replay isn't what the "
                f"reference gives: {difference}. Something was frozen at capture, or reads padded rows"
            )
        return answer
