"""Prime as a runner's strategy: batches of fresh prompts as whole graphs, everything else by the strategy after it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture import BreakableCapture, current_forward_ctx
from segue.errors import ReplayError
from segue.prime.body import Offsets
from segue.prime.copyout import CopyOut
from segue.prime.cuts import pinned
from segue.prime.delivery import deliver
from segue.prime.recorder import Prime, Recorder, Results
from segue.prime.requests import Batch
from segue.prime.trunk import Trunk
from segue.runner.calls import Call
from segue.runner.strategy import CapturedForward, Job

Prompts = Sequence[tuple[int, Any]]


class PrimeStrategy:
    """Runs fresh prompts through a trunk. The runner's function must return the trunk's hidden states [tokens, H].

    Args:
        trunk: as for :class:`~segue.PrimeGraph`; its embedding and head are the caller's, outside the graph.
        fresh: from a call's context to its prompts, ``(tokens, session)`` each in the order of the rows, or None where
            it is no batch of fresh prompts.
        x: the input that has the embedded tokens [tokens, D], padded with zeros.
        requests: the most prompts in a call.
        cuts: as for :class:`~segue.PrimeGraph`; measured at the first capture and kept for the others.
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
    ) -> None:
        self.trunk, self.requests, self.cuts = trunk, requests, cuts
        self._fresh, self._x, self._most_rows = fresh, x, most_rows
        self._programs: weakref.WeakSet[_Captured] = weakref.WeakSet()
        self._shared: weakref.ref[_Shared] | None = None  # goes with the last graph that fills it

    @property
    def captured(self) -> frozenset[int]:
        """Buckets that have a graph."""
        return frozenset(program.rows for program in self._programs if program.open)

    @property
    def scratch_bytes(self) -> int:
        """Memory of the scratch caches, which lie outside the graphs' pool."""
        tensors = [t for program in self._programs if program.open for t in program.scratch]
        return sum({address: nbytes for address, nbytes in map(_torch.storage_span, tensors)}.values())

    def new_scratch(self, rows: int) -> tuple[Any, Any]:
        """A scratch cache for a graph of ``rows`` rows, and what has to be kept with it."""
        part = getattr(self.trunk, "part", None)
        with torch.inference_mode(False):
            if part is None:
                return self.trunk.new_cache(rows, self.requests), None
            shared = None if self._shared is None else self._shared()
            if shared is None or shared.rows < rows:
                most = max(rows, self._most_rows)
                shared = _Shared(self.trunk.new_cache(most, self.requests), most)
                self._shared = weakref.ref(shared)
            return part(shared.cache, rows), shared

    def takes(self, call: Call) -> bool:
        """Whether a call is a batch of fresh prompts that a graph takes."""
        return self.fits(call.ctx if call.ctx is not None else current_forward_ctx(), call.tokens)

    def fits(self, ctx: Any, tokens: int) -> bool:
        """The same of a context and the tokens of its forward."""
        prompts = self._fresh(ctx)
        return (
            prompts is not None
            and len(prompts) <= self.requests
            and all(n >= self.trunk.min_tokens or n == 0 for n, _ in prompts)
            and sum(n for n, _ in prompts) == tokens
        )

    def reference(self, inputs: Mapping[str, Tensor], tokens: int) -> Tensor:
        """The trunk on a fresh cache, eager; sessions are filled as by a replay."""
        x = inputs[self._x]
        with torch.inference_mode(False):
            scratch = self.trunk.new_cache(x.shape[0], self.requests)
        filling = _Filling(self, x, f"reference of {x.shape[0]} rows", scratch)
        prompts = filling.begin()
        hidden = self.trunk.forward(x, filling.offsets.cu_seqlens, filling.scratch)
        filling.end(prompts)
        return hidden

    def capture(self, job: Job) -> CapturedForward:
        """Record the trunk at the bucket's shape, on this call's prompts, and fill their sessions."""
        x = job.inputs[self._x]
        filling = _Filling(self, x, f"{job.name}, prime", *self.new_scratch(x.shape[0]))
        prompts = filling.begin(job.ctx)

        def run() -> Results:
            self.trunk.reset(filling.scratch)
            return (self.trunk.forward(x, filling.offsets.cu_seqlens, filling.scratch),)

        root = Prime(self.trunk, filling.scratch, (x, filling.offsets))
        recorder = Recorder(run, root, job.pool.device, job.pool, job.stream, filling.name)
        marked = recorder.warm()
        filling.offsets.check(filling.name)
        if self.cuts is None and job.pool.device.traits.timing:
            self.cuts, found = recorder.best(None, marked)
            found.close()

        def at_end(results: Results) -> Callable[[], object]:
            finish = job.arrived(results[0])

            def finished() -> None:
                finish()
                filling.end(prompts)

            return finished

        capture = recorder.record(pinned(self.cuts or (), marked), at_end)
        program = _Captured(capture, filling, job.tokens)
        self._programs.add(program)
        return program

    def prompts(self, ctx: Any) -> Prompts:
        """A context's prompts.

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


class _Shared:
    """A scratch cache whose first rows are those of several graphs, which take turns in one pool."""

    def __init__(self, cache: Any, rows: int) -> None:
        self.cache, self.rows = cache, rows


class _Filling:
    """The scratch cache of one bucket and the way from there into sessions. ``kept``: what the cache is a part of."""

    def __init__(self, strategy: PrimeStrategy, x: Tensor, name: str, scratch: Any, kept: Any = None) -> None:
        self._strategy, self.name, self._requests = strategy, name, strategy.requests
        self.scratch, self._kept = scratch, kept
        self.copies = CopyOut(strategy.trunk.state(self.scratch), x.shape[0], self._requests, name)
        self.offsets = Offsets(x.shape[0], self._requests, x.device)

    def begin(self, ctx: Any = None) -> Prompts:
        """Take the prompts of the context, by default the live one."""
        prompts = self._strategy.prompts(current_forward_ctx() if ctx is None else ctx)
        self.offsets.fill(self._starts(prompts))
        return prompts

    def end(self, prompts: Prompts) -> None:
        """Fill their sessions."""
        lengths, sessions = [n for n, _ in prompts], [session for _, session in prompts]
        deliver(self._strategy.trunk, self.copies, sessions, lengths, self._starts(prompts), inference=False)

    def _starts(self, prompts: Prompts) -> list[int]:
        return Batch((), [n for n, _ in prompts], ()).offsets(self._requests)


class _Captured:
    breaks = 0

    def __init__(self, capture: BreakableCapture, filling: _Filling, rows: int) -> None:
        self._capture, self._filling = capture, filling
        self.graphs, self.rows, self.open = capture.graphs, rows, True
        self.writes = [e.tensor for e in capture.externals if e.written]
        self.scratch = filling.copies.tensors

    def replay(self, valid_rows: int | None = None) -> None:
        prompts = self._filling.begin()
        self._capture.replay()
        self._filling.end(prompts)

    def close(self) -> None:
        self._capture.close()
        self.open = False
