"""What a captured bucket consists of, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue import _source_lines
from segue.capture.break_points import Break
from segue.capture.externals import External
from segue.check.oplog import OpLog
from segue.check.sandbox import Environment, Sandbox
from segue.check.trial_calls import AS_GIVEN, TrialCall, resized
from segue.errors import UsageError
from segue.runner.runner import GraphRunner

NOBODY = "the graph alone"  # what owns a tensor outside the pool that the function holds by no name


@dataclass(frozen=True)
class HandoffSummary:
    """A tensor that a break hands to later segments. ``name``: its place in the result. ``token_dim``: None without one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    token_dim: int | None


@dataclass(frozen=True)
class OutsideSummary:
    """A tensor outside the pool that segments use, or that breaks are given.

    ``owner``: who holds it, which is ``"an input"``, ``"the function"``, ``"the context"`` or :data:`NOBODY`. ``name``: under
    which name; empty without one. ``op``, ``where``: the first op that uses it, and its line, empty where segue called it.
    ``written``: whether a segment writes it.
    """

    owner: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    op: str
    where: str
    written: bool

    def __str__(self) -> str:
        return f"{list(self.shape)} of torch.{self.dtype}, used by {self.op} at {self.where or 'a line of segue'}"


@dataclass(frozen=True)
class StepSummary:
    """A segment or a break.

    ``kind``: ``"segment"`` or ``"break"``. ``what``: its number or label. ``where``: the line of a break's call, or of a
    segment's first op; empty where segue alone called its ops. ``ops``: of a segment. ``handoffs``: of a break. ``frozen``: the
    objects among a break's arguments that each replay gets again, as ``name: type``.
    """

    kind: str
    what: str
    where: str
    ops: int = 0
    handoffs: tuple[HandoffSummary, ...] = ()
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True)
class BucketSummary:
    """A captured bucket.

    ``steps``: in the order of a replay. ``outside``: the tensors outside the pool. ``pool_bytes``: what the pool holds once
    this bucket and the larger ones are captured. ``driver_bytes``: what the driver took for this bucket alone.
    """

    bucket: int
    steps: tuple[StepSummary, ...]
    outside: tuple[OutsideSummary, ...]
    pool_bytes: int
    driver_bytes: int

    @property
    def segments(self) -> list[StepSummary]:
        """The steps that are segments."""
        return [s for s in self.steps if s.kind == "segment"]

    @property
    def breaks(self) -> list[StepSummary]:
        """The steps that are breaks."""
        return [s for s in self.steps if s.kind == "break"]

    @property
    def handoffs(self) -> list[HandoffSummary]:
        """The hand-offs of all breaks."""
        return [h for s in self.breaks for h in s.handoffs]

    @property
    def named(self) -> list[OutsideSummary]:
        """The tensors outside the pool, inputs apart, that the function holds by name."""
        return [t for t in self.outside if t.owner == "the function"]

    @property
    def unnamed(self) -> list[OutsideSummary]:
        """The tensors outside the pool that the graph alone holds."""
        return [t for t in self.outside if t.owner == NOBODY]


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
    plan, owns = sandbox.plan(trial), sandbox.recorder.owns
    capture = plan.capture
    if capture is None:
        raise UsageError("only graphs of the breakable strategy can be taken apart, and this runner's last strategy is another")
    steps: list[StepSummary] = []
    segment = 0
    for step in capture.steps:
        if isinstance(step, Break):
            handoffs = tuple(_handoff(h.path, h.buffer, h.dim) for h in step.handoffs)
            frozen = tuple(f"{name}: {type(value).__qualname__}" for name, value in step.bound.frozen.items())
            steps.append(StepSummary("break", step.spec.label, step.called_at, handoffs=handoffs, frozen=frozen))
        else:
            ops = [op for op in log.ops if op.segment == segment]
            where = next((op.where for op in ops if not op.ours), "")
            steps.append(StepSummary("segment", f"segment {segment}", where, ops=len(ops)))
            segment += 1
    check = capture.externals_check
    outside = [
        *(_outside("an input" if owns(e.tensor) else "the function", name, e) for name, e in check.named),
        *(_outside("the context", path, e) for path, e in check.of_context),
        *(_outside(NOBODY, "", e) for e in capture.unnamed_externals if not owns(e.tensor)),
    ]
    pool_bytes = sandbox.recorder.pool.usage().reserved
    return BucketSummary(trial.bucket, tuple(steps), tuple(outside), pool_bytes, plan.driver_bytes)


def _handoff(name: str, buffer: Tensor, token_dim: int | None) -> HandoffSummary:
    return HandoffSummary(name, tuple(buffer.shape), _short(buffer.dtype), buffer.nbytes, token_dim)


def _outside(owner: str, name: str, e: External) -> OutsideSummary:
    t = e.tensor
    where = "" if e.where == _source_lines.caller() else e.where
    return OutsideSummary(owner, name, tuple(t.shape), _short(t.dtype), t.nbytes, e.op, where, e.written)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
