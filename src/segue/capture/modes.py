"""Modes: those of the caller, which segments bake and replays compare, and those that a forward enters around a break.

What a segment's ops read of autocast, default dtype, precision, deterministic algorithms and so on is in its graph for good. So
a replay under other modes than the capture's is refused. Breaks run live, under the caller's modes, and those that the forward
itself had entered around them at capture are entered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from segue import _torch, _torch_modes
from segue.capture.context_paths import is_plain
from segue.capture.object_graph import reached
from segue.capture.thread_state import state
from segue.errors import CaptureError, ReplayError

Enter = Callable[[], AbstractContextManager[Any]]

AUTOCAST, FUNCTION_MODES, DISPATCH_MODES = "autocast", "function modes", "dispatch modes"
# Modes that only some ops read. The others count as read by every segment.
READ_BY_SOME = frozenset(
    {_torch_modes.DEFAULT_DTYPE.name, _torch_modes.ATTENTION.name, _torch_modes.CUDNN.name, _torch_modes.DEVICE}
)
_NONE: Any = object()


@dataclass(frozen=True)
class Modes:
    """What holds at one place of a thread's code. ``flags``: values by name. ``autocast``: on or off and dtype by type of device.
    ``functions``, ``dispatches``: torch's function and dispatch modes, the innermost last.
    """

    flags: dict[str, Any]
    autocast: dict[str, tuple[bool, torch.dtype]]
    functions: list[Any]
    dispatches: list[Any]
    inference: bool
    variables: Context

    def named(self, kind: str) -> dict[str, Any]:
        """By name, what decides about ops on devices of type ``kind``, as values that can be compared."""
        on, dtype = self.autocast[kind]
        device = [d for d in map(_torch_modes.sets_device, self.functions) if d is not None]
        others = [m for m in self.functions if _torch_modes.sets_device(m) is None]
        return {
            **self.flags,
            AUTOCAST: dtype if on else None,
            _torch_modes.DEVICE: device[-1] if device else None,
            FUNCTION_MODES: list(map(_decided_by, others)),
            DISPATCH_MODES: list(map(_decided_by, self.dispatches)),
        }


def modes_now(kind: str) -> Modes:
    """The modes that hold for this thread now. ``kind``: a type of device, beside the CPU."""
    return Modes(
        flags={flag.name: flag.read() for flag in _torch_modes.FLAGS},
        autocast={k: (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in {kind, "cpu"}},
        functions=_torch_modes.function_modes(),
        dispatches=_torch_modes.dispatch_modes(),
        inference=torch.is_inference_mode_enabled(),
        variables=copy_context(),
    )


class SetVariables:
    """The context variables that forwards set around the calls of one break point. ``fn``: its function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._reads: dict[ContextVar[Any], bool] = {}
        self._seen: dict[tuple[ContextVar[Any], int | None], list[Any]] = {}  # plain values in references, by bucket

    def note(self) -> None:
        """Note those that the running reference has set."""
        if state.variables is not None:
            for variable, value, _ in variables_set(state.variables, copy_context()):
                seen = self._seen.setdefault((variable, state.rows), [])
                if is_plain(value) and value not in seen:
                    seen.append(value)

    def another(self, variable: ContextVar[Any], value: Any) -> list[str] | None:
        """The values that references of this bucket gave the variable, in words, if ``value`` is none of them; else None."""
        seen = self._seen.get((variable, state.rows))
        return None if not seen or value in seen else list(map(repr, seen))

    def reads(self, variable: ContextVar[Any]) -> bool:
        """Whether the function reaches a context variable by a name. The search takes milliseconds, and is made once."""
        if variable not in self._reads:
            self._reads[variable] = any(value is variable for _, value in reached(self._fn))
        return self._reads[variable]


@dataclass(frozen=True)
class OtherMode:
    """A mode that is not what it was at the capture. ``then`` and ``now``: its values in words."""

    name: str
    then: str
    now: str


class CallerModes:
    """The caller's modes that a capture saw, which its replays must find again.

    Args:
        kind: the type of the device.
        began: the modes when the capture began.
        read: of :data:`READ_BY_SOME`, those that something captured has read.

    Modes that the captured forward has left changed are its own doing, and not compared.
    """

    def __init__(self, kind: str, began: Modes, read: set[str] | frozenset[str]) -> None:
        ended = modes_now(kind).named(kind)
        self._kind = kind
        self._held = {
            name: value
            for name, value in began.named(kind).items()
            if ended[name] == value and (name in read or name not in READ_BY_SOME)
        }
        held = [flag for flag in _torch_modes.FLAGS if flag.name in self._held]
        self._getters = [getter for flag in held for getter in flag.getters(kind)]
        cast = self._held.get(AUTOCAST) is not None
        self._getters.append(partial(_torch.autocast_state, kind) if cast else _torch.any_autocast)
        # A mode of the user's own may change what it does, so its attributes are compared each time.
        self._own = bool(self._held.get(FUNCTION_MODES) or self._held.get(DISPATCH_MODES))
        self._same = _never if self._own else _quick_check(self._getters, began.functions)

    def other(self) -> OtherMode | None:
        """The first mode that is not as it was; None if all are, which mostly takes half a microsecond."""
        if self._same():
            return None
        modes = modes_now(self._kind)
        now = modes.named(self._kind)
        for name, then in self._held.items():
            if now[name] != then:
                return OtherMode(name, _say(name, then), _say(name, now[name]))
        if not self._own:  # what differs means the same
            self._same = _quick_check(self._getters, modes.functions)
        return None


