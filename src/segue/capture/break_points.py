"""Break points: functions that run eagerly between two segments, and plainly everywhere else."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from segue import _source_lines, _torch
from segue.capture.arguments import BoundArguments, of_context
from segue.capture.code_names import mark_break
from segue.capture.context_paths import ContextMap, getter, is_plain, show
from segue.capture.externals import Baked
from segue.capture.handoff import Allocate, Handoff, first_result, token_dimension, zeros_on
from segue.capture.modes import Enter, SetVariables, under
from segue.capture.nested import Branch, StructureChanged, Take, leaves, parts_of, take_apart
from segue.capture.object_graph import Place
from segue.capture.op_watch import OpWatch
from segue.capture.thread_state import state
from segue.capture.views import cut_rows
from segue.capture.wrappers import refuse_wrapper
from segue.errors import CaptureError, ReplayError, UsageError

# From a leaf's value, path and token dimension: what takes it at a replay, and what the forward goes on with now.
OnLeaf = Callable[[Any, str, int | None], tuple[Take, Any]]
Opaque = Callable[[Any], bool] | None

P = ParamSpec("P")
R = TypeVar("R")


@overload
def break_point(fn: Callable[P, R]) -> Callable[P, R]: ...
@overload
def break_point(
    *, trim: Sequence[str] | Mapping[str, int] = (), token_dim: Any = 0, out: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def break_point(
    fn: Callable[P, R] | None = None,
    *,
    trim: Sequence[str] | Mapping[str, int] = (),
    token_dim: Any = 0,
    out: str | None = None,
) -> Any:
    """Make a function a break: during a capture it ends the segment, runs eagerly with live context, and hands its results on.

    Outside a capture the decorated function is a plain call.

    Args:
        trim: names of arguments that arrive as their valid rows, cut along dimension 0; as a mapping, name to dimension.
        token_dim: the dimension of the result that has one row a token: a value, or one per output (by position, key or
            field); None where there is none. Rows past the valid ones are cleared before the next segment reads them.
        out: name of an argument that the caller allocates and the function fills. It is the result; nothing is copied.

    Raises:
        UsageError: a name that the function doesn't have.
    """
    if fn is not None and not callable(fn):
        raise UsageError(f"break_point decorates a function; got a {type(fn).__qualname__}")
    if fn is None:
        return lambda f: break_point(f, trim=trim, token_dim=token_dim, out=out)  # type: ignore[call-overload]
    spec = BreakSpec(fn, trim if isinstance(trim, Mapping) else dict.fromkeys(trim, 0), token_dim, out)

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

    def __init__(self, fn: Callable[..., Any], trim: Mapping[str, int], token_dim: Any, out: str | None) -> None:
        self.fn, self.trim, self.token_dim, self.out = fn, dict(trim), token_dim, out
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
            _fill(into, result, self.label)
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

    def note_names(self, args: tuple[Any, ...], baked: Baked, line: str) -> None:
        """Note where a forward that calls this break finds it: as a global, or as a method."""
        decorated, user = self.decorated(), f"break {self.label} at {line}"
        if decorated is None:
            return
        for held, name, value in _source_lines.caller_globals():
            if value is decorated:
                baked.slots[id(held), name] = Place(held, name, name, None), decorated, user
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
                spec.note_names(args, baked, self.called_at)
        self._take: Take = _ignore
        self._single: Handoff | None = None  # the whole result is one tensor
        self._nothing = False  # the whole result is None
        self._settled: list[Handoff] = []  # of what the function returned
        self._clears: list[Handoff] = []  # of memory that the caller gave, which the function may fill itself

    @property
    def bound(self) -> BoundArguments:
        """The arguments of a captured break."""
        assert self._bound is not None
        return self._bound

    def runs(self) -> tuple[Callable[[], Any], Take | None, Take]:
        """What a replay calls: the function on the live values; what takes its result, or None where the result was None at
        capture; and what refuses any other result there. ``state`` says which rows are valid."""
        call = self.bound.caller(under(self._enters, self._fn))
        if self._clears or isinstance(self._take, Branch):
            return call, self._accept, self._accept
        if self._single is not None:
            assert self._op_watch is not None
            zeros = zeros_on(self._op_watch.pool.device, self._single.buffer.dtype)
            return call, self._single.taker(zeros), self._accept
        return call, None if self._nothing else self._take, self._take

    def first_run(self) -> Any:
        """Run the function at capture, or in the reference, and return what the forward goes on with.

        Raises:
            CaptureError: a replay couldn't repeat the break: it changed a container, or returned what can't be handed on.
            UsageError: its options don't fit what it returned.
        """
        args, kwargs, into = self._first
        del self._first
        grad = torch.is_grad_enabled() and not state.grad  # only where the forward itself has turned gradients on
        state.inside_break, state.asked_rows = True, False
        try:
            with torch.no_grad():
                cut_args, cut_kwargs = self.spec.trimmed(args, kwargs)
                filled = _containers([*args, *kwargs.values()])
                with nullcontext() if state.made is None else state.made.off(), torch.set_grad_enabled(grad):
                    result, elsewhere = self._ordered(lambda: self._fn(*cut_args, **cut_kwargs))
                if self._op_watch is not None and _containers([*args, *kwargs.values()]) != filled:
                    raise CaptureError(
                        f"{self.where}: the break changed what a list, dict or dataclass argument holds, and the segments after "
                        "it would go on with what it held at capture. Return the new values."
                    )
                if elsewhere:
                    assert self._op_watch is not None
                    self._fn = _in_order(self._op_watch.pool.device.ordered, self._fn)
                destination = self.spec.destination(args, kwargs, into)
                if destination is None:
                    return self._settle(result, args, kwargs)
                if self.spec.out is not None and isinstance(result, Tensor) and not _lies_in(result, _memory([destination])):
                    raise CaptureError(
                        f"{self.where}: it declares out={self.spec.out!r} and returned another tensor, which nothing would read. "
                        f"Fill {self.spec.out!r}, or leave out= away."
                    )
                self._settle_into(destination, result)
                return destination
        finally:
            state.inside_break = False

    def _ordered(self, fn: Callable[[], Any]) -> tuple[Any, bool]:
        return (fn(), False) if self._op_watch is None else self._op_watch.pool.device.ordered(fn)

    def _accept(self, result: Any) -> None:
        if self._clears and (result is None or self.spec.out is not None):
            for handoff in self._clears:
                handoff.clear(state.valid)
            return
        try:
            self._take(result)
        except StructureChanged as e:
            raise ReplayError(
                f"{self.where}: {e.path} is {e.found}, but at capture it was {e.expected}. A break must return the same "
                "structure at every replay."
            ) from None

    def _settle(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments, cuts_rows = [*args, *kwargs.values()], bool(self.spec.trim) or state.asked_rows
        memory = _memory(arguments)
        cut = memory if state.asked_rows else _memory(self.spec.named(self.spec.trim, args, kwargs))
        ours = _made_by_forward if self._op_watch is None else self._op_watch.pool.owns
        allocate: Allocate = _allocate_outside_pool(arguments, result) if self._op_watch is None else self._op_watch.allocate
        notes = self._op_watch or state.made
        copies = None if notes is None else notes.copies
        contexts = ContextMap(state.ctx, None if notes is None else notes.deep)
        seen: dict[int, tuple[Tensor, list[Any]]] = {}
        handoffs = self._settled
        times = Counter(id(v) for v in leaves(result))

        def on_leaf(value: Any, path: str, token_dim: int | None) -> tuple[Take, Any]:
            if not isinstance(value, Tensor):
                return self._check_unchanged(path, value, contexts), value
            refuse_wrapper(value, f"{self.where}: {path}")
            if self._op_watch is not None and value.device != self._op_watch.pool.device.torch_device:
                raise CaptureError(
                    f"{self.where}: {path} is on {value.device}, and segments run on {self._op_watch.pool.device.name}. Move it "
                    "there inside the break, or keep it on the live context if only breaks use it."
                )
            if id(value) in seen:
                return _check_same_tensor(seen[id(value)][1], path, self.where), seen[id(value)][0]
            owned = value.layout is torch.strided and ours(value)
            kept, handoff = first_result(
                value, token_dim, rows=state.rows, valid=state.valid, cuts_rows=cuts_rows,
                argument_memory=(owned or _lies_in(value, memory)) and not contexts.find_memory(value), own_memory=owned,
                cut_memory=(owned and state.asked_rows) or _lies_in(value, cut), allocate=allocate, path=path, where=self.where,
            )  # fmt: skip
            self._weaken(handoff)
            if copies is not None and kept is not value:
                copies.note(kept, value, f"{self.where}: {path}", owned)
            handoffs.append(handoff)
            last: list[Any] = []
            seen[id(value)] = kept, last
            return handoff.accept if times[id(value)] == 1 else _take_and_note(handoff.accept, last), kept

        self._take, settled = self._walk(result, on_leaf, lambda v: contexts.find(v) is not None)
        if isinstance(result, Tensor):
            self._single = handoffs[0]
        self._nothing = result is None
        return settled

    def _settle_into(self, destination: Any, result: Any) -> None:
        def on_leaf(t: Any, path: str, token_dim: int | None) -> tuple[Take, Any]:
            if not isinstance(t, Tensor):
                raise UsageError(f"{self.where}: the destination has a {type(t).__qualname__} at {path}, not a tensor")
            dim = token_dimension(t, token_dim)
            if dim is not None and state.rows is not None and t.shape[dim] != state.rows:
                dim = None
            self._clears.append(Handoff(t, dim, path, self.where))
            return self._clears[-1].accept, t

        self._take, _ = self._walk(destination, on_leaf, None)
        self._accept(result)
        for handoff in self._clears:
            self._weaken(handoff)

    def _weaken(self, handoff: Handoff) -> None:
        if self._op_watch is not None and self._op_watch.pool.owns(handoff.buffer):
            handoff.weaken()

    def _walk(self, value: Any, on_leaf: OnLeaf, opaque: Opaque) -> tuple[Take, Any]:
        try:
            return _settled(value, self.spec.token_dim, on_leaf, opaque)
        except ValueError as e:
            raise UsageError(f"{self.where}: {e}") from None

    def _check_unchanged(self, place: str, value: Any, contexts: ContextMap) -> Take:
        """A check, for every replay, that a value which isn't a tensor is what it was at capture."""
        path = contexts.find(value)
        if path is None and not is_plain(value):
            raise CaptureError(
                f"{self.where}: {place} is a {type(value).__qualname__}, which the forward would go on using as it was at "
                "capture. Return tensors, plain values, or objects that the live context holds."
            )
        get = getter(path) if path is not None else None
        what, where = repr(value) if path is None else show(path), self.where
        kept = value if get is None else None  # this check must not keep the capture's context alive, nor the break

        def check(now: Any) -> None:
            then = kept if get is None else get(state.ctx)
            if not (now is then or (is_plain(now) and type(now) is type(then) and _equal(now, then))):
                raise ReplayError(
                    f"{where}: {place} is {now!r} and was {what} at capture. The segments after it were recorded for "
                    "that value; return it as a tensor, or make the break cover what depends on it."
                )

        return check

    @property
    def handoffs(self) -> Sequence[Handoff]:
        """The tensors of the break's result that later segments read, each once, in the order of the result."""
        return tuple(self._clears or self._settled)

    @property
    def called_at(self) -> str:
        """The line of the forward that called the break: ``file.py:12 in forward``."""
        return self.where.rpartition(" called at ")[2]


