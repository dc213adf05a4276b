"""The graph pool: a private pool of torch's caching allocator, whose turn it is to replay, and which segments to destroy when."""

from __future__ import annotations

import atexit
import bisect
import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.devices.cuda import raw
from segue.devices.protocol import Device, PoolUsage, Segment
from segue.errors import InputError


class _OpenCaptures:
    """Counts the captures under way in this process. Graphs must not be destroyed meanwhile, so the pools to flush are parked."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.count = 0
        self.parked: list[CudaPool] = []
        self.pools: weakref.WeakSet[CudaPool] = weakref.WeakSet()

    def __enter__(self) -> None:
        with self.lock:
            self.count += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.count -= 1
            while not self.count and self.parked:
                self.parked.pop().flush()

    def at_exit(self) -> None:
        """Destroy all graphs before their pools, while the CUDA driver still works."""
        for pool in list(self.pools):
            with contextlib.suppress(Exception):
                pool.flush(even_if_attached=True)


open_captures = _OpenCaptures()
atexit.register(open_captures.at_exit)


class CudaPool:
    """A private pool of torch's caching allocator.

    ``device``: the CUDA device, whose ``torch_device`` has an index. ``id``: what ``capture_begin(pool=...)`` takes.
    ``handle``: the id of a pool that others may use too. Segue doesn't see the replays of graphs that others record into it.
    """

    def __init__(self, device: Device, handle: tuple[int, int] | None = None) -> None:
        self.device = device
        self.index: int = device.torch_device.index
        self.replays = 0
        self._given = handle is not None
        self.id: Any = torch.cuda.graph_pool_handle() if handle is None else handle
        self.memory: torch.cuda.MemPool | None = None  # torch's object of the handle, if it is kept alive here
        self._lock = threading.RLock()
        self._devices: list[int] = []  # for each turn under way, the device that was current before it
        self._put_off = False  # whether to flush when the turn under way ends
        self._stream: int | None = None  # raw stream of the last replay
        self._stream_object: torch.cuda.Stream | None = None
        self.side_streams: dict[int, torch.cuda.Stream] = {}  # by handle, those that the capture under way has forked
        self._attached: set[object] = set()
        self._retired: list[Any] = []
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._starts: list[int] = []  # where the spans of the pool's memory begin, sorted
        self._ends: list[int] = []  # where the same spans end
        self._mark: object = None  # the allocator's mark when the spans were read
        self._growing = False  # a segment is being recorded, and any op may take memory
        self._known = False  # the spans are current, and nobody has allocated since they were read
        self._turn = _Turn(self, self.index)
        open_captures.pools.add(self)

    def anchor(self) -> None:
        """Record an empty graph into the pool, once, which keeps the pool in use.

        torch's allocator releases a pool whose last graph dies, and refuses to record into it afterwards. Without this graph a
        first capture that fails would make the pool unusable.
        """
        if self._anchor is None:
            graph = raw.new_graph()
            try:
                graph.capture_begin(pool=self.id, capture_error_mode="thread_local")
                raw.end_recording(graph)
            except BaseException as e:
                raw.abandon_graph(graph)
                if self._given and isinstance(e, RuntimeError) and not isinstance(e, torch.OutOfMemoryError):
                    first = str(e).partition("\n")[0]
                    raise InputError(
                        f"pool={self.id}: torch can't record into it ({first}). A pool whose last graph has died takes no "
                        "further graphs: give a new handle, or segue.new_pool()."
                    ) from e
                raise
            self._anchor = graph

    def owns(self, t: Tensor, look: bool = True) -> bool:
        """Whether ``t``'s memory lies in this pool. ``look=False``: answer by what torch's allocator said last."""
        if t.device != self.device.torch_device:
            return False
        address = _torch.storage_span(t)[0]
        return self._holds(address) or (look and self._grew() and self._holds(address))

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """Context: a segment is being recorded, and any op may take memory for the pool."""
        self._growing, self._known = True, False
        try:
            yield
        finally:
            self._growing = self._known = False

    def _holds(self, address: int) -> bool:
        i = bisect.bisect_right(self._starts, address) - 1
        return i >= 0 and address < self._ends[i]

    def _grew(self) -> bool:
        """Read which memory the pool has, if torch has taken any from the device since the last time. Returns whether it did."""
        if self._known:
            return False
        self._known = not self._growing
        mark = raw.allocator_mark(self.index)
        if mark == self._mark:
            return False
        self._mark = mark
        spans = sorted((s["address"], s["address"] + s["total_size"]) for s in self._segments())
        self._starts, self._ends = [s for s, _ in spans], [e for _, e in spans]
        return True

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor over a block of the pool; ``stride`` is in elements."""
        self._known = False
        with torch.inference_mode(False), raw.allocating_from(self.id, self.index):
            return torch.empty_strided(size, stride, dtype=dtype, device=self.device.torch_device)

    def blocks(self) -> list[tuple[int, int]]:
        """``(address, bytes)`` of every block that a tensor owns, or that waits for a stream to be done with it."""
        return [(address, size) for address, size, state in self._all_blocks() if state != "inactive"]

    def usage(self) -> PoolUsage:
        """Bytes that torch's allocator has taken for the pool, and of the blocks in use."""
        blocks = self._all_blocks()
        return PoolUsage(sum(b[1] for b in blocks), sum(b[1] for b in blocks if b[2] != "inactive"))

    def poison(self) -> int:
        """Fill every free block with 0xFF on the current stream. Returns how many bytes are filled."""
        filled = 0
        for address, size, state in self._all_blocks():
            if state == "inactive":
                where = self.device.torch_device
                _torch.tensor_at(address, size, torch.uint8, (size,), (1,), 0, where).fill_(0xFF)
                filled += size
        return filled

    def turn(self) -> AbstractContextManager[None]:
        """Context: this thread alone uses the pool, and the current stream waits for the last replay. Adds to ``replays``."""
        return self._turn

    def attach(self, capture: object) -> None:
        """Note that ``capture`` uses this pool."""
        with open_captures.lock:
            self._attached.add(capture)

    def retire(self, capture: object, segments: Sequence[Segment]) -> None:
        """Note that ``capture`` is closed, and :meth:`flush` its segments with those retired before."""
        with open_captures.lock:
            self._attached.discard(capture)
            self._retired.extend(segments)
            self.flush()

    def flush(self, even_if_attached: bool = False) -> None:
        """Destroy the retired segments, all at once, unless an attached capture still uses the pool.

        They go together because resetting one graph can free a cuBLAS workspace whose address other graphs have baked in
        (pytorch#193402). CUDA refuses a reset while anything is being recorded, and a replay of the same graphs may be under
        way. In both cases the flush is put off until the capture or the turn ends.
        """
        if self._anchor is None or (self._attached and not even_if_attached):
            return
        if open_captures.count:
            open_captures.parked.append(self)
            return
        if self._devices or torch.cuda.is_current_stream_capturing():
            self._put_off = True
            return
        self._put_off = False
        torch.cuda.synchronize(self.device.torch_device)
        for segment in self._retired:
            segment.destroy()
        self._retired.clear()
        if self._given and not even_if_attached and self.blocks():
            return  # torch would take no further graphs under this handle, because its pool lives as long as the tensors in it
        self._anchor.reset()
        self._anchor = None
        if not self._given:
            self.id = torch.cuda.graph_pool_handle()
        self._starts, self._ends, self._mark, self._known = [], [], None, False
        torch.cuda.empty_cache()

    def wait_for_last_stream(self, stream: int) -> None:
        """Make the current stream, whose handle is ``stream``, wait for the last replay, on whatever stream that ran."""
        current = torch.cuda.current_stream(self.device.torch_device)
        if self._stream_object is not None:
            current.wait_stream(self._stream_object)
        self._stream, self._stream_object = stream, current

    def _segments(self) -> list[dict[str, Any]]:
        return [s for s in raw.memory_segments(self.id) if s["device"] == self.index]

    def _all_blocks(self) -> list[tuple[int, int, str]]:
        """``(address, bytes, state)`` of every block, free ones too."""
        found = []
        for s in self._segments():
            address = s["address"]
            for b in s["blocks"]:
                found.append((b.get("address", address), b["size"], b["state"]))
                address += b["size"]
        return found


class _Turn:
    """A pool's turn: the pool's device is current, and the current stream waits for the last replay.

    It is a class because entering one costs a lock and two comparisons, a tenth of a generator-based context manager.
    """

    __slots__ = ("_index", "_pool")

    def __init__(self, pool: CudaPool, index: int) -> None:
        self._pool, self._index = pool, index

    def __enter__(self) -> None:
        pool, index = self._pool, self._index
        pool._lock.acquire()
        try:
            before = raw.current_device()
        except BaseException:  # if the lock stayed taken, no other thread would ever get a turn
            pool._lock.release()
            raise
        pool._devices.append(before)
        pool.replays += 1
        try:
            if before != index:
                torch.cuda.set_device(index)
            stream = raw.current_stream(index)
            if stream != pool._stream:
                pool.wait_for_last_stream(stream)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        pool = self._pool
        before = pool._devices.pop()
        try:
            if before != self._index:
                torch.cuda.set_device(before)
        finally:
            pool._lock.release()
        if pool._put_off:
            with open_captures.lock:
                pool.flush()
