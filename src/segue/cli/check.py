"""``segue check``: compare replays of a runner with its reference, or run the gate of a prime graph."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import torch
import typer

from segue.cli.output import Format, FormatOption, log, render
from segue.cli.target import load, runner_of, said_on_stderr
from segue.errors import UsageError


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY | prime",
            help="FACTORY returns a runner, or (runner, args, kwargs[, ctx]) with an example call; ctx may be a "
            "function of the number of tokens. The word prime runs the gate of a prime graph.",
        ),
    ],
    trunk: Annotated[
        str | None,
        typer.Argument(metavar="[MODULE:FACTORY]", help="After prime: FACTORY returns a trunk or a PrimeGraph."),
    ] = None,
    bucket: Annotated[int, typer.Option(min=1, help="After prime: the bucket of the graph.")] = 512,
    requests: Annotated[int, typer.Option(min=1, help="After prime: prompts that a graph holds.")] = 1,
    output: FormatOption = Format.MD,
) -> None:
    """Compare replays with the reference over poisoned memory and other padding; name the line where they differ."""
    if target == "prime":
        _prime(trunk, bucket, requests, output)
        return
    if trunk is not None:
        raise UsageError(f"segue check takes one MODULE:FACTORY; a second one, {trunk!r}, follows the word prime only")
    found = runner_of(target)
    log.print(f"checking {target}")
    with said_on_stderr():
        report = found.runner.check(*found.args, ctx=found.ctx, **(found.kwargs or {}))
    if output is Format.MD:
        sys.stdout.write("\n\n".join([report.summary() + ".", report.table(), *report.notes]) + "\n")
    else:
        sys.stdout.write(render(report.rows, output, [report.summary(), *report.notes]))
    if not report.ok:
        log.print("replays may differ from eager: mend the lines in the column 'where', and check again")
        raise typer.Exit(1)


def _prime(name: str | None, bucket: int, requests: int, output: Format) -> None:
    """Run the gate on the trunk or graph that ``name`` makes, or else on a tiny trunk."""
    from segue.check.prime_gate import check_prime
    from segue.check.tiny_trunk import build
    from segue.prime import PrimeGraph

    factory = build if name is None else load(name)
    with said_on_stderr():
        made: Any = factory()
    if not isinstance(made, PrimeGraph):
        if not (hasattr(made, "new_cache") and hasattr(made, "min_tokens")):
            what = type(made).__qualname__
            raise UsageError(f"{name} returned a {what}; it must return a segue.Trunk or a PrimeGraph")
        device = None if torch.cuda.is_available() else "emulator"
        made = PrimeGraph(made, bucket, requests, device=device)
    with said_on_stderr(), made as prime:
        report = check_prime(prime, progress=log.print)
    sys.stdout.write(render(report.rows, output, [f"The gate of {made.name}.", *report.findings]))
    if not report.ok:
        log.print("the graph may not serve: see the findings above the table")
        raise typer.Exit(1)
