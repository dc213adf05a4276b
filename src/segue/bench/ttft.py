"""Time to first token of one prompt's forward with the cache filled: eager, segue, and the sum of its kernels.

The model has the shape of Qwen3-0.6B and random weights, since times don't depend on what the weights are.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from segue import _torch
from segue.bench import timing
from segue.bench.decoder import Shape
from segue.bench.result import SAME, BenchResult, Row
from segue.devices import Device
from segue.integrations.transformers import accelerate, names
from segue.integrations.transformers.attention import init_layer

LENGTHS = (16, 128, 512, 2048)


@dataclass(frozen=True, kw_only=True)
class FirstToken(BenchResult):
    """Times to the first token."""

    title = "Time to first token, one prompt, cache filled"

    rows: list[Row]  # one per length
    capture: Row
    breaks: list[Row]  # where a break's host time goes

    @property
    def tables(self) -> dict[str, list[Row]]:
        """The rows under the titles that are printed above them."""
        return {
            "One prompt": self.rows,
            "Capturing the ladder": [self.capture],
            "Where the host time of one attention break goes, each part alone": self.breaks,
        }


class FreshPrompt:
    """A random prompt of ``n`` tokens for an accelerated model, with caches for so many ``calls``.

    The caches are made before the clock starts, as generate() makes one before its forwards. Each call uses one up.
    """

    def __init__(self, graphed: Any, n: int, calls: int) -> None:
        self._graphed, self._model = graphed, graphed.model
        draw = torch.Generator().manual_seed(n)
        self.ids = torch.randint(0, self._model.config.vocab_size, (1, n), generator=draw).to(self._model.device)
        self._cache_name = names.cache_name(self._model.forward)
        self.caches = [names.new_cache(self._model.config) for _ in range(calls)]

    def forward(self) -> Any:
        """The logits [1, 1, V] of the last token, with a fresh cache filled."""
        with torch.inference_mode():
            return self._model(self.ids, use_cache=True, logits_to_keep=1, **{self._cache_name: self.caches.pop()})

    def eager(self) -> Any:
        """The same by the untouched model."""
        with self._graphed.untouched():
            return self.forward()

    def breakable(self) -> Any:
        """The same by the breakable graphs, without prime."""
        with self._graphed.without_prime():
            return self.forward()


def measure(
    device: Device,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.bfloat16,
    lengths: Sequence[int] = LENGTHS,
    times: int = 20,
    progress: Callable[[str], None] = lambda line: None,
) -> FirstToken:
    """Capture the default ladder up to the longest of ``lengths``, breakable and with prime, and measure at each of them.

    ``shape``: by default Qwen3-0.6B's. ``times``: measurements of each, of which the median counts. ``progress``: gets a line
    for each step.
    """
    shape = shape or Shape()
    model = shape.model(dtype, device.torch_device).requires_grad_(False)
    with accelerate(model, max_tokens=max(lengths), device=device) as graphed:
        start = time.perf_counter()
        graphed.capture()
        timing.synchronize()
        seconds = time.perf_counter() - start
        stats = graphed.stats
        capture = {
            "buckets": stats.captured,
            "seconds": seconds,
            "pool MiB": stats.pool_bytes / 2**20,
            "driver MiB": stats.driver_bytes / 2**20,
        }
        rows = []
        for n in lengths:
            progress(f"{n} tokens")
            rows.append(_row(graphed, n, times))
        progress("a break's host time")
        breaks = _breaks(graphed, shape, dtype, min(lengths), device.torch_device)
    notes = [f"shape: {dataclasses.asdict(shape)}, {str(dtype).removeprefix('torch.')}"]
    notes.append(
        f'Medians of {times}, in turns. *segue*: strategy "auto", which serves a fresh prompt by its prime graph; *breakable*: '
        "the same prompt by the breakable graph. *kernel sum*: device time of the kernels of one eager forward. *host*: how long "
        "the call keeps the host; *outside the body*: embedding, head, and what transformers and segue do around the graphs."
    )
    right = all(row["replay = reference"] == SAME for row in rows)
    return FirstToken(rows=rows, capture=capture, breaks=breaks, right=right, notes=notes)


def _row(graphed: Any, n: int, times: int) -> Row:
    prompt = FreshPrompt(graphed, n, calls=3 * times + 80)
    before = graphed.stats
    runs = {"eager": prompt.eager, "segue": prompt.forward, "breakable": prompt.breakable}
    taken = timing.wall_in_turns(runs, times)
    after = graphed.stats
    busy = timing.kernels(prompt.eager)
    same, off = _compare(graphed, prompt.ids)
    with graphed.without_prime():
        same = _compare(graphed, prompt.ids)[0] and same
    served = {name: count - before.strategies.get(name, 0) for name, count in after.strategies.items()}
    host = timing.host(prompt.forward, times=20, batch=1), timing.host(prompt.breakable, times=20, batch=1)
    with graphed.with_body(lambda x, *_, **__: x):
        around = timing.host(prompt.breakable, times=20, batch=1)
    return {
        "tokens": n,
        "eager ms": taken["eager"] * 1e3,
        "segue ms": taken["segue"] * 1e3,
        "breakable ms": taken["breakable"] * 1e3,
        "kernel sum ms": None if busy is None else busy * 1e3,
        "eager / segue": taken["eager"] / taken["segue"],
        "segue / kernel sum": None if busy is None else taken["segue"] / busy,
        "eager / breakable": taken["eager"] / taken["breakable"],
        "breakable / kernel sum": None if busy is None else taken["breakable"] / busy,
        "host ms, segue": host[0] * 1e3,
        "host ms, breakable": host[1] * 1e3,
        "of it outside the body": around * 1e3,
        "served by": ", ".join(f"{name} {count}" for name, count in served.items() if count),
        "untouched": after.eager - before.eager,
        "replay = reference": SAME if same else "NO",
        "largest difference to eager": off,
    }


def _compare(graphed: Any, ids: torch.Tensor) -> tuple[bool, float]:
    """Whether a replay's hidden states are the reference's, and how far from the untouched model's they are."""
    decoder = graphed.model.base_model

    def hidden() -> torch.Tensor:
        with torch.inference_mode():
            return decoder(ids, use_cache=True).last_hidden_state.clone()  # type: ignore[no-any-return]

    replayed = hidden()
    with graphed.reference():
        reference = hidden()
    with graphed.untouched():
        eager = hidden()
    return torch.equal(replayed, reference), (replayed.float() - eager.float()).abs().max().item()


def _breaks(graphed: Any, shape: Shape, dtype: torch.dtype, n: int, device: torch.device) -> list[Row]:
    """Host microseconds of each thing that one attention break does, one by one, at ``n`` tokens of a fresh prompt."""
    module = graphed.model.base_model.layers[0].self_attn
    attention = names.attention_function(module, graphed.model.config._attn_implementation)
    q, k, v = (
        torch.zeros(1, n, heads, shape.head_dim, dtype=dtype, device=device).transpose(1, 2)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    result = torch.zeros(1, n, shape.heads, shape.head_dim, dtype=dtype, device=device)
    handoff = torch.zeros(1, 2 * n, shape.heads, shape.head_dim, dtype=dtype, device=device)
    both, zeros = [handoff[:, :n], handoff[:, n:]], torch.zeros_like(result)
    times, batch = 200, 10
    caches = [names.new_cache(graphed.model.config) for _ in range(times + batch)]

    def attend() -> torch.Tensor:
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
