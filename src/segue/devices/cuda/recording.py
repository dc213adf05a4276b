"""Recording a segment on CUDA: a stream capture that becomes one graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from segue import _torch, _torch_ops
from segue.devices import generators
from segue.devices.cuda import raw
from segue.devices.cuda.op_checks import OpChecks
from segue.devices.cuda.pool import CudaPool
from segue.devices.cuda.side_streams import StreamEdges, fork, join, observing
from segue.errors import CaptureError, SegueError


class CudaSegment:
    """One instantiated CUDA graph, and its edges to other streams.

    ``graph``: instantiated unless ``empty``. ``edges``: what the segment was seen to wait for and to record. ``device``: the
    CUDA device's index. ``draws``: an op of the segment was given a random generator.
    """

    __slots__ = ("_draws", "_events", "_forbid", "_waits", "empty", "graph", "launch")

    def __init__(self, graph: torch.cuda.CUDAGraph, empty: bool, edges: StreamEdges, device: int, draws: bool = False) -> None:
        self._waits, self._events = list(edges.waits), edges.records
        self.graph, self.empty = graph, empty and not self._waits and not self._events
        self._forbid, self._draws = _nothing, draws
        self.launch = self._surrounded(_nothing) if empty else lambda: self._first_launch(device)

    def _first_launch(self, device: int) -> None:
        """Launch by torch, which sets the generators that the graph draws from. Without any, later launches bypass torch."""
        self.launch = launch = self._surrounded(raw.graph_launcher(self.graph))
        before = raw.random_state(device)
        launch()
        if self._draws or raw.random_state(device) != before:
            return
        if (plain := raw.plain_launcher(self.graph, device)) is not None:
            self.launch, self._forbid = self._surrounded(plain[0]), plain[1]

    def discard(self) -> None:
        """Give up the segment. Recording ran nothing, so there is nothing to undo."""

    def destroy(self) -> None:
        """Free the graph. A later launch is an error, never a stale result."""
        self._forbid()
        self.graph.reset()

    def _surrounded(self, launch: Callable[[], None]) -> Callable[[], None]:
        """``launch``, preceded by the waits that the segment was seen to make, and followed by the events that it recorded."""
        waits, events = self._waits, self._events
        if not waits and not events:
            return launch

        def with_edges() -> None:
            for wait in waits:
                wait()
            launch()
            for event in events:
                event.record()

        return with_edges


def _nothing() -> None:
    return None


class CudaRecording:
    """A stream capture under way on the current stream, into ``pool``. It begins when this is made.

    Side streams that an earlier segment has forked are part of this one too, as the forward may go on with them. Those that are
    open at the end are joined, since the work in them belongs before the break.
    """

    reenter: AbstractContextManager[Any]
    acted = False

    def __init__(self, pool: CudaPool) -> None:
        pool.anchor()
        self._device = pool.index
        self._scope = ExitStack()
        self._scope.enter_context(pool.growing())
        self._graph, self._draws = raw.new_graph(), False
        self._origin, self._sides = torch.cuda.current_stream(), pool.side_streams
        self._may_draw_from = raw.register_generators(self._graph, self._device, generators.known())
        self._edges, self._ops = StreamEdges(), OpChecks()
        self._scope.enter_context(_fail_on_recompile())
        self._scope.enter_context(observing(self._edges))
        try:
            self._graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
            fork(self._sides.values())
        except BaseException:
            self.abort()
            raise

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op, which the stream capture records, and note whether it is given a random generator.

        Raises:
            CaptureError: CUDA can't record this call; or its generator is one of the user's own that was not known when the
                recording began.
        """
        if kwargs and (generator := kwargs.get("generator")) is not None:
            if generator.device.type == "cuda" and _torch.generator_key(generator) not in self._may_draw_from:
                raise generators.unknown(_torch_ops.op_name(func).removeprefix("aten::"), generator)
            self._draws = True
        return self._ops.run(func, args, kwargs)

    def commit(self) -> CudaSegment:
        """End the capture and instantiate the graph.

        Raises:
            CaptureError: CUDA had invalidated the capture. torch.OutOfMemoryError: the driver has no memory for the graph.
            SegueError: cuda-bindings doesn't say whether the graph is empty.
        """
        self._scope.close()
        self._sides.update((side.cuda_stream, side) for side in self._edges.forked)
        join(self._sides.values(), self._origin)
        try:
            empty = raw.end_graph(self._graph)
            if not empty:
                self._graph.instantiate()
        except Exception as e:
            self.abort()
            if isinstance(e, SegueError):
                raise
            if "out of memory" in str(e):
                raise torch.OutOfMemoryError(str(e).partition("\n")[0]) from e
            raise CaptureError(_why(str(e))) from e
        return CudaSegment(self._graph, empty, self._edges, self._device, self._draws)

    def abort(self) -> None:
        """End the stream capture and drop the graph. Never raises."""
        self._scope.close()
        raw.abandon_graph(self._graph)


def _why(text: str) -> str:
    first = text.splitlines()[0] if text else "no reason given"
    if "unjoined" in text:
        return (
            f"a segment ended while a side stream that was forked in it had not been joined ({first}). Call "
            "current_stream().wait_stream(side) before the break, or before the forward ends."
        )
    return (
        f"CUDA refused the segment when its recording ended ({first}). Something inside it can't be in a graph, most often a "
        "host read (.item(), .cpu()) or a synchronisation whose error was swallowed: move it into a break point."
    )


def _fail_on_recompile() -> AbstractContextManager[Any]:
    """Context: compiled code that would recompile raises an error that says so.

    A compilation invalidates the capture, and otherwise some later op would raise an error that doesn't mention it.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("fail_on_recompile")
    return stance
