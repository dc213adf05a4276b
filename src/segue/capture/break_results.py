"""What a break hands on: its result, settled in hand-offs at capture, and taken from it again at every replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.context_paths import ContextMap, equal, getter, is_plain, show
from segue.capture.handoff import Allocate, Handoff, first_result, token_dimension, zeros_on
from segue.capture.nested import Branch, StructureChanged, Take, leaves, take_apart
from segue.capture.op_watch import OpWatch
from segue.capture.thread_state import state
from segue.capture.wrappers import refuse_wrapper
from segue.errors import CaptureError, ReplayError, UsageError

# From a leaf's value, path and token dimension: what takes it at a replay, and what the forward goes on with now.
OnLeaf = Callable[[Any, str, int | None], tuple[Take, Any]]
Opaque = Callable[[Any], bool] | None


class BreakResult:
    """The result of one break.

    Args:
        token_dim: what the break point declares of it. ``out``: the argument that is it; None where the function returns it.
        watch: of the capture; None in the reference, which has no replays.
        where: what errors call the break.
    """

    def __init__(self, token_dim: Any, out: str | None, *, watch: OpWatch | None, where: str) -> None:
        self._token_dim, self._out, self._op_watch, self._where = token_dim, out, watch, where
        self._take: Take = _ignore
        self._single: Handoff | None = None  # the whole result is one tensor
        self._nothing = False  # the whole result is None
        self._settled: list[Handoff] = []  # of what the function returned
        self._clears: list[Handoff] = []  # of memory that the caller gave, which the function may fill itself

    @property
    def handoffs(self) -> Sequence[Handoff]:
        """The tensors of the result that later segments read, each once, in the order of the result."""
        return tuple(self._clears or self._settled)

    def takers(self) -> tuple[Take | None, Take]:
        """What takes the result of a replay, or None where it was None at capture; and what refuses any other result there."""
        if self._clears or isinstance(self._take, Branch):
            return self._accept, self._accept
        if self._single is not None:
            assert self._op_watch is not None
            zeros = zeros_on(self._op_watch.pool.device, self._single.buffer.dtype)
            return self._single.taker(zeros), self._accept
        return None if self._nothing else self._take, self._take

    def _accept(self, result: Any) -> None:
        if self._clears and (result is None or self._out is not None):
            for handoff in self._clears:
                handoff.clear(state.valid)
            return
        try:
            self._take(result)
        except StructureChanged as e:
            raise ReplayError(
                f"{self._where}: {e.path} is {e.found}, but at capture it was {e.expected}. A break must return the same "
                "structure at every replay."
            ) from None

    def settle(self, result: Any, arguments: list[Any], trimmed: list[Any] | None) -> Any:
        """Settle what the function returned at capture or in the reference, and return what the forward goes on with.

        Args:
            arguments: of the call. ``trimmed``: those that arrive as their valid rows; None if the break declares none.

        Raises:
            CaptureError: it holds what can't be handed on. UsageError: ``token_dim`` doesn't fit it.
        """
        cuts_rows, memory = trimmed is not None or state.asked_rows, _memory(arguments)
        cut = memory if state.asked_rows else _memory(trimmed or [])
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
            refuse_wrapper(value, f"{self._where}: {path}")
            if self._op_watch is not None and value.device != self._op_watch.pool.device.torch_device:
                raise CaptureError(
                    f"{self._where}: {path} is on {value.device}, and segments run on {self._op_watch.pool.device.name}. Move it "
                    "there inside the break, or keep it on the live context if only breaks use it."
                )
            if id(value) in seen:
                return _check_same_tensor(seen[id(value)][1], path, self._where), seen[id(value)][0]
            owned = value.layout is torch.strided and ours(value)
            kept, handoff = first_result(
                value, token_dim, rows=state.rows, valid=state.valid, cuts_rows=cuts_rows,
                argument_memory=(owned or _lies_in(value, memory)) and not contexts.find_memory(value), own_memory=owned,
                cut_memory=(owned and state.asked_rows) or _lies_in(value, cut), allocate=allocate, path=path, where=self._where,
            )  # fmt: skip
            self._weaken(handoff)
            if copies is not None and kept is not value:
                copies.note(kept, value, f"{self._where}: {path}", owned)
            handoffs.append(handoff)
            last: list[Any] = []
            seen[id(value)] = kept, last
            return handoff.accept if times[id(value)] == 1 else _take_and_note(handoff.accept, last), kept

        self._take, settled = self._walk(result, on_leaf, lambda v: contexts.find(v) is not None)
        if isinstance(result, Tensor):
            self._single = handoffs[0]
        self._nothing = result is None
        return settled

    def settle_into(self, destination: Any, result: Any) -> Any:
        """Settle the memory that the caller gave for the result, and return it.

        Raises:
            CaptureError: ``out`` names it, and the function returned another tensor. UsageError: it holds something else than
            tensors.
        """
        if self._out is not None and isinstance(result, Tensor) and not _lies_in(result, _memory([destination])):
            raise CaptureError(
                f"{self._where}: it declares out={self._out!r} and returned another tensor, which nothing would read. "
                f"Fill {self._out!r}, or leave out= away."
            )

        def on_leaf(t: Any, path: str, token_dim: int | None) -> tuple[Take, Any]:
            if not isinstance(t, Tensor):
                raise UsageError(f"{self._where}: the destination has a {type(t).__qualname__} at {path}, not a tensor")
            dim = token_dimension(t, token_dim)
            if dim is not None and state.rows is not None and t.shape[dim] != state.rows:
                dim = None
            self._clears.append(Handoff(t, dim, path, self._where))
            return self._clears[-1].accept, t

        self._take, _ = self._walk(destination, on_leaf, None)
        self._accept(result)
        for handoff in self._clears:
            self._weaken(handoff)
        return destination

    def _weaken(self, handoff: Handoff) -> None:
        if self._op_watch is not None and self._op_watch.pool.owns(handoff.buffer):
            handoff.weaken()

    def _walk(self, value: Any, on_leaf: OnLeaf, opaque: Opaque) -> tuple[Take, Any]:
        try:
            return _settled(value, self._token_dim, on_leaf, opaque)
        except ValueError as e:
            raise UsageError(f"{self._where}: {e}") from None

    def _check_unchanged(self, place: str, value: Any, contexts: ContextMap) -> Take:
        """A check, for every replay, that a value which isn't a tensor is what it was at capture."""
        path = contexts.find(value)
        if path is None and not is_plain(value):
            raise CaptureError(
                f"{self._where}: {place} is a {type(value).__qualname__}, which the forward would go on using as it was at "
                "capture. Return tensors, plain values, or objects that the live context holds."
            )
        get = getter(path) if path is not None else None
        what, where = repr(value) if path is None else show(path), self._where
        kept = value if get is None else None  # this check must not keep the capture's context alive, nor the break

        def check(now: Any) -> None:
            then = kept if get is None else get(state.ctx)
            if not (now is then or (is_plain(now) and type(now) is type(then) and equal(now, then))):
                raise ReplayError(
                    f"{where}: {place} is {now!r} and was {what} at capture. The segments after it were recorded for "
                    "that value; return it as a tensor, or make the break cover what depends on it."
                )

        return check


