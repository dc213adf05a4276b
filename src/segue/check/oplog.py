"""A log of every op that a forward dispatches: what Python decided about it, what it read and wrote, and at which line."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from segue import _source_lines, _torch, _torch_ops, devices
from segue.capture import op_watch, program
from segue.capture.thread_state import state

Keep = Literal["nothing", "values", "memory"]

_SEGUE = os.path.dirname(_torch.__file__) + os.sep
_PASSED_OVER = (  # files whose frames lie between an op and the code that asked for it
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(__file__) + os.sep,
    os.path.dirname(devices.__file__) + os.sep,
    op_watch.__file__,
)
EMPTY_OPS = {  # allocate without writing
    "aten::empty.memory_format", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted", "aten::new_empty",
    "aten::new_empty_strided",
}  # fmt: skip
_MOST_VIEWS = 256  # of one storage
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_plain_dispatch = Tensor.__torch_dispatch__


@dataclass(slots=True)
class LoggedOp:
    """One op as the forward called it; the ops that a composite op runs inside aren't listed.

    ``name``: as in ``aten::add.Tensor``. ``where``: the line of the forward. ``plain``: arguments that aren't tensors, and
    scalars on the host that a graph would hold as numbers, as text by name. ``shapes``: of the operands. ``reads``,
    ``writes``: storage addresses, which identify storages only while the log keeps the tensors; a view writes nothing.
    ``inside``: a break called it. ``ours``: segue called it for its own bookkeeping. ``segment``: the number of the segment
    that was being recorded. ``values``: copies of the results, made right after the op. ``operands``, ``results``: the
    tensors themselves.
    """

    name: str
    where: str
    plain: dict[str, str]
    shapes: tuple[tuple[int, ...], ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inside: bool
    ours: bool
    segment: int
    values: list[Tensor] = field(default_factory=list)
    operands: list[Tensor] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        """The name and line, by which ops of two forwards are matched."""
        return self.name, self.where


@dataclass(frozen=True)
class InPlaceWrite:
    """A tensor that an op wrote in place at the line ``where``. ``cleared``: segue zeroed it, because its rows are padding."""

    tensor: Tensor
    where: str
    cleared: bool


class OpLog:
    """Lists ops in ``ops``, and in-place writes by storage address in ``written``.

    It observes a capture (:func:`segue.capture.op_watch.observing`), or an eager forward under :class:`OpLogMode`.

    Args:
        keep: ``"values"`` keeps copies of all results. ``"memory"`` keeps the tensors themselves, so that their memory isn't
            used again and can be read when everything has run. ``"nothing"`` keeps neither.
    """

    def __init__(self, keep: Keep = "nothing") -> None:
        self.ops: list[LoggedOp] = []
        self.written: dict[int, list[InPlaceWrite]] = {}
        self._keep, self._inside_op = keep, False

    def __call__(self, run: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside_op:
            return run(func, args, kwargs)
        self._inside_op = True
        try:
            result = run(func, args, kwargs)
            if result is not NotImplemented:
                with _torch.function_modes_off():
                    self._note(func, args, kwargs, result)
        finally:
            self._inside_op = False
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        names, written = _signature(func)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        operands = [t for value in given.values() for t in _tensors(value)]
        targets = [t for name in written if name in given for t in _tensors(given[name])]
        results = _tensors(result)
        reads = tuple(map(_key, operands))
        made = [k for k in map(_key, results) if k not in reads]
        op = LoggedOp(
            _torch_ops.op_name(func), _source_lines.caller(), _plain(given, func), tuple(tuple(t.shape) for t in operands),
            reads, (*made, *map(_key, targets)), state.inside_break, _is_ours(),
            0 if state.capture is None else state.capture.graphs,
        )  # fmt: skip
        for t in targets:
            views = self.written.setdefault(_key(t), [])
            if len(views) < _MOST_VIEWS:
                views.append(InPlaceWrite(t.detach(), op.where, op.ours and op.name == "aten::zero_"))
        if self._keep != "nothing":
            op.operands, op.results = operands, [*results, *(t for t in targets if all(t is not r for r in results))]
        if self._keep == "values":
            op.values = [t.detach().clone() for t in op.results]
        self.ops.append(op)


class OpLogMode(_torch.WatchingMode):
    """A context manager that gives a log the ops of an eager forward, or of the breaks of a replay.

    Args:
        fill: a value for all floating-point memory that ops allocate uninitialised; NaN makes every use of it show.
    """

    def __init__(self, log: OpLog, fill: float | None = None) -> None:
        super().__init__()
        self._log, self._fill = log, fill

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(getattr(t, "__torch_dispatch__", _plain_dispatch) is not _plain_dispatch for t in types):
            return NotImplemented
        if _is_launch():  # these ops set the generators that a graph reads, and the forward didn't call them
            return func(*args, **(kwargs or {}))
        return self._log(self._run, func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if self._fill is not None and _torch_ops.op_name(func) in EMPTY_OPS and result.dtype in FLOATS:
            result.fill_(self._fill)
        return result


@functools.cache
def _signature(func: Any) -> tuple[list[str], list[str]]:
    """The names of an op's arguments, and of those that it writes."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    return [a.name for a in arguments], list(_torch_ops.written_arguments(func)[1])


def _plain(given: dict[str, Any], func: Any) -> dict[str, str]:
    return {name: text for name, value in given.items() if (text := _text(value, given, func)) is not None}


def _text(value: Any, given: dict[str, Any], func: Any) -> str | None:
    """An argument as text. None: its value isn't decided by Python, as that of a tensor on the device."""
    if isinstance(value, Tensor):
        if value.dim() or value.device.type != "cpu":
            return None
        lifted = _torch_ops.op_name(func) == "aten::lift_fresh"
        baked = any(t.device.type != "cpu" for v in given.values() for t in _tensors(v))
        return str(value.item()) if lifted or baked else None
    if isinstance(value, Generator):
        return None
    if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
        return str(len(value))
    return repr(value)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided and _has_storage(value) else []
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


def _key(t: Tensor) -> int:
    return _torch.storage_span(t)[0]


def _has_storage(t: Tensor) -> bool:
    try:
        return t.device.type != "meta" and t.untyped_storage().nbytes() >= 0
    except RuntimeError:
        return False  # a wrapper without storage


def _is_ours() -> bool:
    return _asker().startswith(_SEGUE)


def _is_launch() -> bool:
    return _asker() == program.__file__


def _asker() -> str:
    """The file of the code that asked for the op now being logged."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_PASSED_OVER, "<frozen ")) and not name.endswith("contextlib.py"):
            return name
        frame = frame.f_back
    return ""