def _quick_check(getters: list[Callable[[], Any]], functions: list[Any]) -> Callable[[], bool]:
    """Says whether getters give what they give now and function modes are these; False too where it can't tell quickly."""
    function_depth, dispatch_depth = _torch_modes.function_depth, _torch_modes.dispatch_depth
    values = [getter() for getter in getters]
    if not functions:
        return lambda: not function_depth() and not dispatch_depth() and [getter() for getter in getters] == values

    def same() -> bool:
        as_then = _torch_modes.function_modes() == functions
        return as_then and not dispatch_depth() and [getter() for getter in getters] == values

    return same


def _never() -> bool:
    return False


def _decided_by(mode: Any) -> tuple[type, dict[str, Any]]:
    """What decides about what a mode does, as far as it can be compared: its class and its plain attributes."""
    return type(mode), {k: v for k, v in vars(mode).items() if is_plain(v) and not k.startswith("_")}


def _described(decided_by: tuple[type, dict[str, Any]]) -> str:
    kind, own = decided_by
    return f"{kind.__name__}({', '.join(f'{k}={v!r}' for k, v in own.items())})"


def _say(name: str, value: Any) -> str:
    if name == AUTOCAST:
        return "off" if value is None else f"to {value}"
    if name in (FUNCTION_MODES, DISPATCH_MODES):
        return ", ".join(map(_described, value)) or "none"
    return next((flag.show(*value) for flag in _torch_modes.FLAGS if flag.name == name), str(value))


def entered_by_forward(
    began: Modes, here: Modes, grad: bool, known: SetVariables, where: str
) -> tuple[list[Enter], dict[str, Any]]:
    """What the forward entered between the capture's begin and a break's call, each as what enters it again at a replay.

    Args:
        grad: whether the forward turned gradients on.
        known: what is known of the context variables that are set around the break.
        where: what errors call the break.

    Returns:
        that, and what it is by name, in plain values.

    Raises:
        CaptureError: it can't be entered again: the forward left a mode of the caller's, or set a context variable that the break
            reads to something that may change.
    """
    enters: list[Enter] = []
    plain: dict[str, Any] = {}
    if here.inference != began.inference or grad:
        enters.append(partial(_gradients, here.inference, grad))
    for kind, (on, dtype) in here.autocast.items():
        if (on, dtype) != began.autocast[kind] and (on or began.autocast[kind][0]):
            enters.append(partial(torch.autocast, kind, dtype=dtype, enabled=on))
            plain[f"autocast on {kind}"] = dtype if on else None
    for flag in _torch_modes.FLAGS:
        if here.flags[flag.name] != began.flags[flag.name]:
            enters.append(partial(flag.set_to, here.flags[flag.name]))
            plain[flag.name] = flag.show(*here.flags[flag.name])
    for mode in began.functions:
        if not any(m is mode for m in here.functions):
            raise CaptureError(
                f"{where}: the forward has left {type(mode).__qualname__}, a mode of the caller's, before it calls the break. A "
                "replay runs breaks under the caller's modes: enter and leave such a mode in one place."
            )
    for mode in here.functions:
        if not any(m is mode for m in began.functions):
            enters.append(partial(_torch_modes.inside_function_mode, mode))
            plain[f"function mode {type(mode).__name__}"] = str(_torch_modes.sets_device(mode) or _described(_decided_by(mode)))
    for variable, value, before in variables_set(began.variables, here.variables):
        # Frameworks keep records and functions of their own in context variables.
        if (not is_plain(value) or callable(value)) and not known.reads(variable):
            continue
        if not is_plain(value):
            raise CaptureError(
                f"{where}: the forward has set the context variable {variable.name!r} to a {type(value).__qualname__}, which may "
                "be another one in the next forward, and a replay would go on using this one. Set it inside the break, or hand "
                "the value to the break: by the live context, or as a tensor."
            )
        if (other := known.another(variable, value)) is not None:
            raise CaptureError(
                f"{where}: the forward has set the context variable {variable.name!r} to {value!r}, and to {', '.join(other)} in "
                "its warm-up. A replay would go on with the value of the capture. Set it inside the break, or hand the value to "
                "the break by the live context."
            )
        plain[f"context variable {variable.name}"] = value
        enters.append(partial(_variable, variable, value, before, where))
    return enters, plain


def variables_set(began: Context, here: Context) -> Iterator[tuple[ContextVar[Any], Any, Any]]:
    """The context variables that have other values ``here`` than where something ``began``, with both values."""
    for variable, value in here.items():
        before = _value(variable, began)
        if value is not before:
            yield variable, value, before


def under(enters: Sequence[Enter], fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` run under what ``enters`` enters."""
    if not enters:
        return fn

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as scope:
            for enter in enters:
                scope.enter_context(enter())
            return fn(*args, **kwargs)

    return run


@contextmanager
def _gradients(inference: bool, grad: bool) -> Iterator[None]:
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        yield


def _value(variable: ContextVar[Any], context: Context) -> Any:
    try:
        return context[variable] if variable in context else Context().run(variable.get)
    except LookupError:
        return _NONE


def _said(value: Any) -> str:
    return "not set" if value is _NONE else repr(value)


@contextmanager
def _variable(variable: ContextVar[Any], value: Any, before: Any, where: str) -> Iterator[None]:
    """``variable`` as the forward had set it at capture. What it set may depend on what the caller had set."""
    try:
        now = variable.get()  # its default, where the caller has set nothing
    except LookupError:
        now = _NONE
    if not any(now is known or (is_plain(now) and type(now) is type(known) and now == known) for known in (before, value)):
        raise ReplayError(
            f"{where}: the caller's context variable {variable.name!r} is {_said(now)} and was {_said(before)} at capture, when "
            f"the forward set it to {value!r}. A replay can't know what it would set now: hand the value to the break by the "
            "live context, or recapture()."
        )
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
