"""Decoding: a step of generate() and of the model alone by batch and context, a whole text, and how exact half precision is."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from segue.bench import timing
from segue.bench.decode import (
    DECODE_RIVALS,
    NEW_TOKENS,
    STATIC,
    Generate,
    by_generate,
    compiled_calls_timed,
    decode_rival,
    reason,
)
from segue.bench.decoder import Shape
from segue.bench.models import FreshPrompt, last_logits, sharing_copy
from segue.bench.result import SAME, BenchResult, Row
from segue.bench.ways import EAGER, RivalMissing
from segue.devices import Device
from segue.integrations.transformers import accelerate, names

PLACES = ((1, 128), (1, 2048), (1, 16384), (8, 128), (8, 2048), (8, 16384), (32, 128), (32, 2048))  # batch and context
SMALL, SMALL_PLACES = Shape(2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48, vocabulary=61), ((1, 12), (3, 9))
UNSTEADY = "the reference differs from itself"
_LONGEST = 2048  # tokens of prompts that run out of graphs; steps follow longer ones all the same
_GENERATIONS = 3
_CALLS = 24  # of the model alone
_FORCED = 200  # tokens
_TEXT = 128, 256  # tokens of a prompt, and new ones


@dataclass(frozen=True, kw_only=True)
class Steps(BenchResult):
    """Rows of steps, of whole texts, and of errors against fp32."""

    title: ClassVar[str] = "Decoding steps"

    rows: Sequence[Row]
    texts: Sequence[Row]
    errors: Sequence[Row]
    missing: Sequence[Row]

    @property
    def tables(self) -> Mapping[str, Sequence[Row]]:
        return {
            "One step": self.rows,
            f"{_TEXT[1]} tokens after a prompt of {_TEXT[0]}": self.texts,
            f"{_FORCED} forced tokens, largest difference of the logits to fp32": self.errors,
            "Not measured": self.missing,
        }


class _Way:
    """One way to decode by ``model``, which no other way has.

    ``rival``: the name of what makes the tokens, if that isn't ``model.generate()`` alone. ``seconds``: of its start-up.
    """

    def __init__(
        self, name: str, model: Any, device: Device, handle: Any = None, breakable: bool = False, seconds: float = 0.0
    ) -> None:
        self.name, self.model, self.handle, self.seconds = name, model, handle, seconds
        self.rival = name if name in DECODE_RIVALS else ""
        self._device, self._breakable = device, breakable
        self._generates = {new: self._by(new) for new in (NEW_TOKENS, _TEXT[1])}

    def _by(self, new: int) -> Generate:
        return decode_rival(self.rival, self.model, self._device, new) if self.rival else by_generate(self.model, new)

    def context(self) -> AbstractContextManager[Any]:
        """Within this block the model runs this way."""
        only: AbstractContextManager[Any] = self.handle.breakable_only() if self._breakable else nullcontext()
        return only

    def generate(self, ids: Tensor, new: int = NEW_TOKENS) -> tuple[float, Tensor]:
        """Seconds of a step, and ``new`` tokens."""
        with self.context():
            return self._generates[new](ids)

    def call(self, ids: Tensor, times: int) -> float | None:
        """Median seconds of the model's own call for one more token, from an idle device to an idle device. None where no such
        call can be had."""
        if self.rival == STATIC:
            with compiled_calls_timed(self.model) as taken:
                self.generate(ids)
        elif self.rival:
            return None
        else:
            cache = names.new_cache(self.model.config)
            with torch.inference_mode(), self.context():
                last_logits(self.model, ids, cache)
                step = ids[:, :1].clone()
                taken = [timing.wall(lambda: last_logits(self.model, step, cache)) for _ in range(times)]
        return statistics.median(taken[len(taken) // 4 :]) if taken else None


def measure(
    model: Any,
    device: Device,
    *,
    places: Sequence[tuple[int, int]] = PLACES,
    compile: bool = True,
    rivals: Sequence[str] = DECODE_RIVALS,
    generations: int = _GENERATIONS,
    forced: int = _FORCED,
    progress: Callable[[str], None] = print,
    keep: Callable[[Steps], None] = lambda so_far: None,
) -> Steps:
    """Measure decoding of a transformers model, all ways in turns at each place.

    Args:
        model: a causal language model on ``device``'s place, in eval mode.
        places: batch and tokens of the context. ``compile``: segue with compiled layers too. ``rivals``: beside it.
        generations: by each way, of which the median step counts. ``forced``: tokens that errors are measured over.
        progress: gets a line for each step. ``keep``: gets what there is after each place, since all of it takes minutes.
    """
    longest = max(min(n * b, _LONGEST) for b, n in places)
    ways, missing = _ways(model, device, longest, compile, rivals, progress)
    rows, texts, errors = list[Row](), list[Row](), list[Row]()
    try:
        for batch, context in places:
            rows += _place(ways, batch, context, generations, missing, progress)
            keep(_result(model, rows, texts, errors, missing))
        texts = [] if not device.traits.timing else _texts(model, ways, progress)
        keep(_result(model, rows, texts, errors, missing))
        errors = _errors(model, ways, forced)
    finally:
        for way in ways:
            if way.handle is not None:
                way.handle.restore()
    return _result(model, rows, texts, errors, missing)


def _result(
    model: Any, rows: Sequence[Row], texts: Sequence[Row], errors: Sequence[Row], missing: Sequence[Row]
) -> Steps:
    notes = (
        f"Random weights, {str(model.dtype).removeprefix('torch.')}. Medians; all ways in turns at each place. *call*: the model "
        "alone, for one token more, from an idle device to an idle device. *breakable*: the same handle without full graphs. "
        "*full*: steps that full graphs made, of all. *replay = reference*: tokens of generate() against the same functions "
        f"without graphs; {UNSTEADY!r} where those give other tokens from time to time.",
    )
    right = all(row.get("replay = reference") in (None, SAME, UNSTEADY) for row in rows)
    return Steps(rows=[*rows], texts=texts, errors=errors, missing=[*missing], right=right, notes=notes)


def _ways(
    model: Any, device: Device, longest: int, compile: bool, rivals: Sequence[str], progress: Callable[[str], None]
) -> tuple[list[_Way], list[Row]]:
    ways, missing = [_Way(EAGER, model, device)], list[Row]()
    for fused in (False, True)[: 2 if compile else 1]:
        begin = time.perf_counter()
        handle: Any = accelerate(sharing_copy(model), max_tokens=longest, compile=fused, device=device)
        handle.capture()
        timing.synchronize()
        name, seconds = "segue compiled" if fused else "segue", time.perf_counter() - begin
        progress(f"{name}: captured in {seconds:.1f} s")
        for way, breakable in ((name, False), (f"{name}, breakable", True)):
            ways.append(_Way(way, handle.module, device, handle, breakable, seconds))
    for name in rivals:
        try:
            ways.append(_Way(name, sharing_copy(model), device))
        except RivalMissing as e:
            missing.append({"rival": name, "where": "everywhere", "reason": str(e)})
    return ways, missing


def _warm_up(ways: Sequence[_Way], ids: Tensor, where: str, missing: list[Row]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Generate twice by each way: its tokens, and the seconds of both. A rival that fails is added to ``missing`` instead."""
    tokens: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    for way in ways:
        begin = time.perf_counter()
        try:
            for _ in range(2):
                tokens[way.name] = way.generate(ids)[1].clone()
        except Exception as e:
            if not way.rival:
                raise
            missing.append({"rival": way.name, "where": where, "reason": reason(e)})
            continue
        timing.synchronize()
        seconds[way.name] = time.perf_counter() - begin
    return tokens, seconds


