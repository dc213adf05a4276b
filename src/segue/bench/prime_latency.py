"""Prime against breakable: one fresh prompt's forward with the caller's cache filled, beside the sum of its kernels."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from segue.bench import timing
from segue.bench.decoder import Shape
from segue.bench.models import FreshPrompt, last_logits
from segue.bench.result import SAME, BenchResult, Row
from segue.bench.ttft import LENGTHS
from segue.check.compare import difference
from segue.devices import Device
from segue.integrations.transformers import accelerate, names
from segue.integrations.transformers.prime_trunk import ModelTrunk
from segue.prime import PrimeGraph

_RECORDINGS = 7  # of each kind
_SMALL = Shape(2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48, vocabulary=61)
_SMALL_LENGTHS = (3, 16)


@dataclass(frozen=True, kw_only=True)
class PrimeLatency(BenchResult):
    """Times of prime graphs.

    ``rows``: one for each length, every forward as long as its bucket. ``cuts``: milliseconds of each pattern of cuts
    that was measured.
    """

    title = "Prime graphs"

    rows: list[Row]
    cuts: list[Row]

    @property
    def tables(self) -> dict[str, list[Row]]:
        """The rows under the titles that are printed above them."""
        return {"One prompt as long as its bucket": self.rows, "Milliseconds of a replay, by where it is cut": self.cuts}


def measure(
    device: Device,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.bfloat16,
    lengths: Sequence[int] | None = None,
    times: int = 20,
    progress: Callable[[str], None] = lambda line: None,
) -> PrimeLatency:
    """Measure eager, breakable and prime at each of ``lengths``, in turns; each fills a fresh cache and gives logits.

    ``shape``, ``lengths``: by default Qwen3-0.6B's and :data:`LENGTHS`, and small ones on a device without timing. ``times``:
    measurements of each, of which the median counts. ``progress``: gets a line for each length.
    """
    timed = device.traits.timing
    shape, lengths = shape or (Shape() if timed else _SMALL), lengths or (LENGTHS if timed else _SMALL_LENGTHS)
    model = shape.model(dtype, device.torch_device)
    trunk = ModelTrunk(model)  # before it is accelerated: it is the untouched decoder that a trunk runs
    rows, cuts = [], []
    with accelerate(model, max_tokens=max(lengths), strategy="breakable", device=device) as graphed:
        for n in sorted(lengths, reverse=True):
            progress(f"{n} tokens")
            with PrimeGraph(trunk, n, device=device) as prime:
                rows.append(_row(graphed, prime, n, times))
                if prime.measured:
                    cuts.append({"tokens": n, **{str(list(cut)): seconds * 1e3 for cut, seconds in prime.measured.items()}})
    rows.reverse()
    cuts.reverse()
    notes = [f"shape: {dataclasses.asdict(shape)}, {str(dtype).removeprefix('torch.')}"]
    if not timed:
        notes.append(f"Device {device.name}: no time is meant, only the verdicts.")
    notes.append(
        f"Medians of {times}, eager, breakable and prime in turns; each fills a fresh cache and gives the last logits. "
        "*kernel sum*: device time of all that one call has the device do but the copy-out, its kernels one after the other. "
        "*recording*: one capture, without warm-up, garbage collection and the search for cuts."
    )
    return PrimeLatency(rows=rows, cuts=cuts, right=all(row["prime = reference"] == SAME for row in rows), notes=notes)


def _row(graphed: Any, prime: PrimeGraph, n: int, times: int) -> Row:
    model, trunk = graphed.module, prime.trunk
    prompt = FreshPrompt(model, n, calls=3 * times + 28 + _RECORDINGS)

    def breakable() -> Any:
        with torch.inference_mode():
            return last_logits(model, prompt.ids, prompt.caches.pop())

    def eager() -> Any:
        with graphed.untouched():
            return breakable()

    def run() -> Any:
        with torch.inference_mode():
            return prime.run(prompt.ids, prompt.caches.pop())

    def replay() -> None:
        assert prime.capture is not None
        prime.capture.replay()

    def copy() -> None:
        with torch.inference_mode():
            prime.copies.copy(pairs)

    for _ in range(3):
        breakable()  # the reference, the capture, a replay
    session = names.new_cache(model.config)
    with torch.inference_mode():
        trunk.reserve(session, n)  # type: ignore[attr-defined]
        pairs = prime.copies.pairs(trunk.state(session), 0, 0, n)
        got, want = run(), prime.reference(prompt.ids)
    runs = {"eager": eager, "breakable": breakable, "prime": run, "replay": replay, "copy": copy}
    taken = timing.wall_in_turns(runs, times)
    whole, copied = timing.kernels(run), timing.kernels(copy)
    busy = None if whole is None or copied is None else whole - copied
    forwards, recordings = _recordings(prime, eager)
    differs = difference(got.logits, want.logits) or difference(got.hidden, want.hidden)
    return {
        "tokens": n,
        "eager ms": taken["eager"] * 1e3,
        "breakable ms": taken["breakable"] * 1e3,
        "prime ms": taken["prime"] * 1e3,
        "of it replay ms": taken["replay"] * 1e3,
        "kernel sum ms": None if busy is None else busy * 1e3,
        "prime / breakable": taken["prime"] / taken["breakable"],
        "prime / kernel sum": None if busy is None else taken["prime"] / busy,
        "replay / kernel sum": None if busy is None else taken["replay"] / busy,
        "copy-out us": taken["copy"] * 1e6,
        "of it device us": None if copied is None else copied * 1e6,
        "copied MB": sum(to.numel() * to.element_size() for to, _ in pairs) / 1e6,
        "cut after": str(list(prime.cuts)),
        "recording ms": recordings * 1e3,
        "recording / eager": recordings / forwards,
        "prime = reference": differs or SAME,
    }


def _recordings(prime: PrimeGraph, eager: Callable[[], object]) -> tuple[float, float]:
    """Median seconds, taken in turns: an eager forward, and recording ``prime`` as it is cut."""
    eagerly: list[float] = []
    recording: list[float] = []
    for _ in range(_RECORDINGS):
        eagerly.append(timing.wall(eager))
        with PrimeGraph(prime.trunk, prime.bucket, cuts=prime.cuts, device=prime.device) as again:
            recording.append(again.seconds)
    return statistics.median(eagerly), statistics.median(recording)


def float32() -> ModelTrunk:
    """The trunk that is measured, in float32: ``segue check prime segue.bench.prime_latency:float32 --bucket 512``."""
    return _trunk(torch.float32)


def bfloat16() -> ModelTrunk:
    """The trunk that is measured, in bfloat16."""
    return _trunk(torch.bfloat16)


def _trunk(dtype: torch.dtype) -> ModelTrunk:
    return ModelTrunk(Shape().model(dtype, torch.device("cuda" if torch.cuda.is_available() else "cpu")))
