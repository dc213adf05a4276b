"""Time to first token of one prompt's forward with the cache filled, by segue and by what a user could pick instead.

Every way's start-up and whether it is right stand beside its speed. With random weights the times are those of real ones.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.bench import decode, timing
from segue.bench.decoder import Shape
from segue.bench.models import FreshPrompt, last_logits, load, sharing_copy
from segue.bench.result import SAME, BenchResult, Row
from segue.bench.ways import (
    CALLS_TO_START,
    EAGER,
    FORWARD_RIVALS,
    REDUCE,
    Accelerator,
    Eager,
    Segue,
    Way,
    forward_rival,
)
from segue.devices import Device
from segue.errors import SegueError
from segue.integrations.transformers import names
from segue.integrations.transformers.attention import init_layer

LENGTHS = (16, 128, 512, 2048)
LENGTHS_BETWEEN = (300, 700, 1100, 1500)  # no powers of two, so that a ladder of those pads them
RIVALS = (*FORWARD_RIVALS, *decode.DECODE_RIVALS)
_HOST_CALLS = 20
_MORE_CALLS = 2 * _HOST_CALLS + CALLS_TO_START + 12  # of one way, beside the rounds: warm-ups, the profile and verdicts too


@dataclass(frozen=True, kw_only=True)
class FirstToken(BenchResult):
    """Times to the first token, and of a decoding step where that was asked for."""

    title = "Time to first token, one prompt, cache filled"

    rows: list[Row]  # one per length: each way's milliseconds
    between: list[Row]  # the same for lengths between buckets
    ways: list[Row]  # one per length and way: start-up and verdict beside the speed
    startup: list[Row]  # one per way: seconds by how many lengths are ready
    decode: list[Row]  # one per batch and way
    captures: list[Row]  # one per accelerated model
    missing: list[Row]  # rivals that were asked for and couldn't be measured, with the reason
    breaks: list[Row]  # where a break's host time goes

    @property
    def tables(self) -> dict[str, list[Row]]:
        """The rows under the titles that are printed above them."""
        return {
            "One prompt": self.rows,
            "Lengths between buckets": self.between,
            "Each way, its start-up and whether it is right": self.ways,
            "Seconds of start-up, by the number of lengths that are ready": self.startup,
            "One step of generate()": self.decode,
            "Capturing the ladder": self.captures,
            "Rivals that have no row": self.missing,
            "Where the host time of one attention break goes, each part alone": self.breaks,
        }


def measure(
    device: Device,
    model: Shape | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    lengths: Sequence[int] | None = None,
    times: int = 20,
    progress: Callable[[str], None] = lambda line: None,
    *,
    rivals: Sequence[str] = (),
    compile: bool = False,
    buckets: Sequence[int] | None = None,
    batches: Sequence[int] = (),
    conversations: int = 1,
) -> FirstToken:
    """Capture the ladder up to the longest prompt, and measure every way at each of ``lengths``, in turns.

    Args:
        device: that of the model, and where it is captured.
        model: a shape, the name of one, or what ``from_pretrained`` takes; by default Qwen3-0.6B's shape.
        dtype: that of the weights.
        lengths: tokens of a prompt; by default :data:`LENGTHS`, and :data:`LENGTHS_BETWEEN` in a table of their own.
        times: measurements of each, of which the median counts.
        progress: gets a line for each step.
        rivals: some of :data:`RIVALS`. One that is missing or fails gets a row that says why.
        compile: measure segue with compiled layers too.
        buckets: the ladder of segue's graphs; None means segue's default.
        batches: batch sizes of which a decoding step is measured.
        conversations: prompts that take turns, the cache of each living until its next turn.

    Raises:
        UsageError: the model can't be loaded.
        SegueError: the model can't be accelerated without compiled layers.
    """
    between = () if lengths else LENGTHS_BETWEEN
    lengths = lengths or LENGTHS
    loaded = load(model or Shape(), dtype, device.torch_device)
    bench = _Bench(loaded, device, times, conversations, progress)
    try:
        bench.accelerate(max(*lengths, *between, *(b * decode.PROMPT for b in batches), 1), compile, buckets)
        bench.add_rivals(rivals)
        with _many_compilations(rivals):
            rows = [bench.row(n) for n in lengths]
            rows_between = [bench.row(n) for n in between]
            steps = bench.decoding(batches, rivals)
        progress("a break's host time")
        breaks = _breaks(loaded, min(lengths))
    finally:
        bench.close()
    right = bench.right and all(row["replay = reference"] == SAME for row in (*rows, *rows_between))
    right = right and all(row["replay = reference"] in (None, SAME) for row in steps)
    return FirstToken(
        rows=rows, between=rows_between, ways=bench.ways, startup=bench.startup(), decode=steps, captures=bench.captures,
        missing=bench.missing, breaks=breaks, right=right, notes=_notes(model, loaded, dtype, times, conversations),
    )  # fmt: skip


@dataclass
class _Bench:
    """One run: the ways that take part, and the rows that they have given so far."""

    model: Any  # the untouched one
    device: Device
    times: int
    conversations: int
    progress: Callable[[str], None]

    right: bool = True
    captures: list[Row] = field(default_factory=list)
    missing: list[Row] = field(default_factory=list)
    ways: list[Row] = field(default_factory=list)
    _segues: list[Segue] = field(default_factory=list)
    _taking_part: list[Way] = field(default_factory=list)

    def accelerate(self, max_tokens: int, compile: bool, buckets: Sequence[int] | None) -> None:
        """Capture the ladder, and with ``compile`` once more with compiled layers."""
        self._taking_part.append(Eager(EAGER, self.model))
        self._add_segue("segue", Accelerator(self.model, max_tokens, self.device, False, buckets))
        if not compile:
            return
        try:
            self._add_segue("segue compiled", Accelerator(self.model, max_tokens, self.device, True, buckets))
        except SegueError as e:
            self.right = False
            self.missing.append({"rival": "segue compiled", "where": "everywhere", "reason": decode.reason(e)})

    def add_rivals(self, rivals: Sequence[str]) -> None:
        """Let these rivals of a prompt's forward take part."""
        for name in rivals:
            if name in FORWARD_RIVALS:
                try:
                    way = forward_rival(name, self.model, self.device, keeps_caches=self.conversations > 1)
                except Exception as e:
                    self.missing.append({"rival": name, "where": "everywhere", "reason": decode.reason(e)})
                else:
                    self._taking_part.append(way)

    def close(self) -> None:
        """Free all graphs."""
        for way in self._taking_part:
            way.close()
        for segue in self._segues:
            segue.handle.restore()

    def row(self, n: int) -> Row:
        """Measure all ways at ``n`` tokens."""
        calls = (len(self._taking_part) + 1) * (self.times + _MORE_CALLS)
        prompts = [FreshPrompt(self.model, n, calls, seed=100_000 * i) for i in range(self.conversations)]
        expected = [self._logits(self._taking_part[0], prompt) for prompt in prompts]
        started = self._started(prompts[0])
        before = [segue.handle.stats.eager for segue in self._segues]
        runs = {way.name: _Turns(way, prompts) for way, _ in started}
        taken = timing.wall_in_turns(runs, self.times)
        untouched = sum(s.handle.stats.eager - b for s, b in zip(self._segues, before, strict=True))
        self.progress(f"{n} tokens: " + ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in taken.items()))
        rows = [self._way_row(way, seconds, runs[way.name], taken, prompts, expected) for way, seconds in started]
        self.ways += rows
        segues = [row for row in rows if row["replay = reference"] is not None]
        return {
            "tokens": n,
            **{f"{name} ms": seconds * 1e3 for name, seconds in taken.items()},
            "kernel sum ms": rows[0]["kernel sum ms"],
            "eager / segue": taken[EAGER] / taken["segue"],
            "untouched": untouched,
            "replay = reference": SAME if all(row["replay = reference"] == SAME for row in segues) else "NO",
            "largest difference to eager": max(row["largest difference to eager"] for row in segues),
        }

    def decoding(self, batches: Sequence[int], rivals: Sequence[str]) -> list[Row]:
        """Measure a decoding step at each of ``batches``."""
        generates: dict[str, decode.Generate] = {}
        for name in rivals if batches else ():
            if name in decode.DECODE_RIVALS:
                try:
                    generates[name] = decode.decode_rival(name, sharing_copy(self.model), self.device)
                except Exception as e:
                    self.missing.append({"rival": name, "where": "decode", "reason": decode.reason(e)})
        autos = [segue for segue in self._segues if segue.prime]
        times = min(self.times, 5)  # each of them has many steps
        return [
            row
            for batch in batches
            for row in decode.measure_batch(self.model, autos, generates, batch, times, self.missing, self.progress)
        ]

    def startup(self) -> list[Row]:
        """Each way's seconds of start-up for one length, for two, and so on; a ladder is captured once."""
        once = {way.name for way in self._taking_part if way.once}
        seconds: dict[str, list[float]] = {}
        for row in self.ways:
            seconds.setdefault(row["way"], []).append(row["start-up s"])
        sums = {name: given if name in once else list(itertools.accumulate(given)) for name, given in seconds.items()}
        return [{"way": name, **{str(i): s for i, s in enumerate(given, 1)}} for name, given in sums.items()]

    def _add_segue(self, name: str, accelerator: Accelerator) -> None:
        stats = accelerator.handle.stats
        self.progress(f"{name}: {stats.captured} buckets captured in {accelerator.seconds:.1f} s")
        pool = {"pool MiB": stats.pool_bytes / 2**20, "driver MiB": stats.driver_bytes / 2**20}
        self.captures.append({"way": name, "buckets": stats.captured, "seconds": accelerator.seconds, **pool})
        both = [Segue(name, accelerator, prime=True), Segue(f"{name}, breakable", accelerator, prime=False)]
        self._segues += both
        self._taking_part += both

    def _started(self, prompt: FreshPrompt) -> list[tuple[Way, float]]:
        """The ways that are ready for the prompt's length, with the seconds of their start-up."""
        n, ready = prompt.ids.shape[1], []
        for way in self._taking_part:
            try:
                seconds = way.start(prompt.ids, prompt.caches)
            except Exception as e:
                if way.name not in FORWARD_RIVALS:
                    raise
                self.missing.append({"rival": way.name, "where": f"{n} tokens", "reason": decode.reason(e)})
                self.progress(f"{n} tokens: {way.name} failed")
                continue
            ready.append((way, seconds))
            self.progress(f"{n} tokens: {way.name} ready, start-up {seconds:.1f} s")
        return ready

    def _way_row(
        self, way: Way, seconds: float, run: _Turns, taken: dict[str, float], prompts: list[FreshPrompt], expected: list[Tensor]
    ) -> Row:
        mine, busy = taken[way.name], timing.kernels(run)
        host = timing.host(run, times=_HOST_CALLS, batch=1)
        off = max((self._logits(way, p) - e).abs().max().item() for p, e in zip(prompts, expected, strict=True))
        row: Row = {
            "tokens": prompts[0].ids.shape[1],
            "way": way.name,
            "ms": mine * 1e3,
            "eager / this": taken[EAGER] / mine,
            f"this / {REDUCE}": mine / taken[REDUCE] if REDUCE in taken else None,
            "start-up s": seconds,
            "replay = reference": None,
            "largest difference to eager": off,
            "kernel sum ms": None if busy is None else busy * 1e3,
            "call less its kernels ms": None if busy is None else (mine - busy) * 1e3,
            "host ms": host * 1e3,
            "of it outside the body": None,
            "served by": None,
        }
        return row | self._segue_cells(way, run, prompts) if isinstance(way, Segue) else row

    def _segue_cells(self, way: Segue, run: _Turns, prompts: list[FreshPrompt]) -> Row:
        before = way.handle.stats.strategies
        run()
        served = {name: count - before.get(name, 0) for name, count in way.handle.stats.strategies.items()}
        cells: Row = {"served by": ", ".join(name for name, count in served.items() if count) or "the untouched model"}
        with way.context():
            same = all([_compare(way.handle, prompt.ids) for prompt in prompts])
        if not way.prime:
            with way.handle.with_body(lambda x, *_, **__: x):
                cells["of it outside the body"] = timing.host(run, times=_HOST_CALLS, batch=1) * 1e3
        return cells | {"replay = reference": SAME if same else "NO"}

    def _logits(self, way: Way, prompt: FreshPrompt) -> Tensor:
        return way.forward(prompt.ids, prompt.caches.pop()).float().clone()


