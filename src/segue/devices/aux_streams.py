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

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from segue import _torch

COUNT = 2  # auxiliary streams that a device has: a layer's keys and values beside its queries
_MARKS = 16  # per stream; an older one is hardly ever the nearest
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "_scaled_mm", "_grouped_mm"}
_OWN = {"aten", "prims"}

# Memory goes by number: what a forward makes counts from 0, in the order in which it is made; what came from elsewhere, from -1
# down. These two are for operands without any, and for those of which nobody can tell.
NOTHING, UNKNOWN = -(1 << 40), -(1 << 41)


class TracedOp(NamedTuple):
    """An op of a forward.

    ``operands``: the memory of its tensors, in the order of its arguments. ``written``: what of that it writes. ``made``: how
    many blocks the forward has made by its end. ``acts``: it wrote something, gave something new, or there is no telling.
    """

    func: Any
    operands: list[int]
    written: tuple[int, ...]
    made: int
    acts: bool


class Step(NamedTuple):
    """How an op is recorded.

    ``before``: in this order, ``(stream, -1)`` to mark the point that a stream has reached, or ``(stream, i)`` to have what that
    stream is given next wait for the mark that was set as number i. ``release``: then what is held until all streams are
    joined can go. ``hold``: which of its tensors must be held so, and ``keep``: until the segment ends.
    """

    stream: int
    before: tuple[tuple[int, int], ...]
    release: bool
    hold: tuple[int, ...]
    keep: tuple[int, ...]


