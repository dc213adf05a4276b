"""Break points: functions that run eagerly between two segments, and plainly everywhere else."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from segue import _source_lines, _torch
from segue.capture.arguments import BoundArguments, of_context
from segue.capture.break_results import BreakResult, fill, strided_tensors
from segue.capture.code_names import mark_break
from segue.capture.externals import Baked
from segue.capture.handoff import Handoff
from segue.capture.modes import Enter, SetVariables, under
from segue.capture.nested import Take, parts_of
from segue.capture.object_graph import Place
from segue.capture.op_watch import OpWatch
from segue.capture.thread_state import state
from segue.capture.views import cut_rows
from segue.errors import CaptureError, UsageError

P = ParamSpec("P")
R = TypeVar("R")


@overload
def break_point(fn: Callable[P, R]) -> Callable[P, R]: ...
@overload
def break_point(
    *,
    trim: Sequence[str] | Mapping[str, int] = (),
    token_dim: Any = 0,
    out: str | None = None,
    capture_stub: Callable[..., Any] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def break_point(
    fn: Callable[P, R] | None = None,
    *,
    trim: Sequence[str] | Mapping[str, int] = (),
    token_dim: Any = 0,
    out: str | None = None,
    capture_stub: Callable[..., Any] | None = None,
) -> Any:
    """Make a function a break: during a capture it ends the segment, runs eagerly with live context, and hands its results on.

    Outside a capture the decorated function is a plain call.

    Args:
        trim: names of arguments that arrive as their valid rows, cut along dimension 0; as a mapping, name to dimension.
        token_dim: the dimension of the result that has one row a token: a value, or one per output (by position, key or
            field); None where there is none. Rows past the valid ones are cleared before the next segment reads them.
        out: name of an argument that the caller allocates and the function fills. It is the result; nothing is copied.
        capture_stub: runs in the function's place, with its arguments, in captures whose answer nobody waits for, and in their
            warm-ups: ``runner.capture()`` and a bare :class:`BreakableCapture`, whose block then computes no answer. For
            functions that are expensive, or need other ranks. It must give what the function gives, but for the values. A
            capture that answers a call runs the function, and so do replays and the reference.

    Raises:
        UsageError: a name that the function doesn't have, or a stub that isn't callable.
    """
    if fn is not None and not callable(fn):
        raise UsageError(f"break_point decorates a function; got a {type(fn).__qualname__}")
    if fn is None:
        options = {"trim": trim, "token_dim": token_dim, "out": out, "capture_stub": capture_stub}
        return lambda f: break_point(f, **options)
    if capture_stub is not None and not callable(capture_stub):
        raise UsageError(f"break_point: capture_stub={capture_stub!r} must be a function of what {_source_lines.of(fn)} takes")
    spec = BreakSpec(fn, trim if isinstance(trim, Mapping) else dict.fromkeys(trim, 0), token_dim, out, capture_stub)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return spec.call(args, kwargs)

    spec.decorated = weakref.ref(wrapper)
    _torch.dynamo_boundary(wrapper, "a segue break point runs eagerly between two graphs")
    mark_break(wrapper)
    return wrapper


def break_here(fn: Callable[..., Any], dst: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``fn(*args, **kwargs)`` as a break whose result is copied into ``dst`` (tensors), and return ``dst``.

    ``fn`` may fill ``dst`` itself and return None. The result may have fewer rows (dimension 0) than ``dst``, whose others are
    zeroed.

    Raises:
        UsageError: ``dst`` holds something else than tensors, or the result has another structure.
        ReplayError: a tensor of the result doesn't fit its destination.
    """
    return BreakSpec(fn, {}, 0, None).call(args, kwargs, into=dst)


