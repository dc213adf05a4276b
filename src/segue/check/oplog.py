"""Every dispatched op of a forward, in order: what Python decided about it, what it read and made, and where."""

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

import segue
from segue import _source_lines, _torch
from segue.capture.thread_state import state

Keep = Literal["nothing", "values", "memory"]

_SEGUE = os.path.dirname(segue.__file__) + os.sep
_SEEN_THROUGH = (  # frames between an op and whoever asked for it
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(__file__) + os.sep,
    os.path.join(_SEGUE, "devices") + os.sep,
    os.path.join(_SEGUE, "capture", "op_watch.py"),
)
_PROGRAM = os.path.join(_SEGUE, "capture", "program.py")
EMPTY = {
    "aten::empty.memory_format", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted", "aten::new_empty",
    "aten::new_empty_strided",
}  # fmt: skip
_MOST_VIEWS = 256  # of one storage
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_subclass_free = Tensor.__torch_dispatch__


@dataclass(slots=True)
class Op:
    """One op as the forward called it; what a composite op does inside isn't listed.

    ``plain``: its arguments that aren't tensors, and tensors that live on the host, by name. ``reads``, ``writes``:
    addresses of storages, which mean something while the log keeps the tensors; a view writes nothing. ``inside``:
    called in a break. ``ours``: segue's own bookkeeping. ``segment``: of the capture. ``values``: its results as they
    were right after it; ``operands`` and ``results``: the tensors themselves.
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
        """What makes two ops of two runs the same one."""
        return self.name, self.where


@dataclass(frozen=True)
class Written:
    """A tensor that was written in place. ``cleared``: by segue, because its rows are padding."""

    tensor: Tensor
    where: str
    cleared: bool


class OpLog:
    """An observer that lists ops, for a capture (:func:`segue.capture.op_watch.observing`) or under :class:`Trace`.

    Args:
        keep: ``"values"``: copies of all results. ``"memory"``: the tensors, so that their memory isn't used again and
            can be looked at when everything has run.
    """

    def __init__(self, keep: Keep = "nothing") -> None:
        self.ops: list[Op] = []
        self.written: dict[int, list[Written]] = {}  # by address
        self._keep, self._inner = keep, False

    def __call__(self, run: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inner:
            return run(func, args, kwargs)
        self._inner = True
        try:
            result = run(func, args, kwargs)
            if result is not NotImplemented:
                with _torch.function_modes_off():
                    self._note(func, args, kwargs, result)
        finally:
            self._inner = False
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        names, written = _signature(func)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        operands = [t for value in given.values() for t in _tensors(value)]
        targets = [t for name in written if name in given for t in _tensors(given[name])]
        results = _tensors(result)
        reads = tuple(map(_key, operands))
        made = [k for k in map(_key, results) if k not in reads]
        op = Op(
            _torch.op_name(func), _source_lines.caller(), _plain(given, func), tuple(tuple(t.shape) for t in operands),
            reads, (*made, *map(_key, targets)), state.inside_break, _is_ours(),
            0 if state.capture is None else state.capture.graphs,
        )  # fmt: skip
        for t in targets:
            views = self.written.setdefault(_key(t), [])
            if len(views) < _MOST_VIEWS:
                views.append(Written(t.detach(), op.where, op.ours and op.name == "aten::zero_"))
        if self._keep != "nothing":
            op.operands, op.results = operands, [*results, *(t for t in targets if all(t is not r for r in results))]
        if self._keep == "values":
            op.values = [t.detach().clone() for t in op.results]
        self.ops.append(op)


class Trace(_torch.WatchingMode):
    """Shows a log the ops of an eager forward, or of the breaks of a replay.

    ``fill``: what uninitialised floating-point memory is filled with, so that a use of it shows.
    """

    def __init__(self, log: OpLog, fill: float | None = None) -> None:
        super().__init__()
        self._log, self._fill = log, fill

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(getattr(t, "__torch_dispatch__", _subclass_free) is not _subclass_free for t in types):
            return NotImplemented
        if _is_launch():  # torch sets the generators that the graph reads
            return func(*args, **(kwargs or {}))
        return self._log(self._run, func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if self._fill is not None and _torch.op_name(func) in EMPTY and result.dtype in FLOATS:
            result.fill_(self._fill)
        return result


@functools.cache
def _signature(func: Any) -> tuple[list[str], list[str]]:
    """Names of an op's arguments, and of those it writes."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    return [a.name for a in arguments], list(_torch.written_arguments(func)[1])


def _plain(given: dict[str, Any], func: Any) -> dict[str, str]:
    return {name: text for name, value in given.items() if (text := _text(value, given, func)) is not None}


def _text(value: Any, given: dict[str, Any], func: Any) -> str | None:
    if isinstance(value, Tensor):
        if value.dim() or value.device.type != "cpu":
            return None
        lifted = _torch.op_name(func) == "aten::lift_fresh"
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
    return _asker() == _PROGRAM


def _asker() -> str:
    """The file of whoever asked for the op that is being seen."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if (
            not name.startswith(_SEEN_THROUGH)
            and not name.startswith("<frozen ")
            and not name.endswith("contextlib.py")
        ):
            return name
        frame = frame.f_back
    return ""
