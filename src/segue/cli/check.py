"""``segue check``: compare what replays with what runs without graphs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from segue.cli import handles, target
from segue.cli.locate import said_on_stderr
from segue.cli.model_cases import cases_of
from segue.cli.model_check import check_model
from segue.cli.output import Format, FormatOption, examples, log, render
from segue.cli.target import Compile, DType, MaxTokens, ModelOptions, Strategy, Target, TrustRemoteCode
from segue.errors import UsageError
from segue.prime import PrimeGraph
from segue.runner import GraphRunner

EXAMPLES = examples(
    "segue check ./my-model",
    "segue check ./my-model --compile --max-tokens 512",
    "segue check serving.py:make_model",
    "segue check my_package.serving:make_runner -o json",
    "segue check prime",
)


def check(
    name: Annotated[str, typer.Argument(metavar="TARGET", help=f"{target.TARGETS} The word prime: a tiny trunk of segue's own.")],
    trunk: Annotated[
        str | None, typer.Argument(metavar="[TRUNK]", help="After prime: what gives a trunk or a PrimeGraph to check instead.")
    ] = None,
    max_tokens: MaxTokens = None,
    strategy: Strategy = None,
    compile: Compile = False,
    dtype: DType = None,
    trust_remote_code: TrustRemoteCode = False,
    bucket: Annotated[int | None, typer.Option(min=1, help="Of a trunk: the bucket of its graph, by default 512.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Of a trunk: prompts that a graph holds, by default 1.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="Of a trunk: a file of token ids, the text whose perplexity is compared.")
    ] = None,
    output: FormatOption = Format.MD,
) -> None:
    """Compare what replays with what runs without graphs; exit 1 if something differs.

    Of a model, with segue and without: prefill, chunks, steps, padded batches and generate(), or an encoder's forwards.

    Of a runner, replays and the reference, over poisoned memory and other padding; the line where they differ is named.

    Of a trunk or prime graph: lengths up and down, every byte of every cache, and greedy steps.
    """
    options = ModelOptions(max_tokens, strategy, compile, dtype, trust_remote_code)
    if name == "prime":
        options.refuse("the gate of a prime graph takes a trunk and no model")
        options.refuse_loading("the gate of a prime graph takes a trunk and no model")
        _check_prime(*_trunk(trunk), bucket, requests, text, output)
        return
    if trunk is not None:
        raise UsageError(f"segue check takes one TARGET; a second one, {trunk!r}, follows the word prime only")
    found = target.find(name, options, max_tokens=target.MAX_TOKENS)
    if isinstance(found.value, PrimeGraph) or target.is_trunk(found.value):
        _check_prime(name, found.value, bucket, requests, text, output)
        return
    if bucket is not None or requests is not None or text is not None:
        raise UsageError(f"--bucket, --requests and --text are for trunks, and {name} gives a {type(found.value).__name__}")
    if isinstance(found.value, GraphRunner):
        _check_runner(found, output)
    else:
        _check_model(found, output)


def _check_runner(found: Target, output: Format) -> None:
    log.print(f"checking {found.name}")
    call = found.call or target.ExampleCall()
    with said_on_stderr():
        report = found.value.check(*call.args, ctx=call.ctx, **(call.kwargs or {}))
    if output is Format.MD:
        sys.stdout.write("\n\n".join([report.summary() + ".", report.table(), *report.notes]) + "\n")
    else:
        sys.stdout.write(render(report.rows, output, [report.summary(), *report.notes]))
    if not report.ok:
        log.print("replays may differ from eager: mend the lines in the column 'where', and check again")
        raise typer.Exit(1)


def _check_model(found: Target, output: Format) -> None:
    handle = found.value
    model = handles.model_of(handle)
    with said_on_stderr():
        report = check_model(handle, cases_of(handle, found.call), log.print)
    if not report.rows:
        raise UsageError(f"{found.name}: no call of it could be compared. {'; '.join(report.notes)}")
    title = f"{type(model).__name__} on {handles.device_of(handle)}. Each call with segue three times, against the bare model."
    scale = "*off by*: the largest difference, as a part of the largest value."
    sys.stdout.write(render(report.rows, output, [title, scale, *report.findings, *report.notes]))
    if not report.ok:
        log.print("some results are wrong: see the findings above the table")
        raise typer.Exit(1)
    if not handle.stats.replayed:
        log.print("nothing was replayed, so this says nothing about graphs: see the notes")
    log.print(f"next: segue inspect {found.name}")


def _trunk(name: str | None) -> tuple[str, Any]:
    """What ``name`` gives, which must be a trunk or a graph; without a name a tiny trunk."""
    from segue.check.tiny_trunk import build

    if name is None:
        return "the tiny trunk", build()
    made = target.made_by(name)
    if not (isinstance(made, PrimeGraph) or target.is_trunk(made)):
        raise UsageError(f"{name} returned a {type(made).__qualname__}; it must return a segue.Trunk or a PrimeGraph")
    return name, made


def _check_prime(name: str, made: Any, bucket: int | None, requests: int | None, text: Path | None, output: Format) -> None:
    """Run the gate on a graph, or on a new one of a trunk."""
    from segue.check.prime_gate import check_prime

    ids = None if text is None else _token_ids(text)
    with said_on_stderr():
        if not isinstance(made, PrimeGraph):
            made = handles.prime_graph(made, bucket or 512, requests or 1)
        elif bucket is not None or requests is not None:
            raise UsageError(f"{name} gives a PrimeGraph, which is made already: leave out --bucket and --requests")
        with made as prime:
            report = check_prime(prime, progress=log.print, text=ids)
    also = [f"Perplexity: {report.perplexity}."] if report.perplexity else []
    sys.stdout.write(render(report.rows, output, [f"The gate of {made.name}.", *report.findings, *also]))
    if not report.ok:
        log.print("the graph may not serve: see the findings above the table")
        raise typer.Exit(1)


def _token_ids(path: Path) -> list[int]:
    """The whole numbers in a file, between white space or commas."""
    try:
        return [int(word) for word in path.read_text().replace(",", " ").split()]
    except (OSError, ValueError) as e:
        raise UsageError(f"--text {path}: it must be a file of token ids, whole numbers between white space: {e}") from None
