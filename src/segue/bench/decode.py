"""One decoding step of ``generate()``: eager, segue, a static cache with compiled decode, and gpuopt-runtime."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from segue.bench import timing
from segue.bench.models import FreshPrompt
from segue.bench.result import SAME, Row
from segue.bench.ways import EAGER, RivalMissing, Segue
from segue.devices import Device

STATIC, GPUOPT = "static-cache", "gpuopt-runtime"
DECODE_RIVALS = (STATIC, GPUOPT)
PROMPT = 128  # tokens
NEW_TOKENS = 32

# Greedy decoding of a prompt [B, n]: the seconds of one step, and the new tokens.
Generate = Callable[[Tensor], tuple[float, Tensor]]


class StepClock:
    """A streamer for ``generate()`` that notes when each token has come to the host, which generate() waits for anyway."""

    def __init__(self) -> None:
        self._seen: list[float] = []

    def put(self, tokens: Tensor) -> None:
        """Note the time. The first ``tokens`` are the prompt, the second come from its forward."""
        self._seen.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""
        return

    @property
    def step(self) -> float:
        """Median seconds from one token to the next, without the prompt's forward."""
        return statistics.median(b - a for a, b in zip(self._seen[1:], self._seen[2:], strict=False))


def by_generate(model: Any, new: int = NEW_TOKENS, **options: Any) -> Generate:
    """``model.generate()`` of ``new`` tokens, with these options."""

    def generate(ids: Tensor) -> tuple[float, Tensor]:
        clock = StepClock()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, streamer=clock,
            max_new_tokens=new, min_new_tokens=new, **options,
        )  # fmt: skip
        return clock.step, out[:, ids.shape[1] :]

    return generate


def decode_rival(name: str, model: Any, device: Device, new: int = NEW_TOKENS) -> Generate:
    """The rival of that name, one of :data:`DECODE_RIVALS`, on ``model``, for ``new`` tokens.

    Raises:
        RivalMissing: it isn't installed, or can't run on this device.
    """
    if name == GPUOPT:
        return _by_gpuopt(model, new)
    if not device.traits.timing:
        raise RivalMissing(f"not compiled on device {device.name}, where no time is meant")
    return by_generate(model, new, cache_implementation="static")


@contextmanager
def compiled_calls_timed(model: Any) -> Iterator[list[float]]:
    """The seconds of each compiled call that ``generate()`` makes within this block, from an idle device to an idle device."""
    taken: list[float] = []

    def timed(config: Any) -> Callable[..., Any]:
        run = type(model).get_compiled_call(model, config)

        def call(*args: Any, **kwargs: Any) -> Any:
            out: list[Any] = []
            taken.append(timing.wall(lambda: out.append(run(*args, **kwargs))))
            return out[0]

        return call

    model.get_compiled_call = timed
    try:
        yield taken
    finally:
        del model.get_compiled_call


def _by_gpuopt(model: Any, new: int) -> Generate:
    try:
        package: Any = importlib.import_module("gpuopt")
    except ImportError as e:
        raise RivalMissing(f"not installed: {e} (pip install --no-deps {GPUOPT})") from e
    pool = package.CUDAGraphPool()

    def generate(ids: Tensor) -> tuple[float, Tensor]:
        result = pool.generate_greedy(model, {"input_ids": ids}, new, validate=False)
        if result.fallback_reason is not None:
            raise RivalMissing(f"it fell back to eager: {result.fallback_reason}")
        return result.decode_ms / 1e3 / (new - 1), result.token_ids

    return generate


def measure_batch(
    model: Any,
    segues: Sequence[Segue],
    rivals: dict[str, Generate],
    batch: int,
    times: int,
    missing: list[Row],
    progress: Callable[[str], None],
) -> list[Row]:
    """A row for each way to decode ``batch`` sequences after a prompt of :data:`PROMPT` tokens, all of them in turns.

    ``model``: the untouched one. ``times``: generations by each way. A rival that fails gets a row in ``missing``.
    """
    ids = FreshPrompt(model, PROMPT, calls=0, batch=batch).ids
    ways = {EAGER: by_generate(model), **{way.name: by_generate(way.model) for way in segues}, **rivals}
    seconds, tokens = _started(ways, rivals.keys(), ids, missing, progress)
    seconds |= {way.name: seconds[way.name] + way.seconds for way in segues}
    taken: dict[str, list[float]] = {name: [] for name in tokens}
    for _ in range(times):
        for name in taken:
            taken[name].append(ways[name](ids)[0])
    eager = statistics.median(taken[EAGER])
    verdicts = {way.name: _verdict(way, ids, tokens[way.name]) for way in segues}
    return [
        {
            "batch": batch,
            "way": name,
            "step ms": statistics.median(steps) * 1e3,
            "eager / this": eager / statistics.median(steps),
            "start-up s": seconds[name],
            "replay = reference": verdicts.get(name),
            "tokens as eager's": _agreement(tokens[name], tokens[EAGER]),
        }
        for name, steps in taken.items()
    ]


def _started(
    ways: dict[str, Generate], may_fail: Collection[str], ids: Tensor, missing: list[Row], progress: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The seconds of each way's first two generations, and the tokens of the second one."""
    seconds: dict[str, float] = {}
    tokens: dict[str, Tensor] = {}
    for name, generate in ways.items():
        begin = time.perf_counter()
        try:
            generate(ids)
            tokens[name] = generate(ids)[1].clone()
        except Exception as e:
            if name not in may_fail:
                raise
            missing.append({"rival": name, "where": f"batch {ids.shape[0]}", "reason": reason(e)})
            continue
        timing.synchronize()
        seconds[name] = time.perf_counter() - begin
        progress(f"decode, batch {ids.shape[0]}: {name} started in {seconds[name]:.1f} s")
    return seconds, tokens


def _verdict(way: Segue, ids: Tensor, replayed: Tensor) -> str:
    reference: AbstractContextManager[Any] = way.handle.reference()
    with reference:
        expected = by_generate(way.model)(ids)[1]
    return SAME if torch.equal(replayed, expected) else "NO"


def _agreement(tokens: Tensor, eager: Tensor) -> str:
    """How many leading tokens of the worst sequence are eager's."""
    leading = (tokens == eager).long().cumprod(dim=1).sum(dim=1).min().item()
    return f"{leading} of {eager.shape[1]}"


def reason(error: BaseException) -> str:
    """Why a rival has no row: the first line of its error, shortened."""
    text = str(error).strip().split("\n")[0][:300]
    return text if isinstance(error, RivalMissing) else f"{type(error).__name__}: {text}"
