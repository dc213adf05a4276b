"""Recording a segment on the emulator: every op runs at once, and again at each replay."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from segue import _source_lines, _torch, _torch_ops, _torch_ranks
from segue.devices import generators
from segue.devices.emulator.host_guard import HostGuard, eager_compiled
from segue.devices.emulator.op_rules import OpInfo, op_info
from segue.devices.emulator.pool import EmulatedPool
from segue.devices.emulator.tape import EmulatedSegment, Store, TapeExternal, TapeStep
from segue.devices.refusals import MEND, check_arguments, refusal
from segue.errors import CaptureError, UsageError

_CPU = torch.device("cpu")
_PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
_no_subclass = torch.Tensor.__torch_dispatch__


class EmulatedRecording:
    """A tape being written.

    What an op makes is moved into the pool. The tape reads and writes it through tensors that own no memory of the pool, so a
    block is free again when the user's last tensor over it dies.
    """

    reenter: AbstractContextManager[Any]
    acted = False

    def __init__(self, pool: EmulatedPool) -> None:
        if pool.recording:
            raise UsageError("this pool is being recorded into already; one capture at a time")
        self._pool, self._first_serial = pool, pool.serial
        self._steps: list[TapeStep] = []
        self._externals: dict[int, TapeExternal] = {}  # by storage
        self._literals: dict[int, Tensor] = {}  # held, so that no later storage takes over the identity
        self._refused: CaptureError | None = None
        self._undo: dict[tuple[str, int], Callable[[], None]] = {}
        self._generators: dict[int, tuple[Generator, Tensor]] = {}
        self._may_draw_from = set(map(_torch.generator_key, (torch.default_generator, *generators.known())))
        self._transfers: list[Any] = []  # begun by a replay, and not yet waited for
        self._talks = False  # the last step begins one
        self._open = True
        self._seed = torch.default_generator.initial_seed()
        with _plain():
            self._save_generator(torch.default_generator)
        self._guard = HostGuard(self.refuse, self._literals)
        self._stance = eager_compiled()
        self._stance.__enter__()
        self._guard.enter()
        pool.recording = True
        pool.look()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` and record it.

        Raises:
            CaptureError: CUDA could not capture this call. The recording can't be committed any more.
        """
        known = op_info(func)
        operands = _torch_ops.tensors(args, kwargs)
        for t in operands:
            if type(t) not in _PLAIN and type(t).__torch_dispatch__ is not _no_subclass:
                return NotImplemented
        if known.opens is not None:
            return self._opened(func, known, known.opens, args, kwargs)
        with _torch.function_modes_off():
            self._check(known, operands, args, kwargs)
            if any(known.writes):
                self._save_written(known, args, kwargs)
            if known.random:
                for g in (*args, *kwargs.values()):
                    if isinstance(g, Generator):
                        if _torch.generator_key(g) not in self._may_draw_from:
                            raise self.refuse(generators.unknown(known.op, g))
                        self._save_generator(g)
            self.acted = self.acted or known.talks
            result = known.run(*args, **kwargs)
            if known.op == "lift_fresh":
                self._literals[_torch.storage_key(result)] = result
                return result
            return self._record(known, operands, args, kwargs, result)

    def _opened(self, func: Any, known: OpInfo, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if known.body is not None:
            with _torch.function_modes_on(), self._guard.inside(), self.reenter:
                return known.body(*args, **kwargs)
        # A function mode that saw this call would make the whole call again instead of opening it.
        with _torch.function_modes_off(), self.reenter:
            return _torch_ops.open_composite(func, key, *args, **kwargs)

    def refuse(self, error: CaptureError) -> CaptureError:
        """Remember the first refusal and return ``error``. As on CUDA, a recording is unusable even if the error is swallowed."""
        self._refused = self._refused or error
        return error

    def commit(self) -> EmulatedSegment:
        """End the recording.

        Raises:
            CaptureError: something was refused while it was recorded, even if the forward swallowed that error.
        """
        if self._refused is None and torch.default_generator.initial_seed() != self._seed:
            self._refused = CaptureError(
                "torch.manual_seed() with another seed was called in a segment: a graph holds no seed, and CUDA refuses it while "
                "it records. Seed before the capture or the replay, or in a break point."
            )
        refused = self._refused
        if refused is not None:
            self.abort()
            try:
                raise refused
            finally:
                del refused  # its traceback holds this frame
        self._await_transfers()
        self._leave()
        self._literals.clear()
        take_back = partial(_take_back, self._undo, self._generators)
        steps, externals = self._steps, list(self._externals.values())
        self._undo, self._generators, self._steps, self._externals = {}, {}, [], {}  # this object lives until it is collected
        return EmulatedSegment(steps, externals, self._pool, take_back)

    def abort(self) -> None:
        """End the recording, and undo the writes and random draws of its ops, which CUDA would not have run."""
        self._refused = None  # its traceback holds the forward's tensors
        if not self._open:
            return
        self._leave()
        _take_back(self._undo, self._generators)
        self._undo.clear()
        self._generators.clear()
        self._steps.clear()
        self._externals.clear()
        self._literals.clear()

    def _leave(self) -> None:
        self._open = False
        self._pool.recording = False
        self._guard.leave()
        self._stance.__exit__(None, None, None)

    def _check(self, known: OpInfo, operands: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        why = known.refused
        if why is None and known.checked:
            why = check_arguments(known.op, args, kwargs, self._is_literal)
        if why is None:
            for t in operands:
                if t.layout is not torch.strided or t.is_quantized:
                    why = f"the emulator holds dense tensors only, not {t.layout}. {MEND}."
                elif t.device.type not in ("cpu", "meta"):
                    why = f"it has an operand on {t.device}, and this capture is emulated on CPU tensors."
        if why is not None:
            raise self.refuse(refusal(known.op, why))

    def _is_literal(self, t: Tensor) -> bool:
        return _torch.storage_key(t) in self._literals

    def _record(
        self, known: OpInfo, operands: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        fresh = _NewResults(self._pool, known, {_torch.storage_key(t) for t in operands})
        mine = fresh.take(result, ())
        if fresh.refused is not None:
            raise self.refuse(refusal(known.op, fresh.refused))
        if (fresh.stores and fresh.fill) or any(known.writes) or known.acts:
            where = _source_lines.caller()
            bake = partial(self._bake, known.op, where)
            bind: Callable[..., Callable[[], Any]] = _torch_ranks.bound if known.talks else _bound
            run = bind(known.run, _map(bake, args), {k: _map(bake, v) for k, v in kwargs.items()})
            if not known.half:
                self._await_transfers()
            store = self._transfers.append if known.half else _joined(fresh.stores)
            self._steps.append(TapeStep(run, store, known.op, where))
            self._talks = known.half
        return mine

    def _await_transfers(self) -> None:
        """Have replays wait for the transfers between two ranks that were begun last. All may be begun before one is done."""
        if self._talks:
            self._talks = False
            self._steps.append(TapeStep(partial(_finish, self._transfers), None, "c10d::wait", self._steps[-1].where))

    def _bake(self, op: str, where: str, t: Tensor) -> Tensor:
        address, nbytes = _torch.storage_span(t)
        if self._pool.holds(address):
            plain = _torch.tensor_at(address, nbytes, t.dtype, t.size(), t.stride(), int(t.storage_offset()), _CPU)
        elif t.device.type != "cpu":
            return t
        else:
            plain = _torch.alias(t)
            key = _torch.storage_key(t)
            if nbytes and key not in self._externals:
                self._externals[key] = TapeExternal(t.untyped_storage(), address, op, where)
        return _torch.lazy_bits(plain, t)

    def _save_written(self, known: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for t in _torch_ops.tensors(_torch_ops.written(known.writes, args, kwargs), {}):
            address, nbytes = _torch.storage_span(t)
            if not nbytes:
                continue
            serial = self._pool.serial_of(address) if self._pool.holds(address) else None
            if serial is None:
                key = ("storage", _torch.storage_key(t))
                if key not in self._undo:
                    self._undo[key] = partial(_restore_storage, t.untyped_storage(), address, _bytes(address, nbytes))
            elif serial <= self._first_serial and ("block", serial) not in self._undo:
                self._undo["block", serial] = partial(self._restore_block, address, serial, _bytes(address, nbytes))

    def _restore_block(self, address: int, serial: int, before: ctypes.Array[ctypes.c_char]) -> None:
        if self._pool.serial_of(address) == serial:
            ctypes.memmove(address, before, len(before))

    def _save_generator(self, generator: Generator) -> None:
        key = _torch.generator_key(generator)
        if key not in self._generators:
            self._generators[key] = generator, generator.get_state()


class _NewResults:
    """Moves what one op made into the pool. Views and in-place results, which share memory with an operand, stay."""

    def __init__(self, pool: EmulatedPool, known: OpInfo, given: set[int]) -> None:
        self.stores: list[tuple[tuple[int, ...], Store]] = []  # where in the result, and how a replay writes it
        self.refused: str | None = None
        self.fill = not known.allocates or _torch.fills_empty()
        self._pool, self._given = pool, given
        self._moved: dict[int, Tensor] = {}

    def take(self, value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, Tensor):
            return self._move(value, path)
        if isinstance(value, list | tuple):
            parts = [self.take(v, (*path, i)) for i, v in enumerate(value)]
            return parts if isinstance(value, list) else tuple(parts)
        return value

    def _move(self, value: Tensor, path: tuple[int, ...]) -> Tensor:
        if value.layout is not torch.strided or value.is_quantized:
            self.refused = f"its result is {value.layout}, and the emulator holds dense tensors only. {MEND}."
            return value
        if value.device.type != "cpu" or not value.numel():
            return value
        key = _torch.storage_key(value)
        if key in self._given:
            return value
        nbytes, offset = value.untyped_storage().nbytes(), int(value.storage_offset())
        first = self._moved.get(key)
        if first is None:
            mine = self._moved[key] = self._pool.allocate(nbytes, value.dtype, value.size(), value.stride(), offset)
        else:
            mine = _torch.alias(first, value)
        address = _torch.storage_span(mine)[0]
        store = _writer(_torch.tensor_at(address, nbytes, value.dtype, value.size(), value.stride(), offset, _CPU))
        if self.fill:
            store(value)
        self.stores.append((path, store))
        return mine


def _take_back(undo: dict[tuple[str, int], Callable[[], None]], drawn_from: dict[int, tuple[Generator, Tensor]]) -> None:
    with contextlib.suppress(Exception), _plain():
        for restore in reversed(undo.values()):
            restore()
        for generator, before in drawn_from.values():
            generator.set_state(before)


def _finish(transfers: list[Any]) -> None:
    begun = transfers[:]
    transfers.clear()
    _torch_ranks.done(begun)


def _restore_storage(storage: torch.UntypedStorage, address: int, before: ctypes.Array[ctypes.c_char]) -> None:
    if storage.data_ptr() == address and storage.nbytes() == len(before):
        ctypes.memmove(address, before, len(before))


def _bytes(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    copy = (ctypes.c_char * nbytes)()
    ctypes.memmove(copy, address, nbytes)
    return copy


def _writer(baked: Tensor) -> Store:
    """How to write a result of the same geometry into ``baked``. An expanded dimension has one value, which is written once."""
    if 0 not in baked.stride() or not any(s == 0 and n > 1 for n, s in zip(baked.size(), baked.stride(), strict=True)):
        return baked.copy_
    once = tuple(slice(0, 1) if s == 0 else slice(None) for s in baked.stride())
    narrow = baked[once]
    return lambda value: narrow.copy_(value[once])


def _joined(stores: list[tuple[tuple[int, ...], Store]]) -> Store | None:
    """One store for all tensors in an op's result; each has its path in the nested result."""
    if not stores:
        return None
    if len(stores) == 1 and not stores[0][0]:
        return stores[0][1]

    def store(result: Any) -> None:
        for path, one in stores:
            value = result
            for i in path:
                value = value[i]
            one(value)

    return store


def _bound(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    return partial(run, *args, **kwargs)


def _map(bake: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return bake(value)
    if isinstance(value, list | tuple):
        return type(value)(_map(bake, v) for v in value)
    return value


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Run torch's own kernels: neither function modes nor dispatch modes see a call."""
    with _torch.function_modes_off(), _torch.dispatch_modes_off():
        yield
