"""The runner: it is made from declarations, answers every call of a forward, captures ahead of traffic, sleeps and is copied."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor

from segue import devices, environment
from segue.capture.nested import take_apart
from segue.devices import Device, Pool
from segue.errors import UsageError, no_copy
from segue.runner import options
from segue.runner.admission import Admission
from segue.runner.bucket_recorder import BucketRecorder
from segue.runner.buckets import Buckets
from segue.runner.calls import Binder, Key
from segue.runner.check_report import Report, checker
from segue.runner.inputs import Declared
from segue.runner.ladder import Ladder
from segue.runner.memory_budget import Cost, MemoryBudget
from segue.runner.module_guard import ModuleGuard
from segue.runner.outputs import Outputs
from segue.runner.precapture import KeptExample, Precapture, example_call
from segue.runner.progress import CaptureSummary
from segue.runner.rank_group import rank_group
from segue.runner.ranks import LockStep
from segue.runner.replay_verifier import ReplayVerifier
from segue.runner.serving_runner import ServingRunner
from segue.runner.staging import InputBuffers
from segue.runner.stats import Counters, Stats
from segue.runner.strategy import Breakable, Strategy, Takes, ladder_of

log = logging.getLogger("segue")


class GraphRunner(ServingRunner):
    """Runs a forward of varying length from graphs of a few padded lengths.

    Lazy by default: the first call of a bucket runs the reference, the second is captured, later ones replay; each gets
    its answer. ``capture()`` does the whole ladder ahead of traffic. Calls are bound like ``fn``'s signature, plus
    ``ctx``. What ``fn`` writes into an input is in the caller's tensor afterwards, as in eager.

    Args:
        fn: the forward, a function of tensors. It is called with ``ctx`` too if it has that parameter, and returns any
            structure of tensors and plain values.
        inputs: name to :class:`Input`, or to a mapping or sequence of them for an argument that is a structure.
            Arguments that aren't declared must be plain flags; they are part of the variant.
        buckets: padded token counts, a :class:`Ladder` or any iterable of sizes.
        output_token_dim: the dimension in which outputs have one row a token: a number, for all outputs that have the bucket's
            size there; None; or a structure with one for each output.
        outputs: ``"copy"``: the caller owns them. ``"lease"``: a :class:`Lease`, zero-copy, good until the pool replays
            again.
        capture_ctx: from a bucket to a context, for ``capture()``; called for the warm-up and again for the capture.
        max_padding: calls with more run eager. A whole number counts rows; a fraction is a share of the bucket.
        max_variants: the most combinations of optional inputs and flags that get graphs.
        memory_budget: bytes of pool and driver memory. The runner then has a pool of its own unless ``pool`` is given.
        state: tensors to put back after ``capture()``, whatever their size.
        on_failure: ``"eager"``: a capture that fails before anything ran is retried eagerly, counted, and logged once. One
            that runs out of memory is raised all the same, and only later calls of its bucket run eager.
        strict: raise instead of any eager fall-back.
        device: by default that of the module's parameters, or of the first call's tensors.
        request_buckets: a ladder for request-shaped inputs; by default that of the first strategy with a ladder of its own.
        output_request_dim: like ``output_token_dim``, for requests.
        pool: as for :class:`BreakableCapture`. Several runners may share one, and do by default. Give one of its own
            (:func:`~segue.new_pool`) where eager code keeps addresses of memory that other graphs have freed.
        stream: likewise.
        buffers_of: another runner. Inputs of the same names lie in its buffers, and graphs in its pool, so that both take the
            memory of one, as for a verify and a draft step of one model. Calls of the two wait for each other.
        verify_every: every so many replays, also run the reference on a copy of the context and compare. 0: never.
        strategies: how buckets are captured, the preferred first; the last must serve every call.
        progress: show progress and a closing line on stderr during ``capture()``.
        warmups: runs of the reference before a bucket is captured. Kernels that tune themselves may need several.
        takes: from a call's arguments, keyword arguments and context to whether graphs may serve it. Other calls run eager,
            counted: a drafter's step that narrows its rows, say. A call with a ``decision`` isn't asked about.
        after_segment: is called after each segment's end during a capture, as for :class:`BreakableCapture`.
        counters: those of another runner, to count in them too.
        group: a process group of ``torch.distributed`` whose ranks make each call together, one without work with 0 rows. They
            agree on bucket, variant, and graph or eager; the largest length of any rank decides. All make the runner together.
        group_timeout: seconds until a missing rank is an error; None: as long as the group itself waits, and at most a minute.

    ``SEGUE=off`` in the environment when the runner is made runs everything eager.

    A deep copy is a runner of a deep copy of ``fn``, without graphs: a module's copy gets one that runs the copy's forward.

    Raises:
        UsageError: an option or declaration that means nothing.
    """

    _settles_at_once = True

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: Declared,
        buckets: Ladder | Iterable[int],
        output_token_dim: Any = 0,
        outputs: Literal["copy", "lease"] = "copy",
        capture_ctx: Callable[[int], Any] | None = None,
        max_padding: int | float | None = None,
        max_variants: int = 4,
        memory_budget: int | None = None,
        state: Iterable[Tensor] = (),
        on_failure: Literal["raise", "eager"] = "raise",
        strict: bool = False,
        device: str | torch.device | Device | None = None,
        *,
        request_buckets: Ladder | Iterable[int] | None = None,
        output_request_dim: Any = None,
        pool: Pool | tuple[int, int] | None = None,
        stream: Any = None,
        buffers_of: GraphRunner | None = None,
        verify_every: int = 0,
        strategies: Sequence[Strategy] | None = None,
        progress: bool = True,
        warmups: int = 1,
        after_segment: Callable[[], object] | None = None,
        takes: Takes | None = None,
        counters: Counters | None = None,
        group: Any = None,
        group_timeout: float | None = None,
    ) -> None:
        self._lease = options.one_of("outputs", outputs, "copy", "lease")
        self._retry = options.one_of("on_failure", on_failure, "raise", "eager")
        self._max_variants = options.whole_number("max_variants", max_variants, 1)
        self._after_segment = options.function("after_segment", after_segment, "no arguments")
        self._takes: Takes | None = options.function("takes", takes, "a call's args, kwargs and ctx")
        self._warmups = options.whole_number("warmups", warmups, 1)
        verify_every = options.whole_number("verify_every", verify_every, 0)
        self.fn, self.ladder = fn, options.ladder("buckets", buckets)
        self.request_ladder = None if request_buckets is None else options.ladder("request_buckets", request_buckets)
        self.inputs, self._binder = inputs, Binder(fn, inputs)
        self.strategies = list(strategies) if strategies is not None else [Breakable()]
        if not self.strategies:
            raise UsageError("strategies=[] leaves no way to capture; leave it out, or end it with one that serves every call")
        own = {s.name: ladder for s in self.strategies if (ladder := ladder_of(s)) is not None}
        by_request = any(leaf.request for leaf in self._binder.leaves)
        if by_request and self.request_ladder is None:
            self.request_ladder = next(iter(own.values()), None)
        if by_request != (self.request_ladder is not None):
            raise UsageError("request-shaped inputs and request_buckets go together: one was given without the other")
        self.capture_ctx = options.function("capture_ctx", capture_ctx, "a bucket, and return the context of its capture")
        self.state, self.progress = options.tensors("state", state), progress
        self._budget: MemoryBudget | None = None
        if memory_budget is not None:
            self._budget = MemoryBudget(options.whole_number("memory_budget", memory_budget, 1, " of bytes"))
        self.summary: CaptureSummary | None = None
        self.guard, self.disabled = ModuleGuard(fn), environment.disabled()
        self._left_out: dict[int, str] = {}
        self.admission = Admission(
            self.ladder, self.request_ladder, max_padding, tuple(s.name for s in self.strategies), self._left_out, own
        )
        self._buffers_of = buffers_of
        if buffers_of is not None:
            options.shares_buffers(buffers_of, GraphRunner, self._binder.leaves, self.admission.most, pool)
        self._group = group, group_timeout
        self._lock_step = None
        if group is not None:
            self._lock_step = LockStep(rank_group(group, group_timeout), self.admission, self._left_out)
        self._last = self.strategies[-1].name  # the strategy that serves every call
        self._preferred = {s.name for s in self.strategies[:-1]}
        self._strict, self._counters = strict, Counters() if counters is None else counters
        self._output_dims = output_token_dim, output_request_dim
        self._device_asked, self._pool, self._stream = device, pool, stream
        self._verifier = ReplayVerifier(verify_every, self.state) if verify_every else None
        self._closed, self._opening = False, threading.Lock()
        self._asleep = False
        self._examples: dict[Key, KeptExample] = {}  # of capture(), by variant and strategy
        self._buckets: Buckets | None = None
        known = device is not None or devices.device_of(pool) is not None or self.guard.device is not None
        known = known or (buffers_of is not None and buffers_of._buckets is not None)
        if self._settles_at_once and known:
            self._settle(())

    def capture(self, *args: Any, ctx: Any = None, verify: bool = False, **kwargs: Any) -> CaptureSummary:
        """Capture the whole ladder, largest first, from one example call of any length, and put back what that writes.

        Rows beyond the example repeat it. All rows count as real, except with a plain ``ctx`` and no ``capture_ctx``:
        then those of the example do. Without an example every input needs ``shape=`` and ``dtype=``. Tensors that the
        warm-up or a break wrote are put back; Python attributes that changed are reported, by name, in the summary and
        the log. With request-shaped inputs the example is taken as it is, and only buckets that hold it whole are
        captured; the others are left out, and captured when calls come.

        ``verify``: replay each bucket once and compare it with the reference, which runs on another context: a second one of
        ``capture_ctx``'s, or a deep copy. A bucket that differs loses its graphs, as ``on_failure`` says.

        Raises:
            CaptureError: a bucket can't be captured. Those before it keep working. UsageError: a module is in training mode, the
            runner was closed, or not even one bucket fits the memory budget. ReplayError: a bucket's trial replay isn't the
            reference.
        """
        buckets = self.prepare(*args, **kwargs)
        if self._asleep:
            raise UsageError("the runner is asleep, so nothing is captured: call wake()")
        with buckets.recorder.lock:
            self.summary = self._precapture(buckets, args, kwargs, ctx, verify)
        return self.summary

    def recapture(self, *args: Any, ctx: Any = None, **kwargs: Any) -> CaptureSummary | None:
        """Drop every graph, then capture anew: from this example, or lazily where none is given. It is for weights that moved.

        Raises:
            as :meth:`capture`.
        """
        buckets = self.prepare(*args, **kwargs)
        with buckets.recorder.lock:
            buckets.drop(buckets.graphs)
            self._asleep = False
            self._settle((*args, *kwargs.values()))
        return self.capture(*args, ctx=ctx, **kwargs) if args or kwargs else None

    def sleep(self) -> None:
        """Free the graphs, the input buffers, and the pool unless others use it. Until :meth:`wake`, calls run eager, counted.

        Raises:
            UsageError: the runner was closed.
        """
        self._refuse_closed()
        self._asleep = True
        self.guard.forget()
        if (buckets := self._buckets) is not None:
            with buckets.recorder.lock:
                buckets.drop(buckets.graphs)
                self._begin(buckets.recorder.device, buckets.recorder.pool, buckets.recorder.shared)

    def wake(self, *args: Any, ctx: Any = None, **kwargs: Any) -> CaptureSummary | None:
        """End :meth:`sleep` and capture anew: from this example or, where none is given, from those of :meth:`capture`.

        The runner keeps these, one for each variant and strategy: tensors on the host, and the context where there is no
        ``capture_ctx``. Without any, buckets are captured as calls come, and None is returned. On a runner that isn't asleep it
        does nothing.

        Raises:
            as :meth:`capture`. The runner is awake then.
        """
        if not self._asleep:
            return None
        self._asleep = False
        if args or kwargs:
            return self.capture(*args, ctx=ctx, **kwargs)
        summary = None
        for example in list(self._examples.values()):
            summary = self.capture(*example.args, ctx=example.ctx if ctx is None else ctx, **example.kwargs)
        return summary

    def estimate(self, *args: Any, ctx: Any = None, **kwargs: Any) -> Cost:
        """What the graphs of the whole ladder will take, in bytes, before any of them is captured: to size a KV cache by, say.

        It is measured: from the example, as for :meth:`capture`, the largest and the smallest bucket are captured in a pool of
        their own, and freed. It counts one variant, and the strategy that serves every call.

        Raises:
            as :meth:`capture`.
        """
        buckets = self.prepare(*args, **kwargs)
        if self.disabled:
            return Cost(0, 0)
        with self.clone(buckets.recorder.device.new_pool()) as trial:
            return trial._session(trial.prepare(), args, kwargs, ctx, False).estimate()

    def close(self) -> None:
        """Drop every graph; further calls raise. Memory goes back when no other graph shares the pool. May be called
        twice.
        """
        self._closed = True
        self.guard.forget()
        if self._buckets is not None:
            with self._buckets.recorder.lock:
                self._buckets.drop(self._buckets.graphs)

    @property
    def stats(self) -> Stats:
        """A snapshot of the counters."""
        if self._buckets is None:
            return self._counters.snapshot(0, 0, ())
        cost = self._buckets.cost()
        return self._counters.snapshot(cost.pool, cost.driver, self._buckets.captured)

    @property
    def pool(self) -> Pool | None:
        """The graph pool, once the device is known."""
        return None if self._buckets is None else self._buckets.recorder.pool

    def __enter__(self) -> GraphRunner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _settle(self, values: Iterable[Any]) -> Buckets:
        """Settle the device (the one asked for, the module's, or that of the tensors among ``values``) and begin without
        graphs.
        """
        asked: Any = self._device_asked
        values, other = tuple(values), self._buffers_of
        theirs = None if other is None else (other._buckets or other._open(values, {})).recorder
        if asked is None:
            asked = devices.device_of(self._pool if theirs is None else theirs.pool) or self.guard.device
        tensors = [t for v in values for _, t, _ in take_apart(v).leaves if isinstance(t, Tensor)]
        device = devices.resolve(asked, sorted(tensors, key=lambda t: t.device.type == "cpu"))
        self.guard.check_place(device.torch_device)
        if theirs is None:
            own = self._pool is None and self._budget is not None
            pool = device.new_pool() if own else devices.pool_of(device, self._pool)
            buffers = InputBuffers(self.admission.most)
        else:
            pool, buffers = devices.pool_of(device, theirs.pool), theirs.shared
        self._binder = Binder(self.fn, self.inputs)
        self._binder.place(device.torch_device)
        self._read = self._binder.read_any
        return self._begin(device, pool, buffers)

    def _begin(self, device: Device, pool: Pool, buffers: InputBuffers) -> Buckets:
        """Begin without graphs."""
        outputs = Outputs(*self._output_dims, self._binder.label)
        recorder = BucketRecorder(
            self.fn, self._binder, outputs, self._counters, device, pool, self._stream, self.ladder,
            buffers, self._after_segment,
        )  # fmt: skip
        self._left_out.clear()
        if self._budget is not None:
            self._budget.seen.clear()
        self._buckets = Buckets(
            recorder,
            self.guard,
            {s.name: s for s in self.strategies},
            self._left_out,
            self._budget,
            lease=self._lease,
            retry=self._retry,
            most_variants=self._max_variants,
            several_ranks=self._lock_step is not None,
            warmups=self._warmups,
            verifier=self._verifier,
        )
        return self._buckets

    def _precapture(
        self, buckets: Buckets, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: Any, verify: bool
    ) -> CaptureSummary:
        if self.disabled:
            log.info("SEGUE=off: nothing is captured, every call runs eager")
            return CaptureSummary((), 0, 0, 0.0, Cost(0, 0))
        session = self._session(buckets, args, kwargs, ctx, verify)
        summary = session.run()
        kept = None if self.capture_ctx else session.context
        self._examples[session.call.key] = KeptExample(buckets.recorder.binder, session.call, len(args), kept)
        return summary

    def _session(self, buckets: Buckets, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: Any, verify: bool) -> Precapture:
        given = args, dict(kwargs)
        call = example_call(buckets.recorder.binder, args, kwargs, ctx)
        call.given = given
        taken = next((s for s in self.strategies[:-1] if ladder_of(s) is not None and s.takes(call)), self.strategies[-1])
        if taken.name in self._preferred:
            call.key = (*call.key, taken.name)
        return Precapture(
            buckets,
            call,
            self.ladder,
            self.request_ladder,
            strategy=taken,
            context=ctx if call.ctx is None else call.ctx,
            make_context=self.capture_ctx,
            state=self.state,
            progress=self.progress,
            verify=verify,
            ranks=self._lock_step,
        )

    def check(self, *args: Any, ctx: Any = None, **kwargs: Any) -> Report:
        """Compare replays with the reference, on private graphs, and name the op and line where they could differ.

        Tries several buckets and lengths from one example call, optional inputs there and not, both capture orders, over
        poisoned memory and other padding; tensors and plain values that the forward changes are put back. ``ctx``: a
        context, or better a function that makes one from the number of tokens.

        Raises:
            InputError: the call doesn't fit. NoBucketError: no bucket holds it. What the forward itself raises eagerly.
        """
        return checker()(self, args, kwargs, ctx)

    def clone(self, pool: Pool) -> GraphRunner:
        """A runner of the same function with the same declarations and options on ``pool``, which should be its own.

        It has buffers, graphs and counters of its own, and knows the shapes and dtypes that calls have shown this one. It has
        the last strategy alone, no memory budget and no verification of replays; it shows no progress, doesn't warn that a
        capture met no break point, and raises when a capture fails.
        """
        clone = GraphRunner(
            self.fn, **self._declarations(), capture_ctx=self.capture_ctx, state=self.state, device=pool.device, pool=pool,
            strategies=self.strategies[-1:], progress=False,
        )  # fmt: skip
        for leaf, known in zip(clone._binder.leaves, self._binder.leaves, strict=True):
            leaf.spec = leaf.spec or known.spec
        if clone._buckets is not None:
            clone._buckets.warned_no_break = True
        return clone

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphRunner:
        """A runner without graphs of a copy of the function: a module's copy has one that runs the copy.

        Raises:
            UsageError: it has preferred strategies, which may hold graphs.
        """
        if self._preferred:
            why = f"Its strategies ({', '.join(sorted(self._preferred))}) may hold graphs too: make a new runner for the copy."
            raise no_copy(f"the runner of {self._binder.label}", why)
        memo[id(self)] = copied = GraphRunner.__new__(GraphRunner)
        copied._settles_at_once = False  # its module may be half copied by now
        fn, make_context, state = copy.deepcopy((self.fn, self.capture_ctx, self.state), memo)
        GraphRunner.__init__(
            copied, fn, **self._declarations(), capture_ctx=make_context, state=state, device=self._device_asked, pool=self._pool,
            stream=self._stream, strategies=self.strategies, progress=self.progress,
            memory_budget=None if self._budget is None else self._budget.limit, on_failure="eager" if self._retry else "raise",
            verify_every=0 if self._verifier is None else self._verifier.every, after_segment=self._after_segment,
            takes=self._takes, group=self._group[0], group_timeout=self._group[1],
        )  # fmt: skip
        return copied

    def _declarations(self) -> dict[str, Any]:
        """The arguments that clones and copies have in common with this runner, by name."""
        return {
            "inputs": self.inputs, "buckets": self.ladder, "request_buckets": self.request_ladder,
            "output_token_dim": self._output_dims[0], "output_request_dim": self._output_dims[1],
            "outputs": "lease" if self._lease else "copy", "max_padding": self.admission.max_padding,
            "max_variants": self._max_variants, "strict": self._strict, "warmups": self._warmups,
        }  # fmt: skip

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise no_copy(f"the runner of {self._binder.label}", "Pickle the function or module without it, and make a new runner.")
