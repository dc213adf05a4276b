"""Tracing a forward ahead of its captures, and captures that follow the trace, to go on auxiliary streams too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from segue import _torch, _where
from segue.capture.guards import forget_casts, one_capture, still, uninterrupted
from segue.capture.watch import External, Op, Watch
from segue.devices import Device, Pool, Recording
from segue.devices.aux_streams import NOTHING, Step, TracedOp
from segue.devices.trace import Trace
from segue.errors import UnseenWorkError

_END = TracedOp(None, [], (), 0, False)


def trace_of(
    run: Callable[[], object], device: Device, pool: Pool, stream: Any, name: str, into: Trace | None = None
) -> Trace:
    """Record ``run`` as one segment, note its ops (in ``into``), and give the segment up: nothing of it stays.

    Break points in it are plain calls. Not inside a capture, which it would wait for.

    Raises:
        CaptureError: ``run`` can't be in a graph. UnseenWorkError: which memory its ops share can't be told.
    """
    found, token = Trace() if into is None else into, object()
    watch = _Tracing(pool, name, found)
    pool.attach(token)
    try:
        with one_capture, still(), pool.turn(), device.session(pool, stream):
            watch.begin()
            forget_casts()
            recording: Recording | None = None
            try:
                with uninterrupted():
                    recording = device.begin(pool, looks=True)
                    watch.begin_segment(recording, 0)
                with watch:
                    run()
                watch.end_segment()
                watch.finish()
            finally:
                with uninterrupted():
                    watch.leave()
                    if recording is not None:
                        recording.abort()
                    forget_casts()
    finally:
        pool.retire(token, ())
    return found


class _Tracing(Watch):
    """Fills :attr:`trace`."""

    def __init__(self, pool: Pool, name: str, trace: Trace) -> None:
        super().__init__(pool, name)
        self.trace = trace

    def _run(self, op: Op, operands: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.recording is not None
        if self.recording.shows(op.func):  # what it does comes here op by op
            return self._record(op.func, args, kwargs)
        written: list[int] = []
        for t in _torch.written(op.writes, args, kwargs):  # before it may give them other memory
            self._see(t, op, written)
        wrote = tuple(n for n in written if n != NOTHING)
        before, told = len(self._starts), False
        try:
            result = self._record(op.func, args, kwargs)
            told = self._made_by(op, result, operands)
            return result
        finally:  # it counts if it failed, too, and somebody catches that
            made = len(self._starts)
            self.trace.ops.append(TracedOp(op.func, operands, wrote, made, made > before or bool(wrote) or not told))

    def _external(self, value: Tensor, span: tuple[int, int], op: Op) -> External | None:
        found = super()._external(value, span, op)
        if found is not None:
            self.trace.externals.append((found, span))
        return found

    def end_segment(self) -> None:
        assert self.recording is not None
        self.trace.size = self.recording.size()

    def finish(self) -> None:
        _check_apart(self._spans, self._name)


class Following(Watch):
    """Sees that a capture meets the ops of a trace, on the same memory, and says where each is recorded."""

    def __init__(self, pool: Pool, name: str, trace: Trace) -> None:
        super().__init__(pool, name)
        self._trace, self._ops, self._at = trace, [*trace.ops, _END], 0
        self._steps: Iterator[Step | None] = iter(())
        self._shows: Callable[[Any], bool] = _never
        self._size = 0  # of all segments so far

    def begin_segment(self, recording: Recording, number: int) -> None:
        self._steps = self._trace.steps(self._at)
        self._shows = recording.shows
        super().begin_segment(recording, number)

    def leave(self) -> None:
        super().leave()
        self._shows = _never

    def end_segment(self) -> None:
        assert self.recording is not None
        self._size += self.recording.size()

    def _run(self, op: Op, operands: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._shows(op.func):  # what it does comes here op by op
            return self._record(op.func, args, kwargs)
        traced, placed = self._ops[self._at], next(self._steps, _END)
        if traced.func is not op.func or traced.operands != operands or placed is _END:
            raise self._lost(op.func)
        self._at += 1
        result = self._record(op.func, args, kwargs, placed)
        self._made_by(op, result, operands)
        if len(self._starts) != traced.made:
            raise self._lost(op.func)
        return result

    def _external(self, value: Tensor, span: tuple[int, int], op: Op) -> External | None:
        known, number = self._trace.externals, len(self._spans)
        if number < len(known) and known[number][0].seen is value and known[number][1] == span:
            twin: External = known[number][0]
            return External(twin.tensor, value, twin.op, twin.where, self.segment)
        return super()._external(value, span, op)

    def finish(self) -> None:
        """
        Raises:
            UnseenWorkError: the forward ended before its trace, or recorded more, or tensors overlap that didn't.
        """
        if self._at < len(self._trace.ops):
            raise UnseenWorkError(
                f"{self._name}: the forward ended before {self._ops[self._at].func}, which it did when it was traced for "
                "auxiliary streams: it runs otherwise each time. Record with aux_streams=False."
            )
        if self._trace.size is not None and self._size != self._trace.size:
            raise UnseenWorkError(
                f"{self._name}: the segments have {self._size} kernels and copies, and the forward had {self._trace.size} when "
                "it was traced for auxiliary streams: some come from no op. Record with aux_streams=False."
            )
        _check_apart(self._spans, self._name)

    def _lost(self, func: Any) -> UnseenWorkError:
        return UnseenWorkError(
            f"{func} at {_where.caller()} is not what the forward did there, or not on that memory, when it was traced for "
            "auxiliary streams: it runs otherwise each time. Record with aux_streams=False."
        )


def _never(func: Any) -> bool:
    return False


def _check_apart(spans: list[tuple[int, int]], name: str) -> None:
    """Memory from outside goes by storages."""
    ordered = sorted(span for span in spans if span[0])  # without those on the meta device
    if any(start < end for (_, end), (start, _) in itertools.pairwise(ordered)):
        raise UnseenWorkError(
            f"{name}: two of the tensors that the forward uses overlap in memory and have storages of their own, so that an "
            "order between what runs on auxiliary streams can't be told. Record with aux_streams=False."
        )
