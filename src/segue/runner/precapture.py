"""The explicit capture ahead of traffic: the whole ladder from one example, within the memory budget. Its writes are put back."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.isolation import collect_garbage
from segue.capture.object_graph import plain_values
from segue.capture.thread_state import capture_stubs
from segue.errors import UsageError
from segue.runner.bucket_recorder import example_rows, synthetic
from segue.runner.buckets import Buckets
from segue.runner.calls import Binder, Call
from segue.runner.captured_bucket import CapturedBucket
from segue.runner.ladder import Ladder
from segue.runner.memory_budget import Cost, MemoryBudget, mib
from segue.runner.progress import CaptureSummary, Progress
from segue.runner.ranks import LockStep
from segue.runner.replay_verifier import ReplayVerifier
from segue.runner.strategy import Declined, Strategy, ladder_of
from segue.runner.write_log import WriteLog, generators_kept

log = logging.getLogger("segue")
Rung = tuple[int, int | None]  # tokens, requests


class Precapture:
    """One explicit capture of the ladder, for the variant of one example call.

    Args:
        buckets: the runner's. What they have captured already stays.
        call: the example.
        ladder: token buckets. ``request_ladder``: request buckets, if some input is request-shaped.
        strategy: the one that takes the example.
        context: of the example. ``make_context``: from a bucket to a context, which then is used instead.
        state: tensors to put back, whatever their size.
        progress: whether to show it.
        verify: whether each bucket is replayed once and compared with the reference.
        ranks: that capture the same ladder together, and agree on what their memory budgets leave of it.
    """

    def __init__(
        self,
        buckets: Buckets,
        call: Call,
        ladder: Ladder,
        request_ladder: Ladder | None,
        *,
        strategy: Strategy,
        context: Any,
        make_context: Callable[[int], Any] | None,
        state: Sequence[Tensor],
        progress: bool,
        verify: bool = False,
        ranks: LockStep | None = None,
    ) -> None:
        self._ranks = ranks
        self.buckets, self.recorder, self.call = buckets, buckets.recorder, call
        self._strategy, self.context, self._make_context, self._state = strategy, context, make_context, state
        self._shown, self._verifier = progress, ReplayVerifier(1, state) if verify else None
        own = ladder_of(strategy)
        self._fixed = request_ladder is not None or own is not None  # rows and requests of the example belong together
        self.left_out: dict[int, Cost | str] = {}
        if own is None:
            rungs = _rungs(list(ladder), None if request_ladder is None else list(request_ladder))
        else:
            each = call.tokens // max(1, call.tokens if request_ladder is None else call.requests)
            rungs = [(b * each, None if request_ladder is None else b) for b in reversed(own)]
        if self._fixed:
            held = [r for r in rungs if r[0] >= call.tokens and (r[1] or 0) >= call.requests]
            self._note_too_small(rungs, held)
            rungs = held
        self._may = [r for r in rungs if r[0] not in buckets.left_out]
        self.rungs = [r for r in self._may if self._graphs(r) is None]
        self.done: list[Rung] = []

    def estimate(self) -> Cost:
        """What the whole ladder will take, from its largest and its smallest bucket, which are captured: the largest one's pool,
        in which the others have room, and the driver's share of each graph.
        """
        if not self.rungs:
            return Cost(0, 0)
        count, self.rungs = len(self.rungs), list(dict.fromkeys((self.rungs[0], self.rungs[-1])))
        cost = self.run().cost
        inputs = sum(b.nbytes for b in self.recorder.buffers if b is not None)
        return Cost(cost.pool, round(cost.driver * count / len(self.rungs)), inputs)

    def run(self) -> CaptureSummary:
        """Capture every bucket that has no graph yet, largest first, and say what was done.

        Raises:
            CaptureError: a bucket can't be captured. UsageError: not even the smallest fits the memory budget.
        """
        start = time.perf_counter()
        before = self._attributes()
        collect_garbage()
        self._agree()
        progress = Progress(len(self.rungs), self._shown)
        with progress.showing(), generators_kept(self.recorder.device.torch_device):
            if self.buckets.budget is None:
                self._capture(self.rungs, progress)
            else:
                self._capture_within_budget(progress)
        after = self._attributes()
        changed = {k: (v, after[k]) for k, v in before.items() if k in after and after[k] != v}
        if changed:
            log.warning(
                "segue: capturing changed Python attributes, which are not put back: %s",
                ", ".join(f"{k} ({a!r} to {b!r})" for k, (a, b) in changed.items()),
            )
        decisions = self.recorder.places(self.context).decisions
        programs = [p.program for r in self.done if (p := self._graphs(r)) is not None]
        summary = CaptureSummary(
            buckets=tuple(dict.fromkeys(r[0] for r in self.done)),
            segments=sum(p.graphs for p in programs),
            breaks=sum(p.breaks for p in programs),
            seconds=time.perf_counter() - start,
            cost=self.buckets.cost(),
            left_out=self.left_out,
            changed=changed,
            watched=tuple(decisions.paths),
            unwatched=tuple(decisions.left_out),
        )
        progress.close(summary)
        return summary

    def _capture(self, rungs: Sequence[Rung], progress: Progress) -> None:
        for rung in rungs:
            progress.bucket(rung[0], _torch.free_bytes(self.recorder.device.torch_device))
            error: BaseException | None = None
            try:
                self._capture_one(*rung)
            except BaseException as e:
                error = e
                raise
            finally:
                if self._ranks is not None:
                    self._ranks.meet(error)
                del error  # its traceback holds this frame
            progress.done()

    def _capture_one(self, tokens: int, requests: int | None) -> None:
        """Warm up and capture one bucket, then put back what either wrote."""
        all_real = self._make_context is not None or self.context is None
        call = self.call
        if not self._fixed:
            call = example_rows(call, self.recorder.binder, tokens if all_real else min(call.tokens, tokens))
        writes = WriteLog(self.recorder.owns, self._state)
        try:
            for _ in range(self.buckets.warmups):
                with writes, capture_stubs():
                    self.buckets.warm(call, tokens, requests, self._context_of(tokens), self._strategy)
            self.call.specs = ()
            with writes, capture_stubs():
                self.buckets.capture(call, tokens, requests, self._context_of(tokens), self._strategy)
            if self._graphs((tokens, requests)) is None:  # several ranks: it failed, and the reference ran instead
                return
            with writes:
                if self._verifier is not None and not self._replays_rightly(call, tokens, requests, self._verifier):
                    return
        except Declined:
            return
        except Exception as e:
            # The error is logged, and if the bucket was given up, nobody waits for the answer to an example.
            if (call.key, tokens, requests) not in self.buckets.failed or isinstance(e, torch.OutOfMemoryError):
                raise
            return
        finally:
            writes.put_back()
        self.done.append((tokens, requests))

    def _replays_rightly(self, call: Call, tokens: int, requests: int | None, verifier: ReplayVerifier) -> bool:
        """Replay a bucket and compare it with the reference. If they differ, the bucket loses its graphs."""
        captured = self._graphs((tokens, requests))
        assert captured is not None
        who, ctx = "capture(verify=True)", self._context_of(tokens)
        other = verifier.copied(who, ctx) if self._make_context is None else self._context_of(tokens)
        trial = Call(call.values, ctx, call.tensors, call.key, call.tokens, call.requests, call.foreign)
        try:
            verifier.compare(trial, other, captured, self.recorder, self._strategy, who)
        except Declined:  # of another context than that of the capture, which says nothing about its graph
            return True
        except Exception as e:
            self.buckets.give_up((call.key, tokens, requests), e)
            return False
        return True

    def _agree(self) -> None:
        """All ranks keep to the smallest budget of any, and capture the buckets that any has no graphs of and none leaves out."""
        if self._ranks is None:
            return
        mine = self.buckets.budget
        least = -self._ranks.group.largest([-sys.maxsize if mine is None else -mine.limit])[0]
        if mine is not None:
            mine.limit = least
        elif least < sys.maxsize:
            self.buckets.budget = MemoryBudget(least)
        told = self._ranks.group.all((self._may, self.rungs))
        self.rungs = [r for r in self._may if all(r in may for may, _ in told) and any(r in rungs for _, rungs in told)]
        self._drop(*self.rungs)

    def _on_any_rank(self, *found: bool) -> list[bool]:
        """Whether each is so on some rank, where all decide alike though their memory differs."""
        return [*found] if self._ranks is None else [n > 0 for n in self._ranks.group.largest([int(f) for f in found])]

    def _capture_within_budget(self, progress: Progress) -> None:
        """Predict from two small buckets, then capture what fits, largest first.

        Where a bucket takes more than predicted, everything is dropped, so that the pool's memory really goes, and the
        others are captured anew.
        """
        order, base = self._probed(sorted(self.rungs), progress), self.buckets.cost()
        while order:
            rest = [r for r in reversed(order) if r not in self.done]
            over = self._first_over(rest, progress)
            if over is None:
                return
            cost = self.buckets.cost()
            # If the first, largest one is over, its pool is too large; if a later one is, the driver's share of all is.
            dropped = rest[:1] if over == 0 else rest[over:]
            order = [r for r in order if r not in dropped]
            self._leave_out(dropped, cost)
            self._drop(*self.done)
            if self._on_any_rank(self.buckets.cost().pool > base.pool)[0]:
                log.warning("segue: the pool is shared and keeps %s; nothing more is captured", self.buckets.cost())
                return

    def _probed(self, order: list[Rung], progress: Progress) -> list[Rung]:
        """The buckets predicted to fit, from the smallest and the middle one, which are captured.

        Raises:
            UsageError: not even the smallest fits.
        """
        budget = self.buckets.budget
        assert budget is not None
        for rung in dict.fromkeys((order[0], order[len(order) // 2])) if order else ():
            self._capture([rung], progress)
            cost = self.buckets.cost()
            if self._on_any_rank(cost.total > budget.limit)[0]:
                self._drop(*self.done)
                if rung == order[0]:
                    takes = cost if cost.total > budget.limit else "more on another rank"
                    raise UsageError(
                        f"memory_budget={mib(budget.limit)} is too small for one bucket: the smallest, {rung[0]}, "
                        f"takes {takes}. Raise the budget, or share a pool"
                    )
                self._leave_out([r for r in order if r >= rung], cost)
                return [r for r in order if r < rung]
            budget.observe(rung[0], cost)
        now, graphs = self.buckets.cost(), len(self.buckets.graphs)
        buckets = sorted({r[0] for r in order})
        _, left_out = budget.split(buckets, now, graphs)
        over = [b for b, is_over in zip(buckets, self._on_any_rank(*(b in left_out for b in buckets)), strict=True) if is_over]
        for bucket in over:
            self._leave_out([(bucket, None)], left_out.get(bucket, now))
        return [r for r in order if r[0] not in over]

    def _first_over(self, rungs: Sequence[Rung], progress: Progress) -> int | None:
        """Capture until the budget is exceeded. Returns the index of the rung that exceeds it; None if none does."""
        budget = self.buckets.budget
        assert budget is not None
        for i, rung in enumerate(rungs):
            self._capture([rung], progress)
            if self._on_any_rank(self.buckets.cost().total > budget.limit)[0]:
                return i
        return None

    def _drop(self, *rungs: Rung) -> None:
        self.buckets.drop([(self.call.key, *r) for r in rungs if self._graphs(r) is not None])
        self.done = [r for r in self.done if r not in rungs]

    def _leave_out(self, rungs: Sequence[Rung], cost: Cost) -> None:
        buckets = list(dict.fromkeys(r[0] for r in rungs))
        self.left_out.update(dict.fromkeys(buckets, cost))
        self.buckets.leave_out(buckets, cost)

    def _note_too_small(self, rungs: Sequence[Rung], held: Sequence[Rung]) -> None:
        """Note and log the pairs that are too small for the example. Its rows and requests belong together, so it can't be
        cut.
        """
        example = f"{self.call.tokens} tokens" + (f" and {self.call.requests} requests" if self.call.requests >= 0 else "")
        captured = {r[0] for r in held}
        for bucket in dict.fromkeys(r[0] for r in rungs if r[0] not in captured):
            self.left_out[bucket] = f"too small for the example of {example}"
        if len(held) < len(rungs):
            log.warning(
                "segue: %s of %s pairs of a token and a request bucket are too small for the example of %s, and are not "
                "captured now%s. Capture a small example too, or let calls capture them",
                len(rungs) - len(held),
                len(rungs),
                example,
                f", among them all of buckets {', '.join(map(str, self.left_out))}" if self.left_out else "",
            )

    def _graphs(self, rung: Rung) -> CapturedBucket | None:
        return self.buckets.graphs.get((self.call.key, *rung))

    def _context_of(self, tokens: int) -> Any:
        return self.context if self._make_context is None else self._make_context(tokens)

    def _attributes(self) -> dict[str, Any]:
        found = plain_values(self.recorder.fn)
        return found if self.context is None else {**found, **plain_values(self.context, "ctx")}


class KeptExample:
    """The example of an explicit capture, with its tensors on the host, from which a runner captures anew later.

    ``args``, ``kwargs``: as they were given. ``ctx``: its context, held as it is.
    """

    def __init__(self, binder: Binder, call: Call, positional: int, ctx: Any) -> None:
        named = dict(zip(binder.names, call.values, strict=False))
        for further in call.values[len(binder.names) :]:  # flags beyond the named parameters
            named.update(further)
        tensors = [None if t is None else t.detach().to("cpu", copy=True) for t in call.tensors]
        self.kwargs, self.ctx = binder.placed(named, tensors), ctx
        first = list(takewhile(self.kwargs.__contains__, binder.names[:positional]))  # a positional ctx is kept apart
        self.args = tuple(self.kwargs.pop(name) for name in first)


def example_call(binder: Binder, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: Any) -> Call:
    """The example that a ladder is captured from: the call that is given, or one made up from the declared inputs.

    Raises:
        CaptureError: none is given, and an input doesn't declare its shape and dtype. InputError: it doesn't fit.
    """
    if args or kwargs:
        return binder.read(args, kwargs, ctx)
    values, tensors = synthetic(binder)
    named = dict(zip(binder.names, values, strict=True))
    return binder.read((), binder.placed(named, tensors), ctx)


def _rungs(tokens: list[int], requests: list[int] | None) -> list[Rung]:
    """All buckets, largest first. With a request axis they are pairs, with no more requests than could share the tokens."""
    if requests is None:
        return [(b, None) for b in reversed(tokens)]
    pairs: list[Rung] = []
    for b in reversed(tokens):
        enough = next((i for i, r in enumerate(requests) if r >= b), len(requests) - 1)
        pairs += [(b, r) for r in reversed(requests[: enough + 1])]
    return pairs
