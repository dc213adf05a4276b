"""What a captured bucket consists of, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from segue.capture.break_points import Break
from segue.check.breaks import called_at, handoffs
from segue.check.oplog import OpLog
from segue.check.sandbox import Environment, Sandbox
from segue.check.trial_calls import AS_GIVEN, Case, resized
from segue.errors import UsageError
from segue.runner.runner import GraphRunner


@dataclass(frozen=True)
class Step:
    """A segment, with its ``ops``, or a break: ``what`` it is, ``where`` it begins, and what a break hands on."""

    kind: str
    what: str
    where: str
    ops: int
    handoffs: int
    handoff_bytes: int


@dataclass(frozen=True)
class BucketSummary:
    """One bucket. ``named``, ``unnamed``: tensors outside the pool, inputs apart, that its segments use.

    ``pool_bytes``: of the pool, once this and the larger buckets were captured.
    """

    bucket: int
    steps: tuple[Step, ...]
    named: int
    unnamed: tuple[str, ...]
    pool_bytes: int

    @property
    def segments(self) -> list[Step]:
        return [s for s in self.steps if s.kind == "segment"]

    @property
    def breaks(self) -> list[Step]:
        return [s for s in self.steps if s.kind == "break"]


def summaries(
    runner: GraphRunner, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: Any, progress: Callable[[int], None]
) -> list[BucketSummary]:
    """Capture the whole ladder privately, largest first, and take it apart. ``progress`` gets each bucket before."""
    if runner.disabled:
        raise UsageError("SEGUE=off was set when this runner was made, so it has no graphs to take apart")
    ctx = runner.capture_ctx if ctx is None else ctx
    device = runner._ready(args, kwargs).recorder.device
    lab = Sandbox(runner, Environment(runner.fn, ctx, runner.state, device.torch_device), device.new_pool(), args, kwargs)
    try:
        call = lab.example(args, kwargs)
        found = []
        for bucket in reversed(list(runner.ladder)):
            fixed = runner.request_ladder is not None or (call.ctx is not None and not lab.world.varied)
            if runner.request_ladder is not None and bucket < call.tokens:
                continue
            tokens = min(call.tokens, bucket) if fixed else bucket
            requests = runner.admit(call.tokens, call.requests).requests
            case = Case(AS_GIVEN, resized(call, lab.binder, tokens), bucket, requests, 0)
            progress(bucket)
            found.append(_of(lab, case, lab.capture(case).log))
        return found
    finally:
        lab.world.restore()
        lab.close()


def _of(lab: Sandbox, case: Case, log: OpLog) -> BucketSummary:
    capture: Any = lab.plan(case).program._capture  # type: ignore[attr-defined]
    steps: list[Step] = []
    segment = 0
    for step in capture._steps:
        if isinstance(step, Break):
            handed = list(handoffs(step))
            size = sum(h.buffer.nbytes for h in handed)
            steps.append(Step("break", step.spec.label, called_at(step), 0, len(handed), size))
        else:
            ops = [op for op in log.ops if op.segment == segment]
            where = ops[0].where if ops else ""
            steps.append(Step("segment", f"segment {segment}", where, len(ops), 0, 0))
            segment += 1
    outside = [e for e in capture.externals if not lab.recorder.owns(e.tensor)]  # an input's buffer is known by itself
    unnamed = [e for e in capture._program.externals.unnamed if not lab.recorder.owns(e.tensor)]
    return BucketSummary(
        case.bucket,
        tuple(steps),
        len(outside) - len(unnamed),
        tuple(f"{list(e.tensor.shape)} of {e.tensor.dtype}, used by {e.op} at {e.where}" for e in unnamed),
        lab.recorder.pool.usage().reserved,
    )
