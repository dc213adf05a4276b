"""The protocol that the layers above use devices by. CUDA and the emulator implement it.

The vocabulary is CUDA's. A *recording* becomes a *segment*, which is one graph. All segments take memory from a *pool*, in which
a block whose last tensor died is used again by later ops, segments and captures. No layer above knows which device it runs on;
what a device can't hide it declares in ``Traits``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from segue.errors import CaptureError


@dataclass(frozen=True)
class Traits:
    """What a device can't hide. Only tests, demo, bench, prime's search for cuts and a warning about lazy captures read it."""

    streams: bool  # work is asynchronous, and streams order it
    driver_memory: bool  # graphs take memory of the driver, outside torch's allocator
    timing: bool  # measured times say how fast segments are
    compiled: bool  # torch.compile'd code runs compiled inside a segment
    stops_random_ops: bool  # while a segment is recorded, random ops of other threads fail


@dataclass(frozen=True)
class PoolUsage:
    """How much memory a pool has, in bytes."""

    reserved: int  # taken from the device for this pool
    live: int  # the part of it in blocks that a tensor owns right now


class Segment(Protocol):
    """One captured graph."""

    @property
    def empty(self) -> bool:
        """Whether nothing was recorded, so that a launch does nothing."""

    def launch(self) -> None:
        """Run what was recorded, in order, on the caller's current stream.

        Raises:
            SegueError or RuntimeError: the segment was destroyed, or, on the emulator, memory that it uses was freed or moved.
        """

    def discard(self) -> None:
        """Give up a segment that has not been launched. What its ops write outside the pool is as it was before the recording."""

    def destroy(self) -> None:
        """Free the graph. Only the pool calls this. A later launch is an error."""


class Recording(Protocol):
    """A segment being recorded. Exactly one of ``commit`` and ``abort`` ends it."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record one dispatched op (an ``OpOverload``). Returns what the user's code gets from it.

        The ``__torch_dispatch__`` of the capture's mode calls this, while the mode is off. Before the first op the capture sets
        ``self.reenter`` to that mode, so that the recording can run the ops inside an op under it.

        Raises:
            CaptureError: a graph can't hold this op.
        """

    reenter: AbstractContextManager[Any]
    acted: bool  # it has done what an abort can't take back: the emulator talks to other ranks while it records

    def commit(self) -> Segment:
        """End the recording. Returns its segment, which has not been launched yet.

        Raises:
            CaptureError: something in the recording can't be in a graph.
        """

    def abort(self) -> None:
        """End the recording and drop it. Never raises, and leaves the stream not capturing."""


class Pool(Protocol):
    """Graph memory, shared by every segment of every capture that uses it."""

    @property
    def device(self) -> Device:
        """The device whose memory this is."""

    replays: int  # grows with every replay and capture, each of which may overwrite what an older one left

    def owns(self, t: Tensor, look: bool = True) -> bool:
        """Whether ``t``'s memory lies in this pool.

        ``look=False`` is quick, and answers by the memory that the pool had when somebody last looked: a call with ``look=True``,
        or, on the emulator, the start of a recording. So memory that the pool has taken since may be denied.
        """

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialised tensor between two segments; ``stride`` is in elements.

        Its block returns to the pool when the last tensor over it dies.
        """

    def blocks(self) -> list[tuple[int, int]]:
        """``(address, bytes)`` of every block that a tensor owns right now."""

    def usage(self) -> PoolUsage:
        """How much memory the pool has taken from the device, and how much of it is in use."""

    def poison(self) -> int:
        """Fill every free block with 0xFF (NaN in every float dtype). Returns how many bytes were filled."""

    def turn(self) -> AbstractContextManager[None]:
        """Context: this thread alone uses the pool, for one replay, which waits for the last one's work. Adds to ``replays``."""

    def attach(self, capture: object) -> None:
        """Note that ``capture``, which is alive, uses this pool."""

    def retire(self, capture: object, segments: Sequence[Segment]) -> None:
        """Note that ``capture`` is closed. Without an attached capture all segments are destroyed and the memory goes back."""


class Device(Protocol):
    """A place where segments are recorded and launched."""

    name: str  # for people: "cuda:0", "emulator"
    torch_device: torch.device
    traits: Traits

    def default_pool(self) -> Pool:
        """The pool every capture on this device shares unless told otherwise."""

    def new_pool(self, group: Any = None) -> Pool:
        """A pool of its own, registered for the collectives of ``group``, if one is given.

        Raises:
            UsageError: the group registers no memory.
        """

    def pool_at(self, handle: tuple[int, int]) -> Pool:
        """The pool of one of torch's handles, ``torch.cuda.graph_pool_handle()`` or ``CUDAGraph.pool()``: one for each handle."""

    def default_stream(self) -> Any:
        """The stream that captures record on: one per device, never handed to users. None where there are no streams."""

    def has_stream(self, stream: Any) -> bool:
        """Whether ``stream`` is one of this device's. Where there are no streams, any of torch's counts, and means nothing."""

    def on_capture_stream(self, pool: Any, stream: Any) -> AbstractContextManager[None]:
        """Context of a whole capture, which makes ``stream`` current.

        What is done in it waits for the work on the caller's stream, and the caller's stream then waits for what was done.

        Raises:
            UsageError: no capture can be made on ``stream``.
        """

    def begin(self, pool: Any) -> Recording:
        """Start recording a segment on the current stream, into ``pool``, which must be a pool of this device."""

    def ordered(self, fn: Callable[[], Any]) -> tuple[Any, bool]:
        """Run ``fn``, and let what follows wait for what it leaves on other streams.

        Returns what ``fn`` returns, and whether it used another stream.
        """

    def clearer_error(self, error: BaseException) -> CaptureError | None:
        """A clearer error in the place of one that reached a capture, while it recorded a segment, without passing through an op
        that the recording was given; None if the device has nothing to say about it.
        """

    def synchronize(self) -> None:
        """Wait until all work on the device is done."""

    def driver_bytes(self) -> int:
        """Bytes of device memory in use outside torch's allocator, by this process or another; 0 where it isn't known."""