def _settled(value: Any, token_dims: Any, on_leaf: OnLeaf, opaque: Opaque) -> tuple[Take, Any]:
    """What takes a structure at a replay, and what the forward goes on with now, from the same two of each leaf."""
    tree = take_apart(value, token_dims, "result", opaque)
    done = [on_leaf(leaf, path, dim) for path, leaf, dim in tree.leaves]
    return tree.takes(take for take, _ in done), tree.build(new for _, new in done)


def _in_order(ordered: Callable[[Callable[[], Any]], tuple[Any, bool]], fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, a break's function that used other streams at capture, followed by a wait for the work that it leaves there."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return ordered(lambda: fn(*args, **kwargs))[0]

    return run


def _take_and_note(take: Take, last: list[Any]) -> Take:
    """``take``, for a tensor that is at several places of the result. It leaves the tensor in ``last``."""

    def noted(t: Any) -> None:
        last[:] = [t]
        take(t)

    return noted


def _check_same_tensor(last: list[Any], path: str, where: str) -> Take:
    """What takes such a tensor at a later place: it checks that the tensor of the first place is there again."""

    def same(t: Any) -> None:
        first = last.pop() if last else t
        if t is not first and not _reads_same(t, first):
            raise ReplayError(
                f"{where}: {path} and an earlier place of the result were one tensor at capture, and are two now. The segments "
                "after it read one memory for both. Return two tensors at capture too (clone())."
            )
        last.append(first)

    return same


def _reads_same(a: Any, b: Any) -> bool:
    """Whether two tensors read the same elements of the same memory. A tensor passed twice is cut to its valid rows twice, which
    makes two objects of it."""
    return isinstance(a, Tensor) and isinstance(b, Tensor) and _elements_read(a) == _elements_read(b)


def _elements_read(t: Tensor) -> Any:
    if t.layout is not torch.strided:
        return id(t)
    kind = t.dtype, t.device, t.shape
    return (*kind, t.data_ptr(), t.stride(), t.is_conj(), t.is_neg()) if t.numel() else kind


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b or (a != a and b != b))  # NaN counts as equal to NaN


