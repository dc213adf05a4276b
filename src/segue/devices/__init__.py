"""Devices that record segments, and how one is chosen."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from segue.devices.protocol import Device, Pool, PoolUsage, Recording, Segment, Traits
from segue.errors import UsageError

__all__ = ["Device", "Pool", "PoolUsage", "Recording", "Segment", "Traits", "resolve"]

_made: dict[str, Device] = {}
_lock = threading.Lock()
_warned = False
_TAKES = 'segue takes "cuda", "cuda:0" and, for correctness only, "emulator"'


def resolve(device: str | torch.device | Device | None, tensors: Iterable[Tensor] = ()) -> Device:
    """The device for ``device=`` as users give it: None (that of ``tensors``, or CUDA where there is one), ``"emulator"``,
    or anything ``torch.device`` takes. CPU means the emulator, which says once that it is for correctness only.

    Raises:
        UsageError: there is no such device, or none that segue captures on.
    """
    if device is None:
        first = next(iter(tensors), None)
        device = first.device if first is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, str | torch.device):
        if not hasattr(device, "torch_device"):
            raise UsageError(f"device={device!r} is a {type(device).__qualname__}; {_TAKES}")
        return device
    if device == "emulator":
        return _emulator()
    try:
        place = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device={device!r} names no device; {_TAKES}") from None
    if place.type == "cpu":
        _warn_emulated()
        return _emulator()
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (place.index or 0) >= count:
            raise UsageError(f"device={str(place)!r}: torch sees {count} CUDA devices here; {_TAKES}")
        return _cuda(torch.cuda.current_device() if place.index is None else place.index)
    raise UsageError(f"segue captures on CUDA devices and, emulated, on CPU tensors; got device {str(place)!r}")


def _emulator() -> Device:
    from segue.devices.emulator import Emulator

    with _lock:
        if "emulator" not in _made:
            _made["emulator"] = Emulator()
        return _made["emulator"]


def _cuda(index: int) -> Device:
    from segue.devices.cuda import CudaDevice

    name = f"cuda:{index}"
    with _lock:
        if name not in _made:
            _made[name] = CudaDevice(index)
        return _made[name]


def _warn_emulated() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "segue: CPU tensors run on the emulator, which checks correctness and is no faster than eager; "
            'pass device="emulator" to say that this is meant',
            stacklevel=4,
        )
