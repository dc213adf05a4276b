"""What a captured bucket consists of, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from segue.capture.break_points import Break
from segue.check.oplog import OpLog
from segue.check.sandbox import Environment, Sandbox
from segue.check.trial_calls import AS_GIVEN, TrialCall, resized
from segue.errors import UsageError
from segue.runner.runner import GraphRunner


@dataclass(frozen=True)
class StepSummary:
    """A segment or a break.

    ``kind``: ``"segment"`` or ``"break"``. ``what``: its number or label. ``where``: the line of its first op, or of the
    break's call. ``ops``: of a segment. ``handoffs``, ``handoff_bytes``: tensors that a break hands to later segments, and
    their size. ``frozen``: the objects among a break's arguments that each replay gets again, as ``name: type``.
    """

    kind: str
    what: str
    where: str
    ops: int = 0
    handoffs: int = 0
    handoff_bytes: int = 0
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True)
class BucketSummary:
    """A captured bucket.

    ``steps``: in the order of a replay. ``named``: how many tensors outside the pool, inputs apart, its segments use or its
    breaks are given, and the function holds by name. ``unnamed``: the others, in words. ``pool_bytes``: what the pool holds once
    this bucket and the larger ones are captured.
    """

    bucket: int
    steps: tuple[StepSummary, ...]
    named: int
    unnamed: tuple[str, ...]
    pool_bytes: int

    @property
    def segments(self) -> list[StepSummary]:
        """The steps that are segments."""
        return [s for s in self.steps if s.kind == "segment"]

    @property
    def breaks(self) -> list[StepSummary]:
        """The steps that are breaks."""
        return [s for s in self.steps if s.kind == "break"]


def summaries(
    runner: GraphRunner, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: Any, progress: Callable[[int], None]
) -> list[BucketSummary]:
    """Capture a runner's whole ladder in a sandbox, largest bucket first, and describe each bucket.

    Args:
        args, kwargs: the example call; none where the inputs declare shapes and dtypes.
        ctx: a context, or a function that makes one from the number of tokens; None takes the runner's ``capture_ctx``.
        progress: is called with each bucket before that is captured.

    Raises:
        UsageError: the runner has no graphs, because ``SEGUE=off`` was set. What the forward or its capture raises.
    """
    if runner.disabled:
        raise UsageError("SEGUE=off was set when this runner was made, so it has no graphs to take apart")
    ctx = runner.capture_ctx if ctx is None else ctx
    device = runner.prepare(*args, **kwargs).recorder.device
    sandbox = Sandbox(runner, Environment(runner.fn, ctx, runner.state, device.torch_device), device.new_pool())
    try:
        call = sandbox.example(args, kwargs)
        fixed = runner.request_ladder is not None or (call.ctx is not None and not sandbox.environment.varied)
        requests = runner.admit(call.tokens, call.requests).requests
        found = []
        for bucket in reversed(list(runner.ladder)):
            if runner.request_ladder is not None and bucket < call.tokens:
                continue
            tokens = min(call.tokens, bucket) if fixed else bucket
            trial = TrialCall(AS_GIVEN, resized(call, sandbox.binder, tokens), bucket, requests, 0)
            progress(bucket)
            found.append(_summary(sandbox, trial, sandbox.capture(trial).log))
        return found
    finally:
        sandbox.environment.close()
        sandbox.close()


def _summary(sandbox: Sandbox, trial: TrialCall, log: OpLog) -> BucketSummary:
    capture, owns = sandbox.plan(trial).capture, sandbox.recorder.owns
    if capture is None:
        raise UsageError("only graphs of the breakable strategy can be taken apart, and this runner's last strategy is another")
    steps: list[StepSummary] = []
    segment = 0
    for step in capture.steps:
        if isinstance(step, Break):
            size = sum(h.buffer.nbytes for h in step.handoffs)
            frozen = tuple(f"{name}: {type(value).__qualname__}" for name, value in step.bound.frozen.items())
            label, where, handoffs = step.spec.label, step.called_at, len(step.handoffs)
            steps.append(StepSummary("break", label, where, handoffs=handoffs, handoff_bytes=size, frozen=frozen))
        else:
            ops = [op for op in log.ops if op.segment == segment]
            steps.append(StepSummary("segment", f"segment {segment}", ops[0].where if ops else "", ops=len(ops)))
            segment += 1
    # An input's buffer isn't looked for by name.
    named = [name for name, e in capture.externals_check.named if not owns(e.tensor)]
    unnamed = [e for e in capture.unnamed_externals if not owns(e.tensor)]
    return BucketSummary(
        trial.bucket,
        tuple(steps),
        len(named),
        tuple(f"{list(e.tensor.shape)} of {e.tensor.dtype}, used by {e.op} at {e.where}" for e in unnamed),
        sandbox.recorder.pool.usage().reserved,
    )