def _ignore_nothing() -> None:
    return None


def _made_by_forward(t: Tensor) -> bool:
    return state.made is not None and state.made.has(t)


def _ignore(_: Any) -> None:
    return None


def _fill(into: Any, result: Any, label: str) -> None:
    def on_leaf(t: Any, path: str, _: int | None) -> tuple[Take, Any]:
        if not isinstance(t, Tensor):
            raise UsageError(f"break {label}: the destination has a {type(t).__qualname__} at {path}, not a tensor")
        return Handoff(t, token_dimension(t, 0), path, f"break {label}").accept, t

    with torch.no_grad():
        try:
            _settled(into, None, on_leaf, None)[0](result)
        except StructureChanged as e:
            raise UsageError(f"break {label}: {e.path} is {e.found}; its destination is {e.expected}") from None


def _allocate_outside_pool(arguments: list[Any], result: Any) -> Allocate:
    device = next((t.device for t in _tensors([result, *arguments])), torch.device("cpu"))

    def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # as in a capture: code compiled for inference tensors would compile anew for others
            t = torch.empty_strided(size, stride, dtype=dtype, device=device)
        if state.made is not None:
            state.made.comes_from_input(t, "a break's result")
        return t

    return allocate


def _memory(values: list[Any]) -> set[int]:
    return {_torch.storage_key(t) for t in _tensors(values)}


def _lies_in(t: Tensor, memory: set[int]) -> bool:
    return t.layout is torch.strided and _torch.storage_key(t) in memory


def _containers(arguments: list[Any]) -> list[list[tuple[Any, int]]]:
    """What each argument that is a container holds, by identity."""
    return [[(key, id(child)) for key, child in parts_of(a) or ()] for a in arguments]


def _tensors(values: list[Any]) -> list[Tensor]:
    return [v for v in leaves(values) if isinstance(v, Tensor) and v.layout is torch.strided]


def _parameter_names(fn: Callable[..., Any]) -> list[str]:
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional] + [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
