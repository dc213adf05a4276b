"""Auxiliary streams: ops of one segment beside each other where their operands allow it, on every device alike.

A forward is written one op after the other, and recorded so, its graph is a chain: small kernels wait for each other though
keys and values need nothing of the queries. Here each op gets a stream by what it reads and writes. A matrix product that
doesn't need the op before it starts on an idle stream, what follows stays with its operands, and streams wait for each
other exactly where memory passes between them. TensorRT's engines use auxiliary streams in the same way.

Two things make that safe with an allocator that reuses a block at once, in the order of the stream it was taken on. What one
stream allocated and another used is held until stream 0 has waited for all of them, and before the first one uses the block
again it waits for stream 0. What can't be seen through, an op that isn't torch's own or that draws random numbers, runs alone.
An alias that torch doesn't know of, as a slice that went through DLPack within the segment, is taken for other memory.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from segue import _torch

COUNT = 2  # auxiliary streams that a device has: a layer's keys and values beside its queries
_MARKS = 16  # per stream; an older one is hardly ever the nearest
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "_scaled_mm", "_grouped_mm"}
_OWN = {"aten", "prims"}
_RE_STORES = {"set_", "resize_", "resize_as_", "_resize_output_"}  # they let go of a block that others may be using

Token = TypeVar("Token")


@dataclass(frozen=True, slots=True)
class Kind:
    """What there is to know of an op ahead of its calls.

    ``func``: held, so that its id stays its own. ``view``: it launches nothing, and runs on no stream. ``alone``: it may use
    what no operand shows. ``writes``: the arguments that it writes, by position and by name.
    """

    func: Any
    view: bool
    product: bool
    alone: bool
    writes: tuple[tuple[int, ...], tuple[str, ...]]


def kind_of(func: Any) -> Kind:
    """The kind of an ``OpOverload``, learned once."""
    return _kinds.get(id(func)) or _learn(func)


class _Mark(NamedTuple, Generic[Token]):
    at: int  # ops of its stream that come before it
    token: Token
    after: tuple[int, ...]  # what its stream had waited for by then, for each stream


class AuxStreams(Generic[Token]):
    """Which stream each op of one segment runs on, and what it waits for. Stream 0 is the capture stream.

    ``joined``: whether stream 0 has waited for all others.

    Args:
        count: streams beside stream 0.
        mark: marks the point that a stream has reached.
        wait: has what a stream is given next wait for such a point.
    """

    def __init__(self, count: int, mark: Callable[[int], Token], wait: Callable[[int, Token], None]) -> None:
        self._mark, self._wait, self.joined = mark, wait, True
        self._all, self._others = range(count + 1), range(1, count + 1)
        self._tail = [0] * (count + 1)  # ops given to each stream
        # Of each stream, how many ops of every other it is after. An auxiliary stream begins by waiting for stream 0.
        self._after = [[0] * (count + 1), *([-1] + [0] * count for _ in range(count))]
        self._floor = [0] * (count + 1)  # ops of stream 0 that come before whatever an auxiliary stream is given
        self._marks: list[deque[_Mark[Token]]] = [deque(maxlen=_MARKS) for _ in self._all]
        # Memory that this segment's ops made goes by its first address, other memory by the name that it has outside.
        self._writer: dict[int, tuple[int, int]] = {}  # the stream that wrote it last, and number of the op on that stream
        self._readers: list[dict[int, int]] = [{} for _ in self._all]  # of each stream, the op that used it last
        self._home: dict[int, int] = {}  # the stream that allocated it; the block stays with that, whoever owns it later
        self._outside = _Outside()
        self._held: dict[int, tuple[int, Any]] = {}  # storages with their homes, by identity, until all streams are joined
        # Of the op that was entered last: its stream, its operands, and whether it did more than give a result.
        self._now: tuple[int, Collection[int], bool] = 0, (), True
        self._set_mark(0)

    def enter(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The stream for this op, no view, which waits for all that it has to."""
        operands: dict[int, Tensor] = {}
        known = self._collect(args, operands)
        if kwargs:
            known = self._collect(kwargs.values(), operands) and known
        if kind.alone or not known or self._outside.met:
            return self._alone(operands)
        written = self._written(kind, args, kwargs) if kind.writes[0] else ()
        # While all are joined, stream 0 has to wait for nothing.
        stream = self._placed(kind.product, operands, written) if kind.product or not self.joined else 0
        self._tail[stream] = now = self._tail[stream] + 1
        if stream:
            self.joined = False
        home, read = self._home, self._readers[stream]
        for name, t in operands.items():
            read[name] = now
            if home.get(name, stream) != stream:
                self._hold(name, t)
        for name in written:
            self._writer[name] = stream, now
        self._now = stream, operands, bool(written)
        return stream

    def leave(self, result: Any) -> None:
        """What the op that was entered last gave."""
        stream, operands, acted = self._now
        new = self._note(result, stream, operands)
        # A composite op that had nothing to copy counts for nothing. But an auxiliary stream has waited, and must be joined.
        if not (new or acted or stream):
            self._tail[0] -= 1

    def end(self) -> None:
        """Stream 0 waits for all others, and nothing is held any more."""
        self._join()
        self._held.clear()
        self._outside = _Outside()
        self._now = 0, (), True

    def unseen(self) -> None:
        """Something ran on stream 0 that no op told of, while all were joined: it comes after all that was before, and before
        all that follows."""
        self._tail[0] += 1
        self._floor = [self._tail[0]] * len(self._tail)

    def _alone(self, operands: dict[int, Tensor]) -> int:
        self._join()
        self.unseen()
        self._outside.met = False
        self._now = 0, operands, True
        return 0

    def _note(self, result: Any, stream: int, operands: Collection[int]) -> bool:
        """Memory that is new in a result. Returns whether there is any, or no telling."""
        if isinstance(result, Tensor):
            address = _torch.address(result)
            if not address or address in operands:
                return not address and result.numel() > 0  # a sparse one
            if address not in self._home and self._outside.known(result):
                return False
            self._writer[address] = stream, self._tail[stream]
            self._home[address] = stream
            return True
        if isinstance(result, list | tuple):
            return any([self._note(r, stream, operands) for r in result])
        return True

    def _join(self) -> None:
        for s in self._others:
            self._follow(0, s, self._tail[s])

    def _placed(self, product: bool, operands: Collection[int], written: Collection[int]) -> int:
        """The stream for an op, after all that it needs."""
        needs: dict[int, int] = {}  # for each stream the last of its ops that this one must come after
        for name in operands:
            made = self._writer.get(name)
            if made is not None and needs.get(made[0], 0) < made[1]:
                needs[made[0]] = made[1]
        for name in written:
            for s in self._all:
                if (at := self._readers[s].get(name, 0)) > needs.get(s, 0):
                    needs[s] = at
        stream = self._chosen(product, needs)
        for other, at in needs.items():
            if other != stream:
                self._follow(stream, other, at)
        if stream:
            self._follow(stream, 0, self._floor[stream])
        return stream

    def _chosen(self, product: bool, needs: dict[int, int]) -> int:
        after, stream = self._after, 0
        beside = [s for s, at in needs.items() if s and after[0][s] < at]
        if len(beside) == 1:
            mine = after[beside[0]]
            if len(needs) == 1 or all(mine[s] >= at for s, at in needs.items() if s != beside[0]):
                stream = beside[0]
        if product:
            if self._tail[stream] > needs.get(stream, 0):
                return next((s for s in self._others if s != stream and after[0][s] >= self._tail[s]), stream)
            self._set_mark(stream)  # for its siblings, which need what it needs, but not this product
        return stream

    def _follow(self, stream: int, other: int, at: int) -> None:
        """``stream`` goes on after op number ``at`` of ``other``."""
        mine = self._after[stream]
        if mine[other] >= at:
            return
        mark = next((m for m in self._marks[other] if m.at >= at), None) or self._set_mark(other)
        self._wait(stream, mark.token)
        for s in self._all:
            mine[s] = max(mine[s], mark.after[s])
        mine[other] = max(mine[other], mark.at)
        if not stream and all(mine[s] >= self._tail[s] for s in self._others):
            self._let_go()

    def _set_mark(self, stream: int) -> _Mark[Token]:
        marks, at = self._marks[stream], self._tail[stream]
        after = tuple(self._after[stream])
        if not marks or marks[-1].at != at or marks[-1].after != after:  # it may have waited since, and run nothing
            marks.append(_Mark(at, self._mark(stream), after))
        return marks[-1]

    def _hold(self, name: int, t: Tensor) -> None:
        """The storage, for a tensor may be given another (``t.data = ...``)."""
        self._held[_torch.storage_key(t)] = self._home[name], t.untyped_storage()

    def _let_go(self) -> None:
        """Of what was held, now that whatever stream 0 is given next is after every use of it."""
        self.joined = True
        for home, _ in self._held.values():
            self._floor[home] = self._tail[0] + 1
        self._held.clear()

    def _written(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collection[int]:
        found: dict[int, Tensor] = {}
        self._collect(_torch.written(kind.writes, args, kwargs), found)
        return found

    def _collect(self, values: Iterable[Any], into: dict[int, Tensor]) -> bool:
        """The tensors among arguments, by the names of their memory. False if the memory of one isn't known."""
        known, home = True, self._home
        for v in values:
            if isinstance(v, Tensor):
                try:
                    address = v.untyped_storage().data_ptr()
                except RuntimeError:  # a sparse one
                    address = 0
                if address:
                    into[address if address in home else self._outside.name(v)] = v
                elif v.layout is not torch.strided or v.numel():
                    known = False
            elif isinstance(v, list | tuple):
                known = self._collect(v, into) and known
        return known


class _Outside:
    """Names for memory that was made elsewhere. It is held, and what overlaps has one name.

    ``met``: memory with two names turned out to be one, so what is known of either doesn't count any more.
    """

    def __init__(self) -> None:
        self.met = False
        self._names: dict[int, int] = {}  # by storage
        self._storages: list[Any] = []
        self._spans: list[tuple[int, int, int]] = []  # start, end and name, sorted, apart from each other

    def known(self, t: Tensor) -> bool:
        """Whether ``t``'s storage has a name."""
        return _torch.storage_key(t) in self._names

    def name(self, t: Tensor) -> int:
        """The name of ``t``'s memory."""
        key = _torch.storage_key(t)
        found = self._names.get(key)
        if found is None:
            self._storages.append(t.untyped_storage())
            found = self._names[key] = self._placed(*_torch.storage_span(t))
        return found

    def _placed(self, start: int, nbytes: int) -> int:
        end = start + nbytes
        last = first = bisect.bisect_left(self._spans, (end,))
        while first and self._spans[first - 1][1] > start:
            first -= 1
        over = self._spans[first:last]
        name = over[0][2] if over else start
        if len(over) > 1:
            self.met = True
            merged = {n for _, _, n in over}
            self._names.update((key, name) for key, n in self._names.items() if n in merged)
        self._spans[first:last] = [(min([start, *(s for s, _, _ in over)]), max([end, *(e for _, e, _ in over)]), name)]
        return name


_kinds: dict[int, Kind] = {}


def _learn(func: Any) -> Kind:
    name = _torch.op_name(func) if isinstance(func, torch._ops.OpOverload) else "::"
    namespace, _, op = name.partition("::")
    op = op.partition(".")[0]
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    writes = _torch.written_arguments(func)
    aliases = bool(returns) and all(r.alias_info is not None for r in returns) and not writes[0]
    # A composite op that may give a view may as well copy (reshape, contiguous).
    view = aliases and namespace in _OWN and not _torch.has_kernel(name, "CompositeImplicitAutograd")
    draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())  # from a generator, in the order of the calls
    # An out= that is too small is given another block, and compiled code passes blocks that nobody saw it take.
    fills = any(a.kwarg_only and a.name in writes[1] for a in getattr(getattr(func, "_schema", None), "arguments", ()))
    alone = namespace not in _OWN or op in _RE_STORES or draws or fills
    kind = _kinds[id(func)] = Kind(func, view, op in _PRODUCTS, alone, writes)
    return kind