class _Turns:
    """A run of one way in which the prompts take turns. Where there are several, a prompt's cache lives until its next turn."""

    def __init__(self, way: Way, prompts: list[FreshPrompt]) -> None:
        self._way, self._prompts, self._next = way, prompts, 0
        self._kept: list[Any] = [None] * len(prompts)

    def __call__(self) -> None:
        i, self._next = self._next, (self._next + 1) % len(self._prompts)
        prompt = self._prompts[i]
        cache = prompt.caches.pop()
        self._way.forward(prompt.ids, cache)
        if len(self._prompts) > 1:
            self._kept[i] = cache


@contextmanager
def _many_compilations(rivals: Sequence[str]) -> Iterator[None]:
    """Let dynamo compile the same code for each length. By default it gives up after eight times and runs it eagerly."""
    if not {*FORWARD_RIVALS, decode.STATIC} & set(rivals):
        yield
        return
    import torch._dynamo.config as config

    before, config.recompile_limit = config.recompile_limit, 128
    try:
        yield
    finally:
        config.recompile_limit = before


def _compare(graphed: Any, ids: Tensor) -> bool:
    """Whether a replay gives the reference's bits: all hidden states, the last token's logits, and the cache that was filled."""

    def given() -> list[Tensor]:
        model, cache = graphed.module, names.new_cache(graphed.module.config)
        with torch.inference_mode():
            hidden = model.base_model(ids, use_cache=True).last_hidden_state
            logits = last_logits(model, ids, cache)
            return [t.clone() for t in (logits, hidden, *(t for layer in cache.layers for t in (layer.keys, layer.values)))]

    replayed = given()
    with graphed.reference():
        reference = given()
    return all(map(torch.equal, replayed, reference))


