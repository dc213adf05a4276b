"""The modes that decide what torch's ops compute: how to read each, and how to set it. Private calls, as in ``_torch``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._device import DeviceContext

from segue import _torch

_torch.require(
    *("torch._C._get_fp32_precision_getter", "torch._C._set_fp32_precision_setter"),
    *("torch._C._len_torch_dispatch_stack", "torch._C._get_dispatch_stack_at", "torch._C._get_sdp_priority_order"),
    *("torch._C._get_cublas_allow_fp16_accumulation", "torch._C._set_cublas_allow_fp16_accumulation"),
)
_C: Any = torch._C
_PLACES = DeviceContext.__torch_function__.__code__


@dataclass(frozen=True, slots=True)
class Flag:
    """A mode of the whole process. ``parts``: quick getters of its values. ``write`` sets such values, ``show`` says them.

    ``means``: what a getter's value means, where two mean the same. ``cpu_only``: so many parts, the last, are of the CPU alone.
    """

    name: str
    parts: tuple[Callable[[], Any], ...]
    write: Callable[..., object]
    show: Callable[..., str] = str
    means: Callable[[Any], Any] | None = None
    cpu_only: int = 0

    def read(self) -> tuple[Any, ...]:
        """The mode's values now."""
        found = (part() for part in self.parts)
        return tuple(found) if self.means is None else tuple(map(self.means, found))

    def getters(self, kind: str) -> tuple[Callable[[], Any], ...]:
        """The getters that concern devices of type ``kind``."""
        return self.parts if kind == "cpu" else self.parts[: len(self.parts) - self.cpu_only]

    @contextmanager
    def set_to(self, values: tuple[Any, ...]) -> Iterator[None]:
        """Within this block the mode has these values."""
        before = self.read()
        self.write(*values)
        try:
            yield
        finally:
            self.write(*before)


def _precision(value: str) -> str:
    return "ieee" if value == "none" else value  # what nobody has set is exact


def _set_matmul_precision(cuda: str, cpu: str) -> None:
    whole = {("ieee", "ieee"): "highest", ("tf32", "tf32"): "high", ("tf32", "bf16"): "medium"}.get((cuda, cpu))
    if whole is not None:
        torch.set_float32_matmul_precision(whole)
        return
    _C._set_fp32_precision_setter("cuda", "matmul", cuda)
    _C._set_fp32_precision_setter("mkldnn", "matmul", cpu)


def _set_reductions(fp16: Any, bf16: Any, accumulation: bool) -> None:
    _C._set_cublas_allow_fp16_reduced_precision_reduction(*(fp16 if isinstance(fp16, tuple) else (fp16,)))
    _C._set_cublas_allow_bf16_reduced_precision_reduction(*(bf16 if isinstance(bf16, tuple) else (bf16,)))
    _C._set_cublas_allow_fp16_accumulation(accumulation)


def _set_deterministic(on: bool, warn_only: bool) -> None:
    _C._set_deterministic_algorithms(on, warn_only=warn_only)


_BACKENDS = ("flash", "mem_efficient", "math", "cudnn", "overrideable")


def _set_backends(*values: Any) -> None:
    for name, on in zip(_BACKENDS, values, strict=False):
        getattr(_C, f"_set_sdp_use_{name}")(on)
    _C._set_sdp_priority_order(values[-1])


def _show_backends(*values: Any) -> str:
    on = ", ".join(name for name, on in zip(_BACKENDS, values, strict=False) if on)
    return f"{on or 'none'} (in the order {', '.join(map(str, values[-1]))})"


def _set_cudnn(enabled: bool, benchmark: bool, deterministic: bool, precision: str) -> None:
    _C._set_cudnn_enabled(enabled)
    _C._set_cudnn_benchmark(benchmark)
    _C._set_cudnn_deterministic(deterministic)
    if _C._get_fp32_precision_getter("cuda", "conv") != precision:
        _C._set_cudnn_allow_tf32(precision == "tf32")


DEFAULT_DTYPE = Flag("default dtype", (torch.get_default_dtype,), torch.set_default_dtype)
MATMUL_PRECISION = Flag(
    "float32 matmul precision",
    (partial(_C._get_fp32_precision_getter, "cuda", "matmul"), partial(_C._get_fp32_precision_getter, "mkldnn", "matmul")),
    _set_matmul_precision,
    "{} on CUDA and {} on the CPU".format,
    _precision,
    cpu_only=1,
)
REDUCTIONS = Flag(
    "reduced precision in matmuls",
    (
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        _C._get_cublas_allow_fp16_accumulation,
    ),
    _set_reductions,
    "of fp16 {}, of bf16 {}, fp16 accumulation {}".format,
)
DETERMINISTIC = Flag(
    "deterministic algorithms",
    (_C._get_deterministic_algorithms, _C._get_deterministic_algorithms_warn_only),
    _set_deterministic,
    lambda on, warn_only: ("warned of" if warn_only else "on") if on else "off",
)
ATTENTION = Flag(
    "backends of scaled_dot_product_attention",
    (*(getattr(_C, f"_get_{name}_sdp_enabled") for name in _BACKENDS), _C._get_sdp_priority_order),
    _set_backends,
    _show_backends,
)
CUDNN = Flag(
    "cuDNN flags",
    (
        _C._get_cudnn_enabled,
        _C._get_cudnn_benchmark,
        _C._get_cudnn_deterministic,
        partial(_C._get_fp32_precision_getter, "cuda", "conv"),
    ),
    _set_cudnn,
    "enabled {}, benchmark {}, deterministic {}, float32 as {}".format,
)
FLAGS = (DEFAULT_DTYPE, MATMUL_PRECISION, REDUCTIONS, DETERMINISTIC, ATTENTION, CUDNN)
DEVICE = "default device"  # a function mode to torch

function_depth: Callable[[], int] = _C._len_torch_function_stack
dispatch_depth: Callable[[], int] = _C._len_torch_dispatch_stack


def function_modes() -> list[Any]:
    """This thread's function modes, the innermost last, without segue's own."""
    return _theirs(_C._get_function_stack_at, function_depth())


def dispatch_modes() -> list[Any]:
    """This thread's dispatch modes, the innermost last, without segue's own."""
    return _theirs(_C._get_dispatch_stack_at, dispatch_depth())


def _theirs(at: Callable[[int], Any], count: int) -> list[Any]:
    return [mode for mode in map(at, range(count)) if not type(mode).__module__.startswith("segue.")]


def sets_device(mode: Any) -> torch.device | None:
    """The device at which a function mode makes tensors, if it is that of ``with torch.device`` or of a default device."""
    if not isinstance(mode, DeviceContext):
        return None
    device = torch.device(mode.device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def placed_by_default() -> bool:
    """Whether the factory that is running was given its device by a default one, and not by its caller."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _PLACES:
            given, mode = frame.f_locals.get("kwargs"), frame.f_locals.get("self")
            return not isinstance(given, dict) or given.get("device") is getattr(mode, "device", None)
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextmanager
def inside_function_mode(mode: Any) -> Iterator[None]:
    """Within this block ``mode`` is the innermost function mode."""
    if not isinstance(mode, DeviceContext):
        with mode:
            yield
        return
    _torch.push_function_mode(mode)  # its own way in is for default devices, and puts it below all others
    try:
        yield
    finally:
        _C._pop_torch_function_stack()
