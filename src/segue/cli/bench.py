"""``segue bench``: measurements, one sub-command each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from segue.cli.output import Format, FormatOption, log, render, table
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
    from segue.bench.provenance import provenance

    chosen = lengths or bench_ttft.LENGTHS
    result = bench_ttft.measure(resolve("cuda"), lengths=chosen, times=times, progress=log.print)
    sections = [
        "# Time to first token, one prompt, cache filled",
        provenance(),
        *result.notes,
        f"Medians of {times}, eager and segue in turns. *kernel sum*: device time of the kernels of one eager forward. "
        "*segue host*: how long the call keeps the host.",
        table(result.rows),
        "Capturing the ladder:",
        table([result.capture]),
        "Where the host time of one attention break goes, each part alone:",
        table(result.breaks),
    ]
    text = "\n\n".join(sections) + "\n"
    sys.stdout.write(text if output is Format.MD else render(result.rows, output, [provenance(), *result.notes]))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
        log.print(f"written to {out}")
    if not result.right:
        log.print("a replay differs from its reference: see the table")
        raise typer.Exit(1)
