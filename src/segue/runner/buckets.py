"""The life of a bucket: its first call warms up, its second is captured, later ones replay."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from segue import _torch
from segue.capture.isolation import warn_of_lazy_capture
from segue.errors import InputError, LeftBehindError, ReplayError, UsageError
from segue.runner.admission import Decision
from segue.runner.bucket_recorder import BucketRecorder, may_capture
from segue.runner.calls import Call, Key
from segue.runner.captured_bucket import CapturedBucket
from segue.runner.memory_budget import Cost, MemoryBudget, mib
from segue.runner.module_guard import ModuleGuard
from segue.runner.outputs import Layout, Lease, Signature
from segue.runner.reasons import FAILED, INSIDE, OUT_OF_MEMORY, OVER_BUDGET, UNLIKE_REFERENCE, VARIANTS
from segue.runner.replay_verifier import ReplayVerifier
from segue.runner.strategy import Declined, Strategy

log = logging.getLogger("segue")
Slot = tuple[Key, int | None, int | None]  # variant, bucket, request bucket
# Variant, tokens, requests, strategy, and the buckets of a decision that the caller gave.
Route = tuple[Key, int, int, str, tuple[int | None, int | None] | None]

_MOST_ROUTES = 8192


def strategy_of(key: Key, names: Sequence[str]) -> str:
    """The strategy whose graphs a key is for: a preferred one's is at the key's end. ``names``: of all, the preferred first."""
    return key[-1] if key and isinstance(key[-1], str) and key[-1] in names[:-1] else names[-1]


class Buckets:
    """The buckets of one runner, by variant: which are warm, captured, failed or left out.

    Args:
        recorder: warms up and captures.
        guard: checks the modules before either.
        strategies: by name.
        left_out: buckets without a graph, with the reason; shared with the runner's admission, which skips them.
        budget: None for no limit.
        lease: outputs are lent.
        retry: a failed capture counts against its bucket, which runs eager from then on; otherwise it is raised each time.
        most_variants: how many variants get graphs.
        warmups: how often the reference runs before a bucket is captured.
        several_ranks: others run the same calls, so a call whose capture failed runs at the bucket's shape as theirs do.
        verifier: compares some replays with the reference. None: no replay is compared.
    """

    def __init__(
        self,
        recorder: BucketRecorder,
        guard: ModuleGuard,
        strategies: Mapping[str, Strategy],
        left_out: dict[int, str],
        budget: MemoryBudget | None,
        *,
        lease: bool,
        retry: bool,
        most_variants: int,
        warmups: int,
        several_ranks: bool,
        verifier: ReplayVerifier | None,
    ) -> None:
        self.recorder, self.strategies, self.left_out, self.budget = recorder, strategies, left_out, budget
        self._guard, self._verifier = guard, verifier
        self._lease, self._retry, self._most_variants, self.warmups = lease, retry, most_variants, warmups
        self._several_ranks = several_ranks
        self.changes = 0  # of what states() says
        self.graphs: dict[Slot, CapturedBucket] = {}
        self.routes: dict[Route, CapturedBucket] = {}  # where calls like earlier ones go at once
        self.failed: dict[Slot, str] = {}
        self.warmed: dict[Slot, Signature] = {}
        self._runs: Counter[Slot] = Counter()  # warm-ups of each slot
        self.variants: set[Key] = set()
        self._said_inside = False
        self.warned_no_break = False  # the log says that a forward met no break point
        self._serves = False  # the log says that graphs serve

    def serve(self, call: Call, d: Decision) -> Any:
        """The answer to a call that is admitted to a bucket. This is the protocol of a bucket, for each variant and strategy:

        1. **Warm-up.** The first call, or the first ``warmups``, run the reference: the function at the bucket's padded shape,
           without graphs, on the capture stream. It shows what inputs and outputs look like, and lets libraries set themselves
           up.
        2. **Capture.** The next call is recorded as segments and breaks, while it runs: each segment is launched as soon as
           it is recorded, so what the capture returns is the answer.
        3. **Replay.** Later calls stage their inputs, launch the segments with the breaks between them, and get a copy of the
           real rows (:class:`CapturedBucket`). The runner sends them there by ``routes``, without coming through here.

        Raises:
            Declined: the bucket has no graph and gets none, as a capture failed, there are too many variants, or the memory
                budget is used up; or its graph can't serve this call.
        """
        slot = (call.key, d.bucket, d.requests)
        self._refuse_slot(slot)
        assert d.bucket is not None
        recorder, strategy = self.recorder, self.strategies[d.strategy]
        with recorder.lock:
            captured = self.graphs.get(slot)
            if captured is not None:
                self.say_that_graphs_serve()
                return captured.run(call) if self._verifier is None else self._verifier.run(call, captured, recorder, strategy)
            self._guard.check(recorder.device.torch_device)
            first = self._runs[slot] < self.warmups
            inside = not first and not may_capture()
            if not first and not inside:
                self._refuse_over_budget(d.bucket)
                warn_of_lazy_capture(recorder.device)
                answer = self.capture(call, d.bucket, d.requests, call.ctx, strategy)
                self._keep_to_budget(slot)
            else:
                answer = self.warm(call, d.bucket, d.requests, call.ctx, strategy).give(call.tokens, call.requests)
                answer = Lease(answer, None) if self._lease else answer
            call.write_back()
            if inside:
                self._count_inside(d.bucket)
            elif slot not in self.failed:  # otherwise it is counted already, as eager
                recorder.counters.served(d.bucket, call.tokens)
            return answer

    def why_failed(self, d: Decision) -> str | None:
        """Why the bucket of a decision gets no graphs, for a variant that failed in it; None if none did."""
        names = list(self.strategies) if self.failed else []
        for (key, bucket, requests), why in self.failed.items():
            if (strategy_of(key, names), bucket, requests) == (d.strategy, d.bucket, d.requests):
                return why
        return None

    def states(self, graphs: int) -> dict[Slot, int | str]:
        """What each slot has come to: ``graphs`` if it has some, why it gets none, or how many warm-ups it has had."""
        warm = {slot: min(runs, self.warmups) for slot, runs in self._runs.items()}
        return {**warm, **dict.fromkeys(self.graphs, graphs), **self.failed}

    def check_replay(self, call: Call, slot: Slot) -> bool:
        """Raise what a replay of ``call`` in a slot would raise before it ran anything. Returns whether the slot has graphs."""
        captured = self.graphs.get(slot)
        if captured is not None:
            with self.recorder.lock:
                captured.check(call)
        return captured is not None

    def check_capture(self, call: Call, d: Decision) -> None:
        """Raise what :meth:`serve` would raise before it warmed up or captured anything.

        Raises:
            as :meth:`serve`.
        """
        slot = (call.key, d.bucket, d.requests)
        self._refuse_slot(slot)
        with self.recorder.lock:
            self._guard.check(self.recorder.device.torch_device)
            if d.bucket is not None and self._runs[slot] >= self.warmups and may_capture():
                self._refuse_over_budget(d.bucket)

    def _refuse_slot(self, slot: Slot) -> None:
        if slot in self.failed:
            raise Declined(self.failed[slot])
        if slot[0] not in self.variants and len(self.variants) >= self._most_variants:
            raise Declined(VARIANTS)

    def _count_inside(self, bucket: int) -> None:
        """Count a call that ran the reference again because it came from inside another forward. Said once."""
        self.recorder.counters.fell_back(INSIDE)
        if not self._said_inside:
            self._said_inside = True
            log.warning(
                "segue: bucket %s of the runner of %s is called %s, so it has no graph. Capture it ahead: "
                "runner.capture(an example call), or call it twice outside",
                bucket,
                self.recorder.binder.label,
                INSIDE,
            )

    def warm(self, call: Call, bucket: int, requests: int | None, ctx: Any, strategy: Strategy | None = None) -> Layout:
        """Run a bucket's reference as its warm-up, and keep what it showed of inputs and outputs.

        Returns:
            what the forward returned; :meth:`Layout.give` makes the caller's answer of it.
        """
        layout = self.recorder.warm(call, self.recorder.stage(call, bucket, requests), ctx, strategy)
        self.recorder.binder.keep(call)
        self.variants.add(call.key)
        slot = (call.key, bucket, requests)
        self.recorder.counters.warmed += slot not in self.warmed
        self.warmed[slot] = layout.signature()
        self._runs[slot] += 1
        self.changes += 1
        return layout

    def capture(self, call: Call, bucket: int, requests: int | None, ctx: Any, strategy: Strategy) -> Any:
        """Capture a warmed bucket on a call and return its answer.

        Raises:
            Declined: it failed before anything had run, and failures count against the bucket.
            GraphMemoryError: there was no memory for it, whatever is done about failures: it won't get better by itself.
        """
        slot = (call.key, bucket, requests)
        stage = self.recorder.stage(call, bucket, requests)
        job = self.recorder.job(call, stage, ctx)
        try:
            self.changes += 1
            captured, answer = self.recorder.record(call, stage, ctx, strategy, self.warmed[slot], self._lease, job)
        except (UsageError, InputError, ReplayError):
            raise
        except Exception as e:
            answer = None
            if self._several_ranks and not job.launched and not _torch.device_is_lost(e):
                # The others' captures run the forward once, at this shape, and collectives in it wait for this rank's.
                answer = self.warm(call, bucket, requests, ctx, strategy).give(call.tokens, call.requests)
            if not self._retry or _torch.device_is_lost(e):
                raise
            no_memory = isinstance(e, torch.OutOfMemoryError)
            reason = self.failed[slot] = OUT_OF_MEMORY if no_memory else FAILED
            log.warning("segue: %s runs eager from now on: %s: %s", job.name, type(e).__name__, e)
            if no_memory:
                raise
            if job.launched or isinstance(e, LeftBehindError):
                e.add_note(f"{job.name}: part of this call has run, so it isn't retried eagerly; later calls run eager")
                raise
            if not self._several_ranks:
                raise Declined(reason) from e
            self.recorder.counters.fell_back(reason)
            return Lease(answer, None) if self._lease else answer
        self.graphs[slot] = captured
        self.failed.pop(slot, None)  # capture() may try again
        if not captured.program.breaks and not self.warned_no_break and not getattr(strategy, "whole", False):
            self.warned_no_break = True
            log.warning(
                "segue: %s was captured without meeting a break point: everything in it, attention included, runs on "
                "the padded rows. That is right for a forward that treats each row by itself",
                job.name,
            )
        return answer

    def give_up(self, slot: Slot, error: Exception) -> None:
        """Drop the graphs of a slot whose trial replay failed. It is raised each time, or counts against the bucket.

        Raises:
            ``error``: failures are raised.
        """
        self.drop([slot])
        self.changes += 1
        if not self._retry or _torch.device_is_lost(error):
            raise error
        self.failed[slot] = UNLIKE_REFERENCE
        log.warning("segue: bucket %s runs eager from now on: %s: %s", slot[1], type(error).__name__, error)

    def say_that_graphs_serve(self) -> None:
        """Say so in the log, once."""
        if not self._serves:
            self._serves = True
            label, count = self.recorder.binder.label, len(self.captured)
            log.info("segue: graphs serve the runner of %s from now on, in %d buckets so far", label, count)

    def find(self, call: Call, d: Decision) -> CapturedBucket | None:
        """The graphs that replay this call; None if it has none, or if replays are compared with the reference."""
        return self.graphs.get((call.key, d.bucket, d.requests)) if self._verifier is None else None

    def remember(self, route: Route, captured: CapturedBucket) -> None:
        """Send later calls of this route straight to their graphs, until graphs are dropped or buckets are left out."""
        self.say_that_graphs_serve()
        if len(self.routes) >= _MOST_ROUTES:
            self.routes.clear()
        self.routes[route] = captured
        if captured.closed:  # another thread closed it since the call found it, perhaps after it cleared the routes
            self.routes.clear()

    def drop(self, slots: Iterable[Slot]) -> None:
        """Close the graphs of some slots, and forget all routes."""
        self.changes += 1
        try:
            for slot in list(slots):
                self.graphs.pop(slot).close()
        finally:
            self.routes.clear()  # after the closing, because remember() checks that

    def leave_out(self, buckets: Sequence[int], cost: Cost) -> None:
        """Give buckets that don't fit the memory budget no graph, and say so. Longer buckets serve their calls, if any."""
        assert self.budget is not None
        self.changes += 1
        for bucket in dict.fromkeys(buckets):
            self.left_out[bucket] = OVER_BUDGET
            log.warning(
                "segue: bucket %s is left out: graphs would take %s, and memory_budget is %s",
                bucket,
                cost if cost.total > self.budget.limit else "more on another rank",
                mib(self.budget.limit),
            )
        self.routes.clear()

    def cost(self) -> Cost:
        """Bytes that graphs take now: the pool's, and the driver's for this runner's graphs."""
        return Cost(self.recorder.pool.usage().reserved, sum(c.driver_bytes for c in self.graphs.values()))

    @property
    def captured(self) -> tuple[int, ...]:
        """Token buckets that have a graph."""
        return tuple(sorted({slot[1] for slot in self.graphs if slot[1] is not None}))

    def _refuse_over_budget(self, bucket: int) -> None:
        """Raise Declined if a lazy capture would exceed the memory budget by its prediction."""
        if self.budget is None:
            return
        graphs = len(self.graphs)
        cost = self.budget.predict(bucket, self.cost(), graphs, graphs + 1)
        if cost.total > self.budget.limit:
            self.leave_out([bucket], cost)
            raise Declined(OVER_BUDGET)

    def _keep_to_budget(self, slot: Slot) -> None:
        """Drop a lazily captured bucket that took more than was predicted."""
        if self.budget is not None and slot[1] is not None and slot in self.graphs:
            cost = self.cost()
            if cost.total > self.budget.limit:
                self.drop([slot])
                self.leave_out([slot[1]], cost)
            else:
                self.budget.observe(slot[1], cost)
