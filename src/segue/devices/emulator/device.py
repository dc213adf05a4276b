"""The emulator as a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from segue.devices.emulator import host_guard
from segue.devices.emulator.pool import EmulatedPool
from segue.devices.emulator.recording import EmulatedRecording
from segue.devices.protocol import Traits
from segue.errors import CaptureError, UsageError


class Emulator:
    """The device that records and replays segments on CPU tensors. It has no streams and no driver memory."""

    name = "emulator"
    torch_device = torch.device("cpu")
    traits = Traits(streams=False, driver_memory=False, timing=False, compiled=False, stops_random_ops=False)

    def __init__(self) -> None:
        self._pool: EmulatedPool | None = None
        self._given: dict[tuple[int, int], EmulatedPool] = {}  # by torch's handle
        self._lock = threading.Lock()

    def default_pool(self) -> EmulatedPool:
        """The pool that captures share unless they are given another."""
        with self._lock:
            if self._pool is None:
                self._pool = self.new_pool()
            return self._pool

    def new_pool(self, group: Any = None) -> EmulatedPool:
        """A pool of its own. No ``group`` registers its memory.

        Raises:
            UsageError: one is given.
        """
        if group is not None:
            raise UsageError(f"group=: only NCCL registers a pool's memory, and this one is on {self.name}; leave it out")
        return EmulatedPool(self)

    def pool_at(self, handle: tuple[int, int]) -> EmulatedPool:
        """The pool that stands for torch's of this handle."""
        with self._lock:
            return self._given.setdefault(handle, EmulatedPool(self))

    def default_stream(self) -> Any:
        """None: there are no streams."""
        return None

    def has_stream(self, stream: Any) -> bool:
        """Whether ``stream`` is a stream of torch's. None of them means anything here."""
        return isinstance(stream, torch.Stream | torch.cuda.Stream)

    @contextmanager
    def on_capture_stream(self, pool: EmulatedPool, stream: Any) -> Iterator[None]:
        """Context of a whole capture, which holds the pool's turn."""
        with pool.turn():
            try:
                yield
            finally:
                host_guard.sweep()

    def begin(self, pool: EmulatedPool) -> EmulatedRecording:
        """Start recording a segment into ``pool``.

        Raises:
            UsageError: another segment is being recorded into it.
        """
        return EmulatedRecording(pool)

    def ordered(self, fn: Callable[[], Any]) -> tuple[Any, bool]:
        """Run ``fn``. Returns its result, and False: there are no other streams to wait for."""
        return fn(), False

    def clearer_error(self, error: BaseException) -> CaptureError | None:
        """None: whatever the emulator refuses is named at once."""
        return None

    def synchronize(self) -> None:
        """Do nothing: every op is done when it returns."""
        return None

    def driver_bytes(self) -> int:
        """0: there is no driver."""
        return 0
