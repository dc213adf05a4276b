"""What the commands ask of :func:`segue.accelerate` and its handles."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from segue import environment
from segue.errors import UsageError
from segue.integrations.transformers import accelerate
from segue.integrations.transformers.base_handle import Handle
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
        raise UsageError("SEGUE=off is set, so there are no graphs to check, to take apart or to plan for")
    first = next(model.parameters(), None)
    on_cpu = first is not None and first.device.type == "cpu"
    return accelerate(model, device="emulator" if on_cpu else None, **options)


def model_of(handle: Any) -> Any:
    """The transformers model itself."""
    with handle.untouched() as model:
        return model


def runner_of(handle: Any) -> GraphRunner:
    """The runner of what is captured of the model.

    Raises:
        UsageError: the handle has none, because ``SEGUE=off`` was set.
    """
    runner = getattr(handle, "runner", None)
    if not isinstance(runner, GraphRunner):
        raise UsageError("SEGUE=off was set when this handle was made, so it has no graphs to check or to take apart")
    return runner


def device_of(handle: Any) -> str:
    """The device that captures, in words."""
    return "the emulator" if model_of(handle).device.type == "cpu" else f"{model_of(handle).device}"


def call_of_runner(handle: Any, run: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments that the handle's runner is called with while ``run()`` calls the model once; None if it isn't called."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, {k: v for k, v in kwargs.items() if k != "ctx"}))
        return runner_of(handle).reference(*args, **kwargs)

    with handle.with_body(note), handle.without_prime():
        run()
    return seen[0] if seen else None


def cache_in(output: Any) -> tuple[str, Any] | None:
    """The cache in a model's output, and the name of the argument that gives it to the next forward; None without one."""
    for name in _CACHES:
        if (cache := getattr(output, name, None)) is not None and not isinstance(cache, Tensor):
            return name, cache
    return None
