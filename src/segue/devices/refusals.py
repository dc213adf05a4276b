"""What no graph can hold, in the same words on every device: ops that read the host, that count, or that copy from the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from segue import _source_lines, _torch_ops
from segue.errors import CaptureError

MEND = "Move it into a break point"
HOST_READ = (
    "it reads a tensor's values on the host. CUDA refuses that while it records, as nothing has run yet, and every "
    f"replay would go on with the value seen at capture. {MEND}, or keep the value in a tensor."
)
HOST_SCALAR = (
    "it copies a Python number from pageable host memory to the device, which CUDA refuses while it records. Fill "
    "instead (fill_, index_fill_, torch.full((), value, device=...)), or make the tensor before the capture."
)
HOST_COPY = (
    "it copies from pageable host memory, or waits for a copy from pinned memory, which CUDA refuses while it records, and every "
    "replay would see the same values. Make the copy before the capture, hand it in as an input, or move it into a break point."
)
BARRIER = f"it makes the host wait for all ranks, which no replay would do. {MEND}."
# Methods of tensors that read their values on the host.
READS = (
    *("item", "tolist", "numpy", "cpu", "is_nonzero", "apply_", "map_", "map2_", "__array__", "__bool__", "__int__"),
    *("__float__", "__complex__", "__index__", "__repr__", "__format__", "__contains__", "__dlpack__", "__reduce_ex__"),
)
# Functions that make tensors, on the host unless they are given a device.
RANDOM_FACTORIES = ("rand", "randn", "randint", "randperm", "normal")
FACTORIES = (
    *RANDOM_FACTORIES,
    *("zeros", "ones", "empty", "full", "arange", "range", "linspace", "logspace", "eye", "tril_indices"),
    *("triu_indices", "empty_strided", "empty_permuted", "hann_window", "hamming_window", "bartlett_window"),
    *("blackman_window", "kaiser_window"),
)

_READS_HOST = {"is_nonzero", "_assert_scalar", "_linalg_check_errors", "tensor_split.tensor_indices_or_sections"}
_BARRIERS = {"c10d::barrier", "c10d::monitored_barrier_"}
_COUNTS = {"nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount", "_unique", "_unique2", "unique_dim"}
_COUNTS |= {"unique_consecutive", "unique_dim_consecutive"}
_MASKED_READ = {"index.Tensor", "index.Tensor_out", "_unsafe_index.Tensor"}
_MASKED_WRITE = {"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put", "index_put.out"}
_CHECKED = {"lift_fresh", "one_hot", "repeat_interleave.Tensor", "copy_", "histc"} | _MASKED_READ | _MASKED_WRITE


def op_refusal(func: Any) -> str | None:
    """Why no graph can hold any call of an ``OpOverload`` on tensors of the device; None if its arguments decide."""
    op = _op(func)
    if op in _BARRIERS:
        return BARRIER
    if op in _READS_HOST or torch.Tag.data_dependent_output in func.tags:
        return HOST_READ
    if op.split(".")[0] in _COUNTS or (torch.Tag.dynamic_output_shape in func.tags and op not in _CHECKED):
        return _dynamic("it counts what it finds", MEND)
    return None


def is_checked(func: Any) -> bool:
    """Whether :func:`check_arguments` must look at each call of an ``OpOverload``."""
    return _op(func) in _CHECKED


def check_arguments(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_number: Callable[[Tensor], bool]
) -> str | None:
    """Why CUDA can't capture a call of the checked op ``op`` with these arguments, or None.

    ``is_number``: whether a tensor is made of a Python number and lies on the host.
    """

    def argument(position: int, name: str, default: Any = None) -> Any:
        return args[position] if len(args) > position else kwargs.get(name, default)

    if op == "lift_fresh":
        return pageable(tuple(args[0].shape)) if args[0].dim() else None
    if op == "copy_":
        return HOST_SCALAR if is_number(args[1]) else None
    if op == "histc":
        return _dynamic("its range is that of the values", "Pass min= and max=") if _unbounded(argument) else None
    if op == "one_hot":
        return None if argument(1, "num_classes", -1) >= 0 else _dynamic(*_ONE_HOT)
    if op == "repeat_interleave.Tensor":
        return None if kwargs.get("output_size") is not None else _dynamic(*_REPEAT)
    indices = [i for i in args[1] if isinstance(i, Tensor)]
    masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
    if op in _MASKED_READ:
        return _dynamic(*_MASK) if masks else None
    number = is_number(argument(2, "values"))
    if masks:
        # One mask and one Python number become masked_fill_, on CUDA too: nothing is counted.
        return None if number and len(indices) == 1 and not argument(3, "accumulate", False) else _dynamic(*_MASK)
    return HOST_SCALAR if number else None


def refusal(what: str, why: str, where: str | None = None) -> CaptureError:
    """The error that refuses ``what``, with the user's line and the reason. ``where``: by default the line that is running."""
    return CaptureError(f"{what} at {where or _source_lines.caller()} can't be in a segment: {why}")


def host_factory(call: str) -> str:
    """Why a call of the factory ``call`` (``torch.zeros``) without a device is refused."""
    return (
        "without device= it allocates on the host, and CUDA refuses the copy from there (pageable memory) while it "
        f"records. Write {call}(..., device=x.device)."
    )


def pageable(shape: tuple[int, ...] | None) -> str:
    """Why a tensor made from a Python list or array is refused. ``shape``: None where it isn't known."""
    return (
        f"a Python list or array becomes a tensor{'' if shape is None else f' of shape {shape}'} by a copy from pageable host "
        "memory, which CUDA refuses while it records, and every replay would see the same values. Make it before the capture, "
        "hand it in as an input, or move it into a break point."
    )


_MASK = ("a boolean mask is turned into a list of positions", "Use torch.where or masked_fill, or move it into a break")
_ONE_HOT = ("its width is the largest value", "Pass num_classes=")
_REPEAT = ("its length is the sum of the repeats", "Pass output_size=")


def _op(func: Any) -> str:
    return _torch_ops.op_name(func).removeprefix("aten::")


def _unbounded(argument: Any) -> bool:
    return bool(argument(2, "min", 0) == argument(3, "max", 0))


def _dynamic(what: str, mend: str) -> str:
    return (
        f"its result depends on how many or how large the values are ({what}), which the host must read. CUDA refuses "
        f"that while it records, and a replay would keep the shape seen at capture. {mend}."
    )
