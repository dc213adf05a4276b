"""How segue's own share grows with tokens, layers and buckets: a call less its kernels, start-up, and memory.

Each point has an accelerator of its own, whose memory is given back before the next one. With random weights the times are
those of real ones.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from segue.bench import timing
from segue.bench.decoder import Shape
from segue.bench.models import FreshPrompt, load
from segue.bench.result import SAME, BenchResult, Row
from segue.bench.ttft import _compare
from segue.bench.ways import Accelerator, Segue
from segue.capture.isolation import collect_garbage
from segue.devices import Device

MOST_LINEAR = 1.1  # the exponent of what still counts as linear
LINEAR = "at most linear"
_BUCKET_LAYERS = 8  # of the model that the ladders are captured of: all of them have 127 buckets together
_SHARES = ("auto less its kernels ms", "breakable less its kernels ms")
_GROW = {  # the columns that are followed in each table, which is named by what grows
    "tokens": _SHARES,
    "layers": (*_SHARES, "start-up s"),
    "buckets": ("start-up s", "pool beyond the largest bucket's MiB", "driver MiB"),
}
_SMALL = Shape(2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48, vocabulary=61)


@dataclass(frozen=True)
class Sizes:
    """The points: ``tokens`` of a prompt as long as its one bucket, ``layers`` at ``prompt`` tokens, and ``counts`` of
    buckets, evenly spaced up to ``largest`` tokens, the first of them 1.
    """

    tokens: Sequence[int] = (1, 16, 64, 256, 1024, 4096, 16384)
    layers: Sequence[int] = (4, 8, 16, 28, 64)
    prompt: int = 128
    counts: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    largest: int = 2048


SMALL_SIZES = Sizes(tokens=(1, 3, 16), layers=(1, 2), prompt=4, counts=(1, 2, 4), largest=16)


@dataclass(frozen=True, kw_only=True)
class Growth(BenchResult):
    """What was measured at each point, and how it grows. Times are None on a device without timing."""

    title = "Growth with tokens, layers and buckets"

    rows: Mapping[str, list[Row]]  # by what grows, one per point
    growth: list[Row]  # one per followed column: its exponent and the verdict

    @property
    def tables(self) -> dict[str, list[Row]]:
        """The rows under the titles that are printed above them."""
        return {"How segue's share grows": self.growth, **{f"By {what}": rows for what, rows in self.rows.items()}}

    @property
    def panels(self) -> dict[str, dict[str, list[tuple[int, float]]]]:
        """The followed columns by what grows: points of a size and a value above 0."""
        return {what: {column: _points(rows, what, column) for column in _GROW[what]} for what, rows in self.rows.items()}


def measure(
    device: Device,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.bfloat16,
    times: int = 10,
    progress: Callable[[str], None] = lambda line: None,
    *,
    compile: bool = False,
    sizes: Sizes | None = None,
) -> Growth:
    """Measure each point of ``sizes``, one after the other.

    ``shape``, ``sizes``: by default Qwen3-0.6B's and those of :class:`Sizes`, and small ones on a device without timing.
    ``times``: measurements of each, of which the median counts. ``progress``: gets a line for each point. ``compile``: whether
    the layers are compiled, for each point anew.
    """
    timed = device.traits.timing
    shape, sizes = shape or (Shape() if timed else _SMALL), sizes or (Sizes() if timed else SMALL_SIZES)
    bench = _Bench(shape, dtype, device, times, compile, progress)
    progress("warming up")
    with bench.accelerated(bench.model(1), sorted({sizes.prompt, sizes.largest})).handle:
        pass  # kernels are loaded, and what the driver takes for the first graph of all is taken
    buckets = bench.by_buckets(sizes)  # first, as the driver may keep memory of graphs that are gone
    rows = {"tokens": bench.by_tokens(sizes), "layers": bench.by_layers(sizes), "buckets": buckets}
    growth = [_exponents(rows[what], what, column) for what, columns in _GROW.items() for column in columns]
    right = all(row["replay = reference"] == SAME for table in rows.values() for row in table)
    return Growth(rows=rows, growth=growth, right=right, notes=_notes(bench, sizes))


@dataclass(frozen=True)
class _Bench:
    """What all points have in common."""

    shape: Shape
    dtype: torch.dtype
    device: Device
    times: int
    compile: bool
    progress: Callable[[str], None]

    def model(self, layers: int) -> Any:
        return load(dataclasses.replace(self.shape, layers=layers), self.dtype, self.device.torch_device)

    def accelerated(self, model: Any, buckets: Sequence[int]) -> Accelerator:
        """A fresh accelerator, all its buckets captured; its handle is closed by the caller."""
        if self.compile and self.device.traits.compiled:
            torch.compiler.reset()  # otherwise the first point alone would compile
        if self.compile and buckets[0] == 1:
            buckets = [2, *(b for b in buckets if b > 2)]  # compiled code treats a single row apart
        collect_garbage()
        return Accelerator(model, buckets[-1], self.device, self.compile, buckets)

    def by_tokens(self, sizes: Sizes) -> list[Row]:
        """Calls of prompts as long as the one bucket."""
        model, rows = self.model(self.shape.layers), []
        for n in sizes.tokens:
            self.progress(f"{n} tokens")
            accelerator = self.accelerated(model, [n])
            with accelerator.handle:
                rows.append({"tokens": n, **self._calls(accelerator, n), **self._verdict(accelerator, [n])})
        return rows

    def by_layers(self, sizes: Sizes) -> list[Row]:
        """Calls and start-up at one length."""
        n, rows = sizes.prompt, []
        for layers in sizes.layers:
            self.progress(f"{layers} layers")
            accelerator = self.accelerated(self.model(layers), [n])
            with accelerator.handle:
                calls = self._calls(accelerator, n)
                shares = {column.replace(" ms", ", us a layer"): calls[column] for column in _SHARES}
                each = {column: None if share is None else share * 1e3 / layers for column, share in shares.items()}
                start = {"start-up s": accelerator.seconds if self.device.traits.timing else None}
                rows.append({"layers": layers, **calls, **each, **start, **self._verdict(accelerator, [n])})
        return rows

    def by_buckets(self, sizes: Sizes) -> list[Row]:
        """Start-up and memory of ladders with the same largest bucket."""
        model, rows, timed = self.model(min(_BUCKET_LAYERS, self.shape.layers)), list[Row](), self.device.traits.timing
        collect_garbage()
        self.device.synchronize()
        before, alone = self.device.driver_bytes(), 0
        for count in sizes.counts:
            self.progress(f"{count} buckets")
            buckets = [sizes.largest * i // count for i in range(1, count + 1)]
            accelerator = self.accelerated(model, buckets)
            with accelerator.handle as handle:
                seconds, pool = accelerator.seconds, handle.stats.pool_bytes
                driver = (self.device.driver_bytes() - before) / 2**20 if self.device.traits.driver_memory else None
                alone = alone or pool
                rows.append({
                    "buckets": count,
                    "start-up s": seconds if timed else None,
                    "seconds a bucket": seconds / count if timed else None,
                    "pool MiB": pool / 2**20,
                    "pool beyond the largest bucket's MiB": (pool - alone) / 2**20,
                    "driver MiB": driver,
                    **self._verdict(accelerator, sorted({max(1, b - 1) for b in (buckets[0], buckets[-1])})),
                })  # fmt: skip
        return rows

    def _calls(self, accelerator: Accelerator, n: int) -> Row:
        """Milliseconds of a call of each strategy on a fresh prompt of ``n`` tokens, the two in turns."""
        kinds, timed = _ways(accelerator), self.device.traits.timing
        prompt = FreshPrompt(accelerator.handle.module, n, calls=len(kinds) * (2 * self.times + 8) if timed else 0)
        runs = {way.name: lambda way=way: way.forward(prompt.ids, prompt.caches.pop()) for way in kinds}
        taken = timing.wall_in_turns(runs, self.times) if timed else {}
        cells: Row = {}
        for name, run in runs.items():
            seconds, busy = taken.get(name), timing.kernels(run) if timed else None
            cells |= {
                f"{name} ms": None if seconds is None else seconds * 1e3,
                f"{name} kernel sum ms": None if busy is None else busy * 1e3,
                f"{name} less its kernels ms": None if seconds is None or busy is None else (seconds - busy) * 1e3,
                f"{name} host ms": timing.host(run, self.times, batch=1) * 1e3 if timed else None,
            }
        return cells

    def _verdict(self, accelerator: Accelerator, lengths: Sequence[int]) -> Row:
        """Whether both strategies serve a fresh prompt of each length, and give the reference's bits."""
        wrong = []
        for way in _ways(accelerator):
            strategy, before = "prime" if way.prime else "breakable", way.handle.stats.strategies
            with way.context():
                same = all([_compare(way.handle, FreshPrompt(way.model, n, calls=0).ids) for n in lengths])
            served = way.handle.stats.strategies.get(strategy, 0) - before.get(strategy, 0)
            if not same or served < len(lengths):
                wrong.append(way.name if not same else f"{way.name} is not served by {strategy} graphs")
        return {"replay = reference": "NO: " + ", ".join(wrong) if wrong else SAME}


