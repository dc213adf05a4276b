"""What a runner does with a call: it is replayed, given to its bucket to be warmed up or captured, or run eagerly and counted."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from segue import _torch
from segue.capture.thread_state import state as thread
from segue.errors import NoBucketError, UsageError
from segue.runner import options
from segue.runner.admission import EAGER, Admission, Decision
from segue.runner.bucket_recorder import run_eager
from segue.runner.buckets import Buckets, Route
from segue.runner.calls import Binder, Call
from segue.runner.module_guard import ModuleGuard
from segue.runner.outputs import Lease
from segue.runner.ranks import LockStep
from segue.runner.reasons import ASLEEP, DISABLED, NOT_TAKEN, OTHER_SIZE, TRACED
from segue.runner.stats import Counters
from segue.runner.strategy import Declined, Strategy, Takes


class ServingRunner(ABC):
    """A runner as far as calls go. A subclass sets these attributes when it is made, and makes the buckets in :meth:`_settle`."""

    strategies: list[Strategy]  # the preferred first; the last serves every call
    admission: Admission
    guard: ModuleGuard
    disabled: bool  # by SEGUE=off in the environment when the runner was made
    _buckets: Buckets | None  # once the device is known
    _binder: Binder
    _read: Callable[[tuple[Any, ...], dict[str, Any], Any], Call]  # of the binder
    _takes: Takes | None
    _preferred: set[str]  # names of all strategies but the last
    _last: str
    _lock_step: LockStep | None  # with the other ranks of a group
    _counters: Counters
    _strict: bool
    _lease: bool  # outputs are lent
    _asleep: bool
    _closed: bool
    _opening: threading.Lock

    def __call__(self, *args: Any, ctx: Any = None, decision: Decision | None = None, **kwargs: Any) -> Any:
        """The forward's answer, bound like its signature. ``decision``: from :meth:`admit`, so that ranks agree.

        Raises:
            InputError: an argument doesn't fit, or something requires grad in grad mode. UsageError: a module is in training
            mode, or the call is inside another forward that is warmed up or captured, outside a break. ReplayError: a replay
            would not give what eager gives. CaptureError: the forward can't be captured. NoBucketError: it would run eager,
            and ``strict`` forbids that. RankError: a rank of the ``group`` is missing, or refused its part.
        """
        if self._lock_step is not None and decision is None:
            return self._call_in_step(self._lock_step, args, kwargs, ctx)
        buckets = self._buckets
        if buckets is None or self._closed:
            buckets = self._open(args, kwargs)
        if (thread.reference or thread.capture is not None) and not thread.inside_break:
            raise _nested(self._binder.label)
        self.guard.look()
        named = kwargs and (self._preferred or self._takes) and dict(kwargs)  # binding empties them
        call = self._read(args, kwargs, ctx)
        call.given = args, named or kwargs
        asked: tuple[int | None, int | None] | None = None
        if decision is None:
            if self._takes is not None and not self._takes(*call.given, thread.ctx if call.ctx is None else call.ctx):
                return self._fall_back(call, NOT_TAKEN)
            strategy = self._strategy_for(call) if self._preferred else self._last
        elif isinstance(decision, Decision):
            strategy, asked = decision.strategy, (decision.bucket, decision.requests)
        else:
            raise self.admission.no_decision(decision)
        if strategy in self._preferred:
            call.key = (*call.key, strategy)  # its graphs are not those of the last strategy
        route = (call.key, call.tokens, call.requests, strategy, asked)
        captured = buckets.routes.get(route)
        if captured is None:
            return self._serve(call, decision, route, buckets)
        try:
            return captured.run(call)
        except Declined as e:
            return self._serve_otherwise(call, decision, strategy, buckets, e.reason)

    def admit(self, tokens: int, requests: int = -1, strategy: str | None = None) -> Decision:
        """Decide where a call of ``tokens`` tokens would run, and why. It changes nothing, and takes O(log n) for n buckets.

        A bucket whose capture failed for some variant runs eager by this, as the variant isn't known here.

        Args:
            requests: of the call; -1 where it has no request axis.
            strategy: the name of the strategy that takes the call; by default the last, which serves every call.

        Raises:
            UsageError: a count is no whole number, or negative; or there is no such strategy.
        """
        if strategy is not None and strategy not in self.admission.strategies:
            raise UsageError(f"strategy={strategy!r} is none of this runner's: {', '.join(self.admission.strategies)}")
        if tokens.__class__ is not int or tokens < 0:
            tokens = options.whole_number("tokens", tokens, 0)
        if requests != -1:
            requests = options.whole_number("requests", requests, 0)
        if self._asleep:
            return Decision(None, EAGER, ASLEEP)
        decision = self.admission.decide(tokens, requests, strategy)
        failed = None if self._buckets is None else self._buckets.why_failed(decision)
        if failed is None and self._lock_step is not None:
            failed = self._lock_step.why_failed(decision)
        return decision if failed is None else Decision(None, EAGER, failed)

    def explain(self, tokens: int, requests: int = -1) -> str:
        """Say in a sentence what :meth:`admit` decides, with its numbers, and whether the bucket has a graph.

        Raises:
            UsageError: as :meth:`admit`.
        """
        decision = self.admit(tokens, requests)
        bucket = decision.bucket
        if self.disabled:
            return f"{tokens} tokens: eager, SEGUE=off in the environment when the runner was made"
        if self._asleep:
            return f"{tokens} tokens: eager, {ASLEEP}: {ASLEEP.remedy}"
        text = self.admission.explain(tokens, requests)
        if bucket is None and (intended := self.admission.decide(tokens, requests).bucket) is not None:
            return f"{tokens} tokens: eager, {decision.reason} (bucket {intended})"
        if bucket is None or self._buckets is None:
            return text
        if bucket in self._buckets.captured:
            return f"{text}; captured"
        return f"{text}; not captured yet"

    def reference(self, *args: Any, ctx: Any = None, decision: Decision | None = None, **kwargs: Any) -> Any:
        """Run what a replay of this call must equal bit for bit: ``fn`` at the bucket's shape, without a capture.

        It runs on copies, so the caller's inputs stay as they are, even if a call would write them.

        Returns:
            the forward's answer, with the real rows only, the caller's own.

        Raises:
            NoBucketError: no bucket fits the call. InputError: an argument doesn't fit. UsageError: as for a call.
        """
        if (thread.reference or thread.capture is not None) and not thread.inside_break:
            raise _nested(self._binder.label)
        buckets = self.prepare(*args, **kwargs)
        call = self._binder.read(args, kwargs, ctx)
        d = self._decide(call, decision, None if decision is not None else self._strategy_for(call))
        if d.bucket is None:
            raise NoBucketError(f"reference: {self.admission.explain(call.tokens, call.requests)}")
        recorder, strategy = buckets.recorder, buckets.strategies[d.strategy]
        with recorder.lock:
            layout = recorder.reference(call, recorder.stage(call, d.bucket, d.requests), call.ctx, strategy)
            return layout.give(call.tokens, call.requests)

    def prepare(self, *args: Any, **kwargs: Any) -> Buckets:
        """Settle the device, from a call's arguments where nothing else says it, check the modules, and return the buckets.

        Raises:
            UsageError: the runner was closed, or a module is in training mode or on another device.
        """
        buckets = self._open(args, kwargs)
        self.guard.check(buckets.recorder.device.torch_device)
        return buckets

    @abstractmethod
    def _settle(self, values: Iterable[Any]) -> Buckets:
        """Settle the device, from ``values`` where nothing else says it, and begin without graphs."""

    def _serve(self, call: Call, given: Decision | None, route: Route, buckets: Buckets) -> Any:
        """Answer a call whose route is not known yet. :meth:`Buckets.serve` has the protocol of the bucket that takes it."""
        if self.disabled:
            return self._eager(call, DISABLED)
        if (reason := self._unservable(call)) is not None:
            return self._fall_back(call, reason)
        decision = self._decide(call, given, route[3])
        if decision.bucket is None or decision.strategy == EAGER:
            return self._fall_back(call, decision.reason)
        captured = buckets.find(call, decision)
        if captured is not None:
            buckets.remember(route, captured)
        try:
            return buckets.serve(call, decision) if captured is None else captured.run(call)
        except Declined as e:
            return self._serve_otherwise(call, given, route[3], buckets, e.reason)

    def _unservable(self, call: Call) -> str | None:
        """Why no graph may serve a call, whatever its bucket. None if one may."""
        if _torch.is_tracing():  # sizes are tensors then, so that no route is known
            return TRACED
        if self._asleep:
            return ASLEEP
        return None if call.unlike is None else OTHER_SIZE

    def _call_in_step(self, ranks: LockStep, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: Any) -> Any:
        """Answer a call as all ranks of the group agree."""
        with ranks.telling():
            buckets = self._open(args, kwargs)
            if (thread.reference or thread.capture is not None) and not thread.inside_break:
                raise _nested(self._binder.label)
            self.guard.look()
            named = dict(kwargs)
            call = self._read(args, kwargs, ctx)
            call.given = args, named
            reason = DISABLED if self.disabled else self._unservable(call)
            if reason is None and self._takes and not self._takes(args, named, thread.ctx if call.ctx is None else call.ctx):
                reason = NOT_TAKEN
            asked = self._preferred and reason is None and call.tokens  # an idle rank joins the others' strategy
            strategy = self._strategy_for(call) if asked else self._last
            own = ranks.propose(call, strategy, reason, buckets)
        decision = ranks.agree(own)
        if decision.bucket is None:
            return self._eager(call, decision.reason) if self.disabled else self._fall_back(call, decision.reason)
        captured = buckets.find(call, decision)
        return buckets.serve(call, decision) if captured is None else captured.run(call)

    def _serve_otherwise(self, call: Call, given: Decision | None, strategy: str, buckets: Buckets, reason: str) -> Any:
        """Answer a call that graphs of ``strategy`` can't serve, for ``reason``: by the strategies after it, or eagerly.

        A decision that the caller gave is not changed, as other ranks may run by it.
        """
        if strategy == self._last or given is not None:
            return self._fall_back(call, reason)
        self._counters.declined[reason] += 1
        later = self.strategies[[s.name for s in self.strategies].index(strategy) + 1 :]
        call.key = call.key[:-1]
        strategy = next((s.name for s in later[:-1] if s.takes(call)), self._last)
        if strategy in self._preferred:
            call.key = (*call.key, strategy)
        return self._serve(call, None, (call.key, call.tokens, call.requests, strategy, None), buckets)

    def _fall_back(self, call: Call, reason: str) -> Any:
        if self._strict:
            raise NoBucketError(
                f"strict=True, and this call would run eager ({reason}): "
                f"{call.unlike or self.explain(int(call.tokens), int(call.requests))}. "
                "Add a bucket, or allow eager calls with strict=False"
            )
        return self._eager(call, reason)

    def _eager(self, call: Call, reason: str) -> Any:
        self._counters.fell_back(reason)
        buckets = self._buckets
        with nullcontext() if buckets is None or not buckets.graphs else buckets.recorder.filling_tables():
            answer = run_eager(self._binder, call)
        return Lease(answer, None) if self._lease else answer

    def _strategy_for(self, call: Call) -> str:
        """The name of the first strategy that takes the call."""
        return next((s.name for s in self.strategies[:-1] if s.takes(call)), self._last)

    def _decide(self, call: Call, given: Decision | None, strategy: str | None) -> Decision:
        if given is not None:
            self.admission.check(given, call.tokens, call.requests)
            return given
        return self.admission.decide(call.tokens, call.requests, strategy)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError("this runner was closed; its graphs are gone. Make a new one")

    def _open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Buckets:
        self._refuse_closed()
        with self._opening:
            return self._buckets or self._settle((*args, *kwargs.values()))


_torch.dynamo_boundary(ServingRunner.__call__, "a segue runner replays graphs of its own")


def _nested(label: str) -> UsageError:
    return UsageError(
        f"the runner of {label} was called inside the warm-up, reference or capture of another forward, outside a break: it "
        "would take that forward's padded rows for real ones. Call it in a break point, or let the outer graph hold the plain "
        "function"
    )
