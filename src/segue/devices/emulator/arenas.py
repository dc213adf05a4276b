"""Raw memory for an emulated graph pool: mapped arenas, cut into blocks by best fit."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import sys
from dataclasses import dataclass

BLOCK = 512  # bytes; the CUDA caching allocator rounds to the same size
ARENA = 1 << 20  # bytes; arenas are multiples of this


@dataclass(frozen=True)
class Extents:
    """Where some arenas begin and end: two sorted lists of addresses, one entry an arena in each."""

    starts: list[int]
    ends: list[int]

    def hold(self, address: int) -> bool:
        """Whether ``address`` lies in one of the arenas."""
        i = bisect.bisect_right(self.starts, address) - 1
        return i >= 0 and address < self.ends[i]


class Arenas:
    """A best-fit allocator over arenas that never move. It is not thread-safe; its pool holds a lock.

    ``extents``: of all arenas. It is replaced, never changed, when an arena comes or goes.
    """

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}  # by first address
        self.extents = Extents([], [])
        self._by_size: list[tuple[int, int]] = []  # free (bytes, address), sorted
        self._free: dict[int, int] = {}  # free address -> bytes
        self._free_ends: dict[int, int] = {}  # end of a free block -> its address

    @property
    def reserved(self) -> int:
        """Bytes in all arenas."""
        return sum(len(m) for m in self._maps.values())

    def free_blocks(self) -> list[tuple[int, int]]:
        """``(address, bytes)`` of every free block."""
        return list(self._free.items())

    def take(self, nbytes: int) -> tuple[int, int]:
        """Take a free block of at least ``nbytes``, or map an arena for it. Returns its address and its size in bytes."""
        need = max(BLOCK, -(-nbytes // BLOCK) * BLOCK)
        i = bisect.bisect_left(self._by_size, (need, 0))
        if i == len(self._by_size):
            self._grow(need)
            i = bisect.bisect_left(self._by_size, (need, 0))
        size, address = self._by_size[i]
        self._drop(address, size)
        if size > need:
            self._put(address + need, size - need)
        return address, need

    def give(self, address: int, size: int) -> None:
        """Take back a block of ``size`` bytes, and join it with its free neighbours in the same arena."""
        end = address + size
        if end not in self._maps and end in self._free:
            size += self._free[end]
            self._drop(end, self._free[end])
        if address not in self._maps and address in self._free_ends:
            before = self._free_ends[address]
            size += address - before
            address = before
            self._drop(address, self._free[address])
        self._put(address, size)

    def release(self) -> None:
        """Unmap every arena that is free from end to end."""
        for start, mapped in list(self._maps.items()):
            if self._free.get(start) == len(mapped):
                self._drop(start, len(mapped))
                del self._maps[start]
                self._index()
                mapped.close()

    def _grow(self, need: int) -> None:
        size = -(-need // ARENA) * ARENA
        mapped = _map(size)
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._maps[start] = mapped
        self._index()
        self._put(start, size)

    def _index(self) -> None:
        starts = sorted(self._maps)
        self.extents = Extents(starts, [s + len(self._maps[s]) for s in starts])

    def _put(self, address: int, size: int) -> None:
        self._free[address] = size
        self._free_ends[address + size] = address
        bisect.insort(self._by_size, (size, address))

    def _drop(self, address: int, size: int) -> None:
        del self._free[address]
        del self._free_ends[address + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, address))]


def _map(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
