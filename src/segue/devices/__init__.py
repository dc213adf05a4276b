"""The devices that record segments, and how the one to use is found."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from segue.devices.protocol import Device, Pool, PoolUsage, Recording, Segment, Traits
from segue.errors import InputError, UsageError

__all__ = [
    "Device",
    "Pool",
    "PoolUsage",
    "Recording",
    "Segment",
    "Traits",
    "device_of",
    "is_recorded",
    "new_pool",
    "pool_of",
    "resolve",
    "runs_compiled",
    "stream_of",
]

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


def new_pool(device: str | torch.device | Device | None = None, group: Any = None) -> Pool:
    """A graph pool that no capture has unless it is given it, as ``pool=``: memory that other graphs free is not used again.

    Graphs of one pool reuse what the others freed. Where eager code keeps a raw address of such memory, as a decode kernel's
    workspace does, give other graphs a pool of their own. Its memory goes back when the last graph in it is closed.

    ``device``: as for :class:`~segue.BreakableCapture`. ``group``: a process group of ``torch.distributed``, whose NCCL registers
    the pool's memory, so that collectives in graphs need no copies where NCCL can do without. It has made a collective on the
    device already, or was made with ``device_id=``.

    Raises:
        UsageError: the group registers no memory for this device, as gloo does not.
    """
    return resolve(device).new_pool(group)


def device_of(pool: Any) -> Device | None:
    """The device of ``pool=``, as users give it; None where it is None or a handle of torch's, which says no device.

    Raises:
        InputError: it is neither a pool nor such a handle.
    """
    if _is_pool(pool):
        return cast("Pool", pool).device
    if pool is None or _is_handle(pool):
        return None
    raise InputError(
        f"pool={pool!r} is no graph pool: give segue.new_pool(), another capture's or runner's pool, or a handle of torch's, "
        "torch.cuda.graph_pool_handle() or CUDAGraph.pool()"
    )


def pool_of(device: Device, pool: Any) -> Pool:
    """The pool on ``device`` that ``pool=``, as users give it, means; None means the one that captures share.

    Raises:
        InputError: it is neither a pool of this device nor a handle of torch's.
    """
    home = device_of(pool)
    if home is None:
        return device.default_pool() if pool is None else device.pool_at(pool)
    if home is not device:
        raise InputError(f"pool= is a pool of {home.name}, and the graphs are on {device.name}. Give one of that device")
    return cast("Pool", pool)


def stream_of(device: Device, stream: Any) -> Any:
    """The stream on ``device`` that ``stream=``, as users give it, means; None means the one that captures share.

    Raises:
        InputError: it is no stream of this device.
    """
    if stream is None:
        return device.default_stream()
    if not device.has_stream(stream):
        raise InputError(f"stream={stream!r} is no stream of {device.name}: leave it out, or give a torch.cuda.Stream() of it")
    return stream


def _is_pool(pool: Any) -> bool:
    return hasattr(pool, "turn") and hasattr(pool, "device")


def _is_handle(pool: Any) -> bool:
    return isinstance(pool, tuple) and len(pool) == 2 and all(type(n) is int for n in pool)


def is_recorded(place: torch.device) -> bool:
    """Whether the current stream of ``place`` is being recorded, by whomever."""
    return place.type == "cuda" and torch.cuda.is_current_stream_capturing()


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
