"""Recording a segment on several streams, so that its graph has branches."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from segue import _torch, _where
from segue.devices.aux_streams import Step
from segue.devices.cuda import raw
from segue.devices.cuda.pool import CudaPool
from segue.devices.cuda.recording import CudaRecording, CudaSegment
from segue.errors import UnseenWorkError


class ForkedRecording(CudaRecording):
    """A stream capture that forks to auxiliary streams and joins them again.

    Between ops a stream is current that nothing should run on. Kernels that no op tells of, such as triton's, go there, and
    are noticed by that: to ask before each op how far the capture stream has got takes three times as long.

    Args:
        aux: auxiliary streams.
        between: the stream between ops.
        events: a store of events for the edges between streams.
    """

    def __init__(
        self, pool: CudaPool, aux: Sequence[torch.cuda.Stream], between: torch.cuda.Stream, events: list[Any]
    ) -> None:
        super().__init__(pool)
        streams = [torch.cuda.current_stream(), *aux, between]
        *self._enter, self._rest = map(raw.current_setter, streams)
        self._between, self._last = between.cuda_stream, len(streams) - 1
        self._marks: list[Any] = []
        self._forked = {self._last}  # streams that wait for others, and must be joined
        self._held: list[Any] = []
        self._kept: list[Any] = []
        try:
            self._capture = capture = raw.StreamCapture(streams, events)
            capture.wait(self._last, capture.mark(0))
            self._untouched = capture.reached(self._last)
            self._rest()
        except BaseException:
            self.abort()
            raise

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], placed: Step | None = None) -> Any:
        if placed is None:
            return super().run(func, args, kwargs)
        if raw.current_stream(self._device) != self._between:
            raise UnseenWorkError(
                f"at {_where.caller()} the forward has made another stream current, and a segment on auxiliary streams leaves "
                "them to segue. Record with aux_streams=False."
            )
        if placed.alone:
            self._look(f"before {_where.caller()}")
        if placed.before:
            self._order(placed.before)
        if placed.release:
            self._held.clear()
        if placed.hold or placed.keep:  # the storages, for a tensor may be given another (``t.data = ...``)
            operands = _torch.tensors(args, kwargs)
            self._held.extend(operands[i].untyped_storage() for i in placed.hold)
            self._kept.extend(operands[i].untyped_storage() for i in placed.keep)
        self._enter[placed.stream]()
        try:
            return super().run(func, args, kwargs)
        finally:
            self._rest()

    def commit(self, at_once: bool = True) -> CudaSegment:
        try:
            self._look("in the segment")
            self._join()
        except BaseException:
            self.abort()
            raise
        return super().commit(at_once)

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._join()
        super().abort()

    def _order(self, before: Sequence[tuple[int, int]]) -> None:
        capture, marks = self._capture, self._marks
        for stream, mark in before:
            if mark < 0:
                marks.append(capture.mark(stream))
            else:
                capture.wait(stream, marks[mark])
                if stream:
                    self._forked.add(stream)

    def _join(self) -> None:
        self._enter[0]()
        for stream in self._forked:
            self._capture.wait(0, self._capture.mark(stream))
        self._held.clear()
        self._kept.clear()

    def _look(self, when: str) -> None:
        if self._capture.reached(self._last) != self._untouched:
            raise UnseenWorkError(
                f"{when} a kernel that no op tells of (a triton kernel, compiled code) was launched, and nobody knows what it "
                "reads. Record with aux_streams=False, or wrap it with torch.library."
            )
