"""``segue bench``: measurements, one sub-command each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from segue.cli.output import Format, FormatOption, Row, log, render, table
from segue.devices import resolve
from segue.errors import UsageError

app = typer.Typer(help="Measure, on a CUDA device.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure, on a CUDA device."""


@app.command()
def ttft(
    out: Annotated[Path | None, typer.Option("-f", "--out", help="Write the Markdown here too.")] = None,
    lengths: Annotated[list[int] | None, typer.Option("-n", "--tokens", help="A prompt length; repeatable.")] = None,
    times: Annotated[int, typer.Option(min=1, help="Measurements of each, of which the median counts.")] = 20,
    output: FormatOption = Format.MD,
) -> None:
    """Time to first token of the Qwen3-0.6B shape: eager, segue, and the sum of the kernels."""
    if not torch.cuda.is_available():
        raise UsageError("segue bench measures time, which the emulator has none of, and there is no CUDA device here")
    from segue.bench import ttft as bench_ttft

    chosen = lengths or bench_ttft.LENGTHS
    result = bench_ttft.measure(resolve("cuda"), lengths=chosen, times=times, progress=log.print)
    about = (
        f'Medians of {times}, in turns. *segue*: strategy "auto", which serves a fresh prompt by its prime graph; *breakable*: '
        "the same prompt by the breakable graph. *kernel sum*: device time of the kernels of one eager forward. *host*: how long "
        "the call keeps the host; *outside the body*: embedding, head, and what transformers and segue do around the graphs."
    )
    tables = {
        "One prompt": result.rows,
        "Capturing the ladder": [result.capture],
        "Where the host time of one attention break goes, each part alone": result.breaks,
    }
    _publish("# Time to first token, one prompt, cache filled", [*result.notes, about], tables, out, output, result.right)


@app.command()
def breaks(
    out: Annotated[Path | None, typer.Option("-f", "--out", help="Write the Markdown here too.")] = None,
    times: Annotated[int, typer.Option(min=2, help="Rounds; in each of them everything is measured once.")] = 300,
    output: FormatOption = Format.MD,
) -> None:
    """What a break costs: on the host, against launching the same graphs bare, and on the device per boundary.

    Compared with the PyPI package breakable-cuda-graphs too, where that is installed. Without a CUDA device only the
    verdicts are given, in a small size.
    """
    from segue.bench import break_cost as bench_breaks
    from segue.bench.break_programs import Size

    timed = torch.cuda.is_available()
    size = Size() if timed else Size(cuts=4, rows=16, valid=11, width=8, layers=2)
    device = resolve("cuda" if timed else "emulator")
    result = bench_breaks.measure(device, size, times=times, progress=log.print)
    about = (
        f"Medians of {times} rounds, all of one table in turns, with the quartiles beside them. *host*: how long the "
        "call keeps the host."
    )
    tables = {
        f"{size.cuts} breaks that do nothing, and the same graphs launched bare": result.bare,
        "One kind of break each. *host*: less the bare graphs; *added*: less the break's function too": result.breaks,
        "Seeing before each replay that parameters are where they were": result.looks,
        "Long segments, so that the device sets the pace: what a boundary costs it": result.gaps,
    }
    _publish("# What a break costs", [*result.notes, about], tables, out, output, result.right)


@app.command()
def runner(
    out: Annotated[Path | None, typer.Option("-f", "--out", help="Write the Markdown here too.")] = None,
    times: Annotated[int, typer.Option(min=2, help="Rounds; in each of them everything is measured once.")] = 300,
    output: FormatOption = Format.MD,
) -> None:
    """What a runner's call costs the host over the bare replay, beside eager in-place adds and padding by hand.

    Without a CUDA device only the verdicts are given.
    """
    from segue.bench import call_cost as bench_runner

    device = resolve("cuda" if torch.cuda.is_available() else "emulator")
    result = bench_runner.measure(device, times=times, progress=log.print)
    about = f"Medians of {times} rounds, all in turns, with the quartiles beside them. *host*: how long the call keeps the host."
    _publish("# What a runner's call costs", [*result.notes, about], {"One call": result.rows}, out, output, result.right)


