"""Auxiliary streams: ops of one segment beside each other where their operands allow it, on every device alike.

A forward is written one op after the other, and recorded so, its graph is a chain: small kernels wait for each other though
keys and values need nothing of the queries. Here each op gets a stream by what it reads and writes. A matrix product that
doesn't need the op before it starts on an idle stream, what follows stays with its operands, and streams wait for each
other exactly where memory passes between them. TensorRT's engines use auxiliary streams in the same way.

Two things make that safe with an allocator that reuses a block at once, in the order of the stream it was taken on. What one
stream allocated and another used is held until stream 0 has waited for all of them, and before the first one uses the block
again it waits for stream 0. What can't be seen through, an op that isn't torch's own, runs alone.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from segue import _torch

COUNT = 2  # auxiliary streams that a device has: a layer's keys and values beside its queries
_MARKS = 16  # per stream; an older one is hardly ever the nearest
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "_scaled_mm", "_grouped_mm"}
_OWN = {"aten", "prims"}

Token = TypeVar("Token")


@dataclass(frozen=True, slots=True)
class _Kind:
    """An op. ``func``: held, so that its id stays its own. ``view``: it launches nothing. ``alone``: it may use memory that no
    operand shows."""

    func: Any
    view: bool
    product: bool
    alone: bool
    writes: tuple[tuple[int, ...], tuple[str, ...]]


class _Mark(NamedTuple, Generic[Token]):
    at: int  # ops of its stream that come before it
    token: Token
    after: tuple[int, ...]  # what its stream had waited for by then, for each stream


class AuxStreams(Generic[Token]):
    """Which stream each op of one segment runs on, and what it waits for. Stream 0 is the capture stream.

    Args:
        count: streams beside stream 0.
        mark: marks the point that a stream has reached.
        wait: has what a stream is given next wait for such a point.
    """

    def __init__(self, count: int, mark: Callable[[int], Token], wait: Callable[[int, Token], None]) -> None:
        self._mark, self._wait = mark, wait
        self._all = range(count + 1)
        self._tail = [0] * (count + 1)  # ops given to each stream
        # Of each stream, how many ops of every other it is after. An auxiliary stream begins by waiting for stream 0.
        self._after = [[0] * (count + 1), *([-1] + [0] * count for _ in range(count))]
        self._floor = [0] * (count + 1)  # ops of stream 0 that come before whatever an auxiliary stream is given
        self._marks: list[deque[_Mark[Token]]] = [deque(maxlen=_MARKS) for _ in self._all]
        self._writer: dict[int, tuple[int, int]] = {}  # by address of the memory: stream, and number of the op on it
        self._readers: dict[int, dict[int, int]] = {}  # since it was written: the last op of each stream
        self._home: dict[int, int] = {}  # stream that allocated it, in this segment; its block stays with that stream
        self._held: dict[int, tuple[int, Tensor]] = {}  # by storage, since two may lie at one address; with its home
        self._kept: dict[int, Tensor] = {}  # the same of what was made elsewhere, to the end of the segment
        self._outside: list[tuple[int, int, int]] = []  # start, end and address of memory made elsewhere, sorted
        self._now: tuple[int, dict[int, Tensor]] = 0, {}  # stream and operands of the op under way
        self._set_mark(0)

    @property
    def joined(self) -> bool:
        """Whether stream 0 has waited for all others."""
        return all(self._after[0][s] >= self._tail[s] for s in self._all[1:])

    def enter(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The stream for this op, no view, which waits for all that it has to."""
        kind = _kinds.get(id(func)) or _learn(func)
        operands: dict[int, Tensor] = {}
        seen_through = self._collect(args, operands) and self._collect(kwargs.values(), operands)
        if kind.alone or not seen_through:
            return self._alone(operands)
        written: dict[int, Tensor] = {}
        if kind.writes[0]:
            self._collect(_torch.written(kind.writes, args, kwargs), written)
        needs = self._needs(operands, written)
        stream = self._choose(kind.product, needs)
        for other, at in needs.items():
            self._follow(stream, other, at)
        if stream:
            self._follow(stream, 0, self._floor[stream])
        else:
            self._release()
        self._tail[stream] = now = self._tail[stream] + 1
        for key, t in operands.items():
            self._hold(key, t, stream)
            if key in written:
                self._writer[key] = stream, now
                self._readers.pop(key, None)
            else:
                self._readers.setdefault(key, {})[stream] = now
        self._now = stream, operands
        return stream

    def leave(self, result: Any) -> None:
        """What the op that was entered last gave."""
        if isinstance(result, list | tuple):
            for r in result:
                self.leave(r)
        elif isinstance(result, Tensor):
            stream, operands = self._now
            key = _torch.address(result)
            if key and key not in operands:
                self._writer[key] = stream, self._tail[stream]
                self._readers.pop(key, None)
                self._home[key] = stream

    def join(self) -> None:
        """Stream 0 waits for all others."""
        for s in self._all[1:]:
            self._follow(0, s, self._tail[s])

    def unseen(self) -> None:
        """Something ran on stream 0 that no op told of, while all were joined: it comes after all that was before, and before
        all that follows."""
        self._tail[0] += 1
        self._floor = [self._tail[0]] * len(self._tail)
        self._writer.clear()
        self._readers.clear()

    def _alone(self, operands: dict[int, Tensor]) -> int:
        self.join()
        self._release()
        self.unseen()
        for key, t in operands.items():
            self._hold(key, t, 0)
        self._now = 0, operands
        return 0

    def _hold(self, key: int, t: Tensor, stream: int) -> None:
        home = self._home.get(key)
        if home is None:
            self._kept.setdefault(_torch.storage_key(t), t)
        elif home != stream:
            self._held.setdefault(_torch.storage_key(t), (home, t))

    def _collect(self, values: Iterable[Any], into: dict[int, Tensor]) -> bool:
        """The tensors among arguments, by their memory. False if the memory of one isn't known."""
        known = True
        for v in values:
            if isinstance(v, Tensor):
                if key := self._key(v):
                    into[key] = v
                else:
                    known = known and not v.numel()
            elif isinstance(v, list | tuple):
                known = self._collect(v, into) and known
        return known

    def _needs(self, operands: dict[int, Tensor], written: dict[int, Tensor]) -> dict[int, int]:
        """For each stream the last of its ops that this one must come after."""
        needs: dict[int, int] = {}
        for key in operands:
            if (writer := self._writer.get(key)) is not None and writer[1] > needs.get(writer[0], 0):
                needs[writer[0]] = writer[1]
            if key in written:
                for stream, at in self._readers.get(key, {}).items():
                    needs[stream] = max(at, needs.get(stream, 0))
        return needs

    def _choose(self, product: bool, needs: dict[int, int]) -> int:
        stream = 0
        beside = [s for s, at in needs.items() if s and self._after[0][s] < at]
        if len(beside) == 1 and all(self._after[beside[0]][s] >= at for s, at in needs.items() if s != beside[0]):
            stream = beside[0]
        if product:
            if self._tail[stream] > needs.get(stream, 0):
                idle = (s for s in self._all[1:] if s != stream and self._after[0][s] >= self._tail[s])
                stream = next(idle, stream)
            else:
                self._set_mark(stream)  # for its siblings, which need what it needs, but not this product
        return stream

    def _follow(self, stream: int, other: int, at: int) -> None:
        """``stream`` goes on after op number ``at`` of ``other``."""
        if stream == other or self._after[stream][other] >= at:
            return
        mark = next((m for m in self._marks[other] if m.at >= at), None) or self._set_mark(other)
        self._wait(stream, mark.token)
        mine = self._after[stream]
        for s in self._all:
            mine[s] = max(mine[s], mark.after[s])
        mine[other] = max(mine[other], mark.at)

    def _set_mark(self, stream: int) -> _Mark[Token]:
        marks, at = self._marks[stream], self._tail[stream]
        if not marks or marks[-1].at != at:
            marks.append(_Mark(at, self._mark(stream), tuple(self._after[stream])))
        return marks[-1]

    def _release(self) -> None:
        """Let go of what was held, if stream 0 is after every use of it."""
        if self._held and self.joined:
            for home, _ in self._held.values():
                self._floor[home] = self._tail[0]
            self._held.clear()

    def _key(self, t: Tensor) -> int:
        """By what memory is known: its first address, or that of older memory from outside that it overlaps."""
        key = _torch.address(t)
        if not key or key in self._writer or key in self._readers:
            return key
        start, nbytes = _torch.storage_span(t)
        i = bisect.bisect_left(self._outside, (start + nbytes,))
        if i and self._outside[i - 1][1] > start:
            return self._outside[i - 1][2]
        self._outside.insert(i, (start, start + nbytes, key))
        return key


def is_view(func: Any) -> bool:
    """Whether the op only looks at memory in another way: it runs on no stream."""
    return (_kinds.get(id(func)) or _learn(func)).view


_kinds: dict[int, _Kind] = {}


def _learn(func: Any) -> _Kind:
    name = _torch.op_name(func) if isinstance(func, torch._ops.OpOverload) else "::"
    namespace, _, op = name.partition("::")
    op = op.partition(".")[0]
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    writes = _torch.written_arguments(func)
    aliases = bool(returns) and all(r.alias_info is not None for r in returns) and not writes[0]
    # A composite op that may give a view may as well copy (reshape, contiguous).
    view = aliases and namespace in _OWN and not _torch.has_kernel(name, "CompositeImplicitAutograd")
    alone = namespace not in _OWN or op == "set_"
    kind = _kinds[id(func)] = _Kind(func, view, op in _PRODUCTS, alone, writes)
    return kind

