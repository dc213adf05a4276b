"""The write log: copies of what a warm-up or capture overwrites outside its own memory, so that it can be put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from segue import _source_lines, _torch, _torch_ops
from segue.capture import is_breakable_capture_active
from segue.capture.allocations import MadeMemory
from segue.devices import generators
from segue.errors import UsageError

LIMIT = 1 << 30  # bytes


class WriteLog(MadeMemory):
    """Watches the ops of this thread and copies the storage of every external tensor before its first write.

    Memory that a watched op made is internal. Nothing is copied for ops of a segment that is being recorded: they don't execute
    then, and the warm-up has written the same tensors. Memory is known by its address, since an alias may be a storage of its
    own.

    Args:
        internal: whether a tensor is the capture's or runner's own memory.
        state: tensors to put back in any case; they don't count against the limit.
        limit: bytes to copy at most.

    Raises:
        UsageError: from the op whose write exceeds the limit.
    """

    def __init__(self, internal: Callable[[Tensor], bool], state: Iterable[Tensor] = (), limit: int = LIMIT) -> None:
        super().__init__()
        self._internal, self._limit, self._bytes = internal, limit, 0
        self._saved: dict[int, tuple[Any, Tensor]] = {}
        for t in state:
            self._save(t)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_breakable_capture_active():
            return func(*args, **kwargs)
        writes = _torch_ops.written_arguments(func)
        for t in _torch_ops.tensors(_torch_ops.written(writes, args, kwargs), {}) if writes[0] else ():
            if _torch.address(t):
                self._before_write(t, func)
        return self.run(func, args, kwargs)[0]

    def put_back(self) -> None:
        """Restore every storage that was written."""
        with torch.inference_mode(False), torch.no_grad():
            for storage, saved in self._saved.values():
                _bytes_of(storage, saved.device).copy_(saved)

    def _before_write(self, t: Tensor, func: Any) -> None:
        address, nbytes = _torch.storage_span(t)
        if _source_lines.in_compiled_code():
            return  # into memory that it has allocated unseen
        if not nbytes or address in self._saved or self.has(t) or self._internal(t):
            return
        if self._bytes + nbytes > self._limit:
            raise UsageError(
                f"{func} at {_source_lines.caller()} writes a tensor of {nbytes} bytes that capture() would have to copy in "
                f"order to put it back, beyond {self._limit} bytes in all. Name it in GraphRunner(state=[...]), or "
                "capture lazily, where every call is a real one"
            )
        self._bytes += nbytes
        self._save(t)

    def _save(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        with torch.inference_mode(False), torch.no_grad():
            self._saved[storage.data_ptr()] = storage, _bytes_of(storage, t.device).clone()


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Put the random generators of the CPU and the device back after this block, and those that forwards draw from."""
    cuda = device.type != "cpu"
    fork = torch.random.fork_rng([device] if cuda else [], device_type=device.type if cuda else "cuda")
    with fork, generators.kept():
        yield


def _bytes_of(storage: Any, device: torch.device) -> Tensor:
    return _torch.tensor_at(storage.data_ptr(), storage.nbytes(), torch.uint8, (storage.nbytes(),), (1,), 0, device)
