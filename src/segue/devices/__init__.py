"""The devices that record segments, and how the one to use is found."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from segue.devices.protocol import Device, Pool, PoolUsage, Recording, Segment, Traits
from segue.errors import UsageError

__all__ = ["Device", "Pool", "PoolUsage", "Recording", "Segment", "Traits", "resolve", "runs_compiled"]

_devices: dict[str, Device] = {}  # by name
_lock = threading.Lock()
_warned = False
_ACCEPTED = 'segue takes "cuda", "cuda:0" and, for correctness only, "emulator"'


def resolve(device: str | torch.device | Device | None, tensors: Iterable[Tensor] = ()) -> Device:
    """The device that ``device=``, as users give it, means.

    ``device``: a device of segue's, ``"emulator"``, anything that ``torch.device`` takes, or None for the device of the first of
    ``tensors`` or, without tensors, CUDA where there is one. A CPU device means the emulator, with a warning, given once, that it
    is for correctness only.

    Raises:
        UsageError: there is no such device, or segue can't capture on it.
        UnsupportedTorchError: this torch lacks a private call that segue needs on CUDA.
    """
    if device is None:
        first = next(iter(tensors), None)
        device = first.device if first is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, str | torch.device):
        if not hasattr(device, "torch_device"):
            raise UsageError(f"device={device!r} is a {type(device).__qualname__}; {_ACCEPTED}")
        return device
    if device == "emulator":
        return _emulator()
    try:
        place = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device={device!r} names no device; {_ACCEPTED}") from None
    if place.type == "cpu":
        _warn_emulated()
        return _emulator()
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (place.index or 0) >= count:
            raise UsageError(f"device={str(place)!r}: torch sees {count} CUDA devices here; {_ACCEPTED}")
        return _cuda(torch.cuda.current_device() if place.index is None else place.index)
    raise UsageError(f"segue captures on CUDA devices and, emulated, on CPU tensors; got device {str(place)!r}")


def runs_compiled(place: torch.device) -> bool:
    """Whether segments on tensors of this device run compiled code as such. The emulator runs it as its Python."""
    return place.type == "cuda"


def _emulator() -> Device:
    from segue.devices.emulator import Emulator

    with _lock:
        if "emulator" not in _devices:
            _devices["emulator"] = Emulator()
        return _devices["emulator"]


def _cuda(index: int) -> Device:
    from segue.devices.cuda import CudaDevice

    name = f"cuda:{index}"
    with _lock:
        if name not in _devices:
            _devices[name] = CudaDevice(index)
        return _devices[name]


def _warn_emulated() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "segue: CPU tensors run on the emulator, which checks correctness and is no faster than eager; "
            'pass device="emulator" to say that this is meant',
            stacklevel=4,
        )
