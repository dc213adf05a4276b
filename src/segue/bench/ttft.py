"""Time to first token of one prompt's forward with the cache filled: eager, segue, and the sum of its kernels.

The model has the shape of Qwen3-0.6B and random weights: time doesn't depend on what they are.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from segue import _torch
from segue.bench import clock, decoder
from segue.devices import Device
from segue.integrations.transformers import accelerate, names
from segue.integrations.transformers.lazy_cache_init import init_layer

LENGTHS = (16, 128, 512, 2048)


@dataclass(frozen=True)
class Shape(decoder.Shape):
    """A language model's size. The default is Qwen3-0.6B's."""

    vocabulary: int = 151936

    def model(self, dtype: torch.dtype, device: torch.device) -> Any:
        """A Qwen3 with random weights, in eval mode."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            num_hidden_layers=self.layers, hidden_size=self.hidden, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, head_dim=self.head_dim, intermediate_size=self.intermediate,
            vocab_size=self.vocabulary, max_position_embeddings=40960, tie_word_embeddings=True,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
        return model.to(dtype).eval()


@dataclass(frozen=True)
class Result:
    """What one run measured."""

    rows: list[dict[str, Any]]  # one per length
    capture: dict[str, Any]
    breaks: list[dict[str, Any]]  # where a break's host time goes
    right: bool  # every replay equal to its reference, bit for bit
    notes: list[str] = field(default_factory=list)


def measure(
    device: Device,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.bfloat16,
    lengths: Sequence[int] = LENGTHS,
    times: int = 20,
    progress: Callable[[str], None] = lambda line: None,
) -> Result:
    """Capture the default ladder up to the longest of ``lengths``, breakable and with prime, and measure at each of them."""
    shape = shape or Shape()
    model = shape.model(dtype, device.torch_device).requires_grad_(False)
    with accelerate(model, max_tokens=max(lengths), device=device) as graphed:
        start = time.perf_counter()
        graphed.capture()
        clock.synchronize()
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
    return Result(rows, capture, breaks, all(row["replay = reference"] == "bit for bit" for row in rows), notes)


def _row(graphed: Any, n: int, times: int) -> dict[str, Any]:
    model = graphed.model
    draw = torch.Generator().manual_seed(n)
    ids = torch.randint(0, model.config.vocab_size, (1, n), generator=draw).to(model.device)
    name = names.cache_name(model.forward)
    caches = [names.new_cache(model.config) for _ in range(3 * times + 80)]  # generate() too makes them before its forwards

    def forward() -> Any:
        with torch.inference_mode():
            return model(ids, use_cache=True, logits_to_keep=1, **{name: caches.pop()})

    def eager() -> Any:
        with graphed.untouched():
            return forward()

    def breakable() -> Any:
        with _without_prime(graphed):
            return forward()

    before = graphed.stats
    taken = clock.interleaved({"eager": eager, "segue": forward, "breakable": breakable}, times)
    after = graphed.stats
    busy = clock.kernels(eager)
    same, off = _compare(graphed, ids)
    with _without_prime(graphed):
        same = _compare(graphed, ids)[0] and same
    served = {name: count - before.strategies.get(name, 0) for name, count in after.strategies.items()}
    host = clock.host(forward, times=20, batch=1), clock.host(breakable, times=20, batch=1)
    graphed._here.run = lambda x, *_, **__: x  # the forward around the body alone
    around = clock.host(breakable, times=20, batch=1)
    graphed._here.run = None
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
        "replay = reference": "bit for bit" if same else "NO",
        "largest difference to eager": off,
    }


@contextmanager
def _without_prime(graphed: Any) -> Iterator[None]:
    """Fresh prompts too go through the breakable graphs."""
    prime, graphed._prime = graphed._prime, None
    try:
        yield
    finally:
        graphed._prime = prime


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


def _breaks(graphed: Any, shape: Shape, dtype: torch.dtype, n: int, device: torch.device) -> list[dict[str, Any]]:
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
        return [{"part": part, "host us": clock.host(run, times, batch) * 1e6} for part, run in parts.items()]
