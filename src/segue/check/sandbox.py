"""A private clone of a runner on a pool of its own, whose graphs can be poisoned and perturbed while the runner serves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture import active_forward, current_forward_ctx, reference_frame
from segue.capture.break_points import Break
from segue.capture.leftovers import listing
from segue.capture.object_graph import plain_values
from segue.capture.op_watch import observing
from segue.check.frozen import CaptureRecord
from segue.check.oplog import FLOATS, Keep, OpLog, OpLogMode
from segue.check.outcome import Outcome, OutcomeValue, outputs_of, state_of, whole
from segue.check.restore import ContextContents, PlainValues
from segue.check.trial_calls import TrialCall, perturb_tails
from segue.devices import Pool, generators
from segue.runner.bucket_recorder import synthetic
from segue.runner.calls import Call
from segue.runner.captured_bucket import CapturedBucket
from segue.runner.outputs import owned
from segue.runner.runner import GraphRunner
from segue.runner.write_log import WriteLog

FINITE = 3.0  # fills uninitialised memory where a run must not show whether it reads that
NAN = float("nan")


class Environment:
    """What a forward sees besides its inputs, made the same at the start of every run: context, generators, plain values.

    Args:
        fn: the forward.
        ctx: a context, or a function that makes one from the number of tokens.
        state: tensors that the runner was told to put back.
        device: the device whose random generator the forward may draw from.
    """

    def __init__(self, fn: Any, ctx: Any, state: Sequence[Tensor], device: torch.device) -> None:
        self.varied = callable(ctx) and not isinstance(ctx, torch.nn.Module)
        self.ctx, self.state = ctx, list(state)
        self.fn, self.device = fn, device
        self.written: dict[int, tuple[Tensor, str]] = {}  # outside tensors by storage address, with the line that writes them
        self._contents = None if self.varied or ctx is None else ContextContents(ctx)
        self._start = self._original = PlainValues(fn)

    def settle(self) -> None:
        """Make the present plain values the start of every run: the forward has built what it builds on first use."""
        self._start = PlainValues(self.fn)

    def context(self, tokens: int, seed: int) -> Any:
        """Seed the generators, and return the context of a forward of ``tokens`` tokens, holding what it held at first."""
        self.seed(seed)
        if self._contents is not None:
            self._contents.restore()
        return self.ctx(tokens) if self.varied else self.ctx

    def restore(self) -> None:
        """Put back the plain values of the forward and what the context held."""
        self._start.restore()
        if self._contents is not None:
            self._contents.restore()

    def close(self) -> None:
        """Put back everything, as it was when the environment was made."""
        self.restore()
        self._original.restore()

    def seed(self, seed: int) -> None:
        """Seed the generators that a forward on this device may draw from, and no other device's."""
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        for generator in generators.known():
            if generator.device.type == self.device.type:
                generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)