def _place(
    ways: Sequence[_Way], batch: int, context: int, generations: int, missing: list[Row], progress: Callable[[str], None]
) -> list[Row]:
    ids = FreshPrompt(ways[0].model, context, calls=0, batch=batch).ids
    tokens, started = _warm_up(ways, ids, f"batch {batch}, context {context}", missing)
    there = [way for way in ways if way.name in started]
    taken: dict[str, list[float]] = {way.name: [] for way in there}
    full = {way.name: 0 for way in there}
    for _ in range(generations):
        for way in there:
            before = _full(way)
            taken[way.name].append(way.generate(ids)[0])
            full[way.name] += _full(way) - before
    alone = {way.name: way.call(ids, _CALLS) for way in there}
    steps = (f"{way.name} {statistics.median(taken[way.name]) * 1e3:.2f}" for way in there)
    progress(f"batch {batch}, context {context}, ms a step: {', '.join(steps)}")
    return [
        {
            "batch": batch,
            "context": context,
            "way": way.name,
            "step of generate() ms": statistics.median(taken[way.name]) * 1e3,
            "call ms": seconds * 1e3 if (seconds := alone[way.name]) is not None else None,
            "first two generations s": started[way.name],
            "full": full[way.name] if way.handle is not None else None,
            "replay = reference": _verdict(way, ids, tokens[way.name]),
            "tokens as eager's": f"{_leading(tokens[way.name], tokens[EAGER])} of {tokens[EAGER].shape[1]}",
        }
        for way in there
    ]


