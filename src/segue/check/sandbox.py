"""A private copy of a runner on a pool of its own: its graphs can be poisoned and perturbed while the runner serves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from segue.capture import active_forward, current_forward_ctx, reference_frame
from segue.capture.break_points import Break
from segue.capture.object_graph import plain_values
from segue.capture.op_watch import observing
from segue.check.frozen import Recorded
from segue.check.oplog import FLOATS, Keep, OpLog, Trace
from segue.check.outcome import Outcome, Value, outputs_of, state_of, whole
from segue.check.restore import Contents, PlainValues
from segue.check.trial_calls import Case, perturb_tails, with_tensors
from segue.devices import Pool
from segue.runner.bucket_recorder import synthetic
from segue.runner.calls import Call
from segue.runner.captured_bucket import CapturedBucket
from segue.runner.inputs import Spec
from segue.runner.outputs import owned
from segue.runner.runner import GraphRunner
from segue.runner.write_log import WriteLog

FINITE = 3.0  # what uninitialised memory is filled with where a run must not show whether it is read
NAN = float("nan")


class Environment:
    """What a forward can see besides its inputs, the same at the start of every run: context, generators, state.

    Args:
        ctx: a context, or a function that makes one from the number of tokens.
        state: tensors that the runner was told of.
        device: whose random generator is part of it.
    """

    def __init__(self, fn: Any, ctx: Any, state: Sequence[Tensor], device: torch.device) -> None:
        self.varied = callable(ctx) and not isinstance(ctx, torch.nn.Module)
        self.ctx, self.state = ctx, list(state)
        self.fn, self._device = fn, device
        self.written: dict[int, tuple[Tensor, str]] = {}  # outside the forward, by address, with the line
        self._contents = None if self.varied or ctx is None else Contents(ctx)
        self._plain = PlainValues(fn)

    def settle(self) -> None:
        """From now on this is the start: the forward has run once, and what it builds on first use is there."""
        self._plain = PlainValues(self.fn)

    def context(self, tokens: int, seed: int) -> Any:
        """The context of a forward of ``tokens`` tokens, as new."""
        self.seed(seed)
        if self._contents is not None:
            self._contents.restore()
        return self.ctx(tokens) if self.varied else self.ctx

    def restore(self) -> None:
        """Put back plain values of the forward, and what a context held."""
        self._plain.restore()
        if self._contents is not None:
            self._contents.restore()

    def seed(self, seed: int) -> None:
        """Set the generators that a forward on this device may draw from, and no other device's."""
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)