def _breaks(model: Any, n: int) -> list[Row]:
    """Host microseconds of each thing that one attention break does, one by one, at ``n`` tokens of a fresh prompt."""
    config, module = model.config, model.base_model.layers[0].self_attn
    attention = names.attention_function(module, config._attn_implementation)
    heads, width = config.num_attention_heads, module.head_dim
    options: Any = {"dtype": model.dtype, "device": model.device}
    kv_heads = config.num_key_value_heads
    q, k, v = (torch.zeros(1, n, h, width, **options).transpose(1, 2) for h in (heads, kv_heads, kv_heads))
    result = torch.zeros(1, n, heads, width, **options)
    handoff = torch.zeros(1, 2 * n, heads, width, **options)
    both, zeros = [handoff[:, :n], handoff[:, n:]], torch.zeros_like(result)
    times, batch = 200, 10
    caches = [names.new_cache(config) for _ in range(times + batch)]

    def attend() -> Tensor:
        return attention(module, q, k, v, None, dropout=0.0, scaling=module.scaling, sliding_window=None)[0]  # type: ignore[no-any-return]

    def update() -> None:
        cache = caches.pop()
        init_layer(cache, 0, k, v)
        cache.update(k, v, 0)

    parts: dict[str, Callable[[], object]] = {
        "update of a fresh cache layer": update,
        "the model's attention function": attend,
        "copy into the hand-off": lambda: both[0].copy_(result),
        "copy into the hand-off, its tail cleared": lambda: _torch.foreach_copy(both, [result, zeros]),
    }
    with torch.inference_mode():
        return [{"part": part, "host us": timing.host(run, times, batch) * 1e6} for part, run in parts.items()]


