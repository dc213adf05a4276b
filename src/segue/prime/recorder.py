"""Warming up and recording a whole forward: a capture without breaks, cut where that is quickest."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from segue import _source_lines
from segue.capture import BreakableCapture, weak_ref_tensor
from segue.capture.isolation import one_capture
from segue.capture.object_graph import Places
from segue.devices import Device, Pool
from segue.errors import CaptureError, SegueError, UsageError
from segue.prime.cuts import Pattern, marks, patterns, pinned, quickest
from segue.prime.trunk import Trunk

log = logging.getLogger("segue")
Results = tuple[Tensor, ...]
AtEnd = Callable[[Results], Callable[[], object]]


class Prime:
    """What a prime graph reads, by name, for errors about it. ``inputs``: whatever holds what is filled before a run."""

    def __init__(self, trunk: Trunk, scratch: Any, inputs: Any) -> None:
        self.trunk, self.scratch, self.inputs = trunk, scratch, inputs


class Recorder:
    """Records one forward.

    Args:
        run: the forward over fixed memory, to tensors.
        root: where the names of what it reads are looked for.
    """

    def __init__(
        self,
        run: Callable[[], Results],
        root: Prime,
        device: Device,
        pool: Pool,
        stream: Any,
        name: str,
    ) -> None:
        self._run, self._prime, self._name = run, root, name
        self._root: Prime | Places = root
        self._device, self._pool, self._stream = device, pool, stream
        self.seconds = 0.0  # that the latest recording took
        self.measured: dict[Pattern, float] = {}  # seconds of each pattern, where there was a choice and it was measured
        self.results: dict[BreakableCapture, Results] = {}

    def warm(self) -> int:
        """Run the forward eagerly on the capture stream, as libraries set themselves up there. Returns its marks."""
        gc.collect()  # old graphs in reference cycles go now, not while another is being recorded
        with one_capture, self._pool.turn(), self._device.session(self._pool, self._stream), torch.inference_mode():
            marks.begin()
            self._run()
            marked = marks.end()
        self._root = Places(self._prime)  # which each recording would look for again
        return marked

    def best(self, cuts: Sequence[int] | None, marked: int) -> tuple[Pattern, BreakableCapture]:
        """Record with the pinned ``cuts``, or with the quickest pattern, where the device can measure.

        Raises:
            UsageError: a cut is no mark.
        """
        if cuts is not None or not self._device.traits.timing:
            pattern = pinned(cuts or (), marked)
            return pattern, self.record(pattern)
        best, capture, self.measured = quickest(patterns(marked), self.record, self._device)
        self.results = {capture: self.results[capture]}
        shown = ", ".join(f"{list(pattern)} {seconds * 1e3:.3f} ms" for pattern, seconds in self.measured.items())
        log.info("segue: %s is cut after %s: %s", self._name, list(best), shown)
        return best, capture

    def record(self, cuts: Pattern, at_end: AtEnd | None = None) -> BreakableCapture:
        """Record once. ``results`` then has what the forward returned, as views of graph memory that own nothing.

        ``at_end``: gets what the forward returned; what it returns is called when all of it has run, and nobody else
        can replay in the pool.

        Raises:
            CaptureError: the forward can't be in a graph. UsageError: it met a break point.
        """
        capture = BreakableCapture(pool=self._pool, stream=self._stream, name=self._name, root=self._root, defer_checks=True)
        start = time.perf_counter()
        with self._named_errors(), torch.inference_mode(), capture:
            marks.begin(capture, cuts)
            try:
                results = self._run()
            finally:
                marks.end()
            if at_end is not None:
                capture.at_end(at_end(results))
        # In the pool, results are only needed from a replay to the copy after it, which one turn covers.
        self.results[capture] = tuple(weak_ref_tensor(t) if self._pool.owns(t) else t for t in results)
        self.seconds = time.perf_counter() - start
        breaks = capture.breaks
        if breaks:
            capture.close()
            raise UsageError(
                f"{self._name}: the trunk's forward met {breaks} break points. A prime graph has nothing live between "
                "its segments: call the undecorated functions in the trunk, or capture it with a breakable runner"
            )
        return capture

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except SegueError as e:
            if type(e) is not CaptureError or "into a break" not in str(e):
                raise
            raise self._refused(e) from e  # which is right for a breakable capture only
        except RuntimeError as e:
            if "captur" not in str(e):
                raise
            raise self._refused(e) from e

    def _refused(self, error: RuntimeError) -> CaptureError:
        what = str(error).splitlines()[0].split(" can't be in a segment")[0]
        return CaptureError(
            f"{self._name}: trunk.{self._method(error)}(), {_source_lines.raised(error)}, can't be in a graph ({what}): "
            "it reads the host, copies from pageable memory, or its shape depends on the data, and a prime graph has no breaks. "
            "Keep the value in a tensor (torch.where), prepare it in new_cache() or embed(), or run the model breakable"
        )

    def _method(self, error: BaseException) -> str:
        """The trunk's method in which ``error`` was raised."""
        codes = {code: name for name in ("reset", "forward", "head") if (code := _code(self._prime.trunk, name)) is not None}
        tb = error.__traceback__
        while tb is not None:
            if tb.tb_frame.f_code in codes:
                return codes[tb.tb_frame.f_code]
            tb = tb.tb_next
        return "forward"


def _code(trunk: Trunk, method: str) -> CodeType | None:
    return getattr(getattr(trunk, method), "__code__", None)
