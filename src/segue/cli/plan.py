"""``segue plan``: which buckets a sample of lengths calls for, and what they cost."""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from segue.cli import handles, target
from segue.cli.length_samples import read_lengths
from segue.cli.locate import said_on_stderr
from segue.cli.model_cases import keeps_cache
from segue.cli.output import Format, FormatOption, examples, log, render, whole_file
from segue.cli.target import Compile, DType, ModelOptions, Strategy, TrustRemoteCode
from segue.errors import UsageError
from segue.runner import Ladder

EXAMPLES = examples(
    "segue plan lengths.txt",
    "segue plan requests.jsonl --field prompt_tokens -k 8 -k 16",
    "segue plan lengths.txt --model ./my-model",
    "cat lengths.txt | segue plan - --plot lengths.svg",
)
_DECODE = (1, 2, 4, 8)  # tokens of a step of decoding, one for each sequence; compiled layers have no bucket of 1
_COUNTS = (4, 6, 8, 12, 16, 24, 32, 48, 64)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True)
class LadderPlan:
    """The best ladder of at most ``k`` buckets, and those that it must have besides.

    ``share``: its padded rows among all rows, from 0 to 1. ``geometric``: the same of the best geometric ladder.
    """

    k: int
    ladder: Ladder
    share: float
    geometric: float


def plan(
    lengths: Annotated[str, typer.Argument(metavar="LENGTHS", help="txt, csv or jsonl, one length a forward; - for stdin.")],
    field: Annotated[str | None, typer.Option(help="The column or key that holds the lengths.")] = None,
    buckets: Annotated[
        list[int] | None,
        typer.Option("-k", "--buckets", min=1, help="How many buckets; repeatable. By default 4 to 64."),
    ] = None,
    multiple_of: Annotated[int, typer.Option(min=1, help="Every bucket is a multiple of this.")] = 1,
    per_bucket: Annotated[
        str | None, typer.Option(help="What the driver takes for each bucket's graphs, as measured: 12MiB.")
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="What the graph pool takes for the largest bucket, as measured: 328MiB.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help=f"Plan for this model, and measure what its graphs take. {target.MODELS}"),
    ] = None,
    strategy: Strategy = None,
    compile: Compile = False,
    dtype: DType = None,
    trust_remote_code: TrustRemoteCode = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the lengths and the padding shares into this file.")] = None,
    output: FormatOption = Format.MD,
) -> None:
    """The buckets that pad a sample of lengths least, for several numbers of buckets, beside geometric ladders.

    A length is the tokens of one forward: of a batch, batch times padded length. With --model the ladders have buckets for
    decoding too, and the one with fewest buckets is captured to measure the memory.
    """
    driver, shared = _bytes(per_bucket, "--per-bucket"), _bytes(pool, "--pool")
    options = ModelOptions(None, strategy, compile, dtype, trust_remote_code)
    if model is None:
        options.refuse("there is no --model")
        options.refuse_loading("there is no --model")
    elif driver is not None or shared is not None:
        raise UsageError("--model measures what --per-bucket and --pool would say: leave them out")
    sample = read_lengths(lengths, field)
    log.print(f"{len(sample)} lengths read")
    also: tuple[int, ...] = ()
    if model is not None:
        driver, shared, also = _measured(model, options, Ladder.fit(sample, min(buckets or _COUNTS), multiple_of))
    plans = plans_for(sample, buckets or _COUNTS, multiple_of, also)
    if plot is not None:
        with whole_file(plot) as unfinished:
            _draw(unfinished, sample, plans)
        log.print(f"drawn into {plot}")
    notes = [_describe(sample), *([f"For decoding, {', '.join(map(str, also))} are added to each ladder."] if also else [])]
    sys.stdout.write(render([_row(p, driver, shared, output is Format.MD) for p in plans], output, notes))
    best = next((p for p in plans if p.share <= 0.1), plans[-1])
    log.print(f"next: {'GraphRunner(...' if model is None else 'segue.accelerate(model'}, buckets={list(best.ladder)})")


def _measured(name: str, options: ModelOptions, ladder: Ladder) -> tuple[int, int, tuple[int, ...]]:
    """What the driver takes for each of a model's buckets and what all share, in bytes, and the buckets that it decodes in.

    ``ladder`` is captured to find that out.
    """
    with said_on_stderr():
        found = target.find(name, options, buckets=ladder)
        if not handles.is_handle(found.value):
            raise UsageError(f"--model {name} gives a {type(found.value).__name__} and not a model")
        if handles.most_tokens(found.value) != ladder.max:
            raise UsageError(f"--model {name} gives a handle, whose buckets are made already: give the model itself")
        log.print(f"capturing {len(ladder)} buckets of up to {ladder.max} tokens, to measure their memory")
        found.value.capture()
        small = _DECODE[options.compile :] if keeps_cache(found.value) else ()
    stats = found.value.stats
    return stats.driver_bytes // max(1, len(stats.buckets)), stats.pool_bytes + found.value.scratch_bytes, small


