"""What the emulator knows about each op: how to run it, and whether CUDA could capture it. It is worked out once per op."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue import _source_lines, _torch
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
RE_STORED = (
    "it gives a tensor other memory, and a CUDA graph keeps the address it recorded. Allocate the right size at once "
    "(torch.empty), or copy into the old memory (copy_)."
)

_READS_HOST = {"is_nonzero", "_assert_scalar", "_linalg_check_errors", "tensor_split.tensor_indices_or_sections"}
_COUNTS = {"nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount", "_unique", "_unique2", "unique_dim"}
_COUNTS |= {"unique_consecutive", "unique_dim_consecutive"}
_MASKED_READ = {"index.Tensor", "index.Tensor_out", "_unsafe_index.Tensor"}
_MASKED_WRITE = {"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put", "index_put.out"}
_CHECKED = {"lift_fresh", "one_hot", "repeat_interleave.Tensor", "copy_", "histc"} | _MASKED_READ | _MASKED_WRITE
_RE_STORES = {"resize_", "resize_as_", "set_", "_resize_output_", "resize_as_sparse_"}
_ALLOCATES = {"empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class OpInfo:
    """What the emulator knows about one op.

    ``op``: its name without ``aten::``. ``run``: its kernel. ``opens``: the dispatch key whose kernel is run under the capture's
    mode, so that the ops inside arrive one by one; None to record the op as it is. ``body``: the Python function of a custom op,
    which is run in the same way. ``writes``: positions and names of the arguments that the op writes in place. ``allocates``: it
    returns uninitialised memory and launches no kernel. ``acts``: it returns nothing, so it is called for an effect. ``random``:
    it draws random numbers. ``refused``: why no graph can hold it, or None. ``checked``: :func:`check_arguments` must look at
    each call.
    """

    op: str
    run: Any
    opens: str | None
    body: Callable[..., Any] | None
    writes: tuple[tuple[int, ...], tuple[str, ...]]
    allocates: bool
    acts: bool
    random: bool
    refused: str | None
    checked: bool


_known: dict[Any, OpInfo] = {}


def op_info(func: Any) -> OpInfo:
    """What the emulator knows about an ``OpOverload``.

    Raises:
        CaptureError: ``func`` is a higher-order op.
    """
    found = _known.get(func)
    if found is None:
        found = _known[func] = _learn(func)
    return found


def check_arguments(
    known: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], literals: Container[int]
) -> str | None:
    """Why CUDA can't capture a call with these arguments, or None. ``literals``: keys of storages made from Python numbers."""

    def argument(position: int, name: str, default: Any = None) -> Any:
        return args[position] if len(args) > position else kwargs.get(name, default)

    if known.op == "lift_fresh":
        return _pageable(tuple(args[0].shape)) if args[0].dim() else None
    if known.op == "copy_":
        return HOST_SCALAR if _torch.storage_key(args[1]) in literals else None
    if known.op == "histc":
        return _dynamic("its range is that of the values", "Pass min= and max=") if _unbounded(argument) else None
    if known.op == "one_hot":
        return None if argument(1, "num_classes", -1) >= 0 else _dynamic(*_ONE_HOT)
    if known.op == "repeat_interleave.Tensor":
        return None if kwargs.get("output_size") is not None else _dynamic(*_REPEAT)
    indices = [i for i in args[1] if isinstance(i, Tensor)]
    masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
    if known.op in _MASKED_READ:
        return _dynamic(*_MASK) if masks else None
    number = _torch.storage_key(argument(2, "values")) in literals
    if masks:
        # One mask and one Python number become masked_fill_, on CUDA too: nothing is counted.
        return None if number and len(indices) == 1 and not argument(3, "accumulate", False) else _dynamic(*_MASK)
    return HOST_SCALAR if number else None


def refusal(op: str, why: str) -> CaptureError:
    """The error that refuses ``op``, with the user's line and the reason."""
    return CaptureError(f"{op} at {_source_lines.caller()} can't be in a segment: {why}")


def host_factory(call: str) -> str:
    """Why a call of the factory ``call`` (``torch.zeros``) without a device is refused."""
    return (
        "without device= it allocates on the host, and CUDA refuses the copy from there (pageable memory) while it "
        f"records. Write {call}(..., device=x.device)."
    )


_MASK = ("a boolean mask is turned into a list of positions", "Use torch.where or masked_fill, or move it into a break")
_ONE_HOT = ("its width is the largest value", "Pass num_classes=")
_REPEAT = ("its length is the sum of the repeats", "Pass output_size=")


def _unbounded(argument: Any) -> bool:
    return bool(argument(2, "min", 0) == argument(3, "max", 0))


def _dynamic(what: str, mend: str) -> str:
    return (
        f"its result depends on how many or how large the values are ({what}), which the host must read. CUDA refuses "
        f"that while it records, and a replay would keep the shape seen at capture. {mend}."
    )


def _pageable(shape: tuple[int, ...]) -> str:
    return (
        f"a Python list or array becomes a tensor of shape {shape} by a copy from pageable host memory, which CUDA "
        "refuses while it records, and every replay would see the same values. Make it before the capture, hand it in "
        "as an input, or move it into a break point."
    )


def _learn(func: Any) -> OpInfo:
    if not isinstance(func, torch._ops.OpOverload):
        raise refusal(str(func), f"the emulator of CUDA graphs records plain ops, not higher-order ones. {MEND}.")
    name, schema, tags = _torch.op_name(func), func._schema, func.tags
    op = name.removeprefix("aten::")
    base = op.split(".")[0]
    checked = op in _CHECKED
    refused = None
    if op in _READS_HOST or torch.Tag.data_dependent_output in tags:
        refused = HOST_READ
    elif base in _COUNTS or (torch.Tag.dynamic_output_shape in tags and not checked):
        refused = _dynamic("it counts what it finds", MEND)
    elif base in _RE_STORES:
        refused = RE_STORED
    writes = _torch.written_arguments(func)
    opens = body = None
    if refused is None and not checked:
        opens, body = _torch.python_kernel(name), _torch.custom_op_body(name)
        if opens is None and _torch.has_kernel(name, "CompositeImplicitAutograd"):
            opens = "CompositeImplicitAutograd"
    return OpInfo(
        op=op,
        run=_torch.kernel(func),
        opens=opens,
        body=body,
        writes=writes,
        allocates=base in _ALLOCATES and not writes[0],
        acts=not schema.returns,
        random=torch.Tag.nondeterministic_seeded in tags,
        refused=refused,
        checked=checked,
    )