def _ways(accelerator: Accelerator) -> list[Segue]:
    return [Segue("auto", accelerator, prime=True), Segue("breakable", accelerator, prime=False)]


def _points(rows: Sequence[Row], what: str, column: str) -> list[tuple[int, float]]:
    return [(row[what], row[column]) for row in rows if row[column] is not None and row[column] > 0]


def _exponents(rows: Sequence[Row], what: str, column: str) -> Row:
    """How ``column`` grows with ``what``: the slope of its logarithm, over all points and over the last two."""
    row: Row = {"what": column, "with": what, "first": None, "last": None, "exponent": None, "of the last step": None}
    points, last = _points(rows, what, column), rows[-1][column]
    if last is None or (len(points) < 2 and last > 0):
        return {**row, "verdict": "not measured" if last is None else "one point above 0"}
    if len(points) < 2:
        return {**row, "verdict": f"{LINEAR}: 0 at {rows[-1][what]}"}
    sizes, values = ([math.log(v) for v in numbers] for numbers in zip(*points, strict=True))
    exponent = statistics.linear_regression(sizes, values).slope
    row["first"], row["last"] = (f"{value:.3g} at {size}" for size, value in (points[0], points[-1]))
    return row | {
        "exponent": exponent,
        "of the last step": (values[-1] - values[-2]) / (sizes[-1] - sizes[-2]),
        "verdict": LINEAR if exponent <= MOST_LINEAR else "MORE THAN LINEAR",
    }


