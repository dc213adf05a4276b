"""``segue inspect``: list what the captures of a runner or a model consist of."""

from __future__ import annotations

import datetime
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from segue import environment
from segue.check.summary import BucketSummary, StepSummary, summaries
from segue.cli import handles, target
from segue.cli.inspect_page import Checked, Inspection, page
from segue.cli.locate import said_on_stderr
from segue.cli.model_cases import Case, cases_of
from segue.cli.model_check import check_model
from segue.cli.output import Format, FormatOption, examples, log, render, whole_file
from segue.cli.target import Compile, DType, ExampleCall, MaxTokens, ModelOptions, Strategy, Target, TrustRemoteCode
from segue.errors import UsageError
from segue.runner import GraphRunner
from segue.runner.memory_budget import mib

EXAMPLES = examples(
    "segue inspect ./my-model",
    "segue inspect serving.py:make_runner",
    "segue inspect serving.py:make_runner --bucket 64",
    "segue inspect ./my-model --html page.html --check",
)
_SMALL = 64  # the most tokens of the calls that are made


def inspect(
    name: Annotated[str, typer.Argument(metavar="TARGET", help=target.RUNNERS)],
    bucket: Annotated[int | None, typer.Option(help="Show the segments and breaks of this bucket, in order.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write all of it into this file, a page that needs no network.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Run segue check too; exit 1 if it finds something.")] = False,
    max_tokens: MaxTokens = None,
    strategy: Strategy = None,
    compile: Compile = False,
    dtype: DType = None,
    trust_remote_code: TrustRemoteCode = False,
    output: FormatOption = Format.MD,
) -> None:
    """Capture a ladder privately, and list segments, breaks, hand-offs, outside tensors and memory.

    Of a model, a few calls of each kind say what replays, and what ran eager and why.
    """
    found = target.find(name, ModelOptions(max_tokens, strategy, compile, dtype, trust_remote_code), max_tokens=target.MAX_TOKENS)
    if not (isinstance(found.value, GraphRunner) or handles.is_handle(found.value)):
        raise UsageError(f"{name} gives a {type(found.value).__name__}; segue inspect takes runners and models apart")
    with said_on_stderr():
        cases = [] if isinstance(found.value, GraphRunner) else cases_of(found.value, found.call, _SMALL)
        runner, call = _of_a_model(found, cases[0]) if cases else (found.value, found.call or ExampleCall())
        if bucket is not None and bucket not in runner.ladder:
            raise UsageError(f"--bucket {bucket} isn't in the ladder, {', '.join(map(str, runner.ladder))}")
        buckets = summaries(runner, call.args, call.kwargs or {}, call.ctx, lambda b: log.print(f"capturing bucket {b}"))
    calls = _calls(found.value, cases) if cases and (html is not None or bucket is None) else []
    checked = _checked(found, cases) if check else None
    if html is not None:
        with whole_file(html) as unfinished:
            unfinished.write_text(page(_inspection(found, runner.ladder, buckets, cases, checked)), "utf-8")
        log.print(f"written to {html}")
    if bucket is not None:
        (chosen,) = (b for b in buckets if b.bucket == bucket)
        rows = [_step_row(i, step) for i, step in enumerate(chosen.steps)]
        notes = [f"Bucket {bucket}, in the order of a replay."]
    else:
        rows = [_bucket_row(b) for b in buckets]
        notes = _breaks(buckets, bool(cases))
        if unnamed := list(dict.fromkeys(str(t) for b in buckets for t in b.unnamed)):
            notes.append(f"Outside tensors without a name, held and looked at by address: {'; '.join(unnamed)}.")
        notes += calls
    if checked is not None:
        notes[:0] = [checked.summary, *checked.findings, *checked.notes]
    sys.stdout.write(render(rows, output, notes))
    if checked is not None and checked.findings:
        raise typer.Exit(1)
    log.print(f"next: segue inspect {name} --bucket {buckets[0].bucket}, or segue check {name}")


