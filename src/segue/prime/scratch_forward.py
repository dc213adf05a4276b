"""A trunk's forward on a scratch cache: warmed up, recorded whole, replayed, and copied out into sessions.

Both ways to use prime graphs, :class:`~segue.PrimeGraph` and the runner's prime strategy, are thin layers over this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from segue import _source_lines, _torch
from segue.capture import BreakableCapture, weak_ref_tensor
from segue.capture.allocations import Allocations
from segue.capture.isolation import collect_garbage, one_capture
from segue.capture.places import Places
from segue.devices import Pool
from segue.errors import CaptureError, SegueError, UsageError
from segue.prime.copyout import CopyOut
from segue.prime.cuts import Pattern, marks, patterns, pinned, quickest
from segue.prime.fixed_inputs import Offsets
from segue.prime.reference import logits_and_hidden
from segue.prime.trunk import Trunk

log = logging.getLogger("segue")
Results = tuple[Tensor, ...]
AtEnd = Callable[[Results], Callable[[], object]]


class Prime:
    """What a prime graph alone fills, by name: errors call it ``Prime.scratch.kv``."""

    def __init__(self, scratch: Any, x: Tensor, cu_seqlens: Tensor, numbers: Tensor | None) -> None:
        self.scratch, self.x, self.cu_seqlens, self.numbers = scratch, x, cu_seqlens, numbers


def places_of(trunk: Trunk) -> Places:
    """The names that a trunk reaches. Errors call what its graphs read ``Prime.trunk.layers.0.weight``."""
    return Places(trunk, "Prime.trunk", once=True)


class ScratchForward:
    """One bucket's forward over fixed memory. The owner fills ``x`` and ``offsets``, runs or replays, and delivers.

    Args:
        scratch: a cache of the trunk's for at least the rows of ``x``.
        copies: the copies out of ``scratch``.
        x: the embedded tokens [rows, D], zero past the real ones.
        numbers: what the trunk's forward gets as its fourth argument, int64 [rows]; None for a trunk that takes three.
        offsets: where each request's rows begin.
        name: what errors call it.
        places: the names that ``trunk`` reaches. ``remedy``: what errors about something that has changed tell the user to do.
        with_head: whether the trunk's head runs too. The results are then logits [requests, V] and the last hidden states
            [requests, H]; otherwise they are the hidden states [rows, H] alone.

    ``cuts``: after which marks the recorded forward is cut. ``measured``: seconds of each pattern of cuts that was tried.
    ``seconds``: how long the latest recording took, without warm-up and garbage collection.
    """

    def __init__(
        self,
        trunk: Trunk,
        scratch: Any,
        copies: CopyOut,
        x: Tensor,
        offsets: Offsets,
        name: str,
        *,
        places: Places | None = None,
        remedy: str = "capture again",
        with_head: bool = False,
        numbers: Tensor | None = None,
    ) -> None:
        self.trunk, self.scratch, self.copies, self.x, self.offsets, self.name = trunk, scratch, copies, x, offsets, name
        self._with_head, self._places, self._remedy, self.numbers = with_head, places, remedy, numbers
        self.cuts: Pattern = ()
        self.measured: dict[Pattern, float] = {}
        self.seconds = 0.0
        self.captured: BreakableCapture | None = None
        self._results: Results = ()  # of the captured forward

    def forward(self) -> Results:
        """Run the trunk eagerly on the scratch cache as it is, which must be fresh."""
        cu_seqlens = self.offsets.cu_seqlens
        if self._with_head:
            return logits_and_hidden(self.trunk, self.x, cu_seqlens, self.scratch, self.name)
        if self.numbers is not None:
            return (self.trunk.forward(self.x, cu_seqlens, self.scratch, self.numbers),)  # type: ignore[call-arg]
        return (self.trunk.forward(self.x, cu_seqlens, self.scratch),)

    def run(self) -> Results:
        """Reset the scratch cache and run the trunk eagerly: what a graph holds."""
        self.trunk.reset(self.scratch)
        return self.forward()

    def capture(
        self,
        cuts: Sequence[int] | None,
        pool: Pool,
        stream: Any,
        at_end: AtEnd | None = None,
        marked: int | None = None,
        warmups: int = 1,
    ) -> None:
        """Warm up and record.

        Args:
            cuts: as for :class:`~segue.PrimeGraph`. Where they are None and the device can measure, a few patterns are
                recorded and measured, and the quickest is kept.
            at_end: gets the results while they are recorded. What it returns is called when the forward has run whole,
                and while nobody else can replay in the pool.
            marked: how many marks the forward has, where it has been warmed up already.
            warmups: how often it is warmed up otherwise.

        Raises:
            CaptureError: the forward can't be in a graph. UsageError: it met a break point or wrote ``cu_seqlens``, or a cut is
            no mark.
        """
        if marked is None:
            marked = [self._warm_up(pool, stream) for _ in range(warmups)][-1]
            self.offsets.check(self.name)
        root = self._places or places_of(self.trunk)  # one walk for all recordings
        own = Prime(self.scratch, self.x, self.offsets.cu_seqlens, self.numbers)
        results: dict[BreakableCapture, Results] = {}

        def record(pattern: Pattern, at_end: AtEnd | None = None) -> BreakableCapture:
            capture = BreakableCapture(
                pool=pool, stream=stream, name=self.name, root=root, defer_checks=True, remedy=self._remedy, own=own
            )
            results[capture] = self._record(capture, pattern, at_end)
            return capture

        if cuts is None and pool.device.traits.timing:
            self.cuts, found, self.measured = quickest(patterns(marked), record, pool.device)
            shown = ", ".join(f"{list(pattern)} {seconds * 1e3:.3f} ms" for pattern, seconds in self.measured.items())
            log.info("segue: %s is cut after %s: %s", self.name, list(self.cuts), shown)
            if at_end is not None:
                found.close()
                found = record(self.cuts, at_end)
        else:
            self.cuts = pinned(cuts or (), marked)
            found = record(self.cuts, at_end)
        self.captured, self._results = found, results[found]

    def replay(self) -> Results:
        """Replay the recorded forward.

        Returns:
            Views of graph memory that own nothing: copy them before anything else replays in the pool.

        Raises:
            ReplayError: something that the graph reads was re-pointed, or it was closed.
        """
        assert self.captured is not None
        self.captured.replay()
        return self._results

    def deliver(self, sessions: Sequence[Any], lengths: Sequence[int], inference: bool) -> None:
        """Copy the state of each request that has tokens into its session.

        Everything is checked before anything is written, and the sessions' lengths are set last.

        Args:
            lengths: tokens of each request, whose rows lie one after the other in the scratch cache.
            inference: whether memory that the trunk reserves for a session is made in inference mode.

        Raises:
            InputError: a session isn't like the scratch cache, or shares memory with it or another. No session was touched.
        """
        real = [r for r, n in enumerate(lengths) if n]
        receive, reserve = (getattr(self.trunk, name, None) for name in ("receive", "reserve"))
        with without_gradients(inference):
            if receive is not None and self.captured is not None and receive(sessions[0], self.scratch, lengths[0]):
                return
            if reserve is not None:
                for r in real:
                    reserve(sessions[r], lengths[r])
            states = [self.trunk.state(sessions[r]) for r in real]
        with _torch.inference_guard(True):
            pairs, start = [], 0
            for r, state in zip(real, states, strict=True):
                pairs += self.copies.pairs(state, r, start, lengths[r])
                start += lengths[r]
            self.copies.check_apart(states, real)
            self.copies.copy(pairs)
        with without_gradients(inference):
            for r in real:
                self.trunk.set_length(sessions[r], lengths[r])

    def close(self) -> None:
        """Forbid further replays and let go of the results. May be called twice."""
        if self.captured is not None:
            self.captured.close()
        self._results = ()

    def _warm_up(self, pool: Pool, stream: Any) -> int:
        """Run eagerly on the capture stream, as libraries set themselves up there. Returns the number of marks."""
        collect_garbage()
        with one_capture, pool.turn(), pool.device.on_capture_stream(pool, stream), torch.inference_mode():
            marks.begin()
            fixed = [self.x, self.offsets.cu_seqlens, *([] if self.numbers is None else [self.numbers])]
            with Allocations(fixed) as made:
                self.run()
            made.keep(but=fixed)
            return marks.end()

    def _record(self, capture: BreakableCapture, cuts: Pattern, at_end: AtEnd | None) -> Results:
        start = time.perf_counter()
        with self._named_errors(), torch.inference_mode(), capture:
            marks.begin(capture, cuts)
            try:
                results = self.run()
            finally:
                marks.end()
            if at_end is not None:
                due = [at_end(results)]
                # The capture keeps its callbacks. This one is popped, so that it holds no session once the forward has run.
                capture.at_end(lambda: due.pop()())
        # In the pool, results are only needed from a replay to the copy after it, which one turn covers.
        views = tuple(weak_ref_tensor(t) if capture.pool.owns(t) else t for t in results)
        self.seconds = time.perf_counter() - start
        breaks = capture.breaks
        if breaks:
            capture.close()
            raise UsageError(
                f"{self.name}: the trunk's forward met {breaks} break points. A prime graph has nothing live between "
                "its segments: call the undecorated functions in the trunk, or capture it with a breakable runner"
            )
        return views

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Name the trunk's method in errors about host reads. The capture's own advice is to use a break, and there is none."""
        try:
            yield
        except SegueError as e:
            if type(e) is not CaptureError or "into a break" not in str(e):
                raise
            raise self._unfit(e) from e
        except RuntimeError as e:
            if "captur" not in str(e):
                raise
            raise self._unfit(e) from e

    def _unfit(self, error: RuntimeError) -> CaptureError:
        what = str(error).splitlines()[0].split(" can't be in a segment")[0]
        return CaptureError(
            f"{self.name}: trunk.{self._method_of(error)}(), {_source_lines.raised(error)}, can't be in a graph ({what}): "
            "it reads the host, copies from pageable memory, or its shape depends on the data, and a prime graph has no breaks. "
            "Keep the value in a tensor (torch.where), prepare it in new_cache() or embed(), or run the model breakable"
        )

    def _method_of(self, error: BaseException) -> str:
        """The trunk's method in which ``error`` was raised."""
        codes = {code: name for name in ("reset", "forward", "head") if (code := _code(self.trunk, name)) is not None}
        tb = error.__traceback__
        while tb is not None:
            if tb.tb_frame.f_code in codes:
                return codes[tb.tb_frame.f_code]
            tb = tb.tb_next
        return "forward"


def without_gradients(inference: bool) -> Any:
    """A context manager: in inference mode or not, and either way without gradients. It is in force from its making on."""
    guard = _torch.inference_guard(inference)
    torch.set_grad_enabled(False)  # leaving inference mode turns them on; the guard puts them back with the mode
    return guard


def _code(trunk: Trunk, method: str) -> CodeType | None:
    return getattr(getattr(trunk, method), "__code__", None)
