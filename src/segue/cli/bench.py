"""``segue bench``: measurements, one sub-command each. Titles, tables and notes are those of the benchmark's result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from segue import environment
from segue.cli.output import Format, FormatOption, log, render, table
from segue.devices import Device, resolve
from segue.errors import UsageError

if TYPE_CHECKING:
    from segue.bench.result import BenchResult

app = typer.Typer(help="Measure, on a CUDA device.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option("-f", "--out", help="Write the Markdown here too.")]
Lengths = Annotated[list[int] | None, typer.Option("-n", "--tokens", help="A prompt length; repeatable.")]
Buckets = Annotated[list[int] | None, typer.Option("-b", "--bucket", help="Rows of a bucket; repeatable.")]
Times = Annotated[int, typer.Option(min=1, help="Measurements of each, of which the median counts.")]
Rounds = Annotated[int, typer.Option("--times", min=2, help="Rounds; in each of them everything is measured once.")]
Recordings = Annotated[int, typer.Option("--times", min=1, help="Recordings of each bucket, of which the median counts.")]


@app.callback()
def bench() -> None:
    """Measure, on a CUDA device."""


@app.command()
def ttft(out: Out = None, lengths: Lengths = None, times: Times = 20, output: FormatOption = Format.MD) -> None:
    """Time to first token of the Qwen3-0.6B shape: eager, segue, and the sum of the kernels."""
    if not torch.cuda.is_available():
        raise UsageError("segue bench measures time, which the emulator has none of, and there is no CUDA device here")
    from segue.bench.ttft import LENGTHS, measure

    _publish(measure(_device(), lengths=lengths or LENGTHS, times=times, progress=log.print), out, output)


@app.command()
def breaks(out: Out = None, rounds: Rounds = 300, output: FormatOption = Format.MD) -> None:
    """What a break costs: on the host, against launching the same graphs bare, and on the device per boundary.

    Compared with the PyPI package breakable-cuda-graphs too, where that is installed. Without a CUDA device only the
    verdicts are given, in a small size.
    """
    from segue.bench.break_cost import measure

    _publish(measure(_device(), times=rounds, progress=log.print), out, output)


@app.command()
def runner(out: Out = None, rounds: Rounds = 300, output: FormatOption = Format.MD) -> None:
    """What a runner's call costs the host over the bare replay, beside eager in-place adds and padding by hand.

    Without a CUDA device only the verdicts are given.
    """
    from segue.bench.call_cost import measure

    _publish(measure(_device(), times=rounds, progress=log.print), out, output)


@app.command()
def memory(out: Out = None, buckets: Buckets = None, recordings: Recordings = 5, output: FormatOption = Format.MD) -> None:
    """Memory of a ladder against its largest bucket alone, and the time of recording, for the Qwen3-0.6B shape.

    Without a CUDA device only the verdicts and the pool are given, in a small size.
    """
    from segue.bench.ladder_memory import measure

    _publish(measure(_device(), buckets=buckets, times=recordings, progress=log.print), out, output)


@app.command()
def prime(out: Out = None, lengths: Lengths = None, times: Times = 20, output: FormatOption = Format.MD) -> None:
    """Prime graphs against breakable ones and eager, the Qwen3-0.6B shape, one fresh prompt with the cache filled.

    Without a CUDA device only the verdicts mean anything, in a small size.
    """
    from segue.bench.prime_latency import measure

    _publish(measure(_device(), lengths=lengths, times=times, progress=log.print), out, output)


def _device() -> Device:
    return resolve("cuda" if torch.cuda.is_available() else "emulator")


def _publish(result: BenchResult, out: Path | None, form: Format) -> None:
    """Write a result's tables; leave with 1 if a replay was wrong."""
    where = environment.provenance()
    parts = [f"{name}:\n\n{table(rows)}" for name, rows in result.tables.items() if rows]
    text = "\n\n".join([f"# {result.title}", where, *result.notes, *parts]) + "\n"
    rows = [{"table": name, **row} for name, rows in result.tables.items() for row in rows]
    sys.stdout.write(text if form is Format.MD else render(rows, form, [where, *result.notes]))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
        log.print(f"written to {out}")
    if not result.right:
        log.print("a replay differs from its reference: see the table")
        raise typer.Exit(1)