def _inspection(
    found: Target, ladder: Sequence[int], buckets: Sequence[BucketSummary], cases: Sequence[Case], checked: Checked | None
) -> Inspection:
    """What the page shows of a target."""
    value = found.value
    facts: list[tuple[str, object]] = []
    if cases:
        subject = f"{type(handles.model_of(value)).__name__} on {handles.device_of(value)}"
        facts = [
            ("strategies", ", ".join(name for name, why_not in value.strategies.items() if not why_not) or "none"),
            *((f"without {name}, because", why_not) for name, why_not in value.strategies.items() if why_not),
            ("live, outside the graphs", ", ".join(value.boundaries) or "everything"),
            ("scratch caches of prime graphs", mib(value.scratch_bytes)),
        ]
    else:
        fn, device = value.fn, value.prepare().recorder.device.name
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        subject = f"A runner of {name} on {'the emulator' if device == 'emulator' else device}"
    versions = environment.facts()
    footer = (
        f"segue {versions.get('segue-graphs', 'unknown')}, torch {versions['torch']}, {versions['device']}; "
        f"{datetime.date.today().isoformat()}"
    )
    calls = [case.name for case in cases]
    return Inspection(found.name, subject, buckets, ladder, value.stats, facts, calls, checked, footer)


def _checked(found: Target, cases: Sequence[Case]) -> Checked:
    """What ``segue check`` says of a target."""
    log.print(f"checking {found.name}")
    with said_on_stderr():
        if cases:
            report = check_model(found.value, cases, log.print)
            summary = f"Check: each of {len(report.rows)} calls with segue three times, against the bare model."
            return Checked(summary, report.findings, report.notes)
        call = found.call or ExampleCall()
        of_runner = found.value.check(*call.args, ctx=call.ctx, **(call.kwargs or {}))
        return Checked(of_runner.summary(), [str(finding) for finding in of_runner.findings], of_runner.notes)


def _of_a_model(found: Target, case: Case) -> tuple[GraphRunner, ExampleCall]:
    """The runner of what is captured of a model, and the call of it that a call of the model makes."""
    with torch.inference_mode():
        seen = handles.call_of_runner(found.value, lambda: case.run(handles.model_of(found.value)))
    if seen is None:
        raise UsageError(f"{case.name} of {found.name} reached no graph: {'; '.join(found.value.stats.reasons)}")
    runner, args, kwargs = seen
    return runner, ExampleCall(args, kwargs)


def _calls(handle: Any, cases: Sequence[Case]) -> list[str]:
    """Capture the ladder of a model, make some calls, and say what they came to."""
    model = handles.model_of(handle)
    with said_on_stderr(), torch.inference_mode():
        log.print(f"capturing the ladder of {type(model).__name__}")
        cost = handle.capture().cost
        for case in cases:
            log.print(case.name)
            case.run(model)
    return [
        f"{type(model).__name__} on {handles.device_of(handle)}. Its whole ladder takes {mib(cost.pool)} of the graph pool and "
        f"{mib(cost.driver)} of the driver. After {'; '.join(case.name for case in cases)}:",
        handle.report(),
        "The buckets:",
    ]


def _breaks(buckets: Sequence[BucketSummary], of_a_model: bool) -> list[str]:
    """The breaks of the largest bucket, equal ones counted, in words."""
    found = Counter((b.what, b.where) for b in buckets[0].breaks)
    if not any(b.breaks for b in buckets):
        if of_a_model:
            return ["There are no breaks: the whole forward is one graph, masks and all."]
        return ["No break point was met: everything, attention included, runs on the padded rows."]
    return [f"Break, {count} times in a bucket: {what}, called at {where}." for (what, where), count in found.items()]


def _bucket_row(b: BucketSummary) -> dict[str, Any]:
    ops = [s.ops for s in b.segments]
    return {
        "bucket": b.bucket,
        "segments": len(b.segments),
        "breaks": len(b.breaks),
        "ops": sum(ops),
        "ops, largest segment": max(ops, default=0),
        "hand-offs": len(b.handoffs),
        "hand-off KiB": round(sum(h.nbytes for h in b.handoffs) / 1024, 1),
        "outside tensors, named": len(b.named),
        "unnamed": len(b.unnamed),
        "pool MiB, so far": round(b.pool_bytes / 2**20, 2),
    }


def _step_row(i: int, step: StepSummary) -> dict[str, Any]:
    return {
        "step": i,
        "kind": step.kind,
        "what": step.what,
        "where": step.where or None,
        "ops": step.ops if step.kind == "segment" else None,
        "hand-offs": len(step.handoffs) if step.kind == "break" else None,
        "frozen objects": ", ".join(step.frozen) or None,
    }
