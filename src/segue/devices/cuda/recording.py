"""Recording a segment: a stream capture that becomes one graph."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from segue import _torch
from segue.devices.aux_streams import Step
from segue.devices.cuda import raw
from segue.devices.cuda.pool import CudaPool
from segue.devices.cuda.streams import Seen, observing
from segue.errors import CaptureError


class CudaSegment:
    """One CUDA graph, instantiated or about to be.

    ``draws``: it was given a random generator of its own. ``made``: waits until it is instantiated.
    """

    __slots__ = ("_draws", "_events", "_forbid", "_made", "_waits", "empty", "graph", "launch")

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        empty: bool,
        seen: Seen,
        device: int,
        draws: bool = False,
        made: Callable[[], None] | None = None,
    ) -> None:
        self._made = made or _nothing
        self._waits, self._events = list(seen.waits), seen.records
        self.graph, self.empty = graph, empty and not self._waits and not self._events
        self._forbid, self._draws = _nothing, draws
        self.launch = self._surrounded(_nothing) if empty else lambda: self._first_launch(device)

    def _first_launch(self, device: int) -> None:
        """By torch, which sets the generators that the graph draws from. If it draws from none, later launches do without."""
        self._made()
        self.launch = launch = self._surrounded(raw.graph_launcher(self.graph))
        before = raw.random_state(device)
        launch()
        if self._draws or raw.random_state(device) != before:
            return
        if (plain := raw.plain_launcher(self.graph, device)) is not None:
            self.launch, self._forbid = self._surrounded(plain[0]), plain[1]

    def discard(self) -> None:
        pass

    def destroy(self) -> None:
        """Free the graph. A later launch is an error, never a stale result."""
        with contextlib.suppress(Exception):
            self._made()
        self._forbid()
        self.graph.reset()

    def _surrounded(self, launch: Callable[[], None]) -> Callable[[], None]:
        """``launch`` after what the segment was seen to wait for, and before the events that it was seen to record."""
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
    """A stream capture under way on the current stream."""

    reenter: AbstractContextManager[Any]

    def __init__(self, pool: CudaPool) -> None:
        pool.anchor()
        self._device = pool.device.index
        self._scope = ExitStack()
        self._scope.enter_context(pool.growing())
        self._graph, self._draws = raw.new_graph(), False
        self._seen = Seen()
        self._scope.enter_context(_fail_on_recompile())
        self._scope.enter_context(observing(self._seen))
        try:
            self._graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
        except BaseException:
            self.abort()
            raise

    def shows(self, func: Any) -> bool:
        return False

    def size(self) -> int:
        return raw.captured_nodes(self._device)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], placed: Step | None = None) -> Any:
        if kwargs and kwargs.get("generator") is not None:
            self._draws = True
        return _torch.kernel(func)(*args, **kwargs)

    def commit(self, at_once: bool = True) -> CudaSegment:
        """End the capture and instantiate the graph.

        Raises:
            CaptureError: CUDA had invalidated the capture.
        """
        self._scope.close()
        made = None
        try:
            empty = raw.end_graph(self._graph)
            if not empty:
                if at_once:
                    self._graph.instantiate()
                else:
                    made = _instantiating(self._graph, self._device)
        except Exception as e:
            self.abort()
            raise CaptureError(_why(str(e))) from e
        return CudaSegment(self._graph, empty, self._seen, self._device, self._draws, made)

    def abort(self) -> None:
        self._scope.close()
        raw.abandon_graph(self._graph)


def _instantiating(graph: torch.cuda.CUDAGraph, device: int) -> Callable[[], None]:
    """Instantiate in another thread, which takes 2 to 10 ms for a thousand nodes and no interpreter. What is returned waits for
    it."""

    def work() -> None:
        torch.cuda.set_device(device)
        graph.instantiate()

    future = _workers().submit(work)

    def wait() -> None:
        try:
            future.result()
        except Exception as e:
            raise CaptureError(_why(str(e))) from e

    return wait


@functools.cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="segue")


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
    """Compiled code that would recompile inside a capture invalidates it, and a far away op raises: name it instead."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("fail_on_recompile")
    return stance
