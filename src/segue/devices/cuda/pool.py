"""The graph pool: a private pool of torch's caching allocator, its turns, and what is retired from it."""

from __future__ import annotations

import atexit
import bisect
import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from segue import _torch
from segue.devices.cuda import raw
from segue.devices.protocol import PoolUsage, Segment

if TYPE_CHECKING:
    from segue.devices.cuda.device import CudaDevice


class _SessionBooks:
    """Captures under way in this process: graphs must not be destroyed meanwhile, so what is retired is parked."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.open = 0
        self.parked: list[CudaPool] = []
        self.pools: weakref.WeakSet[CudaPool] = weakref.WeakSet()

    def __enter__(self) -> None:
        with self.lock:
            self.open += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.open -= 1
            while not self.open and self.parked:
                self.parked.pop().flush()

    def at_exit(self) -> None:
        """Graphs before their pools, while CUDA still stands."""
        for pool in list(self.pools):
            with contextlib.suppress(Exception):
                pool.flush(even_if_attached=True)


session_books = _SessionBooks()
atexit.register(session_books.at_exit)


class CudaPool:
    """A private pool of torch's caching allocator."""

    def __init__(self, device: CudaDevice) -> None:
        self.device: CudaDevice = device
        self.replays = 0
        self.id: Any = torch.cuda.graph_pool_handle()  # what ``capture_begin(pool=...)`` takes
        self._lock = threading.RLock()
        self._devices: list[int] = []  # current before each turn under way
        self._put_off = False  # what was retired waits for the end of a turn
        self._stream: int | None = None  # raw stream of the last replay
        self._stream_object: torch.cuda.Stream | None = None
        self._attached: set[object] = set()
        self._retired: list[Any] = []
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._starts: list[int] = []  # of the pool's memory, sorted, with the ends beside them
        self._ends: list[int] = []
        self._mark: object = None
        self._growing = False  # any op may take memory now
        self._known = False  # nothing was taken since the last look
        self._turn = _Turn(self, device.index)
        session_books.pools.add(self)

    def anchor(self) -> None:
        """Keep the pool in use from its first recording on, by an empty graph.

        torch's allocators let go of a pool whose last graph dies, and refuse to record into it afterwards: a first capture
        that fails would take the pool with it.
        """
        if self._anchor is None:
            graph = raw.new_graph()
            try:
                graph.capture_begin(pool=self.id, capture_error_mode="thread_local")
                raw.end_recording(graph)
            except BaseException:
                raw.abandon_graph(graph)
                raise
            self._anchor = graph

    def owns(self, t: Tensor, look: bool = True) -> bool:
        if t.device != self.device.torch_device:
            return False
        address = _torch.storage_span(t)[0]
        return self._holds(address) or (look and self._grew() and self._holds(address))

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """While a segment is recorded, when any op may take memory for the pool."""
        self._growing, self._known = True, False
        try:
            yield
        finally:
            self._growing = self._known = False

    def _holds(self, address: int) -> bool:
        i = bisect.bisect_right(self._starts, address) - 1
        return i >= 0 and address < self._ends[i]

    def _grew(self) -> bool:
        """Look again which memory is this pool's, if torch has taken any from the device since the last time."""
        if self._known:
            return False
        self._known = not self._growing
        mark = raw.allocator_mark(self.device.index)
        if mark == self._mark:
            return False
        self._mark = mark
        spans = sorted((s["address"], s["address"] + s["total_size"]) for s in self._segments())
        self._starts, self._ends = [s for s, _ in spans], [e for _, e in spans]
        return True

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._known = False
        with torch.inference_mode(False), raw.allocating_from(self.id, self.device.index):
            return torch.empty_strided(size, stride, dtype=dtype, device=self.device.torch_device)

    def blocks(self) -> list[tuple[int, int]]:
        return [(address, size) for address, size, state in self._all_blocks() if state != "inactive"]

    def usage(self) -> PoolUsage:
        blocks = self._all_blocks()
        return PoolUsage(sum(b[1] for b in blocks), sum(b[1] for b in blocks if b[2] != "inactive"))

    def poison(self) -> int:
        filled = 0
        for address, size, state in self._all_blocks():
            if state == "inactive":
                where = self.device.torch_device
                _torch.tensor_at(address, size, torch.uint8, (size,), (1,), 0, where).fill_(0xFF)
                filled += size
        return filled

    def turn(self) -> AbstractContextManager[None]:
        return self._turn

    def attach(self, capture: object) -> None:
        with session_books.lock:
            self._attached.add(capture)

    def retire(self, capture: object, segments: Sequence[Segment]) -> None:
        with session_books.lock:
            self._attached.discard(capture)
            self._retired.extend(segments)
            self.flush()

    def flush(self, even_if_attached: bool = False) -> None:
        """Destroy what was retired, all at once, if nothing alive shares the pool.

        Resetting one graph can free a cuBLAS workspace of the stream that other graphs baked (pytorch#193402). CUDA refuses it
        while anything is recorded, and a replay may be under way on the very graphs: then it waits for the end of those.
        """
        if self._anchor is None or (self._attached and not even_if_attached):
            return
        if session_books.open:
            session_books.parked.append(self)
            return
        if self._devices or torch.cuda.is_current_stream_capturing():
            self._put_off = True
            return
        self._put_off = False
        torch.cuda.synchronize(self.device.torch_device)
        for segment in self._retired:
            segment.destroy()
        self._retired.clear()
        self._anchor.reset()
        self._anchor = None
        self.id = torch.cuda.graph_pool_handle()
        self._starts, self._ends, self._mark, self._known = [], [], None, False
        torch.cuda.empty_cache()

    def follow(self, stream: int) -> None:
        """Go on in ``stream``, the current one: what it is given waits for the last replay, wherever that ran."""
        current = torch.cuda.current_stream(self.device.torch_device)
        if self._stream_object is not None:
            current.wait_stream(self._stream_object)
        self._stream, self._stream_object = stream, current

    def _segments(self) -> list[dict[str, Any]]:
        mine = tuple(self.id)
        return [
            s
            for s in raw.memory_segments(self.id)
            if s["device"] == self.device.index and tuple(s.get("segment_pool_id", mine)) == mine
        ]

    def _all_blocks(self) -> list[tuple[int, int, str]]:
        found = []
        for s in self._segments():
            address = s["address"]
            for b in s["blocks"]:
                found.append((b.get("address", address), b["size"], b["state"]))
                address += b["size"]
        return found


class _Turn:
    """Entering costs a lock and two comparisons; a generator-based context manager would cost ten times that."""

    __slots__ = ("_index", "_pool")

    def __init__(self, pool: CudaPool, index: int) -> None:
        self._pool, self._index = pool, index

    def __enter__(self) -> None:
        pool, index = self._pool, self._index
        pool._lock.acquire()
        try:
            before = raw.current_device()
        except BaseException:  # nobody else would ever get a turn
            pool._lock.release()
            raise
        pool._devices.append(before)
        pool.replays += 1
        try:
            if before != index:
                torch.cuda.set_device(index)
            stream = raw.current_stream(index)
            if stream != pool._stream:
                pool.follow(stream)
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
            with session_books.lock:
                pool.flush()