class BreakSpec:
    """What is known of a break point before a forward reaches it: the function and its options."""

    def __init__(
        self,
        fn: Callable[..., Any],
        trim: Mapping[str, int],
        token_dim: Any,
        out: str | None,
        capture_stub: Callable[..., Any] | None = None,
    ) -> None:
        self.fn, self.trim, self.token_dim, self.out, self.capture_stub = fn, dict(trim), token_dim, out, capture_stub
        self.label = _source_lines.of(fn)
        self.names = _parameter_names(fn)
        self.decorated: Callable[[], Any] = _ignore_nothing  # gives what replaced the function, while that lives
        self.receiver = self.names[:1] in (["self"], ["cls"])
        self.variables = SetVariables(fn)
        for name in (*self.trim, *((out,) if out else ())):
            if self.names and name not in self.names:
                raise UsageError(f"break_point: {self.label} has no argument {name!r}; it has {', '.join(self.names)}")

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], into: Any = None) -> Any:
        """Call the function: as a break while a segment is recorded, trimmed and cleared in the reference, plainly elsewhere.

        ``into``: the destination of the result, if it isn't that of ``out``. It is returned then.
        """
        if state.phase == "segment" and state.capture is not None:
            if not state.capture.breaks_inside:
                return state.capture.run_break(self, args, kwargs, into)
            return self._recorded(args, kwargs, into, state.capture.name)
        if state.reference and not state.inside_break:
            return self._reference(args, kwargs, into)
        return self._plain(args, kwargs, into)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any], into: Any) -> Any:
        result = self.fn(*args, **kwargs)
        destination = self.destination(args, kwargs, into)
        if into is not None and result is not None and result is not into:
            fill(into, result, self.label)
        return result if destination is None else destination

    def _recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any], into: Any, name: str) -> Any:
        """The function's result while it is recorded into the segment.

        Raises:
            CaptureError: no graph can hold what it does.
        """
        where = f"{name}: break {self.label} called at {_source_lines.caller()}"
        try:
            return self._plain(args, kwargs, into)
        except CaptureError as e:
            raise CaptureError(f"{where} can't be held by a full graph. {e}") from e
        except BaseException as e:
            e.add_note(f"{where}, which a full graph would have to hold")
            raise

    def destination(self, args: tuple[Any, ...], kwargs: dict[str, Any], into: Any) -> Any:
        """The memory that the caller gave for the result; None if it gave none."""
        return into if self.out is None else self._argument(self.out, args, kwargs)

    def trimmed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, those under ``trim`` cut to the valid rows of the running forward."""
        if not self.trim or state.valid is None:
            return args, kwargs
        cut = [cut_rows(v, state.valid, self.trim[k]) if k in self.trim else v for k, v in zip(self.names, args, strict=False)]
        return (*cut, *args[len(cut) :]), {
            k: cut_rows(v, state.valid, self.trim[k]) if k in self.trim else v for k, v in kwargs.items()
        }

    def named(self, names: Iterable[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments of these names that the call gives."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        return [given[name] for name in names if name in given]

    def note_names(self, args: tuple[Any, ...], tensors: Sequence[Tensor], baked: Baked, line: str) -> None:
        """Note where a forward that calls this break finds it, as a global or a method, and the globals among its arguments.

        ``tensors``: those that lie outside the pool.
        """
        decorated, user = self.decorated(), f"break {self.label} at {line}"
        for held, name, value in _source_lines.caller_globals():
            if (value is decorated and value is not None) or any(value is t for t in tensors):
                baked.slots[id(held), name] = Place(held, name, name, None), value, user
        if decorated is None:
            return
        owner = args[0] if self.receiver and args else None
        cls = owner if isinstance(owner, type) else type(owner)
        own = getattr(owner, "__dict__", {})
        for name in [name for base in cls.__mro__ for name, value in vars(base).items() if value is decorated]:
            label = f"{cls.__qualname__}.{name}"
            if getattr(cls, name) is decorated and name not in own:
                baked.slots[id(cls), name] = Place(cls, name, label, None), decorated, user
                if isinstance(own, dict) and own:
                    baked.slots[id(own), name] = Place(own, name, label, None), None, user

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        at = self.names.index(name)
        if at >= len(args) or args[at] is None:
            raise UsageError(f"break {self.label}: out={name!r} names an argument that the call doesn't give")
        return args[at]

    def _reference(self, args: tuple[Any, ...], kwargs: dict[str, Any], into: Any) -> Any:
        self.variables.note()
        rehearsal = state.rehearsal
        if rehearsal is not None and rehearsal.under_way:
            return rehearsal.stand_in([*args, *kwargs.values()], self.destination(args, kwargs, into))
        if state.breaks_inside:
            result = self._plain(args, kwargs, into)
        else:
            result = Break(self, args, kwargs, into, watch=None, where=f"break {self.label} in the reference").first_run()
        if rehearsal is not None:
            rehearsal.note(result, self.token_dim)
        return result


class Break:
    """One break of a program: its function, its bound arguments and its hand-offs.

    Args:
        spec: the break point. ``args``, ``kwargs``, ``into``: of its call at capture, held until :meth:`first_run`.
        watch: of the capture, and ``baked``: what its breaks have bound. None in the reference, which has no replays.
        enters: the modes that the forward has entered around the call, which each replay enters again.
        where: what errors call this break.
    """

    def __init__(
        self,
        spec: BreakSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        into: Any,
        *,
        watch: OpWatch | None,
        baked: Baked | None = None,
        where: str,
        enters: Sequence[Enter] = (),
    ) -> None:
        self.spec, self.where, self._op_watch, self._fn, self._enters = spec, where, watch, spec.fn, enters
        self._first = (args, kwargs, into)
        self._bound: BoundArguments | None = None
        if watch is not None and baked is not None:
            self._fn = of_context(spec.fn, watch.deep, where)
            self._bound = BoundArguments(
                spec.names, args, kwargs, watch=watch, baked=baked, trim=spec.trim, receiver=spec.receiver,
                user=f"break {spec.label}", line=self.called_at, into=into, where=where,
            )  # fmt: skip
            if baked.bare:
                tensors = strided_tensors([*args, *kwargs.values()])
                spec.note_names(args, [t for t in tensors if not watch.pool.owns(t)], baked, self.called_at)
        self._result = BreakResult(spec.token_dim, spec.out, watch=watch, where=where)

    @property
    def bound(self) -> BoundArguments:
        """The arguments of a captured break."""
        assert self._bound is not None
        return self._bound

    def runs(self) -> tuple[Callable[[], Any], Take | None, Take]:
        """What a replay calls: the function on the live values; what takes its result, or None where the result was None at
        capture; and what refuses any other result there. ``state`` says which rows are valid."""
        return (self.bound.caller(under(self._enters, self._fn)), *self._result.takers())

    def first_run(self) -> Any:
        """Run the function or its stub at capture, or in the reference, and return what the forward goes on with.

        Raises:
            CaptureError: a replay couldn't repeat the break: it changed a container, or returned what can't be handed on.
            UsageError: its options don't fit what it returned.
        """
        args, kwargs, into = self._first
        del self._first
        stub = self.spec.capture_stub if state.stubs else None
        fn = stub or self._fn
        grad = torch.is_grad_enabled() and not state.grad  # only where the forward itself has turned gradients on
        state.inside_break, state.asked_rows = True, False
        try:
            with torch.no_grad():
                cut_args, cut_kwargs = self.spec.trimmed(args, kwargs)
                filled = _containers([*args, *kwargs.values()])
                with nullcontext() if state.made is None else state.made.off(), torch.set_grad_enabled(grad):
                    result, elsewhere = self._ordered(lambda: fn(*cut_args, **cut_kwargs))
                if self._op_watch is not None and _containers([*args, *kwargs.values()]) != filled:
                    raise CaptureError(
                        f"{self.where}: the break changed what a list, dict or dataclass argument holds, and the segments after "
                        "it would go on with what it held at capture. Return the new values."
                    )
                if self._op_watch is not None and (elsewhere or stub):  # a stub doesn't show which streams the function uses
                    self._fn = _in_order(self._op_watch.pool.device.ordered, self._fn)
                destination = self.spec.destination(args, kwargs, into)
                if destination is not None:
                    return self._result.settle_into(destination, result)
                trimmed = self.spec.named(self.spec.trim, args, kwargs) if self.spec.trim else None
                return self._result.settle(result, [*args, *kwargs.values()], trimmed)
        finally:
            state.inside_break = False

    def _ordered(self, fn: Callable[[], Any]) -> tuple[Any, bool]:
        return (fn(), False) if self._op_watch is None else self._op_watch.pool.device.ordered(fn)

    @property
    def handoffs(self) -> Sequence[Handoff]:
        """The tensors of the break's result that later segments read, each once, in the order of the result."""
        return self._result.handoffs

    @property
    def called_at(self) -> str:
        """The line of the forward that called the break: ``file.py:12 in forward``."""
        return self.where.rpartition(" called at ")[2]


def _in_order(ordered: Callable[[Callable[[], Any]], tuple[Any, bool]], fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, a break's function that used other streams at capture, followed by a wait for the work that it leaves there."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return ordered(lambda: fn(*args, **kwargs))[0]

    return run


def _ignore_nothing() -> None:
    return None


def _containers(arguments: list[Any]) -> list[list[tuple[Any, int]]]:
    """What each argument that is a container holds, by identity."""
    return [[(key, id(child)) for key, child in parts_of(a) or ()] for a in arguments]


def _parameter_names(fn: Callable[..., Any]) -> list[str]:
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional] + [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
