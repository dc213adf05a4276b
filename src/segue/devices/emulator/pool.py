"""The emulated graph pool: a block is free once the last tensor over it dies, and is then used again by later ops."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from segue import _torch
from segue.devices.emulator.arenas import Arenas
from segue.devices.protocol import Device, PoolUsage, Segment

_CPU = torch.device("cpu")


class EmulatedPool:
    """Graph memory on the host.

    ``poison_freed``: fill a block with 0xFF (NaN in every float dtype) the moment its last tensor dies. A new pool reads
    this setting from the environment variable ``SEGUE_POISON`` (``1`` means on).
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.replays = 0
        self.poison_freed = os.environ.get("SEGUE_POISON", "") not in ("", "0")
        self.recording = False  # whether a segment is being recorded into this pool
        self._arenas = Arenas()
        self._known = self._arenas.extents  # the arenas as they were when somebody last looked
        self._live: dict[int, tuple[int, int]] = {}  # address -> bytes, serial number of the allocation
        self._serial = 0
        self._dead: deque[int] = deque()  # addresses whose tensors died and whose blocks are not free yet
        self._lock = threading.Lock()
        self._turn = _Turn(self)
        self._attached: set[object] = set()
        self._retired: list[Segment] = []
        self._retiring = False  # the last capture is closed, so memory is handed back when the last block is free
        self._segments: weakref.WeakSet[Segment] = weakref.WeakSet()

    def owns(self, t: Tensor, look: bool = True) -> bool:
        """Whether ``t``'s memory lies in this pool. ``look=False``: answer by the arenas that :meth:`look` found last."""
        if look:
            self.look()
        return t.device.type == "cpu" and self._known.hold(_torch.storage_span(t)[0])

    def look(self) -> None:
        """Learn which arenas the pool has now, for ``owns(look=False)``.

        The emulator could always know. A CUDA pool has to ask torch's allocator, and code that forgets it must fail here too.
        """
        self._known = self._arenas.extents

    def holds(self, address: int) -> bool:
        """Whether ``address`` lies in this pool now, whoever looked."""
        return self._arenas.extents.hold(address)

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor over a new block; ``stride`` is in elements."""
        return self.allocate(_extent(size, stride) * dtype.itemsize, dtype, size, stride, 0)

    def allocate(
        self, nbytes: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
    ) -> Tensor:
        """A tensor over a new block of ``nbytes`` bytes; ``offset`` is in elements.

        The block is free again when the last C++ reference to the tensor's storage dies.
        """
        with self._settled():
            address, taken = self._arenas.take(nbytes)
            self._serial += 1
            self._live[address] = taken, self._serial
        t = _torch.tensor_at(address, nbytes, dtype, size, stride, offset, _CPU)
        weakref.finalize(t.untyped_storage(), self._died, address).atexit = False
        return t

    @property
    def serial(self) -> int:
        """Number of the latest allocation; allocations are counted from 1."""
        return self._serial

    def serial_of(self, address: int) -> int:
        """Number of the allocation that owns the block at ``address``; 0 if no tensor owns it."""
        return self._live[address][1] if address in self._live else 0

    def blocks(self) -> list[tuple[int, int]]:
        """``(address, bytes)`` of every block that a tensor owns right now. Bytes are rounded up to a multiple of 512."""
        with self._settled():
            return [(address, size) for address, (size, _) in self._live.items()]

    def usage(self) -> PoolUsage:
        """Bytes of all arenas, and of the blocks in use."""
        with self._settled():
            return PoolUsage(self._arenas.reserved, sum(size for size, _ in self._live.values()))

    def poison(self) -> int:
        """Fill every free block with 0xFF (NaN in every float dtype). Returns how many bytes were filled."""
        with self._settled():
            free = self._arenas.free_blocks()
            for address, size in free:
                ctypes.memset(address, 0xFF, size)
        return sum(size for _, size in free)

    def turn(self) -> AbstractContextManager[None]:
        """Context: this thread alone uses the pool. Adds to ``replays``."""
        return self._turn

    def attach(self, capture: object) -> None:
        """Note that ``capture`` uses this pool."""
        self._retiring = False
        self._attached.add(capture)

    def retire(self, capture: object, segments: Sequence[Segment]) -> None:
        """Note that ``capture`` is closed. Without an attached capture, destroy all segments and unmap free arenas."""
        self._attached.discard(capture)
        self._retired.extend(segments)
        if self._attached:
            return
        self._retiring = True
        with self._turn.lock:
            while self._retired:
                self._retired.pop().destroy()
            with self._settled():
                pass  # entering and leaving hands the memory back

    def adopt(self, segment: Segment) -> None:
        """Hand no memory back while ``segment``, which has addresses of this pool baked in, could be launched."""
        self._segments.add(segment)

    def disown(self, segment: Segment) -> None:
        """Forget ``segment``, which was destroyed."""
        self._segments.discard(segment)

    def _died(self, address: int) -> None:
        # A finalizer may run inside any allocation, also on the thread that holds the lock. Then that thread frees the block.
        self._dead.append(address)
        if self._lock.acquire(blocking=False):
            try:
                self._free_dead()
            finally:
                self._lock.release()

    def _free_dead(self) -> None:
        while self._dead:
            address = self._dead.popleft()
            size, _ = self._live.pop(address)
            if self.poison_freed:
                ctypes.memset(address, 0xFF, size)
            self._arenas.give(address, size)
        if self._retiring and not (self._segments or self.recording):
            self._arenas.release()
            self.look()  # what is allocated elsewhere at the same addresses is not the pool's

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Hold the lock, and free the blocks of dead tensors before and after."""
        with self._lock:
            self._free_dead()
            yield
            self._free_dead()


class _Turn:
    """A pool's turn. It is reentrant, because a break of one capture may replay another capture of the same pool."""

    __slots__ = ("_pool", "lock")

    def __init__(self, pool: EmulatedPool) -> None:
        self._pool, self.lock = pool, threading.RLock()

    def __enter__(self) -> None:
        self.lock.acquire()
        self._pool.replays += 1

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements that a storage needs for this geometry."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
