"""CUDA: segments are ``torch.cuda.CUDAGraph`` objects in one memory pool, recorded on one capture stream per device.

``torch.cuda.graph`` synchronises and empties the cache for every graph, so ``capture_begin`` and ``capture_end`` are driven
directly. What torch does not offer in public goes through :mod:`segue._torch`.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.devices.protocol import PoolUsage, Segment, Traits
from segue.errors import CaptureError

_sessions = 0  # captures under way in this process: graphs must not be destroyed meanwhile
_parked: list[CudaPool] = []  # pools that retired something meanwhile
_books = threading.RLock()


class CudaSegment:
    """One instantiated CUDA graph."""

    __slots__ = ("empty", "graph", "launch")

    def __init__(self, graph: torch.cuda.CUDAGraph, empty: bool) -> None:
        self.graph, self.empty = graph, empty
        self.launch: Callable[[], None] = _nothing if empty else _torch.graph_launcher(graph)


def _nothing() -> None:
    return None


class CudaRecording:
    """A stream capture under way on the current stream."""

    reenter: AbstractContextManager[Any]

    def __init__(self, pool: CudaPool) -> None:
        self._pool, self._ops = pool, 0
        pool.anchor()
        self._graph = _torch.new_graph()
        self._stance = _fail_on_recompile()
        self._stance.__enter__()
        try:
            self._graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
        except BaseException:
            self.abort()
            raise

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def commit(self) -> CudaSegment:
        """End the capture and instantiate the graph.

        Raises:
            CaptureError: CUDA had invalidated the capture.
        """
        self._stance.__exit__(None, None, None)
        self._stance = nullcontext()
        try:
            empty = _torch.finish_graph(self._graph)
        except Exception as e:
            self.abort()
            raise CaptureError(
                f"CUDA refused the segment when its recording ended ({str(e).splitlines()[0]}). Something inside it can't be "
                "in a graph, most often a host read (.item(), .cpu()) or a synchronisation whose error was swallowed: move it "
                "into a break point."
            ) from e
        return CudaSegment(self._graph, empty)

    def abort(self) -> None:
        self._stance.__exit__(None, None, None)
        self._stance = nullcontext()
        _torch.abandon_graph(self._graph, self._pool.device.index, self._pool.id)


class CudaPool:
    """A private pool of torch's caching allocator."""

    def __init__(self, device: CudaDevice) -> None:
        self.device: CudaDevice = device
        self.replays = 0
        self._mempool = torch.cuda.MemPool()
        self._lock = threading.RLock()
        self._stream: int | None = None  # raw stream of the last replay
        self._stream_object: torch.cuda.Stream | None = None
        self._attached: set[object] = set()
        self._retired: list[Segment] = []
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, bool]] = []  # (start, end, in this pool), sorted
        self._turn = _Turn(self)

    @property
    def id(self) -> Any:
        """What ``capture_begin(pool=...)`` takes."""
        return self._mempool.id

    def anchor(self) -> None:
        """Keep the pool in use from its first recording on, by an empty graph.

        torch's allocators let go of a pool whose last graph dies, and refuse to record into it afterwards: a first capture
        that fails would take the pool with it.
        """
        if self._anchor is None:
            self._anchor = _torch.new_graph()
            self._anchor.capture_begin(pool=self.id, capture_error_mode="thread_local")
            _torch.end_recording(self._anchor)

    def owns(self, t: Tensor) -> bool:
        if t.device != self.device.torch_device:
            return False
        address = _torch.storage_span(t)[0]
        known = self._find(address)
        if known is None:
            self.look()
            known = self._find(address)
        return bool(known)

    def look(self) -> None:
        """Learn which of the allocator's segments are this pool's."""
        ranges = [
            (s["address"], s["address"] + s["total_size"], tuple(s.get("segment_pool_id", (0, 0))) == tuple(self.id))
            for s in _torch.memory_segments()
            if s["device"] == self.device.index
        ]
        self._ranges = sorted(ranges)
        self._starts = [r[0] for r in self._ranges]

    def _find(self, address: int) -> bool | None:
        i = bisect.bisect_right(self._starts, address) - 1
        if i >= 0:
            start, end, ours = self._ranges[i]
            if start <= address < end:
                return ours
        return None

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False), torch.cuda.use_mem_pool(self._mempool, self.device.torch_device):
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
        with _books:
            self._attached.add(capture)

    def retire(self, capture: object, segments: Sequence[Segment]) -> None:
        with _books:
            self._attached.discard(capture)
            self._retired.extend(segments)
            if _sessions:
                _parked.append(self)
            else:
                self.flush()

    def flush(self) -> None:
        """Destroy what was retired, all at once, if nothing alive shares the pool.

        Resetting one graph can free a cuBLAS workspace of the stream that other graphs baked (pytorch#193402).
        """
        if self._attached or self._anchor is None:
            return
        torch.cuda.synchronize(self.device.torch_device)
        for segment in self._retired:
            if isinstance(segment, CudaSegment):
                segment.graph.reset()
        self._retired.clear()
        self._anchor.reset()
        self._anchor = None
        self._mempool = torch.cuda.MemPool()
        self._starts, self._ranges = [], []
        torch.cuda.empty_cache()

    def enter(self) -> None:
        self._lock.acquire()
        self.replays += 1
        raw = _torch.raw_stream(self.device.index)
        if raw != self._stream:
            current = torch.cuda.current_stream(self.device.torch_device)
            if self._stream_object is not None:
                current.wait_stream(self._stream_object)
            self._stream, self._stream_object = raw, current

    def leave(self) -> None:
        self._lock.release()

    def _all_blocks(self) -> list[tuple[int, int, str]]:
        ours = tuple(self.id)
        found = []
        for s in _torch.memory_segments(self.id):
            if s["device"] == self.device.index and tuple(s.get("segment_pool_id", (0, 0))) == ours:
                address = s["address"]
                for b in s["blocks"]:
                    found.append((b.get("address", address), b["size"], b["state"]))
                    address += b["size"]
        return found


