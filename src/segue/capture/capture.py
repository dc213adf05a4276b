"""The capture itself: a transaction that ends with a whole program, or leaves everything as it was."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import CodeType, TracebackType
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor

from segue import _source_lines, _torch, devices
from segue.capture.break_memory import BreakMemory
from segue.capture.break_points import Break, BreakSpec
from segue.capture.context_variables import LiveVariables
from segue.capture.externals import Baked, External, Externals
from segue.capture.isolation import no_garbage_collection, one_capture, uninterrupted
from segue.capture.leftovers import Leftovers
from segue.capture.modes import CallerModes, Modes, entered_by_forward, modes_now
from segue.capture.op_watch import OpWatch
from segue.capture.places import Places, tensors_held
from segue.capture.program import Program, Step, row_count
from segue.capture.segment_recorder import SegmentRecorder
from segue.capture.thread_state import capture_frame, state
from segue.capture.wrappers import with_collectives_done
from segue.devices import Device, Pool
from segue.errors import CaptureError, ReplayError, SegueError, UsageError, no_copy, traced

log = logging.getLogger("segue")


class BreakableCapture:
    """Capture what runs inside ``with`` as CUDA graphs, broken where a :func:`~segue.break_point` runs eagerly.

    The capture is a real first forward: each segment is launched as soon as it is recorded, so breaks see real values and
    what the block computes is the answer, unless a break has a ``capture_stub``. Afterwards :meth:`replay` runs it again on the
    memory it was recorded on. What it leaves in graph memory holds until anything else that shares the pool replays: copy it,
    or give it a pool of its own.

    Args:
        rows: the bucket: an output of a break with this size along its token dimension is token-shaped, and its rows past
            the valid ones are zeroed at every replay. None: dimension 0 of every hand-off.
        pool: a pool of ``device``, as :func:`~segue.new_pool` makes, or a handle of torch's, ``torch.cuda.graph_pool_handle()``
            or ``CUDAGraph.pool()``; by default the one that all captures on it share. Replays of graphs that others record under
            such a handle are for the user to order.
        stream: the ``torch.cuda.Stream`` to capture on; by default one that all captures share and nobody else has.
        device: ``"emulator"`` or what ``torch.device`` takes; by default CUDA where there is one.
        valid_rows: how many rows are real in the forward being captured; by default all.
        name: what errors call this capture.
        root: the function being captured, or its :class:`~segue.capture.places.Places`. What segments read is searched
            for in what it reaches, so that errors can name it. A replay then notices that a parameter was given other memory, or
            that its code decided by a module, hook, attribute or global which is another one now.
        defer_checks: a caller may set this if it copies the results out before anything else replays. The device may then run the
            first segment while the host still checks that what the others read is where it was. If that check
            raises an error, the first segment's work in the pool is all that has been done.
        remedy: what an error about something that has changed tells the user to do, beside undoing that.
        stubs: whether breaks that have a ``capture_stub`` run it. False if somebody waits for the answer.
        after_segment: is called after each segment's end during the capture, before the segment is launched, while nothing is
            recorded: a barrier of ranks that must capture together, say. If it raises an error, the capture has failed.
        own: what holds tensors outside the pool that only the caller uses, such as input buffers and a scratch cache. The first
            segment may write them before the checks are done.
        breaks_inside: break points end no segment. Their functions are recorded like everything else, and get all rows.
    """

    def __init__(
        self,
        rows: int | None = None,
        pool: Pool | tuple[int, int] | None = None,
        stream: Any = None,
        device: str | torch.device | Device | None = None,
        *,
        valid_rows: int | None = None,
        name: str | None = None,
        root: Any = None,
        defer_checks: bool = False,
        remedy: str = "capture again",
        own: Any = None,
        breaks_inside: bool = False,
        stubs: bool = True,
        after_segment: Callable[[], object] | None = None,
    ) -> None:
        rows = None if rows is None else row_count(rows, "BreakableCapture: rows")
        valid_rows = None if valid_rows is None else row_count(valid_rows, "BreakableCapture: valid_rows")
        if rows is not None and valid_rows is not None and valid_rows > rows:
            raise UsageError(f"BreakableCapture: valid_rows={valid_rows} is more than its {rows} rows")
        self.device: Device = devices.resolve(devices.device_of(pool) if device is None else device)
        self.pool: Pool = devices.pool_of(self.device, pool)
        self.stream: Any = devices.stream_of(self.device, stream)
        self.rows, self.valid_rows, self.breaks_inside = rows, valid_rows, breaks_inside
        self.name = name or ("capture" if rows is None else f"capture of {rows} rows")
        self._kind = self.device.torch_device.type
        self._began: Modes  # the caller's, when the capture began
        self._status = "new"
        self._steps: list[Step] = []
        self._root, self._defer_checks, self._remedy = root, defer_checks, remedy
        self._stubs = stubs
        self._own = {} if own is None else tensors_held(own, "inputs" if isinstance(own, Mapping) else type(own).__qualname__)
        self._places: Places | None = None  # made when the capture begins, as the forward may change what it decides by
        self._op_watch = OpWatch(self.pool, self.name, self._own)
        self._recorder = SegmentRecorder(self.device, self.pool, self._op_watch, self._steps, self.name, after_segment)
        self._leftovers: Leftovers | None = None
        self._entered: CodeType | None = None  # whose `with` this is
        self._break_memory, self._baked = BreakMemory(), Baked(root is None)
        self._at_end: list[Callable[[], object]] = []
        self._program: Program | None = None
        self._counts: tuple[int, int] | None = None  # graphs and breaks, once the capture has ended
        self._error: BaseException | None = None  # the first one of this capture, while it lasts
        self._failure = ""
        self._scope = ExitStack()
        self._mode_before: Any = None  # the dispatch mode around the capture
        self._unwinding: _torch.PassingMode | None = None
        self._retire: Callable[[], object] = lambda: None

    @staticmethod
    def current() -> BreakableCapture | None:
        """The capture whose ``with`` this thread is in, or None."""
        return cast("BreakableCapture | None", state.capture)

    @property
    def segments(self) -> list[Callable[[], None]]:
        """The flat program: zero-argument callables, a graph first and last, and between two graphs a break or a :meth:`cut`."""
        return [] if self._program is None else self._program.callables

    @property
    def num_segments(self) -> int:
        """Graphs and breaks together."""
        return self.graphs + self.breaks

    @property
    def graphs(self) -> int:
        """Segments: one more than there are breaks and cuts."""
        return self._counts[0] if self._counts else len(self._recorder.segments)

    @property
    def breaks(self) -> int:
        """Break points met during the capture."""
        return self._counts[1] if self._counts else len(self._steps) - len(self._recorder.segments)

    @property
    def acted(self) -> bool:
        """Whether something has run that others can see, whatever was launched."""
        return self._recorder.acted

    @property
    def steps(self) -> Sequence[Step]:
        """The captured segments and breaks in the order of a replay; a cut leaves two segments side by side.

        Empty after :meth:`close`, or when the capture failed.
        """
        return tuple(self._steps)

    def handoffs(self) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
        """Name, shape and token dimension of each tensor that a break hands on; the dimension is None where its rows aren't
        tokens."""
        for step in self._steps:
            if isinstance(step, Break):
                for handoff in step.handoffs:
                    yield f"break {step.spec.label}: {handoff.path}", tuple(handoff.buffer.shape), handoff.dim

    @property
    def externals_check(self) -> Externals:
        """The check that each replay makes: the tensors that the segments read must be where they were.

        Raises:
            ReplayError: the capture failed, was closed, or is not complete.
        """
        if self._program is None:
            raise self._refusal()
        return self._program.externals

    @property
    def externals(self) -> list[External]:
        """Tensors outside the pool that segments read or write."""
        return list(self._op_watch.externals.values())

    @property
    def unnamed_externals(self) -> Sequence[External]:
        """The :attr:`externals`, and tensors that breaks were given, which the root doesn't reach by a name, so that each replay
        checks the addresses of the objects used.
        """
        return () if self._program is None else tuple(self._program.externals.unnamed)

    def __enter__(self) -> BreakableCapture:
        if state.capture is not None:
            raise UsageError(
                f"{self.name} was begun inside {state.capture.name}: captures can't be nested. Let the outer one record the "
                "inner forward, or replay the inner graph in a break."
            )
        if state.pools:
            raise UsageError(f"{self.name} was begun in a break of a replay; capture ahead of it, or outside it.")
        if self._status != "new":
            raise UsageError(f"{self.name} is {self._status}; a capture records once. Make a new BreakableCapture.")
        self._places = self._root if isinstance(self._root, Places) else Places(self._root)
        self._entered = _source_lines.caller_code()
        self._mode_before = _torch.current_mode()
        with ExitStack() as scope:
            scope.enter_context(one_capture)
            scope.enter_context(no_garbage_collection())
            scope.enter_context(self.pool.turn())
            scope.enter_context(self.device.on_capture_stream(self.pool, self.stream))
            scope.enter_context(capture_frame(self, self.rows, self.valid_rows, self.pool, self._stubs))
            self._began = modes_now(self._kind)
            self._baked.variables = LiveVariables(self._began.variables)
            token = object()
            self.pool.attach(token)
            self._retire = weakref.finalize(self, self.pool.retire, token, self._recorder.segments)
            self._status = "recording"
            try:
                self._op_watch.begin()
                if self._root is not None and not self._places.leaves_nothing:
                    self._leftovers = Leftovers(self._places.root, state.ctx, self._places.name)
                self._recorder.begin()
            except BaseException as e:
                self._recorder.abandon()
                self._fail(e)
                raise
            self._scope = scope.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        first = self._error or self._op_watch.error or error
        try:
            if first is None:
                self._recorder.end(launch=False)
                first = self._op_watch.error
            if first is None:
                externals = self._prove()
                # A segment's first launch decides how it is launched from then on, so it comes before the program is made.
                self._recorder.launch()
                if self._leftovers is not None:
                    self._leftovers.check(self.name)
                    assert self._places is not None
                    self._places.leaves_nothing = self._places.once
                modes = CallerModes(self._kind, self._began, self._op_watch.read_modes)
                self._program = Program(self._steps, externals, modes, self.pool, self.rows, self.name)
                while self._at_end:  # none is kept, since they know the caller's objects
                    self._at_end.pop(0)()
        except BaseException as e:
            first = e
        left, self._leftovers = self._leftovers, None
        try:
            with uninterrupted():
                if first is not None and left is not None:
                    left.let_go(self.pool.owns)
                self._recorder.abandon()
                if self._unwinding is not None:
                    self._unwinding.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                    self._unwinding = None
                self._mode_before = None  # a mode holds tensors, and so would whoever keeps this capture
                self._scope.close()
        except BaseException as e:
            first = first or e
        named = None if first is None else self._recorder.clearer_error(first)
        if named is not None:
            named.__cause__, first = first, named
        if first is None:
            self._status = "captured"
            if not self.breaks and self._root is None:
                log.warning("segue: %s met no break point: all of it replays at the captured shape", self.name)
            return
        self._fail(first)
        self._retire()
        if first is error:
            return
        if error is not None and first.__cause__ is not error:
            first.add_note(f"{self.name}: after that, {type(error).__name__}: {error}")
        try:
            raise first
        finally:
            del first, error  # the traceback holds this frame, and the frames of the forward with all their tensors

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise no_copy(self.name, "Make a new capture of the copy.")

    def at_end(self, fn: Callable[[], object]) -> None:
        """Have ``fn()`` called when the whole forward has run, while nothing else can replay in the pool.

        If ``fn`` raises an error, the capture has failed. Call this inside the ``with`` only.
        """
        self._at_end.append(fn)

    def add_eager(self, fn: Callable[[], Any]) -> Any:
        """End the segment, run ``fn()`` now and at every replay, and go on recording. Returns its (handed-off) result.

        Raises:
            UsageError: this capture isn't recording a segment.
        """
        if state.capture is not self or state.phase != "segment":
            raise UsageError(f"{self.name}: add_eager() belongs inside its `with`, outside breaks")
        return self.run_break(BreakSpec(fn, {}, 0, None), (), {}, None)

    def cut(self) -> None:
        """End the segment and go on in the next, with nothing in between. The device starts a long graph sooner in parts.

        Raises:
            UsageError: this capture isn't recording a segment.
        """
        if state.capture is not self or state.phase != "segment":
            raise UsageError(f"{self.name}: cut() belongs inside its `with`, outside breaks")
        try:
            self._recorder.end(launch=False)
            self._recorder.begin()
        except BaseException as e:
            self._leave_forward(e)
            raise

    def run_break(self, spec: BreakSpec, args: tuple[Any, ...], kwargs: dict[str, Any], into: Any) -> Any:
        """End the segment, run a break on real values, and begin the next segment. Returns what the forward goes on with.

        Raises:
            SegueError: a segment can't hold what it recorded, or a replay couldn't repeat the break. The break's own errors pass
            through.
        """
        where = f"{self.name}, after segment {self.graphs}: break {spec.label} called at {_source_lines.caller()}"
        try:
            self._op_watch.refuse_mode_above(where)
            # A collective that the segment began must end in it, and one from outside can't be waited for in a graph.
            args, kwargs = _waited(args, kwargs, self.pool.owns)
            self._recorder.end()
            args, kwargs = _waited(args, kwargs, lambda t: True)
            state.phase = "break"
            asks_grad = torch.is_grad_enabled() and not state.grad
            here = modes_now(self._kind)
            enters, plain = entered_by_forward(self._began, here, asks_grad, spec.variables, where)
            self._break_memory.begin()
            step = Break(spec, args, kwargs, into, watch=self._op_watch, baked=self._baked, where=where, enters=enters)
            step.bound.plain.update(plain)
            if self._leftovers is not None:
                self._leftovers.before_break(code := getattr(spec.fn, "__code__", None), where)
            result = step.first_run()
            if self._leftovers is not None:
                self._leftovers.after_break(code, self._entered, where)
            self._steps.append(step)
            self._recorder.begin()
        except BaseException as e:
            if not isinstance(e, SegueError):
                e.add_note(where)
            self._leave_forward(e)
            raise
        return result

    def replay(self, valid_rows: int | None = None) -> None:
        """Run the captured forward again on the current stream, of whose rows ``valid_rows`` are real (None: all).

        Raises:
            UsageError: ``valid_rows`` is no number of rows of this capture, the pool is in use by a forward around this call, or
                torch.jit.trace is under way.
            ReplayError: the capture failed, was closed, or is not complete; a tensor that it reads was re-pointed; or a break's
                result changed.
        """
        if self._program is None or self._status != "captured":
            raise self._refusal()
        if _torch.is_tracing():
            raise traced(self.name)
        self._program.run(valid_rows)

    def replay_in_turn(self, valid_rows: int | None = None) -> None:
        """Do what :meth:`replay` does, for a caller that holds the pool's turn and has entered the capture's grad mode.

        ``valid_rows`` is not checked. It must be a whole number from 0 to ``rows``, or None.

        Raises:
            as :meth:`replay`.
        """
        if self._program is None or self._status != "captured":
            raise self._refusal()
        self._program.run_in_turn(valid_rows)

    def check_replay(self) -> None:
        """Raise what a replay would raise before it runs anything. Modes are compared with those of the caller.

        Raises:
            ReplayError: what the segments read is another tensor, or what Python decided by is something else.
        """
        if self._program is None or self._status != "captured":
            raise self._refusal()
        self._program.check()

    def close(self) -> None:
        """Forbid replay at once. The memory goes back when no live capture shares the pool. May be called twice.

        Raises:
            UsageError: it is called inside the capture's own ``with``.
        """
        if self._status == "recording":
            raise UsageError(f"{self.name}: close() inside its own `with`")
        if self._status != "failed":
            self._status = "closed"
        if self._program is not None:
            self._program.closed = True
        self._program = None
        self._retire()
        self._steps.clear()

    def _fail(self, error: BaseException) -> None:
        """Remember what happened as text: the exception itself would keep the forward's tensors alive."""
        self._status, self._failure = "failed", f"{type(error).__name__}: {error}"
        self._program = None
        self._error = self._op_watch.error = None
        self._forget()
        self._counts = self.graphs, self.breaks
        self._steps.clear()
        self._recorder.discard()

    def _refusal(self) -> ReplayError:
        why = {
            "new": "has recorded nothing yet",
            "recording": "is still being recorded",
            "closed": "was closed",
            "failed": f"failed: {self._failure}",
        }[self._status]
        return ReplayError(f"{self.name} can't be replayed: it {why}.")

    def _prove(self) -> Externals:
        """See, before the last segments are launched, that nothing in them belongs to another capture."""
        self._op_watch.claim()
        self._counts = self.graphs, self.breaks
        assert self._places is not None
        early, deep = self._defer_checks and self._op_watch.harmless, self._op_watch.deep
        externals = Externals(self.externals, self._places, self._baked, deep, early, self._remedy, self._own)
        used = [*self.externals, *self._baked.tensors.values()]
        if (made := self._break_memory.made(used, self.device.torch_device)) is not None:
            raise CaptureError(
                f"{self.name}: {made.op} at {made.where} uses a tensor {tuple(made.tensor.shape)} that a break made during the "
                "capture and didn't hand on. At a replay the break makes another, and this one would be used for ever. Return it "
                "from the break, or put it on the live context for other breaks to read; if it is made once and kept, as a cache "
                "is, run the forward once before the capture."
            )
        self._forget()
        return externals

    def _forget(self) -> None:
        """Let go of what only a capture that is being made has to know."""
        self._break_memory, self._baked = BreakMemory(), Baked()
        self._op_watch.forget()

    def _leave_forward(self, error: BaseException) -> None:
        """Abandon the capture while the forward is still running, on its way out by ``error``.

        Guards of the forward's, such as ``torch.inference_mode``, were entered while a dispatch mode was active, and put back
        torch's dispatch keys of that time. Without any mode then, every later op of this thread would fail, so one stays
        until the end.
        """
        self._error = self._error or error
        self._recorder.abandon()
        state.phase = None
        if self._unwinding is None and _torch.current_mode() is self._mode_before:
            self._unwinding = _torch.PassingMode()
            self._unwinding.__enter__()  # type: ignore[no-untyped-call]


_torch.dynamo_boundary(BreakableCapture.replay, "a segue capture replays graphs of its own")


def _waited(args: tuple[Any, ...], kwargs: dict[str, Any], which: Callable[[Tensor], bool]) -> tuple[Any, dict[str, Any]]:
    return tuple(with_collectives_done(a, which) for a in args), {k: with_collectives_done(v, which) for k, v in kwargs.items()}
