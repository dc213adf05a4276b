"""The emulated graph pool: a block is free once the last tensor over it dies, and is then used again by later ops."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from segue import _torch
from segue.devices.emulator.arenas import Arenas
from segue.devices.protocol import PoolUsage, Segment

if TYPE_CHECKING:
    from segue.devices.emulator.device import Emulator

_CPU = torch.device("cpu")


class Destroyable(Protocol):
    """A segment that can be told to let go of its memory."""

    def destroy(self) -> None: ...


class EmulatedPool:
    """Graph memory on the host.

    ``poison_freed``: fill a block with 0xFF (NaN in every float dtype) the moment its last tensor dies. New pools take
    it from the environment variable ``SEGUE_POISON`` (``1`` means on).
    """

    def __init__(self, device: Emulator) -> None:
        self.device: Any = device
        self.replays = 0
        self.poison_freed = os.environ.get("SEGUE_POISON", "") not in ("", "0")
        self.recording = False
        self._arenas = Arenas()
        self._live: dict[int, tuple[int, int]] = {}  # address -> bytes, serial number of the allocation
        self._serial = 0
        self._dead: deque[int] = deque()
        self._books = threading.Lock()
        self._turn = _Turn(self)
        self._attached: set[object] = set()
        self._retired: list[Segment] = []
        self._retiring = False  # the last capture has gone, and memory may go with the last block
        self._segments: weakref.WeakSet[Any] = weakref.WeakSet()

    def owns(self, t: Tensor, look: bool = True) -> bool:
        return t.device.type == "cpu" and self.holds(_torch.storage_span(t)[0])

    def holds(self, address: int) -> bool:
        """Whether ``address`` lies in this pool."""
        return self._arenas.holds(address)

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.allocate(_extent(size, stride) * dtype.itemsize, dtype, size, stride, 0)

    def allocate(
        self, nbytes: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
    ) -> Tensor:
        """A tensor over a block of its own. The block is free again when the last C++ reference to its storage dies."""
        with self._open():
            address, taken = self._arenas.take(nbytes)
            self._serial += 1
            self._live[address] = taken, self._serial
        t = _torch.tensor_at(address, nbytes, dtype, size, stride, offset, _CPU)
        weakref.finalize(t.untyped_storage(), self._died, address).atexit = False
        return t

    @property
    def serial(self) -> int:
        """Number of the latest allocation."""
        return self._serial

    def serial_of(self, address: int) -> int:
        """Number of the allocation that owns the block at ``address``, 0 if no tensor owns it."""
        return self._live[address][1] if address in self._live else 0

    def blocks(self) -> list[tuple[int, int]]:
        with self._open():
            return [(address, size) for address, (size, _) in self._live.items()]

    def usage(self) -> PoolUsage:
        with self._open():
            return PoolUsage(self._arenas.reserved, sum(size for size, _ in self._live.values()))

    def poison(self) -> int:
        with self._open():
            free = self._arenas.free_blocks()
            for address, size in free:
                ctypes.memset(address, 0xFF, size)
        return sum(size for _, size in free)

    def turn(self) -> AbstractContextManager[None]:
        return self._turn

    def attach(self, capture: object) -> None:
        self._retiring = False
        self._attached.add(capture)

    def retire(self, capture: object, segments: Sequence[Segment]) -> None:
        self._attached.discard(capture)
        self._retired.extend(segments)
        if self._attached:
            return
        self._retiring = True
        with self._turn.lock:
            while self._retired:
                destroy: Callable[[], None] | None = getattr(self._retired.pop(), "destroy", None)
                if destroy is not None:
                    destroy()
            with self._open():
                pass  # hands memory back

    def adopt(self, segment: Destroyable) -> None:
        """``segment`` has addresses of this pool baked in: nothing is handed back while it could be launched."""
        self._segments.add(segment)

    def disown(self, segment: Destroyable) -> None:
        """``segment`` was destroyed."""
        self._segments.discard(segment)

    def _died(self, address: int) -> None:
        # This may run inside any allocation, on a thread that holds the lock or not: its holder does the rest.
        self._dead.append(address)
        if self._books.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._books.release()

    def _bury(self) -> None:
        while self._dead:
            address = self._dead.popleft()
            size, _ = self._live.pop(address)
            if self.poison_freed:
                ctypes.memset(address, 0xFF, size)
            self._arenas.give(address, size)
        if self._retiring and not (self._segments or self.recording):
            self._arenas.release()

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._books:
            self._bury()
            yield
            self._bury()


class _Turn:
    """Reentrant: a break of one capture may replay another one of the same pool."""

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
