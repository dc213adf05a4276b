"""What the layers above ask of a device. Two implementations: CUDA and the emulator.

The vocabulary is CUDA's: a *recording* becomes a *segment* (one graph); all segments draw memory from a *pool*, in which a
block whose last tensor died is used again by later ops, segments and captures. Nothing above this file knows which device
it runs on; what a device can't hide it declares in ``Traits``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Traits:
    """What a device can't hide. Read by tests, demo and bench only."""

    streams: bool  # work is asynchronous, and streams order it
    driver_memory: bool  # graphs take memory outside torch's allocator
    timing: bool  # a measured time means something
    compiled: bool  # torch.compile'd code runs compiled inside a segment


@dataclass(frozen=True)
class PoolUsage:
    """Bytes of a pool."""

    reserved: int  # taken from the device for this pool
    live: int  # of these, in blocks that some tensor owns right now


class Segment(Protocol):
    """One captured graph."""

    @property
    def empty(self) -> bool:
        """Nothing was recorded; launching does nothing."""

    def launch(self) -> None:
        """Run what was recorded, in order, on the caller's current stream."""

    def discard(self) -> None:
        """It has not been launched and will not be: nothing that its ops would have written outside the pool is."""

    def destroy(self) -> None:
        """Free it. The pool calls this; a later launch is an error."""


class Recording(Protocol):
    """A segment being recorded. Ends by exactly one of ``commit`` and ``abort``."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one dispatched op (an ``OpOverload``) while recording it and return what the user's code sees.

        Called from the ``__torch_dispatch__`` of the capture's mode, with the mode switched off. ``self.reenter`` (set by
        the capture before the first op) is that mode, for ops that must be opened to show the ops inside them.
        """

    reenter: AbstractContextManager[Any]

    def commit(self) -> Segment:
        """End the recording. The segment has not been launched yet."""

    def abort(self) -> None:
        """End the recording and forget it. Never raises, and leaves the stream not capturing."""


class Pool(Protocol):
    """Graph memory, shared by every segment of every capture that uses it."""

    @property
    def device(self) -> Device: ...

    replays: int  # grows with every replay and every capture: what an older one left may be gone

    def owns(self, t: Tensor, look: bool = True) -> bool:
        """Whether ``t``'s memory lies in this pool. ``look=False``: as far as was known when somebody last looked; quick."""

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate between two segments. The block returns to the pool when the last tensor over it dies."""

    def blocks(self) -> list[tuple[int, int]]:
        """``(address, bytes)`` of every block that some tensor owns right now."""

    def usage(self) -> PoolUsage: ...

    def poison(self) -> int:
        """Fill every free block with 0xFF (NaN in every float dtype). Returns the bytes filled."""

    def turn(self) -> AbstractContextManager[None]:
        """Hold the pool for one replay: one thread at a time, ordered after the last replay's stream. Counts in ``replays``."""

    def attach(self, capture: object) -> None:
        """A live capture uses this pool."""

    def retire(self, capture: object, segments: Sequence[Segment]) -> None:
        """``capture`` is closed. Its segments are destroyed, and the memory handed back, once no attached capture is left."""


class Device(Protocol):
    """A place where segments are recorded and launched."""

    name: str  # for people: "cuda:0", "emulator"
    torch_device: torch.device
    traits: Traits

    def default_pool(self) -> Pool:
        """The pool every capture on this device shares unless told otherwise."""

    def new_pool(self) -> Pool: ...

    def default_stream(self) -> Any:
        """The capture stream: one per device, never handed to users. None where there are no streams."""

    def session(self, pool: Any, stream: Any) -> AbstractContextManager[None]:
        """Around a whole capture: on the capture stream, after the caller's work; the caller's stream goes on after it."""

    def begin(self, pool: Any) -> Recording:
        """Start recording a segment into ``pool``, one of this device's, on the current stream."""

    def ordered(self, fn: Callable[[], Any]) -> tuple[Any, bool]:
        """Run ``fn`` and order what it leaves on other streams before what follows. Returns whether it used any."""

    def synchronize(self) -> None: ...

    def driver_bytes(self) -> int:
        """Device memory in use by this process outside torch's allocator, as far as the device can tell. 0 where it can't."""
