"""The user's line that is running: that of the nearest stack frame which is neither torch's nor segue's."""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, cast

import torch

_SKIPPED = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_ALSO = ("<frozen ", "contextlib.py")
_TENSOR_METHODS = torch._tensor.__file__  # those that are written in Python
_LOADS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST"}


def caller() -> str:
    """``file.py:12 in forward`` of the nearest user frame. It walks the frames itself because ``traceback`` takes 300 us."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        known = _known.get(id(code)) or _learn(code)
        if known[1]:
            return f"{known[1]}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return "an unknown place"


def running_call() -> str | None:
    """The name of what the nearest user frame is calling: ``item`` for ``x[0].item()``, ``bool`` for ``bool(x)``.

    For a truth test it is ``__bool__``, for an index ``__getitem__``, and for a method that ``torch.Tensor`` has in Python its
    name, whatever that calls. None where it isn't known.

    Methods of tensors that are written in C leave no frame, so it looks at the instruction. That takes a millisecond.
    """
    frame: FrameType | None = sys._getframe(1)
    method = None
    while frame is not None:
        code = frame.f_code
        if (_known.get(id(code)) or _learn(code))[1]:
            return method or _called(code, frame.f_lasti)
        if code.co_filename == _TENSOR_METHODS:
            method = code.co_name
        frame = frame.f_back
    return None


def _called(code: CodeType, offset: int) -> str | None:
    """The name in the call, or ``__bool__`` for the truth test, that the instruction at ``offset`` of ``code`` makes."""
    before = [i for i in dis.get_instructions(code) if i.offset <= offset]
    now = before.pop()
    if "JUMP" in now.opname or now.opname in ("UNARY_NOT", "TO_BOOL"):
        return "__bool__"
    if "SUBSCR" in now.opname:
        return "__getitem__"
    if "CALL" not in now.opname or now.positions is None or now.positions.col_offset is None:
        return None
    start = now.positions.lineno, now.positions.col_offset
    for i in reversed(before):  # a call begins where the expression of its function does, and that is loaded last by its name
        if i.opname in _LOADS and i.positions is not None and (i.positions.lineno, i.positions.col_offset) == start:
            return str(i.argval)
    return None


def caller_globals() -> list[tuple[dict[str, Any], str, Any]]:
    """The globals that the code of the nearest user frame may read: the dict, the name, and the value."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (_known.get(id(frame.f_code)) or _learn(frame.f_code))[1]:
        frame = frame.f_back
    held = {} if frame is None else frame.f_globals
    return [] if frame is None else [(held, name, held[name]) for name in frame.f_code.co_names if name in held]


def read_by_callers(knows: Callable[[Any], bool]) -> dict[str, bool]:
    """The attributes and texts that the running functions of the user may have read so far, up to where segue called them, with
    whether it was a text.

    ``knows``: only functions count that have a local variable of which this is true, or that call ``current_forward_ctx``.
    """
    found: dict[str, bool] = {}
    user, frame = False, cast("FrameType | None", sys._getframe(1))
    while frame is not None:
        code = frame.f_code
        if (_known.get(id(code)) or _learn(code))[1]:
            user = True
            if "current_forward_ctx" in code.co_names or any(map(knows, frame.f_locals.values())):
                found.update((word, text) for at, word, text in _words(code) if at <= frame.f_lasti)
        elif user and code.co_filename.startswith(_SKIPPED[1]):
            break
        frame = frame.f_back
    return found


def names_in_callers(until: CodeType | None) -> set[str]:
    """The names and texts that the running functions of the user read somewhere, up to where segue called them, or to the one
    whose code is ``until``.
    """
    found: set[str] = set()
    user, frame = False, cast("FrameType | None", sys._getframe(1))
    while frame is not None and frame.f_code is not until:
        code = frame.f_code
        if (_known.get(id(code)) or _learn(code))[1]:
            user = True
            found |= _names(code)
        elif user and code.co_filename.startswith(_SKIPPED[1]):
            break
        frame = frame.f_back
    return found


def caller_code() -> CodeType | None:
    """The code of the nearest user frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (_known.get(id(frame.f_code)) or _learn(frame.f_code))[1]:
        frame = frame.f_back
    return None if frame is None else frame.f_code


@functools.lru_cache(maxsize=256)
def _names(code: CodeType) -> frozenset[str]:
    reads = {*_LOADS, "LOAD_CONST"} - {"LOAD_FAST"}
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in reads and isinstance(i.argval, str))


@functools.lru_cache(maxsize=256)
def _words(code: CodeType) -> list[tuple[int, str, bool]]:
    reads = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST")
    found = [i for i in dis.get_instructions(code) if i.opname in reads and isinstance(i.argval, str)]
    return [(i.offset, i.argval, i.opname == "LOAD_CONST") for i in found]


def in_compiled_code() -> bool:
    """Whether code that inductor has written is running: it allocates unseen, and of its kernels only torch's own are ops."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if "extern_kernels" in frame.f_globals and "assert_size_stride" in frame.f_globals:
            return True
        code = frame.f_code
        if (_known.get(id(code)) or _learn(code))[1]:
            return False
        frame = frame.f_back
    return False


_MOST = 10_000  # entries of the cache
# By a code object's id: the object, held so that no other takes over its id, and its file ("": torch's or segue's).
_known: dict[int, tuple[CodeType, str]] = {}


def _learn(code: CodeType) -> tuple[CodeType, str]:
    name = code.co_filename
    passed = name.startswith((*_SKIPPED, _ALSO[0])) or name.endswith(_ALSO[1])
    if len(_known) > _MOST:
        _known.clear()
    found = _known[id(code)] = code, "" if passed else _short(name)
    return found


def raised(error: BaseException) -> str:
    """``file.py:12 in forward`` of the innermost user frame that ``error`` passed."""
    found, tb = "an unknown place", error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        if not code.co_filename.startswith(_SKIPPED) and not code.co_filename.startswith(_ALSO[0]):
            found = f"{_short(code.co_filename)}:{tb.tb_lineno} in {code.co_name}"
        tb = tb.tb_next
    return found


def line(code: CodeType, number: int | None) -> str:
    """``file.py:12 in forward`` of a line of a function's code."""
    return f"{_short(code.co_filename)}:{number} in {code.co_name}"


def raised_by_call(error: BaseException) -> str | None:
    """What :func:`running_call` says of the call in the innermost user frame that ``error`` passed."""
    found, method, tb = None, None, error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        if (_known.get(id(code)) or _learn(code))[1]:
            found, method = (code, tb.tb_lasti), None
        elif code.co_filename == _TENSOR_METHODS:
            method = method or code.co_name
        tb = tb.tb_next
    return method or (None if found is None else _called(*found))


def of(fn: Any) -> str:
    """``name (file.py:12)`` of a function, method, partial or callable object; the name alone if it has no Python code."""
    inner = getattr(fn, "func", fn)
    name = getattr(inner, "__qualname__", None) or type(fn).__qualname__
    code = getattr(inner, "__code__", None)
    if not isinstance(code, CodeType):
        code = getattr(type(fn).__dict__.get("__call__"), "__code__", None)
    return f"{name} ({_short(code.co_filename)}:{code.co_firstlineno})" if isinstance(code, CodeType) else str(name)


def _short(path: str) -> str:
    return os.sep.join(path.split(os.sep)[-2:])
