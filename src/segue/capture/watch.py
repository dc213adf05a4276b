"""The one dispatch mode of a capture, on every device: it sees each op before it is recorded.

It keeps alive what the graph reads and did not make (CUDA graphs bake addresses and own nothing), notes what is written, and
refuses what training would need. A dispatch mode works while CUDA records; one that calls itself infrastructure leaves compiled
code compiled.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from segue import _torch, _where
from segue.devices import Pool, Recording
from segue.devices.aux_streams import NOTHING, UNKNOWN, Step
from segue.errors import CaptureError

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Observer = Callable[[Run, Any, tuple[Any, ...], dict[str, Any]], Any]  # calls the first, and returns what that does


@dataclass(slots=True)
class External:
    """A tensor that segments read or write and that lies outside the pool. The capture keeps its memory alive.

    ``tensor``: a detached alias, which stays on the captured memory. ``seen``: the object that was used, which may be given
    other memory later. ``where``: the line that used it first, in segment number ``segment``. ``written``: by some op of a
    segment.
    """

    tensor: Tensor
    seen: Tensor
    op: str
    where: str
    segment: int = 0
    written: bool = False


class _Observing(threading.local):
    observer: Observer | None = None


_observing = _Observing()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Have ``observer`` called around every op that captures begun in this block, by this thread, record."""
    before, _observing.observer = _observing.observer, observer
    try:
        yield
    finally:
        _observing.observer = before