@app.command()
def memory(
    out: Annotated[Path | None, typer.Option("-f", "--out", help="Write the Markdown here too.")] = None,
    buckets: Annotated[list[int] | None, typer.Option("-b", "--bucket", help="Rows of a bucket; repeatable.")] = None,
    times: Annotated[int, typer.Option(min=1, help="Recordings of each bucket, of which the median counts.")] = 5,
    output: FormatOption = Format.MD,
) -> None:
    """Memory of a ladder against its largest bucket alone, and the time of recording, for the Qwen3-0.6B shape.

    Without a CUDA device only the verdicts and the pool are given, in a small size.
    """
    from segue.bench import ladder_memory as bench_memory
    from segue.bench.decoder import Shape

    timed = torch.cuda.is_available()
    shape = None if timed else Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96)
    chosen = buckets or (bench_memory.BUCKETS if timed else (64, 32, 16, 8))
    device = resolve("cuda" if timed else "emulator")
    result = bench_memory.measure(device, shape, chosen, times=times, progress=log.print)
    about = (
        "*pool*: graph memory, inputs and weights not in it; *driver*: what the graphs take outside torch's allocator. "
        "*recording*: one capture, each segment launched as soon as it is recorded, without warm-up and garbage "
        f"collection; medians of {times}, in turns with an eager forward. *by torch alone*: the same graphs recorded and "
        "launched by torch's CUDAGraph, with nothing watched, held or checked."
    )
    tables = {"One pool, the largest bucket first": result.memory, "Recording a bucket": result.recording}
    _publish("# Memory of a ladder, and recording it", [*result.notes, about], tables, out, output, result.right)


@app.command()
def prime(
    out: Annotated[Path | None, typer.Option("-f", "--out", help="Write the Markdown here too.")] = None,
    lengths: Annotated[list[int] | None, typer.Option("-n", "--tokens", help="A prompt length; repeatable.")] = None,
    times: Annotated[int, typer.Option(min=1, help="Measurements of each, of which the median counts.")] = 20,
    output: FormatOption = Format.MD,
) -> None:
    """Prime graphs against breakable ones and eager, the Qwen3-0.6B shape, one fresh prompt with the cache filled.

    Without a CUDA device only the verdicts mean anything, in a small size.
    """
    from segue.bench import prime_latency as bench_prime
    from segue.bench.ttft import LENGTHS, Shape

    timed = torch.cuda.is_available()
    shape = None if timed else Shape(2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48, vocabulary=61)
    chosen = lengths or (LENGTHS if timed else (3, 16))
    device = resolve("cuda" if timed else "emulator")
    result = bench_prime.measure(device, shape, lengths=chosen, times=times, progress=log.print)
    about = (
        f"Medians of {times}, eager, breakable and prime in turns; each fills a fresh cache and gives the last logits. "
        "*kernel sum*: device time of all that one call has the device do but the copy-out, its kernels one after the other. "
        "*recording*: one capture, without warm-up, garbage collection and the search for cuts."
    )
    tables = {"One prompt as long as its bucket": result.rows, "Milliseconds of a replay, by where it is cut": result.cuts}
    _publish("# Prime graphs", [*result.notes, about], tables, out, output, result.right)


def _publish(
    title: str, notes: Sequence[str], tables: Mapping[str, Sequence[Row]], out: Path | None, form: Format, right: bool
) -> None:
    """Write tables that belong together; leave with 1 if a replay was wrong."""
    from segue.bench.provenance import provenance

    parts = [f"{name}:\n\n{table(rows)}" for name, rows in tables.items() if rows]
    text = "\n\n".join([title, provenance(), *notes, *parts]) + "\n"
    rows = [{"table": name, **row} for name, rows in tables.items() for row in rows]
    sys.stdout.write(text if form is Format.MD else render(rows, form, [provenance(), *notes]))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
        log.print(f"written to {out}")
    if not right:
        log.print("a replay differs from its reference: see the table")
        raise typer.Exit(1)
