"""Functions compiled once for every length: fused kernels inside segments."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor

from segue import _source_lines, _torch, devices
from segue.errors import CaptureError, UsageError

log = logging.getLogger("segue")


class Compiled:
    """A function that is compiled at its first call on a device that runs compiled code. :func:`compile_dynamic` makes it.

    ``seconds``: what compiling has taken so far. ``failed``: why it runs as its Python, if compiling failed.
    """

    def __init__(self, fn: Callable[..., Any], retry: bool) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._torchdynamo_orig_callable = fn  # as on every compiled function: whoever looks for compiled code finds this
        self._fn, self._retry = fn, retry
        self._run: Callable[..., Any] | None = None
        self.seconds, self.failed = 0.0, ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = next(_tensors((args, kwargs)), None)
        if first is None or self.failed or torch.compiler.is_compiling() or not devices.runs_compiled(first.device):
            return self._fn(*args, **kwargs)
        if self._run is None:
            self._run = torch.compile(self._fn, dynamic=True)
        args, kwargs = _plain(args), _plain(kwargs)
        graphs, start = _torch.compiled_graphs(), time.perf_counter()
        try:
            return self._run(*args, **kwargs)
        except Exception as e:
            if not _torch.is_compile_error(e):
                raise
            self._give_up(e)
            return self._fn(*args, **kwargs)
        finally:
            if _torch.compiled_graphs() != graphs:
                self.seconds += time.perf_counter() - start

    def __get__(self, obj: Any, cls: type | None = None) -> Any:
        return self if obj is None else MethodType(self, obj)  # a method, where it was made in a class body

    def _give_up(self, error: Exception) -> None:
        first = (str(error).strip().splitlines() or ["no reason given"])[0]
        text = (
            f"{_source_lines.of(self._fn)} could not be compiled: {type(error).__name__}: {first}. Compiling needs triton and a "
            "C compiler. Install them, or capture the function as it is: leave out compile=True."
        )
        if not self._retry:
            raise CaptureError(text) from error
        self.failed = text
        log.warning("segue: %s It runs as its Python from now on, with the kernels that that launches", text)


def compile_dynamic(fn: Callable[..., Any], *, on_failure: Literal["raise", "eager"] = "raise") -> Compiled:
    """Compile a function of tensors once, for every number of tokens, so that it can be captured in every bucket.

    Call the result where ``fn`` was called, inside a :class:`~segue.GraphRunner`'s function or a trunk. The warm-up of the first
    bucket compiles it; captures and replays compile nothing. Break points inside end a compiled graph by themselves. On the
    emulator it runs as its Python, with the same answers. Fused kernels round differently than the ops one by one: what a replay
    equals bit for bit is the compiled function.

    ``fn`` must not write tensors that it is given: what compiled code writes is seen by nobody, so that a replay that is refused,
    as a tensor was re-pointed, may have written them.

    Dynamo takes two sizes that are equal at the first call for one size, and a size of 1 for a constant. So the first number of
    tokens should be above 1 and equal no other size in the function; otherwise it is compiled once more for another number.

    Args:
        fn: a function or method over tensors; a module's ``forward``.
        on_failure: ``"eager"``: where it can't be compiled it runs as its Python, which is logged once.

    Raises:
        UsageError: ``fn`` is no function, or ``on_failure`` no such word. When it is called, CaptureError: it can't be compiled.
    """
    if not callable(fn):
        raise UsageError(f"compile_dynamic compiles a function; got a {type(fn).__qualname__}")
    if on_failure not in ("raise", "eager"):
        raise UsageError(f'on_failure={on_failure!r} is neither "raise" nor "eager"')
    return Compiled(fn, on_failure == "eager")


def as_input(t: Tensor) -> Tensor:
    """``t`` as compiled code should get it that goes on after eager code: a plain tensor.

    Compiled code guards on whether a tensor is an inference tensor, and on all strides. What a forward makes is one, what it is
    given is not, and what a break hands on is one at times; a dimension of size 1 has any stride. As plain aliases, whose strides
    of such dimensions follow from the others, all are alike, and nothing is compiled twice for it. Without dynamo in the
    process, and where compiled code runs as its Python, it is ``t`` itself.
    """
    if "torch._dynamo" not in sys.modules or t.layout is not torch.strided or not devices.runs_compiled(t.device):
        return t
    with _torch.dispatch_modes_off():
        return _torch.alias(t, strides=_settled_strides(t))


def _settled_strides(t: Tensor) -> list[int]:
    strides, behind = list(t.stride()), 1
    for dim in reversed(range(t.dim())):
        if t.shape[dim] == 1:
            strides[dim] = behind
        behind = strides[dim] * t.shape[dim]
    return strides


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return as_input(value)
    if type(value) in (tuple, list):
        return type(value)(_plain(v) for v in value)
    return {k: _plain(v) for k, v in value.items()} if type(value) is dict else value


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _tensors(v)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