def fill(into: Any, result: Any, label: str) -> None:
    """Copy ``result`` into the tensors of ``into``, which may have more rows. ``label``: of the break.

    Raises:
        UsageError: ``into`` holds something else than tensors, or ``result`` has another structure.
        ReplayError: a tensor doesn't fit its destination.
    """

    def on_leaf(t: Any, path: str, _: int | None) -> tuple[Take, Any]:
        if not isinstance(t, Tensor):
            raise UsageError(f"break {label}: the destination has a {type(t).__qualname__} at {path}, not a tensor")
        return Handoff(t, token_dimension(t, 0), path, f"break {label}").accept, t

    with torch.no_grad():
        try:
            _settled(into, None, on_leaf, None)[0](result)
        except StructureChanged as e:
            raise UsageError(f"break {label}: {e.path} is {e.found}; its destination is {e.expected}") from None


def _settled(value: Any, token_dims: Any, on_leaf: OnLeaf, opaque: Opaque) -> tuple[Take, Any]:
    """What takes a structure at a replay, and what the forward goes on with now, from the same two of each leaf."""
    tree = take_apart(value, token_dims, "result", opaque)
    done = [on_leaf(leaf, path, dim) for path, leaf, dim in tree.leaves]
    return tree.takes(take for take, _ in done), tree.build(new for _, new in done)


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


def _made_by_forward(t: Tensor) -> bool:
    return state.made is not None and state.made.has(t)


def _ignore(_: Any) -> None:
    return None


def _allocate_outside_pool(arguments: list[Any], result: Any) -> Allocate:
    device = next((t.device for t in strided_tensors([result, *arguments])), torch.device("cpu"))

    def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # as in a capture: code compiled for inference tensors would compile anew for others
            t = torch.empty_strided(size, stride, dtype=dtype, device=device)
        if state.made is not None:
            state.made.comes_from_input(t, "a break's result")
        return t

    return allocate


def _memory(values: list[Any]) -> set[int]:
    return {_torch.storage_key(t) for t in strided_tensors(values)}


def _lies_in(t: Tensor, memory: set[int]) -> bool:
    return t.layout is torch.strided and _torch.storage_key(t) in memory


def strided_tensors(values: list[Any]) -> list[Tensor]:
    """The tensors in nested values that have memory of their own, dense or with gaps."""
    return [v for v in leaves(values) if isinstance(v, Tensor) and v.layout is torch.strided]
