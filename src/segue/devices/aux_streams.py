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
_LISTS = (list, tuple)
_PLAIN = {int, float, bool, type(None), torch.dtype}  # arguments that hold no tensor
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


class _Block:
    """Memory that ops of this segment use.

    ``start``, ``end``: which addresses are known to be in it; of a block of this segment's the first alone. ``home``: the
    stream that allocated it; it stays with that, whoever owns it later. None for memory that was made elsewhere. ``by``,
    ``at``: the stream that wrote it last, and the number of the op on that stream. ``read``: of each stream, the op that used
    it last.
    """

    __slots__ = ("at", "by", "end", "home", "read", "start")

    def __init__(self, start: int, end: int, home: int | None, by: int, at: int, streams: int) -> None:
        self.start, self.end, self.home, self.by, self.at = start, end, home, by, at
        self.read = [0] * streams


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
        # This segment's own, by the addresses of tensors in them. What was at an address last is what is there.
        self._blocks: dict[int, _Block] = {}
        self._outside = _Outside(count + 1)
        self._held: dict[_Block, Any] = {}  # their storages, until all streams are joined
        # Of the op that was entered last: its stream, its operands, and whether it did more than give a result.
        self._now: tuple[int, Collection[_Block], bool] = 0, (), True
        self._set_mark(0)

    def enter(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The stream for this op, no view, which waits for all that it has to."""
        operands: dict[_Block, Tensor] = {}
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
        for block, t in operands.items():
            block.read[stream] = now
            if block.home != stream and block.home is not None:
                self._hold(block, t)
        for block in written:
            block.by, block.at = stream, now
        self._now = stream, operands, bool(written)
        return stream

    def leave(self, result: Any) -> None:
        """What the op that was entered last gave."""
        stream, operands, acted = self._now
        new = self._note(result, stream, operands)
        # A composite op that had nothing to copy counts for nothing. But an auxiliary stream has waited, and must be joined.
        if not (new or acted or stream):
            self._tail[0] -= 1

    def viewed(self, args: tuple[Any, ...], result: Any) -> None:
        """A view was made, which runs on no stream."""
        if not args or not isinstance(args[0], Tensor):
            return
        block = self._blocks.get(args[0].data_ptr())
        if block is not None:
            for r in (result,) if isinstance(result, Tensor) else result:
                if address := r.data_ptr():
                    self._blocks[address] = block

    def end(self) -> None:
        """Stream 0 waits for all others, and nothing is held any more."""
        self._join()
        self._held.clear()
        self._outside = _Outside(len(self._all))
        self._now = 0, (), True

    def _alone(self, operands: Collection[_Block]) -> int:
        """On stream 0, after all that was before, and before all that follows."""
        self._join()
        self._tail[0] += 1
        self._floor = [self._tail[0]] * len(self._tail)
        self._outside.met = False
        self._now = 0, operands, True
        return 0

    def _note(self, result: Any, stream: int, operands: Collection[_Block]) -> bool:
        """Memory that is new in a result. Returns whether there is any, or no telling."""
        if isinstance(result, Tensor):
            try:
                address = result.data_ptr()
            except RuntimeError:  # a sparse one
                return True
            if not address:
                return result.numel() > 0
            offset = result.storage_offset()
            start = address - int(offset) * result.itemsize if offset else address
            for block in operands:
                if block.start <= start < block.end:
                    if block.home is not None:
                        self._blocks[address] = block
                    return False
            block = _Block(start, start + 1, stream, stream, self._tail[stream], len(self._all))
            self._blocks[start] = self._blocks[address] = block
            return True
        if isinstance(result, _LISTS):
            return any([self._note(r, stream, operands) for r in result])
        return True

    def _join(self) -> None:
        for s in self._others:
            self._follow(0, s, self._tail[s])

    def _placed(self, product: bool, operands: Iterable[_Block], written: Iterable[_Block]) -> int:
        """The stream for an op, after all that it needs."""
        needs = [0] * len(self._all)  # for each stream the last of its ops that this one must come after
        for block in operands:
            if needs[block.by] < block.at:
                needs[block.by] = block.at
        for block in written:
            for s, at in enumerate(block.read):
                if needs[s] < at:
                    needs[s] = at
        stream = self._chosen(product, needs)
        for other, at in enumerate(needs):
            if other != stream and at:
                self._follow(stream, other, at)
        if stream:
            self._follow(stream, 0, self._floor[stream])
        return stream

    def _chosen(self, product: bool, needs: list[int]) -> int:
        reached, tail = self._after[0], self._tail
        stream, beside = 0, 0
        for s in self._others:
            if reached[s] < needs[s]:
                stream, beside = s, beside + 1
        if beside:
            mine = self._after[stream]
            for s, at in enumerate(needs):
                if at and s != stream and mine[s] < at:
                    stream = 0
                    break
        if product:
            if tail[stream] > needs[stream]:
                for s in self._others:
                    if s != stream and reached[s] >= tail[s]:
                        return s
                return stream
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

    def _hold(self, block: _Block, t: Tensor) -> None:
        """Its storage, for a tensor may be given another (``t.data = ...``)."""
        if block not in self._held:
            self._held[block] = t.untyped_storage()

    def _let_go(self) -> None:
        """Of what was held, now that whatever stream 0 is given next is after every use of it."""
        self.joined = True
        for block in self._held:
            if block.home is not None:
                self._floor[block.home] = self._tail[0] + 1
        self._held.clear()

    def _written(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collection[_Block]:
        found: dict[_Block, Tensor] = {}
        self._collect(_torch.written(kind.writes, args, kwargs), found)
        return found

    def _collect(self, values: Iterable[Any], into: dict[_Block, Tensor]) -> bool:
        """The tensors among arguments, by their memory. False if the memory of one isn't known."""
        known, blocks = True, self._blocks
        for v in values:
            kind = type(v)
            if kind in _PLAIN:
                continue
            if kind is Tensor or isinstance(v, Tensor):
                try:
                    block = blocks.get(v.data_ptr()) or self._find(v)
                except RuntimeError:  # a sparse one
                    block = None
                if block is not None:
                    into[block] = v
                elif v.layout is not torch.strided or v.numel():
                    known = False
            elif isinstance(v, _LISTS):
                known = self._collect(v, into) and known
        return known

    def _find(self, t: Tensor) -> _Block | None:
        """The block of a tensor that isn't known by its address: it came from elsewhere, or is a view that nobody saw made."""
        block = self._outside.get(t)
        if block is None and (start := t.untyped_storage().data_ptr()):
            block = self._blocks.get(start) or self._outside.add(t)
        return block


class _Outside:
    """Memory that was made elsewhere. It is held, and what overlaps is one block.

    ``met``: two blocks turned out to be one, so what is known of either doesn't count any more.
    """

    def __init__(self, streams: int) -> None:
        self.met = False
        self._streams = streams
        self._by_tensor: dict[int, tuple[int, _Block, Tensor]] = {}  # with its address: it may be given other memory
        self._by_storage: dict[int, tuple[_Block, Any]] = {}
        self._sorted: list[_Block] = []  # by address, apart from each other
        self._starts: list[int] = []

    def get(self, t: Tensor) -> _Block | None:
        """The block of a tensor that was added; quick."""
        found = self._by_tensor.get(id(t))
        return found[1] if found is not None and found[0] == t.data_ptr() else None

    def add(self, t: Tensor) -> _Block:
        """The block of ``t``."""
        storage = t.untyped_storage()
        key = storage._cdata
        if key not in self._by_storage:
            start = storage.data_ptr()
            self._by_storage[key] = self._placed(start, start + storage.nbytes()), storage
        block = self._by_storage[key][0]
        self._by_tensor[id(t)] = t.data_ptr(), block, t
        return block

    def _placed(self, start: int, end: int) -> _Block:
        last = first = bisect.bisect_left(self._starts, end)
        while first and self._sorted[first - 1].end > start:
            first -= 1
        over = self._sorted[first:last]
        block = over[0] if over else _Block(start, end, None, 0, 0, self._streams)
        for other in over:
            block.end = max(block.end, other.end)
        block.start, block.end = min(start, block.start), max(end, block.end)
        if len(over) > 1:
            self.met = True
            self._by_storage.update((k, (block, s)) for k, (b, s) in self._by_storage.items() if b in over)
            self._by_tensor.update((k, (a, block, t)) for k, (a, b, t) in self._by_tensor.items() if b in over)
        self._sorted[first:last], self._starts[first:last] = [block], [block.start]
        return block


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