def _notes(bench: _Bench, sizes: Sizes) -> list[str]:
    notes = [f"shape: {dataclasses.asdict(bench.shape)}, {str(bench.dtype).removeprefix('torch.')}"]
    if not bench.device.traits.timing:
        notes.append(f"Device {bench.device.name}: no time is meant, and there is no driver memory, only the verdicts.")
    layers, compiled = min(_BUCKET_LAYERS, bench.shape.layers), "compiled layers, " if bench.compile else ""
    return [
        *notes,
        f"Medians of {bench.times}, {compiled}both strategies in turns; one call is the whole forward of a fresh prompt, an "
        "empty cache filled, one row of logits. *auto* serves it by its prime graph. *kernel sum*: device time of the kernels of "
        "one call. *less its kernels*: segue's own share. *host*: how long the call keeps the host. By tokens: one bucket, as "
        f"long as the prompt. By layers: one bucket, {sizes.prompt} tokens.",
        f"By buckets: {layers} layers, buckets evenly spaced up to {sizes.largest} tokens; *pool beyond the largest bucket's*: "
        "what a ladder takes over that of one bucket. *driver*: what it takes outside torch's allocator, since before the first "
        "one. *start-up*: both strategies captured, compilation included, whose caches on disk are used as they are.",
        f"*exponent*: the slope, by least squares, of the logarithm against that of the size; at most {MOST_LINEAR} counts as "
        "linear. *of the last step*: that of the two largest sizes. Points at or below 0 have no logarithm and are left out.",
        "*replay = reference*: hidden states, logits and cache of both strategies; in a ladder, of prompts one token shorter "
        "than its smallest bucket and than its largest.",
    ]