def _full(way: _Way) -> int:
    return 0 if way.handle is None else way.handle.stats.strategies.get("full", 0)


def _verdict(way: _Way, ids: Tensor, replayed: Tensor) -> str | None:
    if way.handle is None:
        return None
    with way.handle.reference():
        expected = way.generate(ids)[1]
        if torch.equal(replayed, expected):
            return SAME
        return "NO" if torch.equal(way.generate(ids)[1], expected) else UNSTEADY


def _leading(tokens: Tensor, eager: Tensor) -> int:
    return int((tokens == eager).long().cumprod(dim=1).sum(dim=1).min())


def _texts(model: Any, ways: Sequence[_Way], progress: Callable[[str], None]) -> list[Row]:
    prompt, new = _TEXT
    ids = FreshPrompt(model, prompt, calls=0, seed=1).ids
    rows: list[Row] = []
    for way in ways:
        begin = time.perf_counter()
        try:
            way.generate(ids, new)
        except Exception:
            if not way.rival:
                raise
            continue  # the reason is among what was not measured
        timing.synchronize()
        warm = way.seconds + time.perf_counter() - begin
        seconds = min(timing.wall(partial(way.generate, ids, new)) for _ in range(2))
        rows.append({"way": way.name, "seconds": seconds, "warm-up s": warm})
        progress(f"a text by {way.name}: {seconds:.2f} s")
    return rows


def _errors(model: Any, ways: Sequence[_Way], forced: int) -> list[Row]:
    """How far logits of forced steps are from those of the same weights in fp32, at most and on average over the steps."""
    tokens = FreshPrompt(model, forced + 16, calls=0, seed=2).ids
    exact = copy.deepcopy(model).float()  # a copy that shared its weights would give all of them another dtype
    want = _forced(exact, tokens)
    del exact
    rows: list[Row] = []
    for way in ways:
        if way.rival:
            continue
        with way.context():
            off = (_forced(way.model, tokens) - want).abs().amax(-1)
        rows.append({"way": way.name, "at most": off.max().item(), "mean of the steps": off.mean().item()})
    return rows


def _forced(model: Any, tokens: Tensor) -> Tensor:
    """Logits [steps, V] of each token after a prompt of 16, in fp32."""
    cache, found = names.new_cache(model.config), []
    with torch.inference_mode():
        last_logits(model, tokens[:, :16], cache)
        for at in range(16, tokens.shape[1]):
            found.append(last_logits(model, tokens[:, at : at + 1], cache)[0, -1].float())
    return torch.stack(found)
