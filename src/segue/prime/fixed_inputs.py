"""What a prime graph reads at fixed addresses: the embedded tokens and where each request's rows begin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from segue import _torch
from segue.capture import BreakableCapture
from segue.errors import UsageError
from segue.prime.requests import Batch


class Offsets:
    """``cu_seqlens``, int32 [requests + 1] on ``device``, at a fixed address: where each request's rows begin and end."""

    def __init__(self, bucket: int, requests: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.cu_seqlens = torch.zeros(requests + 1, dtype=torch.int32, device=device)
            # Offsets are copied from here: a number from the host would have to travel through pinned memory.
            numbers = torch.arange(bucket + 1, dtype=torch.int32, device=device)
            self._numbers = list(numbers.split(1))
            self._slots = list(self.cu_seqlens.split(1))[1:]
        self._version, self._offsets = 0, [0] * (requests + 1)

    def fill(self, offsets: Sequence[int]) -> None:
        """Write where each request's rows begin, and where the last one's end: [requests + 1] numbers, the first is 0.

        Numbers that are there already cost no copy, unless somebody wrote ``cu_seqlens`` since.
        """
        if offsets == self._offsets and self.cu_seqlens._version == self._version:
            return
        _torch.foreach_copy(self._slots, [self._numbers[at] for at in offsets[1:]])
        self._version, self._offsets = self.cu_seqlens._version, list(offsets)

    def check(self, name: str) -> None:
        """Check that no forward has written ``cu_seqlens`` since :meth:`fill`. ``name`` is the graph's, for errors.

        Raises:
            UsageError: one has.
        """
        if self.cu_seqlens._version != self._version:
            raise UsageError(f"{name}: the trunk's forward writes cu_seqlens, which other layers read. Let it work on a copy")


class Inputs:
    """At fixed addresses: the embedded tokens ``x`` [bucket, D], zero past the real rows, and their offsets.

    ``like``: embedded tokens [n, D] whose width, dtype and device ``x`` gets.
    """

    def __init__(self, like: Tensor, bucket: int, requests: int) -> None:
        with torch.inference_mode(False):
            self.x = torch.zeros(bucket, *like.shape[1:], dtype=like.dtype, device=like.device)
        self.offsets = Offsets(bucket, requests, like.device)
        self._bucket, self._requests = bucket, requests
        self._dirty = 0  # rows from here on are zero
        self._written = False  # whether the graph writes x, so that its tail is never known to be zero

    def fill(self, rows: Sequence[Tensor], batch: Batch) -> None:
        """Write the embedded tokens of each request [n, D], zeros after them, and the offsets."""
        offsets = batch.offsets(self._requests)
        total, start = offsets[-1], 0
        dirty = self._bucket if self._written else self._dirty
        self._dirty = max(dirty, total)
        for part, n in zip(rows, batch.lengths, strict=True):
            if n:
                self.x.narrow(0, start, n).copy_(part)
                start += n
        if dirty > total:
            self.x.narrow(0, total, dirty - total).zero_()
        self._dirty = total
        self.offsets.fill(offsets)

    def look_at(self, capture: BreakableCapture) -> None:
        """Learn from a capture whether its graphs write ``x``, so that all its tail has to be zeroed before each run."""
        x = _torch.storage_key(self.x)
        self._written = any(e.written and _torch.storage_key(e.tensor) == x for e in capture.externals)