_CAST = torch.ops.aten._to_copy.default  # to fill its cache autocast turns grad mode on; whoever uses the copy is seen by itself
_NO_WRAPPER = Tensor.__torch_dispatch__
_PLAIN = {int, float, bool, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format}
_TENSOR, _NUMBERS = {"Tensor", "Optional"}, {"int", "float", "bool", "number", "str", "Device", "Generator", "List", "Optional"}
_makers: weakref.WeakKeyDictionary[Pool, dict[int, tuple[int, str]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Op:
    """What there is to know of an op ahead of its calls.

    ``func``: held, so that its id stays its own. ``plain``: types of arguments that neither are nor hold tensors. ``writes``:
    positions and names. ``restores``: it gives a tensor other memory, which wasn't made for that.
    """

    func: Any
    name: str
    plain: set[type]
    writes: tuple[tuple[int, ...], tuple[str, ...]]
    restores: bool


_ops: dict[int, Op] = {}  # by the id of the function, which is a third of what its hash costs


class Watch(_torch.WatchingMode):
    """Observes the ops of all segments of one capture and passes them to the recording under way.

    Memory goes by number, so that the same memory can be told from one pass of a forward to the next
    (:mod:`segue.devices.aux_streams`).
    """

    def __init__(self, pool: Pool, name: str) -> None:
        super().__init__()
        self._name = name
        # Pool blocks that this capture has written or was seen to allocate: where each begins, in the order of their numbers,
        # and the number of the one that was at an address last, for addresses of tensors in them too.
        self._starts: list[int] = []
        self._made: dict[int, int] = {}
        self._before: list[tuple[int, int]] = []  # pool blocks that were alive when it began
        self.externals: dict[int, External] = {}  # by storage
        self._unsure: dict[int, External] = {}  # of these, the ones that may yet turn out to be the pool's
        self._spans: list[tuple[int, int]] = []  # of each external's memory, in the order of their numbers
        self._numbers: dict[int, int] = {}  # by storage
        self._met: dict[int, tuple[int, int]] = {}  # by the object that an external holds: its address and number
        self.recording: Recording | None = None
        self.segment = 0  # its number
        self.harmless = True  # the first segment has written no external
        self.error: BaseException | None = None  # the first refusal, even if the forward swallowed it
        self.pool = pool
        self._observer = _observing.observer
        self._record: Callable[..., Any] = _no_recording

    def begin_segment(self, recording: Recording, number: int) -> None:
        """Pass what follows to ``recording``."""
        recording.reenter = self
        self.recording, self.segment = recording, number
        self._record = recording.run if self._observer is None else _observed(self._observer, recording)

    def leave(self) -> None:
        """Pass nothing on any more."""
        self.recording, self._record = None, _no_recording

    def end_segment(self) -> None:
        """What was passed on is whole. Raises a CaptureError if it isn't as it should be."""

    def finish(self) -> None:
        """At the end, before the capture counts as whole. Raises a CaptureError if it doesn't."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # What this does for every op is most of what a recording costs: operands in blocks of its own pass by their address.
        op, made = _ops.get(id(func)) or _learn(func), self._made
        plain, kwargs = op.plain, kwargs or {}
        operands: list[int] = []
        try:
            if is_grad_enabled() and func is not _CAST:
                _refuse_training(op.name, (args, *kwargs.values()))
            for a in (*args, *kwargs.values()) if kwargs else args:
                kind = type(a)
                if kind is Tensor:
                    try:
                        if (number := made.get(a.data_ptr())) is not None:
                            operands.append(number)
                            continue
                    except RuntimeError:  # it has no storage, as a sparse one
                        pass
                elif kind in plain:
                    continue
                self._see(a, op, operands)
            if op.writes[0]:
                self._write(op, args, kwargs)
            if types and any(t.__torch_dispatch__ is not _NO_WRAPPER for t in types):
                return NotImplemented  # torch asks the subclass, and its inner ops come here one by one
            return self._run(op, operands, args, kwargs)
        except CaptureError as e:
            self.error = self.error or e
            raise

    def _run(self, op: Op, operands: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have an op recorded, whose operands have been looked at."""
        result = self._record(op.func, args, kwargs)
        try:
            if type(result) is Tensor and not op.restores and result.data_ptr() in self._made:
                return result
        except RuntimeError:  # it has no storage, as a sparse one
            return result
        self._made_by(op, result, operands)
        return result

    def _made_by(self, op: Op, result: Any, operands: list[int]) -> bool:
        """Number the memory that is new in an op's result. False if there is no telling."""
        if not op.restores or not isinstance(result, Tensor):
            return self._note_made(result, operands)
        address, start = result.data_ptr(), _torch.storage_span(result)[0]
        if not any(n >= 0 and self._starts[n] == start for n in operands):
            # In a block that nobody saw taken, or which was given as a storage: what was there before doesn't count.
            self._made.pop(address, None)
            if not op.name.startswith("aten.set_"):
                self._made.pop(start, None)
            elif (number := self._made.get(start)) is not None:
                self._made[address] = number
        return False

    def _see(self, value: Any, op: Op, operands: list[int]) -> None:
        """Number the tensors in an operand, and hold them, unless this capture made their memory. By storage: two may lie at
        one address."""
        if not isinstance(value, Tensor):
            if isinstance(value, list | tuple):
                for v in value:
                    self._see(v, op, operands)
            return
        try:
            address = value.data_ptr()
            known = self._made.get(address)
            if known is None and (met := self._met.get(id(value))) is not None and met[0] == address:
                known = met[1]
            storage = value.untyped_storage() if known is None else None
            start = storage.data_ptr() if storage is not None else 0
        except RuntimeError:  # without storage: a sparse one, or a wrapper, whose inner tensors come next
            operands.append(UNKNOWN)
            return
        operands.append(self._number(value, storage, start, op) if known is None else known)

    def _number(self, value: Tensor, storage: Any, start: int, op: Op) -> int:
        key = storage._cdata
        number = self._numbers.get(key)
        if number is not None or not value.numel():
            return NOTHING if number is None else number
        number = self._made.get(start)
        if number is not None:
            return number
        if value.layout is not torch.strided:
            return UNKNOWN
        span = start, start + storage.nbytes()
        external = self._external(value, span, op)
        if external is None:
            self.prove(value, op.name)
            return self._made[start]
        self.externals[key] = self._unsure[key] = external
        self._spans.append(span)
        number = self._numbers[key] = -len(self._spans)
        self._met[id(value)] = value.data_ptr(), number
        return number

    def _external(self, value: Tensor, span: tuple[int, int], op: Op) -> External | None:
        """What to hold of a tensor that is used for the first time; None if it is in the pool, as far as is known."""
        if self.pool.owns(value, look=False):
            return None
        return External(value.detach(), value, op.name, _where.caller(), self.segment)

    def settle(self) -> None:
        """At a segment's end: of what it met first, some may lie in memory that the pool has taken since it was looked at.

        Raises:
            CaptureError: another capture left it there.
        """
        unsure, self._unsure = self._unsure, {}
        for key, external in unsure.items():
            if self.pool.owns(external.tensor):
                del self.externals[key], self._numbers[key], self._met[id(external.seen)]
                self.prove(external.tensor, external.op, external.where)

    def begin(self) -> None:
        """Note what is in the pool already: another capture's outputs, which this one must not read."""
        self._before = self.pool.blocks()

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the pool for a hand-off, which a break is about to write."""
        t = self.pool.empty(size, stride, dtype)
        self._add(_torch.storage_span(t)[0])
        return t

    def claim(self) -> None:
        """Write this capture's name on the blocks of the pool that outlive it, for the error that another one may need."""
        makers = _makers.setdefault(self.pool, {})
        alive = {address: size for address, size in self.pool.blocks()}
        before = {address for address, _ in self._before}
        for address in [a for a in makers if a not in alive]:
            del makers[address]
        makers.update({a: (size, self._name) for a, size in alive.items() if a not in before})

    def _add(self, start: int) -> int:
        number = self._made[start] = len(self._starts)
        self._starts.append(start)
        return number

    def _note_made(self, result: Any, operands: list[int]) -> bool:
        """Number the memory that is new in a result: in none of the operands' blocks. False if there is no telling."""
        if isinstance(result, Tensor):
            try:
                address = result.data_ptr()
            except RuntimeError:
                return False  # it has no storage, as a sparse one
            if not address:
                return not result.numel()
            offset = result.storage_offset()
            start = address - int(offset) * result.itemsize if offset else address
            for n in operands:
                if n >= 0:
                    if self._starts[n] == start:
                        self._made[address] = n
                        return True
                elif n > NOTHING:
                    first, end = self._spans[-1 - n]
                    if first <= start < end:
                        return True
            self._made[start] = self._made[address] = len(self._starts)
            self._starts.append(start)
            return True
        if isinstance(result, list | tuple):
            return all([self._note_made(r, operands) for r in result])
        return False

    def prove(self, t: Tensor, user: Any, where: str = "") -> None:
        """See that this capture made ``t``'s memory: what another one left in the pool is overwritten without notice.

        Compiled code allocates without being seen, so a block that is alive now and wasn't at the beginning is this
        capture's too.
        """
        address = _torch.storage_span(t)[0]
        if address in self._made:
            return
        if not _inside(address, self._before) and _inside(address, self.pool.blocks()):
            self._add(address)
            return
        maker = next((f"{name} made it" for a, (n, name) in _makers.get(self.pool, {}).items() if a <= address < a + n), None)
        at = where or _where.caller()
        raise CaptureError(
            f"{self._name}: {user} at {at} uses a tensor {tuple(t.shape)} in graph memory that this capture did "
            f"not write ({maker or 'whoever made it has let go of it'}). Another replay overwrites it at any time: clone it "
            "outside graphs, or give the captures pools of their own."
        )

    def _write(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for t in _tensors(_torch.written(op.writes, args, kwargs)):
            if t.layout is torch.strided:
                external = self.externals.get(_torch.storage_key(t))
                if external is not None:
                    external.written = True
                    self.harmless = self.harmless and self.segment > 0


def _no_recording(*_: Any) -> Any:
    raise AssertionError("an op was seen between two segments")


def _observed(observer: Observer, recording: Recording) -> Callable[..., Any]:
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], placed: Step | None = None) -> Any:
        return observer(functools.partial(recording.run, placed=placed), func, args, kwargs)

    return run


def _learn(func: Any) -> Op:
    schema = getattr(func, "_schema", None)  # a higher-order op has none
    types = [set(re.findall(r"\w+", str(a.type))) for a in schema.arguments] if schema is not None else [{"Any"}]
    plain = _PLAIN | {list, tuple} if all(t <= _TENSOR or t <= _NUMBERS for t in types) else _PLAIN
    restores = schema is not None and schema.name.rpartition("::")[2] in _torch.RE_STORING
    op = _ops[id(func)] = Op(func, str(func), plain, _torch.written_arguments(func), restores)
    return op


def _refuse_training(op: str, operands: tuple[Any, ...]) -> None:
    if any(t.requires_grad for t in _tensors(operands)):
        raise CaptureError(
            f"{op} at {_where.caller()} has an operand that requires grad while grad mode is on; a graph records no "
            "autograd. Capture and replay under torch.inference_mode()."
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _tensors(v)


def _inside(address: int, blocks: list[tuple[int, int]]) -> bool:
    return any(start <= address < start + size for start, size in blocks)
