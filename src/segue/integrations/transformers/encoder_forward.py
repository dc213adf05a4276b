"""An encoder's whole forward as what is captured: from the inputs to the output's tensors, masks included, without a break."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from segue.capture.places import Places
from segue.devices import refusals
from segue.integrations.transformers.compiled_layers import CompiledLayers
from segue.integrations.transformers.encoder_calls import Boundary

_FACTORIES = {getattr(torch, name) for name in refusals.FACTORIES}


class EncoderBody:
    """``(main, mask, ...) -> tensors of the output``, all at a bucket's shape. Captured without a break.

    Args:
        boundary: whose forward is captured.
        names: the arguments that it is given, in the order of the tensors.
        places: the names that the module reaches, found once for all bodies.
        layers: run compiled.
    """

    owner = "the handle of segue.accelerate"  # whose recapture() errors name

    def __init__(
        self, boundary: Boundary, names: Sequence[str], places: Places, layers: CompiledLayers | None = None
    ) -> None:
        self._boundary, self.places, self._layers = boundary, places, layers
        self.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])

    def __call__(self, **tensors: Tensor) -> tuple[Tensor, ...]:
        with nullcontext() if self._layers is None else self._layers.active():
            out = run_traced(self._boundary, tensors)
        parts = self._boundary.parts_of(out)
        return tuple(parts[name] for name in self._boundary.fields)


def run_plain(boundary: Boundary, tensors: dict[str, Tensor]) -> Any:
    """What the boundary's own forward returns."""
    asks = {"output_hidden_states": True} if boundary.hidden_states else {}
    return boundary.forward(**tensors, **({"return_dict": True} if boundary.return_dict else {}), **asks)


def run_traced(boundary: Boundary, tensors: dict[str, Tensor]) -> Any:
    """The same as it runs where a graph is recorded: no mask is left out because of what is in it."""
    place = tensors[boundary.main].device
    with as_while_capturing(), OnDevice(place) if boundary.host_made else nullcontext():
        return run_plain(boundary, tensors)


def places_of(boundary: Boundary) -> Places:
    """What the module's code decides by: one walk for all graphs. Whether attention is causal is handed on as a plain value."""
    return Places(boundary.module, outside=(boundary.module,), also=("is_causal",), once=True)


class OnDevice(TorchFunctionMode):
    """Makes tensors on the device, where code would make them on the host and copy them there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and len(args) == 1 and kwargs.get("device") is not None and isinstance(args[0], int | float):
            return torch.full((), args[0], **kwargs)  # of the same dtype
        given = any(isinstance(a, Tensor) for a in (*args, *kwargs.values()))
        if func in _FACTORIES and kwargs.get("device") is None and not given:
            kwargs["device"] = self._device
        return func(*args, **kwargs)


class _Here(threading.local):
    capturing = False


_here = _Here()


@contextmanager
def as_while_capturing() -> Iterator[None]:
    """Within this block, in this thread, transformers takes a CUDA stream to be recording.

    It then makes masks without asking the host what is in them. On CUDA it would do so in a capture, but not in the warm-up
    before it, and on the emulator in neither.
    """
    _watch_captures()
    before, _here.capturing = _here.capturing, True
    try:
        yield
    finally:
        _here.capturing = before


@functools.cache
def _watch_captures() -> None:
    """Let transformers' question be answered by :func:`as_while_capturing` too. It stays so; outside such blocks nothing changes.

    Releases that don't ask have nothing to be told.
    """
    from transformers.utils import import_utils

    ask = getattr(import_utils, "is_cuda_stream_capturing", None)
    if ask is None:
        return

    @functools.wraps(ask)
    def capturing() -> bool:
        return _here.capturing or ask()

    import_utils.is_cuda_stream_capturing = capturing
