"""``segue bench``: measurements, one sub-command each. Titles, tables and notes are those of the benchmark's result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from segue import environment
from segue.cli.output import Format, FormatOption, examples, log, render, table, whole_file
from segue.devices import Device, resolve
from segue.errors import UsageError

if TYPE_CHECKING:
    from segue.bench.result import BenchResult

app = typer.Typer(
    help="Measure, on a CUDA device. Without one most say only whether replays are right; ranks needs none.",
    epilog=examples("segue bench ttft -h", "segue bench breaks -f breaks.md"),
    no_args_is_help=True,
    rich_markup_mode=None,
)

Out = Annotated[Path | None, typer.Option("-f", "--out", help="Write the Markdown here too.")]
Lengths = Annotated[list[int] | None, typer.Option("-n", "--tokens", help="A length in tokens; repeatable.")]
Buckets = Annotated[list[int] | None, typer.Option("-b", "--bucket", help="Rows of a bucket; repeatable.")]
Times = Annotated[int, typer.Option(min=1, help="Measurements of each, of which the median counts.")]
Rounds = Annotated[int, typer.Option("--times", min=2, help="Rounds; in each of them everything is measured once.")]
Recordings = Annotated[int, typer.Option("--times", min=1, help="Recordings of each bucket, of which the median counts.")]


@app.command(
    short_help="Time to first token, beside eager and rivals.",
    epilog=examples("segue bench ttft -n 128 -n 512 --rivals none", "segue bench ttft --model ./my-model --decode"),
)
def ttft(
    out: Out = None,
    lengths: Lengths = None,
    times: Times = 20,
    model: Annotated[
        str, typer.Option(help="0.6B, 1.7B or 8B: Qwen3's shape with random weights; or a name or folder for transformers.")
    ] = "0.6B",
    compile: Annotated[bool, typer.Option("--compile", help="Measure segue with compiled layers too.")] = False,
    buckets: Buckets = None,
    rivals: Annotated[str, typer.Option(help="all, none, or names with commas between them.")] = "all",
    decode: Annotated[bool, typer.Option("--decode", help="Measure a step of generate() too, after 128 tokens.")] = False,
    batches: Annotated[
        list[int] | None, typer.Option("--batch", min=1, help="A batch size to decode, by default 1 and 8; repeatable.")
    ] = None,
    conversations: Annotated[int, typer.Option(min=1, help="Prompts that take turns, each with a cache that lives on.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw time against tokens, and start-up, into this file.")] = None,
    output: FormatOption = Format.MD,
) -> None:
    """Time to first token: eager, segue, torch.compile, and other packages that are installed.

    Every way's start-up and its correctness stand beside its speed. The rivals are torch.compile, reduce-overhead,
    breakable-cuda-graphs, piecewise-cuda-graphs, and with --decode static-cache and gpuopt-runtime. reduce-overhead takes
    half a minute for each length.
    """
    device, chosen = _device_with_timing(), _rivals(rivals)
    from segue.bench import plots
    from segue.bench.ttft import measure

    if plot is not None:
        plots.require_matplotlib()  # before minutes of measuring
    result = measure(
        device,
        model,
        lengths=lengths,
        times=times,
        progress=log.print,
        rivals=chosen,
        compile=compile,
        buckets=buckets,
        batches=batches or ((1, 8) if decode else ()),
        conversations=conversations,
    )
    try:
        if plot is not None:
            with whole_file(plot) as unfinished:
                plots.draw(unfinished, result.ways, result.startup)
            log.print(f"drawn into {plot}")
    finally:  # a plot that can't be written costs nobody the results
        _publish(result, out, output)


@app.command(
    short_help="Draw the README's picture from files that were written with -f.",
    epilog=examples(
        "segue bench plots benchmarks/results/nvidia-h200-ttft.md benchmarks/results/nvidia-h200-growth.md -f measured.svg"
    ),
)
def plots(
    first_token: Annotated[Path, typer.Argument(metavar="TTFT", help="What segue bench ttft -f wrote.")],
    growth: Annotated[Path, typer.Argument(metavar="GROWTH", help="What segue bench growth -f wrote.")],
    out: Annotated[Path, typer.Option("-f", "--out", help="The picture, .svg or .png.")],
    others: Annotated[
        Path | None, typer.Option(help="A table of another run, tokens by ways, for rivals that the first lacks: drawn dashed.")
    ] = None,
) -> None:
    """Draw time to first token against tokens, start-up against lengths, and memory against buckets. Measures nothing."""
    from segue.bench import plots, saved_tables

    ways, large = saved_tables.read(first_token), saved_tables.read(growth)
    rivals = saved_tables.having(saved_tables.read(others), "tokens", "eager") if others is not None else []
    with whole_file(out) as unfinished:
        plots.draw_summary(
            unfinished,
            saved_tables.having(ways, "tokens", "way", "ms"),
            rivals,
            saved_tables.having(ways, "way", "1"),
            saved_tables.having(large, "buckets", "pool MiB", "driver MiB"),
        )
    log.print(f"drawn into {out}")


@app.command(
    short_help="What a break costs, on host and device.",
    epilog=examples("segue bench breaks", "segue bench breaks --times 100 -o json"),
)
def breaks(out: Out = None, rounds: Rounds = 300, output: FormatOption = Format.MD) -> None:
    """What a break costs: on the host, against launching the same graphs bare, and on the device per boundary.

    Compared with the PyPI package breakable-cuda-graphs too, where that is installed. Without a CUDA device only the
    verdicts are given, in a small size.
    """
    from segue.bench.break_cost import measure

    _publish(measure(_device(), times=rounds, progress=log.print), out, output)


@app.command(
    short_help="What a runner's call costs the host.",
    epilog=examples("segue bench runner", "segue bench runner -f runner.md"),
)
def runner(out: Out = None, rounds: Rounds = 300, output: FormatOption = Format.MD) -> None:
    """What a runner's call costs the host over the bare replay, beside eager in-place adds and padding by hand.

    Without a CUDA device only the verdicts are given.
    """
    from segue.bench.call_cost import measure

    _publish(measure(_device(), times=rounds, progress=log.print), out, output)


@app.command(
    short_help="What a ladder takes, and how long it records.",
    epilog=examples("segue bench memory", "segue bench memory -b 512 -b 2048 --times 3"),
)
def memory(out: Out = None, buckets: Buckets = None, recordings: Recordings = 5, output: FormatOption = Format.MD) -> None:
    """Memory of a ladder against its largest bucket alone, and the time of recording, for the Qwen3-0.6B shape.

    Without a CUDA device only the verdicts and the pool are given, in a small size.
    """
    from segue.bench.ladder_memory import measure

    _publish(measure(_device(), buckets=buckets, times=recordings, progress=log.print), out, output)


@app.command(
    short_help="Prime graphs against breakable ones and eager.",
    epilog=examples("segue bench prime", "segue bench prime -n 128 -n 512"),
)
def prime(out: Out = None, lengths: Lengths = None, times: Times = 20, output: FormatOption = Format.MD) -> None:
    """Prime graphs against breakable ones and eager, the Qwen3-0.6B shape, one fresh prompt with the cache filled.

    Without a CUDA device only the verdicts mean anything, in a small size.
    """
    from segue.bench.prime_latency import measure

    _publish(measure(_device(), lengths=lengths, times=times, progress=log.print), out, output)


@app.command(
    short_help="What it costs ranks to agree on a call.",
    epilog=examples("segue bench ranks", "segue bench ranks --ranks 8 -f ranks.md"),
)
def ranks(
    out: Out = None,
    rounds: Annotated[int, typer.Option("--times", min=2, help="How often they agree in each way.")] = 2000,
    ranks: Annotated[int, typer.Option(min=2, help="Processes to start.")] = 2,
    output: FormatOption = Format.MD,
) -> None:
    """What it costs the ranks of one host to agree on a call: over sockets, over gloo, and in a runner's call.

    It starts its own processes, and needs no CUDA device.
    """
    from segue.bench.rank_agreement import measure

    _publish(measure(ranks, times=rounds, progress=log.print), out, output)


@app.command(
    short_help="Decoders of several kinds: dense, mixture, hybrid, latent attention.",
    epilog=examples("segue bench kinds", "segue bench kinds --compile -n 256 -f kinds.md"),
)
def kinds(
    out: Out = None,
    lengths: Lengths = None,
    times: Times = 20,
    compile: Annotated[bool, typer.Option("--compile", help="Measure segue with compiled layers too.")] = False,
    output: FormatOption = Format.MD,
) -> None:
    """Decoders of several kinds, a prompt and a decoding step, eager and by segue.

    Without a CUDA device only the verdicts are given, in a small size.
    """
    from segue.bench.kinds import KindSizes, measure

    device = _device()
    if device.traits.timing:
        result = measure(device, times=times, lengths=lengths or (), progress=log.print, compile=compile)
    else:
        small = KindSizes(layers=4, hidden=64, vocabulary=61)
        result = measure(device, small, torch.float32, times=2, lengths=(16,), progress=log.print, compile=compile)
    _publish(result, out, output)


@app.command(
    short_help="Decoding steps by batch and context.",
    epilog=examples("segue bench steps", "segue bench steps --places 1x128 --places 8x2048 -f steps.md"),
)
def steps(
    out: Out = None,
    places: Annotated[list[str] | None, typer.Option(help="Batch x context, as in 8x2048; again for each.")] = None,
    compile: Annotated[bool, typer.Option(help="Measure segue with compiled layers too.")] = True,
    rivals: Annotated[bool, typer.Option(help="Measure the static cache with compiled decode and gpuopt-runtime too.")] = True,
    output: FormatOption = Format.MD,
) -> None:
    """A step of generate() and of the model alone, a text end to end, and how exact it is, of Qwen3-0.6B's shape.

    Without a CUDA device only the verdicts are given, in a small size.
    """
    from segue.bench.decode import DECODE_RIVALS
    from segue.bench.models import load
    from segue.bench.steps import PLACES, SMALL, SMALL_PLACES, measure

    try:
        chosen = [(int(b), int(n)) for b, n in (place.split("x") for place in places or ())]
    except ValueError:
        raise UsageError(f"--places {' '.join(places or ())}: each is a batch and a context, as in 8x2048") from None
    device = _device()
    if device.traits.timing:
        model = load("0.6B", torch.bfloat16, device.torch_device)
        against = DECODE_RIVALS if rivals else ()
        result = measure(
            model, device, places=chosen or PLACES, compile=compile, rivals=against, progress=log.print,
            keep=lambda so_far: None if out is None else _save(so_far, out),
        )  # fmt: skip
    else:
        model = load(SMALL, torch.float32, device.torch_device)
        small = chosen or SMALL_PLACES
        result = measure(model, device, places=small, compile=compile, rivals=(), generations=1, forced=12, progress=log.print)
    _publish(result, out, output)


@app.command(
    short_help="An encoder, one sequence and many sentences.",
    epilog=examples("segue bench encoder", "segue bench encoder --dtype float32 -n 32 -f encoder.md"),
)
def encoder(
    out: Out = None,
    lengths: Lengths = None,
    times: Times = 50,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of the weights.")] = "bfloat16",
    output: FormatOption = Format.MD,
) -> None:
    """An encoder of all-MiniLM-L6's shape: one sequence, and 500 sentences of mixed length embedded in batches.

    Eager, segue, segue with compiled layers, and torch.compile, which takes ten seconds for each length. Without a CUDA device
    only the verdicts are given, in a small size.
    """
    from segue.bench.encoder import measure

    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"--dtype {dtype}: neither float32 nor bfloat16")
    result = measure(_device(), dtype=getattr(torch, dtype), times=times, progress=log.print, lengths=lengths)
    _publish(result, out, output)


@app.command(
    short_help="What grows with tokens, layers and buckets.",
    epilog=examples("segue bench growth --plot growth.svg", "segue bench growth --model 8B --compile"),
)
def growth(
    out: Out = None,
    times: Times = 10,
    model: Annotated[str | None, typer.Option(help="0.6B, by default, 1.7B or 8B: Qwen3's shape with random weights.")] = None,
    compile: Annotated[bool, typer.Option(help="Measure with compiled layers.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw what grows with tokens, layers and buckets into this file.")] = None,
    output: FormatOption = Format.MD,
) -> None:
    """How segue's own share of a call, its start-up and its memory grow: with tokens, layers and buckets.

    Without a CUDA device only the verdicts and the pool are given, in a small size.
    """
    from segue.bench import plots
    from segue.bench.decoder import SHAPES
    from segue.bench.growth import measure

    if model is not None and model not in SHAPES:
        raise UsageError(f"--model {model}: none of {', '.join(SHAPES)}")
    if plot is not None:
        plots.require_matplotlib()
    shape = None if model is None else SHAPES[model]
    result = measure(_device(), shape, times=times, progress=log.print, compile=compile)
    try:
        if plot is not None:
            with whole_file(plot) as unfinished:
                plots.draw_growth(unfinished, result.panels)
            log.print(f"drawn into {plot}")
    finally:
        _publish(result, out, output)


def _device() -> Device:
    return resolve("cuda" if torch.cuda.is_available() else "emulator")


def _device_with_timing() -> Device:
    if not torch.cuda.is_available():
        raise UsageError("segue bench measures time, which the emulator has none of, and there is no CUDA device here")
    return _device()


def _rivals(names: str) -> list[str]:
    """The rivals that ``--rivals`` names."""
    from segue.bench.ttft import RIVALS

    if names in ("all", "none"):
        return list(RIVALS) if names == "all" else []
    given = [name.strip() for name in names.split(",")]
    if unknown := [name for name in given if name not in RIVALS]:
        raise UsageError(f"--rivals: {', '.join(unknown)} is none of {', '.join(RIVALS)}, all and none")
    return given


def _text(result: BenchResult) -> str:
    parts = [f"{name}:\n\n{table(rows)}" for name, rows in result.tables.items() if rows]
    return "\n\n".join([f"# {result.title}", environment.provenance(), *result.notes, *parts]) + "\n"


def _save(result: BenchResult, out: Path) -> None:
    with whole_file(out) as unfinished:
        unfinished.write_text(_text(result))


def _publish(result: BenchResult, out: Path | None, form: Format) -> None:
    """Write a result's tables; leave with 1 if a replay was wrong."""
    rows = [{"table": name, **row} for name, rows in result.tables.items() for row in rows]
    where = [environment.provenance(), *result.notes]
    sys.stdout.write(_text(result) if form is Format.MD else render(rows, form, where))
    if out is not None:
        _save(result, out)
        log.print(f"written to {out}")
    if not result.right:
        log.print("a replay differs from its reference: see the table")
        raise typer.Exit(1)
