"""What the commands ask of handles of :func:`segue.accelerate`, and of prime graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from segue import environment
from segue.errors import UsageError
from segue.integrations.transformers import accelerate
from segue.integrations.transformers.base_handle import Handle
from segue.prime import PrimeGraph
from segue.runner import GraphRunner

_CACHES = ("cache", "past_key_values", "cache_params")  # what releases of transformers and families call their cache


def is_handle(value: Any) -> bool:
    """Whether this is what :func:`segue.accelerate` returns."""
    return isinstance(value, Handle)


def accelerated(model: nn.Module, **options: Any) -> Any:
    """The handle of a model; on the emulator if the model lies on the CPU. ``options``: those of :func:`segue.accelerate`.

    Raises:
        SegueError: the model can't be accelerated, and why.
    """
    if environment.disabled():
        raise UsageError("SEGUE=off is set, so there are no graphs to check or to take apart")
    first = next(model.parameters(), None)
    on_cpu = first is not None and first.device.type == "cpu"
    return accelerate(model, device="emulator" if on_cpu else None, **options)


def prime_graph(trunk: Any, bucket: int, requests: int = 1) -> PrimeGraph:
    """A prime graph of a trunk, on the emulator if there is no CUDA device."""
    return PrimeGraph(trunk, bucket, requests, device=None if torch.cuda.is_available() else "emulator")


def model_of(handle: Any) -> Any:
    """The transformers model itself."""
    with handle.untouched() as model:
        return model


def most_tokens(handle: Any) -> int:
    """The most tokens of a sequence that has a graph.

    Raises:
        UsageError: none has, because ``SEGUE=off`` was set.
    """
    low, high = 0, 1
    while handle.graphs_of(high)[0] is not None:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if handle.graphs_of(middle)[0] is None else (middle, high)
    if not low:
        raise UsageError("SEGUE=off was set when this handle was made, so it has no graphs to check or to take apart")
    return low


def device_of(handle: Any) -> str:
    """The device that captures, in words."""
    return "the emulator" if model_of(handle).device.type == "cpu" else f"{model_of(handle).device}"


def call_of_runner(handle: Any, run: Callable[[], Any]) -> tuple[GraphRunner, tuple[Any, ...], dict[str, Any]] | None:
    """The runner that ``run()``, a forward of the model, replays, and what it is called with; None if it replays none."""
    seen: list[tuple[GraphRunner, tuple[Any, ...], dict[str, Any]]] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        one_of_many = bool(args) and isinstance(args[0], GraphRunner)  # then its tensors follow
        runner, given = (args[0], tuple(args[1])) if one_of_many else (handle.runner, args)
        seen.append((runner, given, {key: value for key, value in kwargs.items() if key != "ctx"}))
        return runner.reference(*given, **kwargs)

    with handle.with_body(note), handle.breakable_only():
        run()
    return seen[0] if seen else None


def parts_of(output: Any) -> dict[str, Any]:
    """What a model's output holds, by name; by number where it is a tuple."""
    if isinstance(output, Mapping):
        return dict(output)
    return {str(i): part for i, part in enumerate(output)} if isinstance(output, tuple | list) else {"output": output}


def cache_in(output: Any) -> tuple[str, Any] | None:
    """The cache in a model's output, and the name of the argument that gives it to the next forward; None without one."""
    parts = parts_of(output)
    return next(((name, parts[name]) for name in _CACHES if parts.get(name) is not None), None)
