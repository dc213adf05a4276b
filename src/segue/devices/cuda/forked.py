"""Recording a segment on several streams, so that its graph has branches; and, ahead of that, seeing that it can be done."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from segue import _where
from segue.devices.aux_streams import Held, Step, kind_of
from segue.devices.cuda import raw
from segue.devices.cuda.pool import CudaPool
from segue.devices.cuda.recording import CudaRecording, CudaSegment
from segue.errors import UnseenWorkError


class ForkedRecording(CudaRecording):
    """A stream capture that forks to auxiliary streams where ops are placed there, and joins them again.

    Args:
        aux: auxiliary streams.
        events: a store of events for the edges between streams.
        looks: whether to look, around each op, that nothing gets in but by ops. Kernels that no op tells of, such as triton's,
            go to the current stream, which then has got further than the last op took it.
    """

    def __init__(self, pool: CudaPool, aux: Sequence[torch.cuda.Stream], events: list[Any], looks: bool) -> None:
        super().__init__(pool)
        streams = [torch.cuda.current_stream(), *aux]
        self._handles = [s.cuda_stream for s in streams]
        self._enter = [raw.current_setter(s) for s in streams]
        self._on = 0  # the current one
        self._looks = looks
        self._marks: list[Any] = []
        self._forked: set[int] = set()  # streams that wait for others, and must be joined
        self._held = Held()
        try:
            self._capture = raw.StreamCapture(streams, events)
            self._reached = self._capture.reached(0)
        except BaseException:
            self.abort()
            raise

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], placed: Step | None = None) -> Any:
        if placed is None and kind_of(func).view:
            return super().run(func, args, kwargs)
        if raw.current_stream(self._device) != self._handles[self._on]:
            raise UnseenWorkError(
                f"at {_where.caller()} the forward has made another stream current, and a segment on auxiliary streams leaves "
                "them to segue. Record with aux_streams=False."
            )
        if self._looks:
            self._look()
        if placed is not None:
            self._place(placed, args, kwargs)
        if not self._looks:
            return super().run(func, args, kwargs)
        try:
            return super().run(func, args, kwargs)
        finally:
            self._reached = self._capture.reached(self._on)

    def size(self) -> int:
        if self._looks:
            self._look()
        return super().size()

    def commit(self, at_once: bool = True) -> CudaSegment:
        try:
            self._join()
        except BaseException:
            self.abort()
            raise
        return super().commit(at_once)

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._join()
        super().abort()

    def _place(self, placed: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if placed.before:
            self._order(placed.before)
        self._held.follow(placed, args, kwargs)
        if placed.stream != self._on:
            self._on = placed.stream
            self._enter[self._on]()

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
        self._on = 0
        for stream in self._forked:
            self._capture.wait(0, self._capture.mark(stream))
        self._held.clear()

    def _look(self) -> None:
        if self._capture.reached(self._on) != self._reached:
            raise UnseenWorkError(
                f"before {_where.caller()} a kernel that no op tells of (a triton kernel, compiled code) was launched, and "
                "nobody knows what it reads. Record with aux_streams=False, or wrap it with torch.library."
            )
