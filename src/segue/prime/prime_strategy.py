"""Prime as a runner's strategy: batches of fresh prompts as whole graphs, everything else by the strategy after it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture import current_forward_ctx
from segue.capture.named_ranges import named
from segue.capture.places import Places
from segue.capture.thread_state import state
from segue.errors import ReplayError
from segue.prime.copyout import CopyOut
from segue.prime.cuts import marks
from segue.prime.fixed_inputs import Offsets
from segue.prime.requests import packed_offsets
from segue.prime.scratch_forward import Results, ScratchForward, places_of
from segue.prime.trunk import Trunk
from segue.runner.calls import Call
from segue.runner.strategy import CapturedForward, Job

Prompts = Sequence[tuple[int, Any]]


class PrimeStrategy:
    """Runs fresh prompts through a trunk. The runner's function must return the trunk's hidden states [tokens, H].

    Args:
        trunk: as for :class:`~segue.PrimeGraph`; its embedding and head are the caller's, outside the graph.
        fresh: gives the prompts of a call's context, ``(tokens, session)`` each in the order of the rows, or None where
            the context is no batch of fresh prompts.
        x: the input that has the embedded tokens [tokens, D], padded with zeros.
        requests: the most prompts in a call.
        cuts: as for :class:`~segue.PrimeGraph`; measured at the first capture and kept for the others.
        name: by which counters and decisions know it.
        numbers: gives one whole number for each token of a context, int64 [tokens]. The trunk's forward gets them as a fourth
            argument [rows], in which the rows past the real ones hold whatever an earlier call left.
        beside: another prime strategy, for a trunk of the same model. All that fill its scratch cache share what is found out
            about the model: the quickest cuts, and what decides what it computes.
        most_rows: the largest bucket. A trunk with ``part()`` makes one scratch cache of so many rows, and the graphs of all
            buckets fill that; by default it is made anew for a bucket larger than those before.
    """

    name, whole = "prime", True

    def __init__(
        self,
        trunk: Trunk,
        fresh: Callable[[Any], Prompts | None],
        x: str = "x",
        requests: int = 1,
        cuts: Sequence[int] | None = None,
        most_rows: int = 0,
        *,
        name: str = "prime",
        numbers: Callable[[Any], Tensor] | None = None,
        beside: PrimeStrategy | None = None,
    ) -> None:
        self.trunk, self.requests, self.cuts, self.name = trunk, requests, cuts, name
        self._numbers, self._beside = numbers, beside
        self._fresh, self._x, self._most_rows = fresh, x, most_rows
        self._programs: weakref.WeakSet[_PrimeProgram] = weakref.WeakSet()
        self._marked: int | None = None  # marks of the forward, which its warm-up has counted
        self._shared: weakref.ref[_SharedScratch] | None = None  # goes with the last graph that fills it
        self._places: Places | None = None

    @property
    def captured(self) -> frozenset[int]:
        """Buckets that have a graph."""
        return frozenset(program.rows for program in self._programs if program.open)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch caches, which lie outside the graphs' pool."""
        tensors = [t for program in self._programs if program.open for t in program.scratch]
        return sum({address: nbytes for address, nbytes in map(_torch.storage_span, tensors)}.values())

    def new_scratch(self, rows: int) -> tuple[Any, Any]:
        """A scratch cache for a graph of ``rows`` rows, and the larger one that it is a part of, which must be kept alive with it
        (None where it is no part)."""
        if self._beside is not None:
            return self._beside.new_scratch(rows)
        part = getattr(self.trunk, "part", None)
        with torch.inference_mode(False):
            if part is None:
                return self.trunk.new_cache(rows, self.requests), None
            shared = None if self._shared is None else self._shared()
            if shared is None or shared.rows < rows:
                most = max(rows, self._most_rows)
                shared = _SharedScratch(self.trunk.new_cache(most, self.requests), most)
                self._shared = weakref.ref(shared)
            return part(shared.cache, rows), shared

    def takes(self, call: Call) -> bool:
        """Whether a call is a batch of fresh prompts that a graph takes."""
        return self.fits(call.ctx if call.ctx is not None else current_forward_ctx(), call.tokens)

    def fits(self, ctx: Any, tokens: int) -> bool:
        """Whether a graph takes a forward of ``tokens`` tokens whose context is ``ctx``."""
        prompts = self._fresh(ctx)
        return (
            prompts is not None
            and len(prompts) <= self.requests
            and all(n >= self.trunk.min_tokens or n == 0 for n, _ in prompts)
            and sum(n for n, _ in prompts) == tokens
        )

    def reference(self, inputs: Mapping[str, Tensor], tokens: int) -> Tensor:
        """The trunk's hidden states [rows, H], eager, on a fresh cache. Sessions are filled as by a replay."""
        x = inputs[self._x]
        with torch.inference_mode(False):
            scratch = self.trunk.new_cache(x.shape[0], self.requests)
        forward = self._forward(x, scratch, f"reference of {x.shape[0]} rows")
        prompts = self._begin(forward)
        if state.made is not None:
            state.made.comes_from_input(forward.offsets.cu_seqlens, "an input of that run")
            if forward.numbers is not None:
                state.made.comes_from_input(forward.numbers, "an input of that run")
        marks.begin()
        (hidden,) = forward.forward()
        self._marked = marks.end()
        forward.offsets.check(forward.name)
        _fill_sessions(forward, prompts)
        return hidden

    def capture(self, job: Job) -> CapturedForward:
        """Record the trunk at the bucket's shape, on this call's prompts, and fill their sessions."""
        x = job.inputs[self._x]
        scratch, kept = self.new_scratch(x.shape[0])
        first = self._beside or self
        if first._places is None or first._places.decisions.changed() is not None:
            first._places = places_of(first.trunk)
        forward = self._forward(x, scratch, f"{job.name}, {self.name}", job.remedy)
        prompts = self._begin(forward, job.ctx)

        def at_end(results: Results) -> Callable[[], object]:
            finish = job.arrived(results[0])

            def finished() -> None:
                finish()
                _fill_sessions(forward, prompts)

            return finished

        forward.capture(first.cuts, job.pool, job.stream, at_end, self._marked)
        if forward.measured:
            first.cuts = forward.cuts
        program = _PrimeProgram(self, forward, job.tokens, kept)
        self._programs.add(program)
        return program

    def prompts(self, ctx: Any) -> Prompts:
        """The prompts of a context: tokens and session of each.

        Raises:
            ReplayError: it has none that a prime graph may run.
        """
        found = self._fresh(ctx)
        if found is None:
            raise ReplayError(
                "this call was sent to a prime graph, and its context is no batch of fresh prompts (any more): the graph would "
                "overwrite what the sessions hold. Admit it again"
            )
        return found


    def replay(self, forward: ScratchForward) -> None:
        """Replay ``forward`` on the live context's prompts, and fill their sessions.

        Raises:
            ReplayError: the context is no batch of fresh prompts, or the graph can't be replayed. InputError: a session
            doesn't fit. Either way no session was touched.
        """
        prompts = self._begin(forward)
        forward.replay()
        _fill_sessions(forward, prompts)

    def _forward(self, x: Tensor, scratch: Any, name: str, remedy: str = "") -> ScratchForward:
        rows = x.shape[0]
        copies = CopyOut(self.trunk.state(scratch), rows, self.requests, name)
        offsets = Offsets(rows, self.requests, x.device)
        numbers = None
        if self._numbers is not None:
            with torch.inference_mode(False):
                numbers = torch.zeros(rows, dtype=torch.int64, device=x.device)
        places = (self._beside or self)._places
        return ScratchForward(self.trunk, scratch, copies, x, offsets, name, places=places, remedy=remedy, numbers=numbers)

    def _begin(self, forward: ScratchForward, ctx: Any = None) -> Prompts:
        """Write where the prompts of ``ctx``, by default the live context, begin, and its numbers. Returns the prompts."""
        ctx = current_forward_ctx() if ctx is None else ctx
        prompts = self.prompts(ctx)
        forward.offsets.fill(packed_offsets([n for n, _ in prompts], self.requests))
        if forward.numbers is not None and self._numbers is not None:
            numbers = self._numbers(ctx)
            forward.numbers.narrow(0, 0, numbers.shape[0]).copy_(numbers)
        return prompts


