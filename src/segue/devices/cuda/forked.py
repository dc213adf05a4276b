"""Recording a segment on several streams, so that its graph has branches."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from segue import _where
from segue.devices.aux_streams import AuxStreams, kind_of
from segue.devices.cuda import raw
from segue.devices.cuda.pool import CudaPool
from segue.devices.cuda.recording import CudaRecording, CudaSegment
from segue.errors import UnseenWorkError


class ForkedRecording(CudaRecording):
    """A stream capture that forks to auxiliary streams and joins them again.

    Between ops the capture stream is the current one, and kernels that no op tells of, such as triton's, go there. They are
    noticed, as that stream has then got further than its ops took it.
    """

    def __init__(self, pool: CudaPool, aux: list[torch.cuda.Stream], events: list[Any]) -> None:
        super().__init__(pool)
        try:
            capture = raw.StreamCapture(self._device, events)
            streams = [torch.cuda.current_stream(), *aux]
            self._origin = streams[0].cuda_stream
            self._enter = [raw.current_setter(s) for s in streams]
            self._reached, self._expected = capture.reached, capture.reached()
            self._aux: AuxStreams[Any] = AuxStreams(
                len(aux), lambda s: capture.mark(streams[s]), lambda s, event: capture.wait(streams[s], event)
            )
        except BaseException:
            self.abort()
            raise

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        if kind.view:
            return super().run(func, args, kwargs)
        self._look()
        stream = self._aux.enter(kind, args, kwargs)
        if stream:
            self._enter[stream]()
            try:
                result = super().run(func, args, kwargs)
            finally:
                self._enter[0]()
        else:
            try:
                result = super().run(func, args, kwargs)
            finally:  # one that failed may have waited, and whoever catches the error goes on
                self._expected = self._reached()
        self._aux.leave(result)
        return result

    def commit(self) -> CudaSegment:
        self._look()
        self._aux.end()
        return super().commit()

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._aux.end()
        super().abort()

    def _look(self) -> None:
        if raw.current_stream(self._device) != self._origin:
            raise UnseenWorkError(
                f"at {_where.caller()} the forward has made another stream current, and a segment on auxiliary streams leaves "
                "them to segue. Record with aux_streams=False."
            )
        if (reached := self._reached()) == self._expected:
            return
        if not self._aux.joined:
            raise UnseenWorkError(
                f"before {_where.caller()} a kernel that no op tells of (a triton kernel, compiled code) ran beside ops on "
                "auxiliary streams, and nobody knows what it reads. Record with aux_streams=False, or wrap it with torch.library."
            )
        self._expected = reached
        self._aux.unseen()
