"""How the command says what went wrong: segue's errors in a line, the user's own from the first frame of their code on."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

import torch
import typer

_SEGUE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MACHINERY = (_SEGUE, *(os.path.dirname(package.__file__ or "") + os.sep for package in (typer, torch)), "<frozen ")


def explained(error: BaseException) -> str:
    """The traceback of a user's error without the frames that lead to their code, and its last line.

    An error that no code of the user's took part in has its whole traceback: it is a fault of segue's.
    """
    told = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = told
    while part is not None:
        frames = list(part.stack)
        first = next((i for i, frame in enumerate(frames) if _is_users(frame.filename)), 0)
        part.stack[:] = frames[first:]
        part = part.__cause__ or part.__context__
    return "".join(told.format()) + f"segue: {type(error).__name__}: {error}"


def place(error: BaseException) -> str | None:
    """``file.py, line 12, in make``: the innermost line of the user's own code that the error passed."""
    found, tb = None, error.__traceback__
    while tb is not None:
        found, tb = _line(tb) or found, tb.tb_next
    return found


def _line(tb: TracebackType) -> str | None:
    code = tb.tb_frame.f_code
    if not _is_users(code.co_filename) or "site-packages" in Path(code.co_filename).parts:
        return None
    file = os.path.relpath(code.co_filename)
    return f"{code.co_filename if file.startswith(os.pardir) else file}, line {tb.tb_lineno}, in {code.co_name}"


def _is_users(file: str) -> bool:
    """Whether a frame's file is neither segue's, torch's, the command line's nor Python's own machinery of imports."""
    command = os.path.realpath(sys.argv[0]) == os.path.realpath(file)
    machinery = file.endswith("contextlib.py") or Path(file).parent.name in ("click", "importlib")
    return not (file.startswith(_MACHINERY) or command or machinery)