def _fill_sessions(forward: ScratchForward, prompts: Prompts) -> None:
    named("copy-out", forward.deliver)([session for _, session in prompts], [n for n, _ in prompts], inference=False)


class _SharedScratch:
    """A scratch cache whose first rows are those of several graphs, which take turns in one pool."""

    def __init__(self, cache: Any, rows: int) -> None:
        self.cache, self.rows = cache, rows


class _PrimeProgram:
    """A captured bucket, as the runner replays it. ``kept``: what its scratch cache is a part of, kept alive with it."""

    breaks = 0

    def __init__(self, strategy: PrimeStrategy, forward: ScratchForward, rows: int, kept: Any) -> None:
        capture = forward.captured
        assert capture is not None
        self._strategy, self._forward, self._kept = strategy, forward, kept
        self.graphs, self.rows, self.open = capture.graphs, rows, True
        self.changed = capture.externals_check.changed
        self.scratch = forward.copies.tensors
        own = {_torch.address(t) for t in self.scratch}
        self.uses = [e.tensor for e in capture.externals]
        self.writes = [t for e in capture.externals for t in e.parts if _torch.address(t) not in own]

    def check(self) -> None:
        self._strategy.prompts(current_forward_ctx())
        assert self._forward.captured is not None
        self._forward.captured.check_replay()

    def replay(self, valid_rows: int | None = None) -> None:
        self._strategy.replay(self._forward)

    def close(self) -> None:
        self._forward.close()
        self.open = False