class Held:
    """Storages that outlive their tensors while a segment is recorded. Storages, for a tensor may be given another
    (``t.data = ...``)."""

    def __init__(self) -> None:
        self._until_joined: list[Any] = []
        self._until_the_end: list[Any] = []

    def follow(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Let go and hold as ``step`` says of an op with these arguments."""
        if step.release:
            self._until_joined.clear()
        if step.hold or step.keep:
            operands = _torch.tensors(args, kwargs)
            self._until_joined.extend(operands[i].untyped_storage() for i in step.hold)
            self._until_the_end.extend(operands[i].untyped_storage() for i in step.keep)

    def clear(self) -> None:
        """Let go of everything."""
        self._until_joined.clear()
        self._until_the_end.clear()


@dataclass(frozen=True, slots=True)
class Kind:
    """What there is to know of an op ahead of its calls.

    ``func``: held, so that its id stays its own. ``view``: it launches nothing, and runs on no stream. ``alone``: it may use
    what no operand shows.
    """

    func: Any
    view: bool
    product: bool
    alone: bool


def kind_of(func: Any) -> Kind:
    """The kind of an ``OpOverload``, learned once."""
    return _kinds.get(id(func)) or _learn(func)


class _Block:
    """Memory that ops of this segment use.

    ``home``: the stream that allocated it; it stays with that, whoever owns it later. None for memory that was made elsewhere.
    ``by``, ``at``: the stream that wrote it last, and the number of the op on that stream. ``read``: of each stream, the op
    that used it last.
    """

    __slots__ = ("at", "by", "home", "read")

    def __init__(self, home: int | None, at: int, streams: int) -> None:
        self.home, self.by, self.at = home, home or 0, at
        self.read = [0] * streams


class _Mark(NamedTuple):
    at: int  # ops of its stream that come before it
    number: int
    after: tuple[int, ...]  # what its stream had waited for by then, for each stream


class AuxStreams:
    """Which stream each op of one segment runs on, and what it waits for. Stream 0 is the capture stream.

    Args:
        count: streams beside stream 0.
        made: how many blocks the forward had made before this segment.
    """

    def __init__(self, count: int, made: int) -> None:
        self._all, self._others = range(count + 1), range(1, count + 1)
        self._joined = True  # stream 0 has waited for all others
        self._tail = [0] * (count + 1)  # ops given to each stream
        # Of each stream, how many ops of every other it is after. An auxiliary stream begins by waiting for stream 0.
        self._after = [[0] * (count + 1), *([-1] + [0] * count for _ in range(count))]
        self._floor = [0] * (count + 1)  # ops of stream 0 that come before whatever an auxiliary stream is given
        self._marks: list[deque[_Mark]] = [deque(maxlen=_MARKS) for _ in self._all]
        self._blocks: dict[int, _Block] = {}
        self._held: dict[int, _Block] = {}  # until all streams are joined
        self._kept: set[int] = set()  # until the segment ends: which stream uses such a block again isn't known
        self._made = made
        # Of the next step.
        self._before: list[tuple[int, int]] = []
        self._numbers = 0
        self._release = False
        self._set_mark(0)

    def place(self, op: TracedOp) -> Step | None:
        """How to record the next op; None for a view."""
        kind = kind_of(op.func)
        made, self._made = range(self._made, op.made), op.made
        if kind.view and not made:
            return None
        operands = {n: self._block(n) for n in op.operands if n != NOTHING}
        alone = kind.alone or UNKNOWN in operands
        written = [operands[n] for n in op.written]
        stream = self._alone() if alone else self._placed(kind.product, operands.values(), written)
        self._tail[stream] += 1
        now = self._tail[stream]
        hold, keep = [], []
        for i, n in enumerate(op.operands if not alone else ()):
            if n < 0:
                continue  # the capture holds it
            block = operands[n]
            if block.home is None and n not in self._kept:
                self._kept.add(n)
                keep.append(i)
            elif block.home is not None and block.home != stream and n not in self._held:
                self._held[n] = block
                hold.append(i)
        for block in operands.values():
            block.read[stream] = now
        for block in written:
            block.by, block.at = stream, now
        for n in made:
            self._blocks[n] = _Block(stream, now, len(self._all))
        if stream:
            self._joined = False
        elif alone:
            self._floor = [now] * len(self._tail)
        elif not op.acts:  # a composite op that had nothing to copy counts for nothing
            self._tail[0] -= 1
        before, self._before = tuple(self._before), []
        release, self._release = self._release, False
        return Step(stream, before, release, tuple(hold), tuple(keep))

    def _block(self, n: int) -> _Block:
        found = self._blocks.get(n)
        if found is None:
            found = self._blocks[n] = _Block(None, 0, len(self._all))
        return found

    def _alone(self) -> int:
        """Stream 0, after all that was before. What follows comes after it."""
        for s in self._others:
            self._follow(0, s, self._tail[s])
        return 0

    def _placed(self, product: bool, operands: Iterable[_Block], written: Collection[_Block]) -> int:
        """The stream for an op, after all that it needs."""
        if self._joined and not product:
            return 0  # which then has to wait for nothing
        needs = [0] * len(self._all)  # for each stream the last of its ops that this one must come after
        for block in operands:
            needs[block.by] = max(needs[block.by], block.at)
        for block in written:
            needs = list(map(max, needs, block.read))
        stream = self._chosen(product, needs)
        for other, at in enumerate(needs):
            if other != stream and at:
                self._follow(stream, other, at)
        if stream:
            self._follow(stream, 0, self._floor[stream])
        return stream

    def _chosen(self, product: bool, needs: list[int]) -> int:
        reached, stream = self._after[0], 0
        beside = [s for s in self._others if reached[s] < needs[s]]
        if len(beside) == 1:
            mine = self._after[beside[0]]
            if all(mine[s] >= at for s, at in enumerate(needs) if at and s != beside[0]):
                stream = beside[0]
        if product:
            if self._tail[stream] > needs[stream]:
                return next((s for s in self._others if s != stream and reached[s] >= self._tail[s]), stream)
            self._set_mark(stream)  # for its siblings, which need what it needs, but not this product
        return stream

    def _follow(self, stream: int, other: int, at: int) -> None:
        """``stream`` goes on after op number ``at`` of ``other``."""
        mine = self._after[stream]
        if mine[other] >= at:
            return
        mark = next((m for m in self._marks[other] if m.at >= at), None) or self._set_mark(other)
        self._before.append((stream, mark.number))
        for s in self._all:
            mine[s] = max(mine[s], mark.after[s])
        mine[other] = max(mine[other], mark.at)
        if not stream and all(mine[s] >= self._tail[s] for s in self._others):
            self._let_go()

    def _set_mark(self, stream: int) -> _Mark:
        marks, at = self._marks[stream], self._tail[stream]
        after = tuple(self._after[stream])
        if not marks or marks[-1].at != at or marks[-1].after != after:  # it may have waited since, and run nothing
            marks.append(_Mark(at, self._numbers, after))
            self._numbers += 1
            self._before.append((stream, -1))
        return marks[-1]

    def _let_go(self) -> None:
        """Of what was held, now that whatever stream 0 is given next is after every use of it."""
        self._joined = self._release = True
        for block in self._held.values():
            assert block.home is not None
            self._floor[block.home] = self._tail[0] + 1
        self._held.clear()


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
    alone = namespace not in _OWN or op in _torch.RE_STORING or draws or fills
    kind = _kinds[id(func)] = Kind(func, view, op in _PRODUCTS, alone)
    return kind
