"""External tensors: names for what a graph reads outside its pool, and a quick check at each replay that it is where it was.

A graph bakes addresses. The capture keeps the memory behind them alive, so no address dangles. But if a parameter is given other
memory (``p.data = ...``, a new ``Parameter``) or a cache is replaced, the graph would silently go on reading the old memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import getitem
from types import MappingProxyType
from typing import Any

from torch import Tensor

from segue import _torch
from segue.capture.allocations import made_from_input
from segue.capture.comparisons import Change
from segue.capture.context_paths import DEEPEST, MOST, ContextMap, DeepContext, Path, getter, show
from segue.capture.context_variables import LiveVariables
from segue.capture.object_graph import Place
from segue.capture.places import Places
from segue.capture.thread_state import state
from segue.errors import CaptureError, ReplayError, StateChangedError

_data_ptr = Tensor.data_ptr


@dataclass(slots=True)
class External:
    """A tensor that segments read or write and that lies outside the pool. The capture keeps its memory alive.

    ``tensor``: a detached alias, which stays on the captured memory. ``seen``: the object that was used, which may be given
    other memory later. ``op`` and ``where``: the first op that used it and its line, in segment number ``segment``, counted from
    0. ``written``: whether an op of a segment writes it. ``parts``: the views that are written.
    """

    tensor: Tensor
    seen: Tensor
    op: str
    where: str
    segment: int = 0
    written: bool = False
    filled: list[tuple[int, int]] = field(default_factory=list)  # bytes that ops have overwritten whole, by addresses
    read_back: bool = False  # something read what this capture had overwritten before
    kept: bool = False  # something read what it had not
    parts: list[Tensor] = field(default_factory=list)

    def fill(self, t: Tensor) -> None:
        """Note that an op overwrites ``t``, a view of this, without reading it."""
        if t.is_contiguous():
            begin, end = t.data_ptr(), t.data_ptr() + t.nbytes
            apart = [(a, b) for a, b in self.filled if b < begin or end < a]
            joined = [span for span in self.filled if span not in apart]
            self.filled = [*apart, (min([begin, *(a for a, _ in joined)]), max([end, *(b for _, b in joined)]))]

    def read(self, t: Tensor) -> None:
        """Note that an op reads ``t``, a view of this."""
        if not self.kept:
            begin = t.data_ptr()
            end = begin + t.nbytes
            self.read_back = t.is_contiguous() and any(a <= begin and end <= b for a, b in self.filled)
            self.kept = not self.read_back

    @property
    def workspace(self) -> bool:
        """Whether the segments overwrite all that they read of it, so that it need only be there, wherever it is held."""
        return self.read_back and not self.kept


@dataclass
class FrozenObject:
    """An argument of a break that is no tensor and that the context doesn't hold. Each replay gives the break this object.

    Where the captured function holds the object by name, somebody keeps it up to date. Elsewhere the forward may have made it, so
    that what is in it is frozen too: ``tensors``, and why that must not be, ``refusal``.
    """

    value: Any
    refusal: str = ""
    tensors: list[External] = field(default_factory=list)


@dataclass
class Baked:
    """What the breaks of one capture have bound and a replay would go on with.

    ``tensors``: arguments outside the pool, by storage. ``context_tensors``: tensors of the live context of which an argument is
    a view, by path. ``objects``: arguments that are frozen, by id. ``slots``: places that decide which function a break's name
    stands for, with what they held at capture and the break in words. They are for a ``bare`` capture: of a function that was
    captured, the code tells. ``nones``: paths of the context at which an argument's None was, with the argument in words.
    ``variables``: of the caller's context, from which arguments are read; None where there is nothing to look for.
    """

    bare: bool = False
    variables: LiveVariables | None = None
    tensors: dict[int, External] = field(default_factory=dict)
    context_tensors: dict[str, tuple[Callable[[Any], Any], Tensor]] = field(default_factory=dict)
    objects: dict[int, FrozenObject] = field(default_factory=dict)
    slots: dict[tuple[int, str], tuple[Place, Any, str]] = field(default_factory=dict)
    nones: dict[Path, str] = field(default_factory=dict)


class Externals:
    """The externals of one capture: where each is held, and the check that it still is.

    Args:
        externals: what segments read or write outside the pool.
        places: those of the function that was captured, found before the capture.
        baked: what breaks have bound. Tensors there count as externals.
        deep: the context of the capture.
        defer_checks: the first segment may run before the rest is checked. The caller knows that this segment was seen to write
            nothing outside the pool, and that nobody reads what the last replay left in the pool.
        remedy: what errors tell the user to do, beside undoing a change.
        own: places of tensors that only the caller uses, by storage.

    What the code decided by (:class:`~segue.capture.decisions.Decisions`) is compared together with the rest.

    ``named`` pairs a name with each external that has one, ``unnamed`` are the others. Where compiled code is reachable from
    the root, nothing could watch its inner operands, so every tensor that the root reaches counts as read.

    ``early``: the caller may launch the first segment after :meth:`check_first`, and call :meth:`check_rest` while that runs and
    before it launches anything else.
    """

    def __init__(
        self,
        externals: list[External],
        places: Places,
        baked: Baked,
        deep: DeepContext,
        defer_checks: bool,
        remedy: str = "capture again",
        own: Mapping[int, Place] = MappingProxyType({}),
    ) -> None:
        _settle_frozen(baked, places)
        known = {_torch.storage_key(e.tensor) for e in externals}
        externals = [*externals, *(e for key, e in baked.tensors.items() if key not in known)]

        def search() -> list[Place | None]:
            return [own.get(_torch.storage_key(e.tensor)) or places.of(e.tensor) for e in externals]

        found = search()
        if None in found:
            places.look_again()
            found = search()
        _refuse_stale(externals, found)
        if places.compiled:
            externals = [*externals, *_inside_compiled_code(externals, places)]
            found = [*found, *(places.of(e.tensor) for e in externals[len(found) :])]
        places.decisions.settle()
        self._decisions, self._remedy = places.decisions, remedy
        contexts = ContextMap(state.ctx, deep)
        named: list[tuple[Place, External]] = []
        self.unnamed: list[External] = []
        self._context: list[tuple[str, Callable[[Any], Any], int, External | None]] = [
            (path, get, t.data_ptr(), None) for path, (get, t) in baked.context_tensors.items()
        ]
        whole = contexts.whole or deep.whole(state.ctx)
        for external, place in zip(externals, found, strict=True):
            key = _torch.storage_key(external.tensor)
            elsewhere = key in own or key in baked.tensors  # where others read it
            own_doing = place is not None and place.key in places.stored_names and place.key not in places.live_names
            if external.workspace and own_doing and not elsewhere:
                # The function has made itself a larger one by now. This capture goes on with its own, which it alone reads. What
                # others put there, as a cache, they read too.
                self.unnamed.append(replace(external, seen=external.tensor))
            elif place is not None:
                named.append((place, external))
            elif paths := contexts.find_memory(external.tensor):
                for path in paths:
                    get = getter(path)
                    self._context.append((show(path), get, get(state.ctx).data_ptr(), external))
            else:
                if not whole and key in baked.tensors:
                    raise _out_of_sight(external)
                self.unnamed.append(external)
        self.named = [(place.name, external) for place, external in named]
        self.early = defer_checks and not places.writes_unseen
        self._first, self._rest = (
            _AddressCheck(
                [(place, e) for place, e in named if (e.segment == 0 or not self.early) is first],
                [e for e in self.unnamed if (e.segment == 0 or not self.early) is first],
                remedy,
            )
            for first in (True, False)
        )
        self._slots = list(baked.slots.values())
        self._nones = [(show(path), getter(path), user) for path, user in baked.nones.items()]

    def check(self) -> None:
        """Check that everything a segment baked is where it was, and what Python decided by as it was.

        Raises:
            StateChangedError: something was re-pointed, resized or freed, and the line that reads it; or a submodule, hook,
                attribute or global is another one. ReplayError: a tensor of the context is another one.
        """
        self.check_first()
        self.check_rest()

    def check_rest(self) -> None:
        """Do what :meth:`check` does beside :meth:`check_first`."""
        self._decisions.check(self._remedy)
        self._rest.check()
        for place, then, user in self._slots:
            if place.get() is not then:
                raise ReplayError(
                    f"{place.name} was replaced since the capture, and {user} would go on with the old one. Put that back, or "
                    f"{self._remedy}."
                )
        for path, get, user in self._nones:
            try:
                now = get(state.ctx)
            except (AttributeError, KeyError, IndexError, TypeError):
                continue
            if now is not None:
                raise ReplayError(
                    f"{path} was None at capture and is a {type(now).__qualname__} now. {user} got that None, and a replay would "
                    f"go on giving it. Read it inside the break, from current_forward_ctx(), or {self._remedy} with what is "
                    "there now."
                )

    @property
    def of_context(self) -> list[tuple[str, External]]:
        """The externals that the context holds, each with its path there."""
        return [(path, external) for path, _, _, external in self._context if external is not None]

    def changed(self) -> Change | None:
        """What Python decided by and is something else now; None if nothing is."""
        return self._decisions.changed()

    def check_first(self) -> None:
        """Do what :meth:`check` does for what the first segment uses, and for the tensors of the live context."""
        self._first.check()
        for path, get, pointer, used in self._context:
            try:
                now = get(state.ctx)
            except (AttributeError, KeyError, IndexError, TypeError):
                now = None
            if _pointer(now) != pointer:
                raise _context_moved(path, used)


class _AddressCheck:
    """Checks that some externals are where they were. Each is found by its place, or else by the object that was used."""

    def __init__(self, named: list[tuple[Place, External]], unnamed: list[External], remedy: str) -> None:
        self._unnamed, self._remedy = unnamed, remedy
        self._items = [(place, external) for place, external in named if place.subscript]
        self._attributes = [(place, external, place.get().data_ptr()) for place, external in named if not place.subscript]
        loose = [external.seen for external in unnamed]
        self._holders = [*(place.holder for place, _ in self._items), *(loose for _ in loose)]
        self._keys = [*(place.key for place, _ in self._items), *range(len(loose))]
        self._pointers = self._pointers_now()

    def check(self) -> None:
        """Raise StateChangedError if something was re-pointed, resized or freed."""
        try:
            there = self._pointers_now() == self._pointers
        except (KeyError, IndexError, TypeError, RuntimeError):  # a place holds nothing, or no tensor, any more
            there = False
        if not there:
            raise self._moved()
        for place, external, pointer in self._attributes:
            if _pointer(place.get()) != pointer:
                raise _repointed(place.name, external, self._remedy)

    def _pointers_now(self) -> list[int]:
        held: Iterable[Any] = map(getitem, self._holders, self._keys)
        return list(map(_data_ptr, held))

    def _moved(self) -> StateChangedError:
        pointers = iter(self._pointers)
        for place, external in self._items:
            if _pointer(place.get()) != next(pointers):
                return _repointed(place.name, external, self._remedy)
        for external, pointer in zip(self._unnamed, pointers, strict=True):
            if _pointer(external.seen) != pointer:
                return _repointed(f"a tensor {tuple(external.tensor.shape)} {external.tensor.dtype}", external, self._remedy)
        raise AssertionError("a pointer differed, and none does")


def _refuse_stale(externals: list[External], places: list[Place | None]) -> None:
    """Raise CaptureError for an external that an earlier run made from its input. What the graph itself writes is state, or a
    workspace, and no such thing."""
    for external, place in zip(externals, places, strict=True):
        if not external.written and (line := made_from_input(external.tensor)) is not None:
            what = place.name if place is not None else f"a tensor {tuple(external.tensor.shape)} {external.tensor.dtype}"
            raise CaptureError(
                f"{what}, used by {external.op} at {external.where}, was made from an input by an earlier run of the forward "
                f"({line}) and kept. The graph would read that call's values for ever. Make it anew in each forward, make it "
                "in a break, or keep only what constants and weights give."
            )


def _out_of_sight(external: External) -> CaptureError:
    return CaptureError(
        f"{external.op} at {external.where} is a tensor {tuple(external.tensor.shape)}, and whether the live context holds it "
        f"can't be told: only {DEEPEST} levels and {MOST} values of a context are looked at, and this one has more. Every replay "
        "would pass this tensor. Read it inside the break, from current_forward_ctx(), or give active_forward() a context that "
        "holds less."
    )


def _pointer(value: Any) -> int | None:
    try:
        return value.data_ptr() if isinstance(value, Tensor) else None
    except RuntimeError:  # it has no memory of its own
        return None


def _repointed(name: str, external: External, remedy: str) -> StateChangedError:
    return StateChangedError(
        f"{name}, used by {external.op} at {external.where}, has other memory than at capture (re-pointed, resized or freed). "
        f"The graph would go on with the old values. Change values in place (copy_), or {remedy}.",
        Change("memory", name, "the memory of the capture", "other memory"),
    )


def _context_moved(path: str, external: External | None) -> ReplayError:
    reader = f"{external.op} at {external.where}" if external is not None else "a break's argument, a view of it,"
    return ReplayError(
        f"{path} is another tensor than at capture, and {reader} has baked the old one's address. Declare it as an input, read "
        "it inside a break, or keep one tensor and copy_ into it."
    )


def _settle_frozen(baked: Baked, places: Places) -> None:
    """See which frozen objects the root holds: those are compared with the rest of what the code decided by. What the others hold
    counts as bound by the break.
    """
    for frozen in baked.objects.values():
        if (frozen.refusal or frozen.tensors) and not places.holds(frozen.value):
            if frozen.refusal:
                raise CaptureError(frozen.refusal)
            for use in frozen.tensors:
                baked.tensors.setdefault(_torch.storage_key(use.tensor), use)


def _inside_compiled_code(externals: list[External], places: Places) -> list[External]:
    seen = {_torch.storage_key(e.tensor) for e in externals}
    tensors = [t for t in places.tensors() if _torch.storage_key(t) not in seen]
    # Which segment uses them isn't known. They count as the second's, to be looked at while the first runs.
    return [External(t.detach(), t, "compiled code", "a line that nothing could watch", segment=1) for t in tensors]
