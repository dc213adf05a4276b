"""The buckets of one runner: which are warm, captured, or failed, for which variant."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from segue import _torch
from segue.errors import InputError, ReplayError, UsageError
from segue.runner.bucket_recorder import Recorder
from segue.runner.calls import Call, Key
from segue.runner.captured_bucket import Plan
from segue.runner.memory import Cost
from segue.runner.outputs import Layout, Signature
from segue.runner.strategy import Strategy

log = logging.getLogger("segue")
Place = tuple[Key, int | None, int | None]  # variant, bucket, request bucket

_MOST_ROUTES = 8192
FAILED = "a failed capture"


class CaptureFailed(Exception):
    """A capture failed before anything had run, so that the call may be retried eagerly."""


class Buckets:
    """Plans by place, and what comes before a plan.

    Args:
        lease: plans lend their outputs.
        retry: a failed capture counts against its bucket, which runs eager from then on; otherwise it is raised
            each time.
    """

    def __init__(self, recorder: Recorder, lease: bool, retry: bool) -> None:
        self.recorder, self._lease, self._retry = recorder, lease, retry
        self.plans: dict[Place, Plan] = {}
        self.routes: dict[tuple[Key, int, int], Plan] = {}  # where calls went: variant, tokens, requests
        self.failed: dict[Place, str] = {}
        self.warmed: dict[Place, Signature] = {}
        self.variants: set[Key] = set()
        self._told = False

    def warm(
        self, call: Call, bucket: int, requests: int | None, ctx: Any, strategy: Strategy | None = None
    ) -> Layout:
        """Run a bucket's reference as its warm-up, and keep what it showed of inputs and outputs."""
        layout = self.recorder.warm(call, self.recorder.stage(call, bucket, requests), ctx, strategy)
        self.recorder.binder.keep(call)
        self.variants.add(call.key)
        self.warmed[call.key, bucket, requests] = layout.signature()
        self.recorder.counters.warmed += 1
        return layout

    def record(self, call: Call, bucket: int, requests: int | None, ctx: Any, strategy: Strategy) -> Any:
        """Capture a warmed bucket on a call and return its answer.

        Raises:
            CaptureFailed: it failed before anything had run, and failures count against the bucket.
        """
        place = (call.key, bucket, requests)
        stage = self.recorder.stage(call, bucket, requests)
        job = self.recorder.job(call, stage, ctx)
        try:
            plan, answer = self.recorder.record(call, stage, ctx, strategy, self.warmed[place], self._lease, job)
        except (UsageError, InputError, ReplayError):
            raise
        except Exception as e:
            if not self._retry or _torch.device_is_lost(e):
                raise
            self.failed[place] = FAILED
            log.warning("segue: %s runs eager from now on: %s: %s", job.name, type(e).__name__, e)
            if job.launched:
                e.add_note(f"{job.name}: part of this call has run, so it isn't retried eagerly; later calls run eager")
                raise
            raise CaptureFailed from e
        self.plans[place] = plan
        if not plan.program.breaks and not self._told and not getattr(strategy, "whole", False):
            self._told = True
            log.warning(
                "segue: %s was captured without meeting a break point: everything in it, attention included, runs on "
                "the padded rows. That is right for a forward that treats each row by itself",
                job.name,
            )
        return answer

    def remember(self, call: Call, plan: Plan) -> None:
        """Send later calls like this one straight to ``plan``, for as long as the rules of admission are what they are."""
        if len(self.routes) >= _MOST_ROUTES:
            self.routes.clear()
        self.routes[call.key, call.tokens, call.requests] = plan
        if plan.closed:  # by another thread since the call found it, which has cleared the routes before or will do so
            self.routes.clear()

    def drop(self, places: Iterable[Place]) -> None:
        """Close some graphs."""
        try:
            for place in list(places):
                self.plans.pop(place).close()
        finally:
            self.routes.clear()  # after the closing, which remember() looks at

    def cost(self) -> Cost:
        """Bytes that graphs take now: the pool's, and the driver's for this runner's graphs."""
        return Cost(self.recorder.pool.usage().reserved, sum(p.driver_bytes for p in self.plans.values()))

    @property
    def captured(self) -> tuple[int, ...]:
        """Token buckets that have a graph."""
        return tuple(sorted({p[1] for p in self.plans if p[1] is not None}))