class _Turn:
    """Entering costs a lock and a comparison; a generator-based context manager would cost ten times that."""

    __slots__ = ("_pool",)

    def __init__(self, pool: CudaPool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        self._pool.enter()

    def __exit__(self, *_: object) -> None:
        self._pool.leave()


class CudaDevice:
    """One CUDA device."""

    traits = Traits(streams=True, driver_memory=True, timing=True, compiled=True)

    def __init__(self, index: int) -> None:
        self.index, self.name = index, f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self._pool: CudaPool | None = None
        self._stream: torch.cuda.Stream | None = None

    def default_pool(self) -> CudaPool:
        if self._pool is None:
            self._pool = self.new_pool()
        return self._pool

    def new_pool(self) -> CudaPool:
        with torch.cuda.device(self.index):
            pool = CudaPool(self)
        _pools.append(pool)
        return pool

    def default_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = _torch.private_stream(self.torch_device)
        return self._stream

    @contextmanager
    def session(self, pool: CudaPool, stream: torch.cuda.Stream) -> Iterator[None]:
        global _sessions
        with torch.cuda.device(self.index):
            caller = torch.cuda.current_stream()
            with _books:
                _sessions += 1
            stream.wait_stream(caller)
            pool.look()
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                caller.wait_stream(stream)
                with _books:
                    _sessions -= 1
                    if not _sessions:
                        while _parked:
                            _parked.pop().flush()

    def begin(self, pool: CudaPool) -> CudaRecording:
        return CudaRecording(pool)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def driver_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return max(0, total - free - torch.cuda.memory_reserved(self.torch_device))


_pools: list[CudaPool] = []


@atexit.register
def _at_exit() -> None:
    """Graphs before their pools, while CUDA still stands."""
    for pool in _pools:
        with contextlib.suppress(Exception):
            pool._attached.clear()
            pool.flush()


def _fail_on_recompile() -> AbstractContextManager[Any]:
    """Compiled code that would recompile inside a capture invalidates it, and a far away op raises: name it instead."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("fail_on_recompile")
    return stance
