"""Refuses what CUDA can't record before CUDA does, and says what its own errors mean, in the words of every device.

CUDA's errors name neither the op nor the user's line nor a remedy, and they invalidate the recording.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue import _source_lines, _torch, _torch_ops
from segue.devices.refusals import (
    FACTORIES,
    HOST_COPY,
    HOST_READ,
    HOST_SCALAR,
    MEND,
    RANDOM_FACTORIES,
    READS,
    check_arguments,
    host_factory,
    is_checked,
    op_refusal,
    pageable,
    refusal,
)
from segue.errors import CaptureError, SegueError

_MOVES = {"to.device", "to.dtype_layout", "to.other", "_to_copy"}
_SLOTS = {"bool": "__bool__", "int": "__int__", "float": "__float__", "complex": "__complex__", "range": "__index__"}
_FROM_DATA = {"tensor": "torch.tensor(...)", "as_tensor": "torch.as_tensor(...)", "asarray": "torch.asarray(...)"}
_FROM_DATA |= {"new_tensor": "Tensor.new_tensor()", "__getitem__": "an index"}
_COMPOSITE = "CompositeImplicitAutograd"


@dataclass(frozen=True, slots=True)
class OpRule:
    """What is worked out once for an op. ``func``: held, so that its id stays its own. ``kernel``: what runs it.

    ``op``: its name without ``aten::``. ``watched``: its calls are checked before they run. ``refused``: why no graph can
    hold a call on the device, or None. ``checked``: the arguments decide. ``made``: for a factory, what calls it.
    """

    func: Any
    kernel: Callable[..., Any]
    op: str
    watched: bool
    refused: str | None
    checked: bool
    made: str | None


_rules: dict[int, OpRule] = {}  # by the id of the function, which is a third of what its hash costs


def _learn(func: Any) -> OpRule:
    kernel = _torch_ops.kernel(func)
    if not isinstance(func, torch._ops.OpOverload):  # a higher-order op
        rule = OpRule(func, kernel, str(func), False, None, False, None)
    else:
        op = _torch_ops.op_name(func).removeprefix("aten::")
        base = op.split(".")[0]
        refused, checked = op_refusal(func), is_checked(func)
        made = f"torch.{base}" if base in FACTORIES else None
        watched = refused is not None or checked or made is not None or op in _MOVES
        rule = OpRule(func, kernel, op, watched, refused, checked, made)
    _rules[id(func)] = rule
    return rule


class OpChecks:
    """Runs the ops of one segment, refuses those that no graph can hold, and explains CUDA's own refusals.

    It knows the host's tensors that the segment's ops have made. Work on the host alone is fine: it happens once, at the capture.
    """

    def __init__(self) -> None:
        # By storage: the tensor, held so that no later one takes over the identity, and the refusal of its copy to the device.
        self._made: dict[int, tuple[Tensor, CaptureError]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op.

        Raises:
            CaptureError: no graph can hold this call.
        """
        rule = _rules.get(id(func)) or _learn(func)
        try:
            return self._run_watched(rule, args, kwargs) if rule.watched else rule.kernel(*args, **kwargs)
        except Exception as e:
            named = self._explain(e, rule, args, kwargs)
            if named is None:
                raise
            raise named from e

    def _run_watched(self, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check(rule, _torch_ops.tensors(args, kwargs), args, kwargs)
        result = rule.kernel(*args, **kwargs)
        if (rule.made or rule.op == "lift_fresh") and isinstance(result, Tensor) and _on_host(result):
            self._note_made(rule, result)
        return result

    def _note_made(self, rule: OpRule, t: Tensor) -> None:
        random = rule.made is not None and rule.made.removeprefix("torch.") in RANDOM_FACTORIES
        if not (random or t.dim()):
            return  # an op of the device takes it as a number
        error = (
            refusal(rule.op, pageable(tuple(t.shape)))
            if rule.made is None
            else refusal(f"{rule.made}(...)", host_factory(rule.made))
        )
        if random:  # it would be drawn once, at the capture
            raise error
        self._made[_torch.storage_key(t)] = t, error

    def check(self, rule: OpRule, operands: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise CaptureError if no graph can hold this call of a watched op."""
        op = rule.op
        if op in _MOVES:
            self._check_move(op, args, kwargs)
        if all(map(_on_host, operands)) or op == "lift_fresh":  # which takes a tensor as it is
            return
        if rule.refused is not None:
            name = _reading(op)
            raise refusal(name, rule.refused if name == op else HOST_READ)
        if op == "copy_":
            self._check_copy(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        elif rule.checked:
            why = check_arguments(op, args, kwargs, lambda t: isinstance(t, Tensor) and _on_host(t) and not t.dim())
            if why is not None:
                raise refusal(op, why)
            for t in args[1] if op.startswith(("index", "_index", "_unsafe_index")) else ():
                if isinstance(t, Tensor) and _on_host(t) and t.dim():
                    raise self._copied(t, op)

    def _explain(self, error: Exception, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureError | None:
        """The refusal that stands for torch's error of a call; None if the error has nothing to do with the recording."""
        if isinstance(error, SegueError | torch.OutOfMemoryError):
            return None
        operands = _torch_ops.tensors(args, kwargs)
        if self._made and not all(map(_on_host, operands)):
            for t in operands:
                if _on_host(t) and _torch.storage_key(t) in self._made:
                    return self._copied(t, rule.op)
        if (named := _inside(rule.func, args, kwargs)) is not None or not _is_about_recording(error):
            return named
        return _in_python(error) or refusal(rule.op, _refused_by_cuda(error))

    def _check_move(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = kwargs.get("device") if op in ("to.dtype_layout", "_to_copy") else args[1]
        source, place = args[0], target.device if isinstance(target, Tensor) else target
        if place is None or place.type == source.device.type:
            return
        if place.type == "cpu":
            raise refusal(_reading('Tensor.to("cpu")'), HOST_READ)
        if not _on_host(source):
            return
        if not source.dim():
            call = _source_lines.running_call() or ""
            raise refusal(_FROM_DATA.get(call, "Tensor.to(...)"), HOST_SCALAR)
        if not _waits_for_nobody(source, args[3] if len(args) > 3 else kwargs.get("non_blocking", False)):
            raise self._copied(source, op)

    def _check_copy(self, to: Tensor, source: Tensor, non_blocking: bool) -> None:
        if _on_host(to) and not _on_host(source):
            if not _waits_for_nobody(to, non_blocking):
                raise refusal("copy_", HOST_READ)
        elif _on_host(source) and not _on_host(to):
            if not source.dim():
                raise refusal("copy_", HOST_SCALAR)
            if not _waits_for_nobody(source, non_blocking):
                raise self._copied(source, "copy_")

    def _copied(self, t: Tensor, op: str) -> CaptureError:
        known = self._made.get(_torch.storage_key(t))
        return refusal(op, HOST_COPY) if known is None else known[1]


def clearer_error(error: BaseException) -> CaptureError | None:
    """The refusal that stands for an error that reached the capture without passing through an op that it saw; None if it has
    nothing to do with the recording.
    """
    to_numpy = isinstance(error, TypeError) and "device type tensor to numpy" in str(error)
    if not to_numpy and not _is_about_recording(error):
        return None
    if (named := _in_python(error)) is not None:
        return named
    call = _source_lines.raised_by_call(error)
    return refusal(f"{call}()" if call else "what ran", _refused_by_cuda(error), _source_lines.raised(error))


def _is_about_recording(error: BaseException) -> bool:
    """Whether an error of torch's says that something is impossible while a stream is captured."""
    words = ("captur",) if isinstance(error, torch.AcceleratorError) else ("graph capture", "capturing", "capture mode")
    usual = isinstance(error, RuntimeError) and not isinstance(error, SegueError | torch.OutOfMemoryError)
    return usual and any(word in str(error).lower() for word in words)


def _refused_by_cuda(error: BaseException) -> str:
    first = str(error).partition("\n")[0].rstrip(".")
    return (
        f"CUDA refused it while it recorded ({first}). A graph holds work of the device alone: nothing in it may wait for the "
        f"device, read its values on the host, or copy from pageable memory. {MEND}."
    )


def _in_python(error: BaseException) -> CaptureError | None:
    """The refusal of the call in the innermost user frame that ``error`` passed, if that reads the host or copies from it."""
    call, where = _source_lines.raised_by_call(error) or "", _source_lines.raised(error)
    call = _SLOTS.get(call, call)
    if call in READS:
        return refusal(f"Tensor.{call}()", HOST_READ, where)
    return refusal(_FROM_DATA[call], pageable(None), where) if call in _FROM_DATA else None


def _reading(op: str) -> str:
    """The method that the user's code calls to read a tensor on the host; ``op`` where it calls none."""
    call = _source_lines.running_call() or ""
    call = _SLOTS.get(call, call)
    if call in READS:
        return f"Tensor.{call}()"
    return "Tensor.__bool__()" if op == "is_nonzero" else op


def _inside(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureError | None:
    """What is refused inside a composite op, of which only the whole was seen: it is run once more, without memory."""
    if not isinstance(func, torch._ops.OpOverload) or not _torch_ops.has_kernel(_torch_ops.op_name(func), _COMPOSITE):
        return None
    try:
        with _Looking():
            _torch_ops.open_composite(func, _COMPOSITE, *_without_memory(args), **_without_memory(kwargs))
    except CaptureError as e:
        return e.with_traceback(None)
    except Exception:
        return None
    return None


class _Looking(_torch.WatchingMode):
    """Checks ops on tensors without memory, composite ones by what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self._host = OpChecks()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        rule, kwargs = _rules.get(id(func)) or _learn(func), kwargs or {}
        if rule.watched:
            self._host.check(rule, _torch_ops.tensors(args, kwargs), args, kwargs)
        if not rule.checked and _torch_ops.has_kernel(_torch_ops.op_name(func), _COMPOSITE):
            with self:
                return _torch_ops.open_composite(func, _COMPOSITE, *args, **kwargs)
        return rule.kernel(*args, **kwargs)


def _without_memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {key: _without_memory(v) for key, v in value.items()}
    return type(value)(map(_without_memory, value)) if isinstance(value, list | tuple) else value


def _on_host(t: Tensor) -> bool:
    return t.device.type == "cpu"


def _waits_for_nobody(host: Tensor, non_blocking: bool) -> bool:
    """Whether a copy from or to ``host`` is recorded as such: its memory is pinned, and nobody waits for the copy."""
    return non_blocking and host.is_pinned()