def _notes(model: Shape | str | None, loaded: Any, dtype: torch.dtype, times: int, conversations: int) -> list[str]:
    shape = model if isinstance(model, str) else dataclasses.asdict(model or Shape())
    notes = [
        f"model: {shape}, {loaded.num_parameters() / 1e9:.2f} G parameters, {str(dtype).removeprefix('torch.')}",
        f"Medians of {times}, all ways in turns; one call is the whole forward of a prompt, an empty cache filled, one row of "
        'logits. *segue*: strategy "auto", which serves a fresh prompt by its prime graph; *breakable*: the same prompt by the '
        "breakable graph. *start-up*: of segue the whole ladder, both strategies, captured once, compilation included; of all "
        "others the first calls at that length. Compilers found their caches on disk as they were. *kernel sum*: device time of "
        "the kernels of one call, in the first two tables of the eager one. *host*: how long the call keeps the host; *outside "
        "the body*: embedding, head, and what transformers and segue do around the graphs.",
        "*replay = reference*: hidden states, logits and cache, of segue alone. *largest difference to eager*: of the logits. "
        "Fused kernels round differently. Ladders share one pool, so *pool MiB* of a second one counts the first one's too.",
        f"{REDUCE}: compiled for each length alone; its logits are copied out of the memory that its next call overwrites"
        + (f". {conversations} conversations take turns, so its cache is copied out too." if conversations > 1 else
           ", its cache is not, so that it is gone with the next call."),
    ]  # fmt: skip
    return notes
