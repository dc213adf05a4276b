"""The user's line that is running: that of the nearest stack frame which is neither torch's nor segue's."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import Any

import torch

_SKIPPED = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_ALSO = ("<frozen ", "contextlib.py")


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