class Sandbox:
    """Runs the reference of a runner's buckets, captures them and replays them, each run from the same start.

    Args:
        runner: the runner to clone; its device must be settled.
        environment: where every run starts from.
        pool: a pool that nothing else uses.
    """

    def __init__(self, runner: GraphRunner, environment: Environment, pool: Pool) -> None:
        self.environment = environment
        self.runner = runner.clone(pool)
        self.buckets = self.runner.prepare()
        self.recorder, self.binder = self.buckets.recorder, self.buckets.recorder.binder

    def close(self) -> None:
        """Drop the clone's graphs."""
        self.runner.close()

    def example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The example call, bound and checked; one padded row where none is given and the inputs' shapes are known.

        Raises:
            InputError: the arguments don't fit. CaptureError: none is given, and a shape isn't known.
        """
        environment, binder = self.environment, self.binder
        named = dict(kwargs)
        if not (args or kwargs):
            values, tensors = synthetic(binder)
            named = binder.placed(dict(zip(binder.names, values, strict=True)), tensors)
        call = binder.read(args, named, None if environment.varied else environment.ctx)
        binder.keep(call)
        if environment.varied:
            call.ctx = environment.context(call.tokens, 0)
        elif call.ctx is not environment.ctx:  # it was given as an argument
            self.environment = Environment(environment.fn, call.ctx, environment.state, environment.device)
        return self.binder.with_tensors(call, call.tensors)

    def unpadded(self, trial: TrialCall, log: OpLog) -> Outcome:
        """Run the forward at the call's own shape, which is what eager does."""
        return self._forward(trial, trial.tokens, trial.call.requests, log, perturbed=False, fill=FINITE)

    def reference(self, trial: TrialCall, log: OpLog, perturbed: bool = False, fill: float = FINITE) -> Outcome:
        """Run the forward at the bucket's shape.

        Args:
            perturbed: padded rows hold other values than declared.
            fill: what uninitialised floating-point memory holds.
        """
        requests = -1 if trial.requests is None else trial.requests
        return self._forward(trial, trial.bucket, requests, log, perturbed, fill)

    def capture(self, trial: TrialCall, keep: Keep = "nothing") -> CaptureRecord:
        """Warm up and capture a bucket, and put back the tensors that either wrote.

        Raises:
            Exception: what the forward or the capture raises.
        """
        log, strategy = OpLog(keep), self.runner.strategies[-1]
        with self._tensors_put_back(), self.recorder.lock:
            ctx = self.environment.context(trial.tokens, trial.values)
            self.buckets.warm(trial.call, trial.bucket, trial.requests, ctx)
            ctx = self.environment.context(trial.tokens, trial.values)
            with observing(log), listing() as left:
                self.buckets.capture(trial.call, trial.bucket, trial.requests, ctx, strategy)
        values = "" if trial.values == 0 else ", other values"
        label = f"when captured with {trial.tokens} tokens{values}"
        record = CaptureRecord(label, log, self.breaks(trial), plain_values(self.environment.fn), left)
        for t in self.plan(trial).program.writes:
            address = t.untyped_storage().data_ptr()
            if address and not self.recorder.owns(t):
                self.environment.written.setdefault(address, (whole(t), "a captured op"))
        return record

    def plan(self, trial: TrialCall) -> CapturedBucket:
        """The captured bucket of a call. Raises KeyError if there is none."""
        return self.buckets.graphs[trial.call.key, trial.bucket, trial.requests]

    def has(self, trial: TrialCall) -> bool:
        """Whether the call's bucket was captured."""
        return (trial.call.key, trial.bucket, trial.requests) in self.buckets.graphs

    def breaks(self, trial: TrialCall) -> list[Break]:
        """The breaks of a captured bucket, in order."""
        capture = self.plan(trial).capture
        return [] if capture is None else [step for step in capture.steps if isinstance(step, Break)]

    def replay(self, trial: TrialCall, perturbed: bool) -> Outcome:
        """Replay a bucket while free blocks, outputs and what breaks allocate hold NaN.

        Args:
            perturbed: padded rows hold other values than declared.
        """
        plan, call, log = self.plan(trial), trial.call, OpLog()
        requests = call.requests
        pool = self.recorder.pool

        def run(ctx: Any) -> dict[str, OutcomeValue]:
            with self.recorder.lock, pool.turn():
                for t in plan.layout.tensors:
                    if pool.owns(t) and t.dtype in FLOATS:
                        t.fill_(NAN)
                pool.poison()
                plan.stage.fill(call.tensors, trial.tokens, requests, call.foreign)
                with torch.inference_mode():
                    if perturbed:
                        perturb_tails(plan.stage.static, trial, self.binder)
                    with active_forward(ctx), OpLogMode(log, NAN):
                        plan.program.replay(trial.tokens)
                    given = plan.layout.give(trial.tokens, requests)
                    lent = plan.layout.lend(trial.tokens, requests)
            return outputs_of(given, lent)

        return self._run(trial, log, run)

    def _forward(
        self, trial: TrialCall, rows: int, requests: int, log: OpLog, perturbed: bool, fill: float
    ) -> Outcome:
        call = trial.call

        def run(ctx: Any) -> dict[str, OutcomeValue]:
            stage = self.recorder.stage(call, rows, None if requests < 0 else requests)
            tensors = stage.padded(call.tensors, trial.tokens, call.requests)
            if perturbed:
                perturb_tails(tensors, trial, self.binder)
            with (
                torch.inference_mode(),
                active_forward(ctx),
                reference_frame(rows, trial.tokens, [t for t in tensors if t is not None]),
                OpLogMode(log, fill),
            ):
                raw = self.binder.invoke(call, tensors, ctx)
            if rows != trial.bucket:
                return outputs_of(owned(raw), raw)
            with torch.inference_mode():
                layout = self.recorder.outputs.layout(raw, call.key, stage.tokens, stage.requests)
                return outputs_of(layout.give(trial.tokens, call.requests), raw)

        return self._run(trial, log, run)

    def _run(self, trial: TrialCall, log: OpLog, run: Callable[[Any], dict[str, OutcomeValue]]) -> Outcome:
        self.environment.restore()
        outcome = Outcome(log=log)
        with self._tensors_put_back() as outside:
            ctx = self.environment.context(trial.tokens, trial.values)
            try:
                outcome.outputs = run(ctx if ctx is not None else current_forward_ctx())
            except Exception as e:
                outcome.error = e
            written = self.environment.written
            for address, writes in log.written.items():
                if address in outside and address not in written:
                    written[address] = whole(writes[0].tensor), writes[0].where
            outcome.state = state_of({a: at for a, at in written.items() if at[0].data_ptr()}, ctx)
        return outcome

    @contextmanager
    def _tensors_put_back(self) -> Iterator[set[int]]:
        """Put back the outside tensors that this block writes, those that graphs are known to write included.

        Yields:
            The storage addresses of these tensors; a write within the block adds its own.
        """
        known = [*self.environment.state, *(t for t, _ in self.environment.written.values() if t.data_ptr())]
        outside = {_torch.storage_span(t)[0] for t in known}

        def internal(t: Tensor) -> bool:
            if self.recorder.owns(t):
                return True
            outside.add(_torch.storage_span(t)[0])
            return False

        writes = WriteLog(internal, known)
        try:
            with writes:
                yield outside
        finally:
            writes.put_back()
