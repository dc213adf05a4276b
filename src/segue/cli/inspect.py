"""``segue inspect``: list what the captures of a runner consist of."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from segue.check.summary import BucketSummary, StepSummary, summaries
from segue.cli.output import Format, FormatOption, log, render
from segue.cli.target import runner_of, said_on_stderr
from segue.errors import UsageError


def inspect(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:FACTORY", help="FACTORY returns a runner, or (runner, args, kwargs[, ctx])."),
    ],
    bucket: Annotated[int | None, typer.Option(help="Show the segments and breaks of this bucket, in order.")] = None,
    output: FormatOption = Format.MD,
) -> None:
    """Capture a runner's ladder privately, and list segments, breaks, hand-offs, outside tensors and memory."""
    found = runner_of(target)
    if bucket is not None and bucket not in found.runner.ladder:
        raise UsageError(f"--bucket {bucket} isn't in the ladder, {', '.join(map(str, found.runner.ladder))}")
    with said_on_stderr():
        buckets = summaries(
            found.runner, found.args, found.kwargs or {}, found.ctx, lambda b: log.print(f"capturing bucket {b}")
        )
    if bucket is not None:
        (chosen,) = (b for b in buckets if b.bucket == bucket)
        rows = [_step_row(i, step) for i, step in enumerate(chosen.steps)]
        sys.stdout.write(render(rows, output, [f"Bucket {bucket}, in the order of a replay."]))
        return
    unnamed = list(dict.fromkeys(text for b in buckets for text in b.unnamed))
    notes = [f"Outside tensors without a name, held and looked at by address: {'; '.join(unnamed)}."] if unnamed else []
    if not any(b.breaks for b in buckets):
        notes.append("No break point was met: everything, attention included, runs on the padded rows.")
    sys.stdout.write(render([_bucket_row(b) for b in buckets], output, notes))
    log.print(f"next: segue inspect {target} --bucket {buckets[0].bucket}, or segue check {target}")


def _bucket_row(b: BucketSummary) -> dict[str, Any]:
    ops = [s.ops for s in b.segments]
    return {
        "bucket": b.bucket,
        "segments": len(b.segments),
        "breaks": len(b.breaks),
        "ops": sum(ops),
        "ops, largest segment": max(ops, default=0),
        "hand-offs": sum(s.handoffs for s in b.breaks),
        "hand-off KiB": round(sum(s.handoff_bytes for s in b.breaks) / 1024, 1),
        "outside tensors, named": b.named,
        "unnamed": len(b.unnamed),
        "pool MiB, so far": round(b.pool_bytes / 2**20, 2),
    }


def _step_row(i: int, step: StepSummary) -> dict[str, Any]:
    return {
        "step": i,
        "kind": step.kind,
        "what": step.what,
        "where": step.where,
        "ops": step.ops if step.kind == "segment" else None,
        "hand-offs": step.handoffs if step.kind == "break" else None,
        "frozen objects": ", ".join(step.frozen) or None,
    }
