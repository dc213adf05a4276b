"""Warming up and recording one bucket: what happens before a call can be replayed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from segue import _torch, devices
from segue.capture import BreakableCapture, active_forward, current_forward_ctx, reference_frame
from segue.capture.isolation import one_capture
from segue.capture.leftovers import Leftovers
from segue.capture.nested import leaves
from segue.capture.object_graph import reached
from segue.capture.places import Places
from segue.capture.rehearsal import IndexChecks, Rehearsal
from segue.capture.thread_state import state
from segue.capture.wrappers import with_collectives_done
from segue.devices import Device, Pool
from segue.errors import CaptureError, InputError, UsageError
from segue.runner.calls import Binder, Call, Key
from segue.runner.captured_bucket import CapturedBucket
from segue.runner.fixed_shapes import FixedShapes
from segue.runner.ladder import Ladder
from segue.runner.outputs import Layout, Lease, Outputs, Signature, owned
from segue.runner.shared_memory import SharedMemory
from segue.runner.staging import Buffer, InputBuffers, Stage
from segue.runner.stats import Counters
from segue.runner.strategy import Finish, Job, Strategy
from segue.runner.write_log import WriteLog, generators_kept

log = logging.getLogger("segue")
_warming = threading.local()


class BucketRecorder:
    """Warms up and records buckets. It owns the input buffers, and knows the pool and the stream that all buckets share.

    Its users hold ``lock``, because the buffers serve one call at a time.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        binder: Binder,
        outputs: Outputs,
        counters: Counters,
        device: Device,
        pool: Pool,
        stream: Any,
        ladder: Ladder,
        shared: InputBuffers,
        after_segment: Callable[[], object] | None = None,
    ) -> None:
        self.fn, self.binder, self.outputs, self.counters = fn, binder, outputs, counters
        self._ladder = list(ladder)
        self.most_tokens = 0  # real ones of the call that is served, on any rank
        self.device, self.pool = device, pool
        self.stream = devices.stream_of(device, stream)
        self._after_segment = after_segment
        self._places: Places | None = None
        self.buffers: list[Buffer | None] = [None] * len(binder.leaves)
        # Of one bucket of each variant: its rows, and what its breaks hand on.
        self._handed: dict[tuple[Key, int], tuple[int, list[tuple[str, tuple[int, ...], int | None]]]] = {}
        self.shared, self.lock = shared, shared.lock

    def stage(self, call: Call, tokens: int, requests: int | None) -> Stage:
        """The buffers of the inputs that ``call`` gives, at a bucket's shape. Buffers that don't exist yet are made.

        ``tokens``, ``requests``: the bucket's; None without a request axis.
        """
        shown = dict(call.specs)
        chosen: list[Buffer | None] = []
        for i, (leaf, t) in enumerate(zip(self.binder.leaves, call.tensors, strict=True)):
            if t is None:
                chosen.append(None)
                continue
            buffer = self.buffers[i]
            if buffer is None:
                spec = leaf.spec or shown[leaf]
                most = self.shared.most[0] if leaf.token else self.shared.most[1] if leaf.request else 0
                buffer = self.shared.find(leaf, spec) or Buffer(leaf, spec, most + leaf.extra, self.device.torch_device)
                if leaf.spec is not None:
                    self.buffers[i] = buffer
                    self.shared.keep(buffer)
            chosen.append(buffer)
        return Stage(chosen, tokens, -1 if requests is None else requests)

    def reference(self, call: Call, stage: Stage, ctx: Any, strategy: Strategy | None = None) -> Layout:
        """Run the function at the bucket's shape on fresh padded inputs. Breaks are plain calls, which trim and clear as in a
        replay.

        A strategy with a ``reference`` of its own runs that instead. Inputs that the forward wrote are noted in ``call.updates``.
        """
        own, inside = getattr(strategy, "reference", None), getattr(strategy, "breaks_inside", False)
        padded = stage.padded(call.tensors, call.tokens, call.requests)  # before the frame: the forward doesn't make its inputs
        with (
            torch.inference_mode(),
            active_forward(ctx if ctx is not None else state.ctx),
            reference_frame(stage.tokens, call.tokens, [t for t in padded if t is not None], inside),
        ):
            versions = [0 if t is None else t._version for t in padded]
            constants = self._constants(call, stage, padded) if own is None else None
            with constants or nullcontext():
                raw = self.binder.invoke(call, padded, ctx) if own is None else own(self._named(padded), call.tokens)
            assert state.made is not None
            stage.updates_of(padded, versions, state.made.wrote, call)
            self.shared_memory(call, state.made.outside, state.made.used, padded).check(call.tensors)
        return self.outputs.layout(raw, call.key, stage.tokens, stage.requests, constants or ())

    def shared_memory(
        self, call: Call, outside: Sequence[Tensor], used: set[int], inputs: Sequence[Tensor | None]
    ) -> SharedMemory:
        """The check for calls like ``call``, which ran on ``inputs``; ``call.updates`` says what of them it wrote.

        Args:
            outside: all that it wrote and didn't make. ``used``: addresses of what it used and didn't make.
        """
        mine = {_torch.address(t) for t in inputs if t is not None}
        others = [t for t in outside if _torch.address(t) not in mine]
        return SharedMemory(self.binder.leaves, [slot for slot, _ in call.updates], others, used - mine)

    def warm(self, call: Call, stage: Stage, ctx: Any, strategy: Strategy | None = None) -> Layout:
        """Run the reference on the capture stream, so that what libraries keep for each stream exists before the capture."""
        with _on_capture_stream(self.device, self.pool, self.stream), self.filling_tables():
            unsure = self.outputs.undecided(call.key, stage.tokens, stage.requests)
            if not unsure or getattr(strategy, "reference", None) is not None or self.places(ctx).compiled:
                return self.reference(call, stage, ctx, strategy)
            rehearsal = Rehearsal(stage.tokens, self.device.torch_device)
            with _rehearsing(rehearsal):
                layout = self.reference(call, stage, ctx, strategy)
                for counts in self._other_rows(call, stage, layout):
                    for rows in counts:
                        if self._shows_sizes(call, stage, ctx, layout, rehearsal, rows):
                            break
            return layout

    def _other_rows(self, call: Call, stage: Stage, layout: Layout) -> tuple[list[int], list[int]]:
        """Row counts at which two more runs may show which sizes of the outputs follow the rows, for each run the best first.

        A size may be the same at a like number of rows, as one that is rounded up or limited. So the second run has few rows,
        and an odd number. Inputs may be indices of rows, so the call's own must all be there, unless no input is made of whole
        numbers.
        """
        rows, most = stage.tokens, max(call.tokens, self.most_tokens)
        near = sorted((b for b in self._ladder if b != rows), key=lambda b: (abs(b - rows), b))[:2]
        cut = stage.requests < 0 and all(t is None or t.is_floating_point() for t in call.tensors)
        sizes = {size for t in layout.tensors for size in t.shape}

        def telling(*counts: int) -> list[int]:
            return [n for n in counts if 1 < n <= 2 * rows and n not in sizes and (cut or n >= most)][:2]

        # Fewer rows first: a table may end at the largest bucket.
        return telling(*near, rows // 2, 2 * rows, rows + 1), telling(3, 5, most, rows + 1)

    def _shows_sizes(self, call: Call, stage: Stage, ctx: Any, layout: Layout, rehearsal: Rehearsal, rows: int) -> bool:
        """Run the function at ``rows`` rows, with stand-ins for its breaks, and compare the sizes of the outputs. What it changes
        is put back. Returns whether it could run so.

        Raises:
            UsageError: an output has the bucket's size by chance, or a size that follows the rows in another way.
        """
        if call.tokens > rows:
            call = example_rows(call, self.binder, rows)
        padded = stage.padded(call.tensors, call.tokens, call.requests, rows)
        before, writes = Leftovers(self.fn, ctx), WriteLog(self.owns)
        rehearsal.begin(rows)
        try:
            with (
                generators_kept(self.device.torch_device),
                torch.inference_mode(),
                active_forward(ctx if ctx is not None else state.ctx),
                reference_frame(rows, call.tokens),
                writes,
                IndexChecks(),
            ):
                raw = self.binder.invoke(call, padded, ctx)
                for value in leaves(raw):
                    with_collectives_done(value, lambda _: True)
        except Exception as e:
            log.debug("segue: bucket %s could not be run at %s rows: %s", stage.tokens, rows, e)
            return False
        finally:
            writes.put_back()
            before.put_back()
        self.outputs.check_rows(layout, raw, call.key, stage.tokens, stage.requests, rows)
        return True

    def record(
        self, call: Call, stage: Stage, ctx: Any, strategy: Strategy, warmed: Signature, lease: bool, job: Job
    ) -> tuple[CapturedBucket, Any]:
        """Capture the bucket on ``call``'s values.

        Args:
            warmed: what the warm-up's result looked like. The capture's must look the same.
            lease: outputs are lent.
            job: from :meth:`job`; its ``forward`` and ``arrived`` are set here.

        Returns:
            the graphs, and the answer to the call.

        Raises:
            CaptureError: what the forward does can't be in a graph, or there was no memory for it.
        """
        answer: list[Any] = []
        kept: list[Layout] = []
        as_caller = torch.is_inference_mode_enabled()

        def arrived(raw: Any) -> Finish:
            layout = self.outputs.layout(raw, call.key, stage.tokens, stage.requests)
            layout.check_same(warmed)
            kept[:] = [layout]  # a strategy may record several times, and the last one counts

            def finish() -> None:
                with torch.inference_mode(as_caller):
                    answer.append(layout.give(call.tokens, call.requests))
                layout.weaken(self.pool)

            return finish

        job.arrived = arrived
        job.forward = lambda: self.binder.invoke(call, stage.static, ctx)
        before, start = self.device.driver_bytes(), time.perf_counter()
        stage.fill(call.tensors, call.tokens, call.requests, call.foreign)
        program = strategy.capture(job)
        self.counters.seconds += time.perf_counter() - start
        self.counters.captured += 1
        stage.wrote(program.writes)
        stage.updates(call)
        shared = self.shared_memory(call, program.writes, {_torch.address(t) for t in program.uses}, stage.static)
        try:
            shared.check(call.tensors)
            self._compare_handoffs(call, stage, getattr(program, "capture", None))
        except (InputError, UsageError):
            program.close()
            raise
        captured = CapturedBucket(stage, program, kept[0], self.pool, self.lock, self.counters, strategy.name, lease, shared)
        captured.driver_bytes = max(0, self.device.driver_bytes() - before)
        return captured, Lease(answer[0], None) if lease else answer[0]

    def _compare_handoffs(self, call: Call, stage: Stage, capture: BreakableCapture | None) -> None:
        """Compare what breaks handed on with another bucket of the variant. That shows a size that is the bucket's by chance.

        Raises:
            UsageError: one has, so its rows past the valid ones would be cleared, as if they were tokens.
        """
        if capture is None:
            return
        now = [*capture.handoffs()]
        rows, before = self._handed.setdefault((call.key, stage.requests), (stage.tokens, now))
        if rows == stage.tokens or [name for name, _, _ in before] != [name for name, _, _ in now]:
            return
        for (name, shape, dim), (_, other, other_dim) in zip(now, before, strict=True):
            if shape == other and (dim is None) != (other_dim is None):
                chance, beside = (stage.tokens, rows) if dim is not None else (rows, stage.tokens)
                raise UsageError(
                    f"bucket {stage.tokens}, {name} is ambiguous: its shape {list(shape)} has the bucket's size in bucket "
                    f"{chance} by chance, as it is the same in bucket {beside}. Rows past the valid ones would be cleared there. "
                    "Say break_point(token_dim=None), or None for it in a structure"
                )

    def job(self, call: Call, stage: Stage, ctx: Any) -> Job:
        """What a strategy has to know to capture ``call``'s bucket. :meth:`record` adds the forward."""
        also = "" if stage.requests < 0 else f", {stage.requests} requests"
        return Job(
            forward=lambda: None,
            arrived=lambda raw: lambda: None,
            tokens=stage.tokens,
            requests=stage.requests,
            valid=call.tokens,
            ctx=ctx if ctx is not None else state.ctx,
            pool=self.pool,
            stream=self.stream,
            root=self.places(ctx),
            name=f"bucket {stage.tokens}{also}",
            remedy=f"call recapture() on {self.owner}",
            inputs=self._named(stage.static),
            stubs=state.stubs,
            after_segment=self._after_segment,
        )

    @property
    def owner(self) -> str:
        """What has the ``recapture()`` that errors tell the user to call."""
        return getattr(self.fn, "owner", None) or f"the runner of {self.binder.label}"

    def places(self, ctx: Any) -> Places:
        """The names that the function reaches: one walk for all buckets, until something that it decides by has changed.

        A function that has ``places`` of its own is taken at its word.
        """
        own = getattr(self.fn, "places", None)
        if isinstance(own, Places):
            return own
        if self._places is None or self._places.decisions.changed() is not None:
            self._places = Places(self.fn, ctx=ctx)
        return self._places

    @contextmanager
    def filling_tables(self) -> Iterator[None]:
        """Let dicts grow that the function fills while it runs in this block, such as tables by length."""
        decisions = None if self._places is None else self._places.decisions
        same = decisions is not None and decisions.changed() is None
        yield
        if decisions is not None and same:
            decisions.let_grow()

    def _constants(self, call: Call, stage: Stage, padded: Sequence[Tensor | None]) -> FixedShapes | None:
        """What has a fixed shape, if the sizes of the outputs decide which are token-shaped: the inputs without a token or
        request dimension, and the tensors that the function reaches. None if sizes don't decide.
        """
        if not self.outputs.undecided(call.key, stage.tokens, stage.requests):
            return None
        fixed = [t for leaf, t in zip(self.binder.leaves, padded, strict=True) if t is not None and leaf.declared.dim is None]
        return FixedShapes([*fixed, *(t for _, t in reached(self.fn) if isinstance(t, Tensor))])

    def _named(self, tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
        return {leaf.name: t for leaf, t in zip(self.binder.leaves, tensors, strict=True) if t is not None}

    def owns(self, t: Tensor) -> bool:
        """Whether ``t`` is memory of the pool or of an input buffer."""
        address = t.untyped_storage().data_ptr()
        return self.pool.owns(t) or any(b is not None and b.flat.data_ptr() == address for b in self.buffers)


def run_eager(binder: Binder, call: Call) -> Any:
    """The answer to a call that no bucket serves: the plain function, unpadded, on the call's own tensors.

    Tensors of another device go to the runner's, and back where the function writes them.
    """
    device, tensors = binder.device, call.tensors
    if call.foreign:
        with torch.inference_mode(False), torch.no_grad():
            moved_once = {id(t): t.to(device) for t in tensors if t is not None}  # a tensor given twice stays one
            tensors = [None if t is None else moved_once[id(t)] for t in tensors]
    versions = [_version(t) for t in tensors] if call.foreign else []
    with torch.inference_mode(), active_forward(call.ctx if call.ctx is not None else current_forward_ctx()):
        raw = binder.invoke(call, tensors, call.ctx)
        for mine, moved, version in zip(call.tensors, tensors, versions, strict=False):
            if mine is not None and moved is not None and moved is not mine and _version(moved) != version:
                mine.copy_(moved)
    binder.keep(call)
    return owned(raw)


def _version(t: Tensor | None) -> int:
    return -1 if t is None or t.is_inference() else t._version


def may_capture() -> bool:
    """Whether this thread is outside any warm-up, capture and replay. Inside one a lazy bucket can't be captured, so it runs its
    reference once more.
    """
    return not state.pools and state.capture is None and not getattr(_warming, "on", False)


def example_rows(call: Call, binder: Binder, valid: int) -> Call:
    """``call`` with ``valid`` tokens. Its rows are cut or repeated, so that the values are realistic."""
    tensors: list[Tensor | None] = []
    specs = dict(call.specs)
    for leaf, t in zip(binder.leaves, call.tensors, strict=True):
        dim = None if t is None else (leaf.spec or specs[leaf]).dim
        if t is None or dim is None:
            tensors.append(t)
        else:
            tensors.append(_repeated(t, dim, valid + leaf.extra, leaf.declared.pad) if leaf.token else t)
    new = Call(call.values, call.ctx, tensors, call.key, valid, call.requests, call.foreign)
    new.specs = call.specs
    return new


def synthetic(binder: Binder) -> tuple[Sequence[Any], list[Tensor | None]]:
    """Values and tensors for a capture without an example: one padded row of each declared input; optional ones absent.

    Raises:
        CaptureError: an input whose shape or dtype is not known.
    """
    unknown = [leaf.name for leaf in binder.leaves if leaf.spec is None and not leaf.optional]
    if unknown:
        raise CaptureError(
            f"capture() without an example needs shape= and dtype= of every input; {', '.join(map(repr, unknown))} "
            "lacks one. "
            "Give them in segue.Input, or pass an example call of any length"
        )
    tensors: list[Tensor | None] = []
    for leaf in binder.leaves:
        if leaf.optional or leaf.spec is None:
            tensors.append(None)
            continue
        pad = leaf.declared.pad
        value = 0 if pad is None or isinstance(pad, str) else pad
        with torch.inference_mode(False):
            tensors.append(
                torch.full(leaf.spec.sizes(1 + leaf.extra), value, dtype=leaf.spec.dtype, device=binder.device)
            )
    return binder.defaults(), tensors


def _repeated(t: Tensor, dim: int, rows: int, pad: Any) -> Tensor:
    have = t.shape[dim]
    if have >= rows:
        return t.narrow(dim, 0, rows)
    if not have:
        sizes = list(t.shape)
        sizes[dim] = rows
        return t.new_full(sizes, 0 if isinstance(pad, str) or pad is None else pad)
    return t.index_select(dim, torch.arange(rows, device=t.device) % have)


@contextmanager
def _rehearsing(rehearsal: Rehearsal) -> Iterator[None]:
    before, state.rehearsal = state.rehearsal, rehearsal
    try:
        yield
    finally:
        state.rehearsal = before


@contextmanager
def _on_capture_stream(device: Device, pool: Pool, stream: Any) -> Iterator[None]:
    if not may_capture():
        yield
        return
    with one_capture:  # another thread may be recording on the very stream
        _warming.on = True
        try:
            with device.on_capture_stream(pool, stream):
                yield
        finally:
            _warming.on = False