def plans_for(lengths: Sequence[int], counts: Sequence[int], multiple_of: int = 1, also: Sequence[int] = ()) -> list[LadderPlan]:
    """A plan for each number of buckets, ascending; none after the first that pads nothing.

    ``also``: buckets that every ladder has besides, as far as they are smaller than its largest.
    """
    sample = Counter(lengths)
    plans: list[LadderPlan] = []
    for k in sorted(set(counts)):
        fitted = Ladder.fit(lengths, k, multiple_of)
        geometric = geometric_ladders(min(sample), max(sample), k, multiple_of)
        best, *others = (Ladder({*ladder, *(n for n in also if n < fitted.max)}) for ladder in (fitted, *geometric))
        plans.append(LadderPlan(k, best, _share(best, sample), min(_share(other, sample) for other in others)))
        if len(fitted) < k or not plans[-1].share:
            break
    return plans


def geometric_ladders(least: int, most: int, k: int, multiple_of: int = 1) -> list[Ladder]:
    """Ladders of at most ``k`` buckets that grow by a constant ratio, up to ``most``: those a person would try.

    Evenly spaced in the logarithm from ``least`` and from 1; and the finest :meth:`Ladder.geometric`, which has buckets
    for decode, where one of that size exists.
    """
    found = []
    for low in {least, 1}:
        sizes = [most * (low / most) ** (i / max(1, k - 1)) for i in range(k)]
        found.append(Ladder(-(-max(1, round(s)) // multiple_of) * multiple_of for s in sizes))
    fine, coarse = 1.0001, float(max(2, most))
    for _ in range(40):
        middle = (fine * coarse) ** 0.5
        if len(Ladder.geometric(most, middle, multiple_of)) > k:
            fine = middle
        else:
            coarse = middle
    finest = Ladder.geometric(most, coarse, multiple_of)
    return [*found, finest] if len(finest) <= k else found


def _share(ladder: Ladder, sample: Mapping[int, int]) -> float:
    """Padded rows among all rows of the calls that a bucket serves."""
    real = padded = 0
    for n, count in sample.items():
        bucket = ladder.bucket_for(n)
        if bucket is not None:
            real, padded = real + n * count, padded + (bucket - n) * count
    return padded / (real + padded) if real else 0.0


def _row(p: LadderPlan, driver: int | None, shared: int | None, for_people: bool) -> dict[str, Any]:
    """A table's row. Shares are per cent for people, and numbers from 0 to 1 for programs."""
    shares = {"padding": p.share, "geometric": p.geometric}
    row: dict[str, Any] = {"k": p.k}
    row.update({name: f"{share:.1%}" if for_people else round(share, 6) for name, share in shares.items()})
    if driver is not None or shared is not None:
        row["memory MiB"] = round(((driver or 0) * len(p.ladder) + (shared or 0)) / 2**20, 1)
    return {**row, "buckets": ", ".join(map(str, p.ladder))}


def _describe(lengths: Sequence[int]) -> str:
    ordered = sorted(lengths)
    median, high = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return (
        f"{len(ordered)} lengths, {ordered[0]} to {ordered[-1]}, median {median}, 99th percentile {high}. *padding*: "
        "padded rows among all rows, with the best buckets; *geometric*: with the best ladder of the same size that "
        "grows by a constant ratio."
    )


def _bytes(text: str | None, option: str) -> int | None:
    """A size such as ``12MiB`` in bytes. ``option``: its name, for the error."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)i?b?\s*", text.lower())
    if match is None:
        raise UsageError(f"{option} {text!r} is no size; give bytes, or 12MiB")
    return round(float(match[1]) * _UNITS[match[2]])


def _draw(path: Path, lengths: Sequence[int], plans: Sequence[LadderPlan]) -> None:
    try:
        backend: Any = importlib.import_module("matplotlib.backends.backend_agg")
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'segue-graphs[plot]'") from None
    figure = figures.Figure(figsize=(9, 3.5), layout="constrained")
    canvas = backend.FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.hist(lengths, bins=min(80, len(set(lengths))), color="0.6")
    shown = plans[len(plans) // 2].ladder
    for bucket in shown:
        left.axvline(bucket, color="tab:blue", linewidth=0.6)
    left.set(xlabel="tokens", ylabel="forwards", title=f"lengths, and {len(shown)} buckets")
    ks = [p.k for p in plans]
    right.plot(ks, [100 * p.share for p in plans], marker="o", label="best")
    right.plot(ks, [100 * p.geometric for p in plans], marker="o", color="0.6", label="geometric")
    right.set(xlabel="buckets", ylabel="padded rows, %", title="padding", ylim=(0, None))
    right.legend()
    try:
        canvas.print_figure(path)
    except (OSError, ValueError) as e:
        raise UsageError(f"--plot {path.name}: {e}") from None
