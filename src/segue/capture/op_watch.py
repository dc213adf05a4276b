"""The dispatch mode of a capture, on every device. It sees each op before it is recorded.

It keeps alive what the graph reads and didn't make, as CUDA graphs bake addresses and own nothing. It notes what is written, and
refuses ops that would record gradients. A dispatch mode works while CUDA records, and one that calls itself infrastructure leaves
compiled code compiled.
"""

from __future__ import annotations

import functools
import gc
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from segue import _source_lines, _torch, _torch_modes, _torch_ops
from segue.capture.context_paths import DeepContext
from segue.capture.copied_memory import CopiedMemory
from segue.capture.externals import External
from segue.devices import Pool, Recording
from segue.errors import CaptureError

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Observer = Callable[[Run, Any, tuple[Any, ...], dict[str, Any]], Any]  # calls its first argument, and returns its result


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


_FRESH = torch.ops.aten.lift_fresh.default
_CAST = torch.ops.aten._to_copy.default  # autocast fills its cache in grad mode; each op that uses the copy is checked by itself
_NO_WRAPPER = Tensor.__torch_dispatch__
_USES_CUDNN = re.compile("conv|cudnn|rnn|lstm|gru|batch_norm")
_PLAIN = {int, float, bool, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format}
_TENSOR, _NUMBERS = {"Tensor", "Optional"}, {"int", "float", "bool", "number", "str", "Device", "Generator", "List", "Optional"}
_FILLS = {"aten::copy_", "aten::fill_", "aten::zero_"}  # beside ops with out=
_MAY_COPY = {f"aten::{name}" for name in ("reshape", "reshape_as", "contiguous", "flatten", "ravel", "to", "type_as", "_to_copy")}
_makers: weakref.WeakKeyDictionary[Pool, dict[int, tuple[int, str]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Op:
    """What is worked out once for an op, before its calls.

    ``func``: held, so that its id stays its own. ``plain``: types of arguments that neither are nor hold tensors. ``writes``:
    positions and names of the arguments that it writes. ``restores``: it gives a tensor other memory, as ``set_`` does.
    ``reads``: the mode that it reads and most ops don't, or "". ``fills``: it overwrites what it writes without reading it.
    ``views``: it reads nothing, and gives another view of an operand. ``fresh``: its operand is one that Python has just made.
    """

    func: Any
    name: str
    plain: set[type]
    writes: tuple[tuple[int, ...], tuple[str, ...]]
    restores: bool
    reads: str
    fills: bool
    views: bool
    fresh: bool


_ops: dict[int, _Op] = {}  # by the id of the function, which is a third of what its hash costs


class OpWatch(_torch.WatchingMode):
    """Observes the ops of all segments of one capture and passes them to the recording under way."""

    def __init__(self, pool: Pool, name: str, own: Collection[int] = ()) -> None:
        super().__init__()
        self._name = name
        # Where pool blocks begin that this capture has written or was seen to allocate, and where views of them do.
        self._made: set[int] = set()
        self._fresh: list[Tensor] = []  # held, so that nobody else's tensor gets the address of one
        self._outside: set[int] = set()  # addresses of externals
        self._blocks_before: list[tuple[int, int]] = []  # pool blocks that were alive when the capture began
        self._young_before: dict[int, Any] = {}  # objects by id, held so that no other gets it
        self.externals: dict[int, External] = {}  # by storage
        self._uses: list[tuple[int, Tensor]] = []  # operands of the running op outside memory that is known to be this capture's
        self._unsure: dict[int, External] = {}  # those of this segment, which may lie in memory that the pool took in it
        self.recording: Recording | None = None
        self.segment = 0  # the number of the segment that is recorded
        self.harmless = True  # the first segment was seen to write nothing outside that anybody but the caller uses
        self._own = own  # storages of these, which are the caller's alone
        self._device_is_set = False
        self.read_modes: set[str] = set()  # of the modes that only some ops read, those that an op has read
        self.error: BaseException | None = None  # the first refusal, even if the forward swallowed it
        self.pool = pool
        self.copies, self.deep = CopiedMemory(), DeepContext()  # of the hand-offs, and of the live context
        self._observer = _observing.observer
        self._record: Callable[..., Any] = _no_recording

    def begin_segment(self, recording: Recording, number: int) -> None:
        """Pass the ops that follow to ``recording``, that of segment ``number``."""
        recording.reenter = self
        self.recording, self.segment = recording, number
        self._record = recording.run if self._observer is None else _observed(self._observer, recording)

    def leave(self) -> None:
        """Stop passing ops on: the segment has ended."""
        self.recording, self._record = None, _no_recording

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # What happens here for every op is most of a recording's cost, so operands in blocks of its own pass by their address.
        op, made = _ops.get(id(func)) or _op_facts(func), self._made
        plain, kwargs = op.plain, kwargs or {}
        try:
            if is_grad_enabled() and func is not _CAST:
                _refuse_training(op.name, (args, *kwargs.values()))
            for a in (*args, *kwargs.values()) if kwargs else args:
                kind = type(a)
                if kind is Tensor:
                    try:
                        if a.data_ptr() in made:
                            continue
                    except RuntimeError:  # it has no storage, as a sparse one
                        pass
                elif kind in plain:
                    continue
                self._hold_externals(a, op)
            if op.writes[0]:
                self._write(op, args, kwargs)
            if self._uses:
                self._note_uses(op, args, kwargs)
            if types and any(t.__torch_dispatch__ is not _NO_WRAPPER for t in types):
                return NotImplemented  # torch asks the subclass, and its inner ops come here one by one
            result = self._record(func, args, kwargs)
            if op.reads:
                self.read_modes.add(op.reads)
            first = args[0] if args else None
            if not (isinstance(first, Tensor) and first.is_floating_point()):
                self._note_defaults(args, kwargs, result)
            if not op.restores:
                self._note_made(result)
            return result
        except CaptureError as e:
            self.error = self.error or e
            raise

    def _hold_externals(self, value: Any, op: _Op) -> None:
        """Hold the tensors in an operand, unless this capture made their memory. Each storage is held once, since two storages
        may begin at one address.
        """
        if not isinstance(value, Tensor):
            if isinstance(value, list | tuple):
                for v in value:
                    self._hold_externals(v, op)
            return
        try:
            key = _torch.storage_key(value)
            if value.numel():
                self._uses.append((key, value))
            if key in self.externals or not value.numel():
                return
            address = _torch.storage_span(value)[0]
        except RuntimeError:
            return  # without storage: a sparse one, or a wrapper, whose inner tensors come next
        if address in self._made or value.layout is not torch.strided:
            return
        # Dynamo makes a tensor on the host of each float. A graph reads it only from pinned memory.
        if op.fresh and value.device != self.pool.device.torch_device and not value.is_pinned():
            self._fresh.append(value)
            self._made.add(address)
            return
        if self.pool.owns(value, look=_source_lines.in_compiled_code()):
            self.prove(value, op.name)
            return
        external = External(value.detach(), value, op.name, _source_lines.caller(), self.segment)
        self.externals[key] = self._unsure[key] = external
        self._outside.add(address)

    def _note_uses(self, op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note which externals an op overwrites, and which it reads: one that is overwritten before it is read is a workspace."""
        uses, self._uses = self._uses, []
        if op.views:
            return
        filled = [t for t in _tensors(_torch_ops.written(op.writes, args, kwargs)) if op.fills]
        for key, t in uses:
            external = self.externals.get(key)
            if external is not None and sum(t is other for _, other in uses) > sum(t is other for other in filled):
                external.read(t)
        for t in filled:
            if t.layout is torch.strided and (external := self.externals.get(_torch.storage_key(t))) is not None:
                external.fill(t)

    def _note_defaults(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note whether an op took the dtype of its result, or its place, from the defaults: where neither operands nor arguments
        say it.
        """
        made, given = _torch_ops.tensors((result,), {}), _torch_ops.tensors(args, kwargs)
        told = any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values()))
        if not told and any(map(_inexact, made)) and not any(map(_inexact, given)):
            self.read_modes.add(_torch_modes.DEFAULT_DTYPE.name)
        if made and not given and (
            _torch_modes.placed_by_default() if self._device_is_set else made[0].device != self.pool.device.torch_device
        ):
            self.read_modes.add(_torch_modes.DEVICE)

    def refuse_mode_above(self, where: str) -> None:
        """Refuse a break that the forward calls inside a dispatch mode of its own, which this one can't be left below.

        Raises:
            CaptureError: it does.
        """
        top = _torch.current_mode()
        if top is not None and top is not self and not isinstance(top, _torch.WatchingMode):
            raise CaptureError(
                f"{where}: the forward has entered {type(top).__qualname__}, a dispatch mode, around the break. A segment can't "
                "end inside one: enter it inside the break, or around the whole forward."
            )

    def settle(self) -> None:
        """At a segment's end, check the externals that were first used in it once more. During the segment the pool may have
        taken memory that a quick ``owns`` didn't know yet.

        Raises:
            CaptureError: one lies in the pool, and another capture left it there.
        """
        unsure, self._unsure = self._unsure, {}
        for key, external in unsure.items():
            if self.pool.owns(external.tensor):
                del self.externals[key]
                self._outside.discard(_torch.storage_span(external.tensor)[0])
                self.prove(external.tensor, external.op, external.where)

    def begin(self) -> None:
        """Note whether the caller has set a default device, which blocks of the pool are alive already, and which objects are as
        young as those that the forward will make. The blocks are other captures' outputs, which this one must not read.
        """
        self._blocks_before = self.pool.blocks()
        self._device_is_set = any(map(_torch_modes.sets_device, _torch_modes.function_modes()))
        self._young_before = {id(o): o for o in gc.get_objects(generation=0)}

    def forget(self) -> None:
        """Let go of the context, of the hand-offs and of what there was before, at the end of the capture."""
        self.copies, self.deep, self._young_before, self._fresh = CopiedMemory(), DeepContext(), {}, []

    def is_new(self, obj: Any) -> bool:
        """Whether ``obj`` was made in this capture. The garbage collector, which is off, counts such objects as young."""
        return self._young_before.get(id(obj)) is not obj and any(other is obj for other in gc.get_objects(generation=0))

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate memory of the pool for a hand-off, which a break is about to write. ``stride`` is in elements."""
        t = self.pool.empty(size, stride, dtype)
        self._made.add(_torch.storage_span(t)[0])
        return t

    def claim(self) -> None:
        """Note that this capture made the blocks of the pool that outlive it, so that an error of a later capture can name it."""
        makers = _makers.setdefault(self.pool, {})
        alive = {address: size for address, size in self.pool.blocks()}
        before = {address for address, _ in self._blocks_before}
        for address in [a for a in makers if a not in alive]:
            del makers[address]
        makers.update({a: (size, self._name) for a, size in alive.items() if a not in before})

    def _note_made(self, result: Any) -> None:
        if isinstance(result, Tensor):
            try:
                address = result.data_ptr()
            except RuntimeError:
                return  # it has no storage, as a sparse one
            if address and address not in self._made:
                start = address - int(result.storage_offset()) * result.itemsize
                if start not in self._outside:
                    self._made.update((start, address))
        elif isinstance(result, list | tuple):
            for r in result:
                self._note_made(r)

    def prove(self, t: Tensor, user: Any, where: str = "") -> None:
        """Check that this capture made the memory of ``t``, which lies in the pool. Another capture's replays would overwrite
        what it left there without notice.

        This mode doesn't see what compiled code allocates, so a block that is alive now and wasn't at the beginning counts as
        this capture's.

        Args:
            user: the op or argument that uses ``t``. ``where``: its line; by default the line that is running.

        Raises:
            CaptureError: another capture made it.
        """
        address = _torch.storage_span(t)[0]
        if address in self._made:
            return
        unseen = _source_lines.in_compiled_code()
        if not _inside(address, self._blocks_before) and (unseen or _inside(address, self.pool.blocks())):
            self._made.add(address)
            return
        maker = next((f"{name} made it" for a, (n, name) in _makers.get(self.pool, {}).items() if a <= address < a + n), None)
        at = where or _source_lines.caller()
        raise CaptureError(
            f"{self._name}: {user} at {at} uses a tensor {tuple(t.shape)} in graph memory that this capture did "
            f"not write ({maker or 'whoever made it has let go of it'}). Another replay overwrites it at any time: clone it "
            "outside graphs, or give the captures pools of their own."
        )

    def _write(self, op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        written = list(_tensors(_torch_ops.written(op.writes, args, kwargs)))
        self.copies.check_write(op.name, written)
        for t in written:
            if t.layout is torch.strided:
                key = _torch.storage_key(t)
                external = self.externals.get(key)
                if external is not None:
                    external.written = True
                    external.parts.append(t.detach())
                    self.harmless = self.harmless and (self.segment > 0 or key in self._own)


def _no_recording(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise AssertionError("no segment is being recorded")


def _observed(observer: Observer, recording: Recording) -> Callable[..., Any]:
    return functools.partial(observer, recording.run)


def _inexact(t: Tensor) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex


def _op_facts(func: Any) -> _Op:
    schema = getattr(func, "_schema", None)  # a higher-order op has none
    types = [set(re.findall(r"\w+", str(a.type))) for a in schema.arguments] if schema is not None else [{"Any"}]
    plain = _PLAIN | {list, tuple} if all(t <= _TENSOR or t <= _NUMBERS for t in types) else _PLAIN
    restores = schema is not None and schema.name.rpartition("::")[2] in _torch_ops.RE_STORING
    name = str(func)
    reads = _torch_modes.ATTENTION.name if "scaled_dot_product" in name else ""
    reads = _torch_modes.CUDNN.name if _USES_CUDNN.search(name) else reads
    writes = _torch_ops.written_arguments(func)
    fills = schema is not None and (schema.name in _FILLS or any(a.is_out for a in schema.arguments))
    views = schema is not None and not writes[0] and schema.name not in _MAY_COPY and any(r.alias_info for r in schema.returns)
    op = _ops[id(func)] = _Op(func, name, plain, writes, restores, reads, fills, views, func is _FRESH)
    return op


def _refuse_training(op: str, operands: tuple[Any, ...]) -> None:
    if any(t.requires_grad for t in _tensors(operands)):
        raise CaptureError(
            f"{op} at {_source_lines.caller()} has an operand that requires grad while grad mode is on; a graph records no "
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