class Sandbox:
    """Runs the reference of a runner's buckets, captures them, and replays them, each run from the same start."""

    def __init__(
        self, runner: GraphRunner, world: Environment, pool: Pool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.world = world
        dims, request_dims = runner._output_dims
        self.runner = GraphRunner(
            runner.fn, runner.inputs, runner.ladder, dims, device=pool.device, pool=pool, state=runner.state,
            request_buckets=runner.request_ladder, output_request_dim=request_dims, strategies=runner.strategies[-1:],
            progress=False,
        )  # fmt: skip
        self.buckets = self.runner._ready(args, kwargs)
        self.buckets._said_whole = True  # that no break was met is said in the report
        self.recorder, self.binder = self.buckets.recorder, self.buckets.recorder.binder
        self.learn([leaf.spec for leaf in runner._binder.leaves])

    def learn(self, specs: Sequence[Spec | None]) -> None:
        """Take what is known of the inputs from elsewhere."""
        for leaf, spec in zip(self.binder.leaves, specs, strict=True):
            leaf.spec = leaf.spec or spec

    def close(self) -> None:
        self.runner.close()

    def example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The example call, bound and checked; one padded row where there is none and the inputs' shapes are known."""
        world, binder = self.world, self.binder
        named = dict(kwargs)
        if not (args or kwargs):
            values, tensors = synthetic(binder)
            named = binder.placed(dict(zip(binder.names, values, strict=True)), tensors)
        call = binder.read(args, named, None if world.varied else world.ctx)
        binder.keep(call)
        if world.varied:
            call.ctx = world.context(call.tokens, 0)
        elif call.ctx is not world.ctx:  # given as an argument
            self.world = Environment(world.fn, call.ctx, world.state, world._device)
        return with_tensors(call, call.tensors, binder)

    def unpadded(self, case: Case, log: OpLog) -> Outcome:
        """The forward at the call's own shape: eager."""
        return self._forward(case, case.tokens, case.call.requests, log, perturbed=False, fill=FINITE)

    def reference(self, case: Case, log: OpLog, perturbed: bool = False, fill: float = FINITE) -> Outcome:
        """The forward at the bucket's shape. ``perturbed``: over other padding. ``fill``: of uninitialised memory."""
        requests = -1 if case.requests is None else case.requests
        return self._forward(case, case.bucket, requests, log, perturbed, fill)

    def capture(self, case: Case, keep: Keep = "nothing") -> Recorded:
        """Warm up and capture a bucket, and put back the tensors that either wrote.

        Raises:
            whatever the forward or the capture raises.
        """
        log, strategy = OpLog(keep), self.runner.strategies[-1]
        with self._kept(), self.recorder.lock:
            ctx = self.world.context(case.tokens, case.values)
            self.buckets.warm(case.call, case.bucket, case.requests, ctx)
            ctx = self.world.context(case.tokens, case.values)
            with observing(log):
                self.buckets.capture(case.call, case.bucket, case.requests, ctx, strategy)
        values = "" if case.values == 0 else ", other values"
        found = Recorded(
            f"when captured with {case.tokens} tokens{values}", log, self.breaks(case), plain_values(self.world.fn)
        )
        for t in self.plan(case).program.writes:
            address = t.untyped_storage().data_ptr()
            if address and not self.recorder.owns(t):
                self.world.written.setdefault(address, (whole(t), "a captured op"))
        return found

    def plan(self, case: Case) -> CapturedBucket:
        return self.buckets.graphs[case.call.key, case.bucket, case.requests]

    def has(self, case: Case) -> bool:
        """Whether the case's bucket was captured."""
        return (case.call.key, case.bucket, case.requests) in self.buckets.graphs

    def breaks(self, case: Case) -> list[Break]:
        """The breaks of a captured bucket, in order."""
        capture = getattr(self.plan(case).program, "_capture", None)
        return [s for s in getattr(capture, "_steps", ()) if isinstance(s, Break)]

    def replay(self, case: Case, perturbed: bool) -> Outcome:
        """A replay over poisoned free blocks, outputs and allocations of breaks. ``perturbed``: over other padding."""
        plan, call, log = self.plan(case), case.call, OpLog()
        requests = call.requests
        pool = self.recorder.pool

        def run(ctx: Any) -> dict[str, Value]:
            with self.recorder.lock, pool.turn():
                for t in plan.layout.tensors:
                    if pool.owns(t) and t.dtype in FLOATS:
                        t.fill_(NAN)
                pool.poison()
                plan.stage.fill(call.tensors, case.tokens, requests, call.foreign)
                with torch.inference_mode():
                    if perturbed:
                        perturb_tails(plan.stage.static, case, self.binder)
                    with active_forward(ctx), Trace(log, NAN):
                        plan.program.replay(case.tokens)
                    given = plan.layout.give(case.tokens, requests)
                    lent = plan.layout.lend(case.tokens, requests)
            return outputs_of(given, lent)

        return self._run(case, log, run)

    def _forward(self, case: Case, rows: int, requests: int, log: OpLog, perturbed: bool, fill: float) -> Outcome:
        call = case.call

        def run(ctx: Any) -> dict[str, Value]:
            stage = self.recorder.stage(call, rows, None if requests < 0 else requests)
            tensors = stage.padded(call.tensors, case.tokens, call.requests)
            if perturbed:
                perturb_tails(tensors, case, self.binder)
            with (
                torch.inference_mode(),
                active_forward(ctx),
                reference_frame(rows=rows, valid_rows=case.tokens),
                Trace(log, fill),
            ):
                raw = self.binder.invoke(call, tensors, ctx)
            if rows != case.bucket:
                return outputs_of(owned(raw), raw)
            with torch.inference_mode():
                layout = self.recorder.outputs.layout(raw, call.key, stage.tokens, stage.requests)
                return outputs_of(layout.give(case.tokens, call.requests), raw)

        return self._run(case, log, run)

    def _run(self, case: Case, log: OpLog, run: Callable[[Any], dict[str, Value]]) -> Outcome:
        self.world.restore()
        outcome = Outcome(log=log)
        with self._kept() as writes:
            ctx = self.world.context(case.tokens, case.values)
            try:
                outcome.outputs = run(ctx if ctx is not None else current_forward_ctx())
            except Exception as e:
                outcome.error = e
            written = self.world.written
            for address, views in log.written.items():
                if address in writes._saved and address not in written:
                    written[address] = whole(views[0].tensor), views[0].where
            outcome.state = state_of({a: at for a, at in written.items() if at[0].data_ptr()}, ctx)
        return outcome

    @contextmanager
    def _kept(self) -> Iterator[WriteLog]:
        """Whatever tensors a run writes are put back afterwards, those that graphs write included."""
        known = [t for t, _ in self.world.written.values() if t.data_ptr()]
        writes = WriteLog(self.recorder.owns, [*self.world.state, *known])
        try:
            with writes:
                yield writes
        finally:
            writes.put_back()
