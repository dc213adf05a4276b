"""CUDA as a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from segue import _torch_ranks
from segue.devices.cuda import raw, side_streams
from segue.devices.cuda.op_checks import clearer_error
from segue.devices.cuda.pool import CudaPool, open_captures
from segue.devices.cuda.recording import CudaRecording
from segue.devices.protocol import Traits
from segue.errors import CaptureError, UsageError


class CudaDevice:
    """The CUDA device with this index.

    Raises:
        UnsupportedTorchError: this torch lacks a private call that segue needs on CUDA.
    """

    traits = Traits(
        streams=True, driver_memory=True, timing=True, compiled=True, stops_random_ops=raw.captures_stop_random_ops()
    )

    def __init__(self, index: int) -> None:
        raw.require_torch()
        self.index, self.name = index, f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        raw.settle_attention_order(self.torch_device)
        self._pool: CudaPool | None = None
        self._given: dict[tuple[int, int], CudaPool] = {}  # by torch's handle
        self._stream: torch.cuda.Stream | None = None
        self._blas_memory: torch.cuda.MemPool | None = None

    def default_pool(self) -> CudaPool:
        """The pool that captures on this device share unless they are given another."""
        if self._pool is None:
            self._pool = self.new_pool()
        return self._pool

    def new_pool(self, group: Any = None) -> CudaPool:
        """A pool of its own, whose memory ``group``'s NCCL registers.

        Raises:
            UsageError: that group registers none.
        """
        memory = None if group is None else _torch_ranks.registered_memory(group, self.torch_device)
        with torch.cuda.device(self.index):
            pool = CudaPool(self, None if memory is None else memory.id)
        pool.memory = memory
        return pool

    def pool_at(self, handle: tuple[int, int]) -> CudaPool:
        """The pool of torch's handle. It may be one that segue made, of which a user has read the handle."""
        known = next((p for p in list(open_captures.pools) if p.id == handle and p.device is self), None)
        if known is None:
            with torch.cuda.device(self.index):
                known = CudaPool(self, handle)
            known = self._given.setdefault(handle, known)
        return known

    def default_stream(self) -> torch.cuda.Stream:
        """The device's capture stream, which is made at the first call."""
        if self._stream is None:
            self._stream = raw.private_stream(self.torch_device)
        return self._stream

    def has_stream(self, stream: Any) -> bool:
        """Whether ``stream`` is a ``torch.cuda.Stream`` of this device."""
        return isinstance(stream, torch.cuda.Stream) and stream.device == self.torch_device

    @contextmanager
    def on_capture_stream(self, pool: CudaPool, stream: torch.cuda.Stream) -> Iterator[None]:
        """Context of a whole capture on ``stream``, which waits for the caller's stream and is then waited for by it.

        Raises:
            UsageError: ``stream`` is the legacy default stream.
        """
        if stream.cuda_stream == 0:
            raise UsageError("CUDA can't capture on the legacy default stream. Leave stream= out, or give a torch.cuda.Stream().")
        with open_captures, side_streams.event_patches, torch.cuda.device(self.index):
            caller = torch.cuda.current_stream()
            stream.wait_stream(caller)
            try:
                with torch.cuda.stream(stream):
                    self._make_blas_workspace()
                    yield
            finally:
                pool.side_streams.clear()
                caller.wait_stream(stream)

    def _make_blas_workspace(self) -> None:
        """Make what cuBLAS needs on the current stream: neither handle nor workspace can be made while it is recorded.

        Graphs bake the workspace's address, and torch frees all workspaces whenever it likes (``torch.compile`` with
        reduce-overhead does at each recording). So it lies in memory that nothing else is ever given.
        """
        if self._blas_memory is None:
            self._blas_memory = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._blas_memory), torch.inference_mode():
            torch.cuda.current_blas_handle()
            a = torch.zeros(16, 16, dtype=torch.bfloat16, device=self.torch_device)
            torch.nn.functional.linear(a, a, a[0])  # cuBLASLt may have a workspace of its own

    def begin(self, pool: CudaPool) -> CudaRecording:
        """Start a stream capture on the current stream, into ``pool``."""
        return CudaRecording(pool)

    def ordered(self, fn: Callable[[], Any]) -> tuple[Any, bool]:
        """Run ``fn``, and let the current stream wait for others that it used. Returns its result, and whether there were any."""
        return side_streams.ordered(fn)

    def clearer_error(self, error: BaseException) -> CaptureError | None:
        """What an error of CUDA's means that reached a capture; None if it has nothing to do with the recording."""
        return clearer_error(error)

    def synchronize(self) -> None:
        """Wait until all work on the device is done."""
        torch.cuda.synchronize(self.torch_device)

    def driver_bytes(self) -> int:
        """Bytes in use on the device outside this process's torch allocator: of the driver, and of other processes."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return max(0, total - free - torch.cuda.memory_reserved(self.torch_device))
