"""What the emulator knows about an op, learned once per op: how to run it, and whether CUDA could capture it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue import _torch, _where
from segue.errors import CaptureError

_READS_HOST = {"is_nonzero", "_assert_scalar", "_linalg_check_errors", "tensor_split.tensor_indices_or_sections"}
_DYNAMIC = {"nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount", "_unique", "_unique2", "unique_dim"}
_DYNAMIC |= {"unique_consecutive", "unique_dim_consecutive"}
_MASKED_READ = {"index.Tensor", "index.Tensor_out", "_unsafe_index.Tensor"}
_MASKED_WRITE = {"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put", "index_put.out"}
_RESTORAGE = {"resize_", "resize_as_", "set_", "_resize_output_", "resize_as_sparse_"}
_ALLOCATES = {"empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided"}
MEND = "Move it into a break point"


@dataclass(frozen=True)
class Facts:
    """``opens``: dispatch key whose kernel is run under the capture's mode, so that the ops inside arrive one by one.
    ``writes``: arguments written in place, by position and by name. ``allocates``: gives uninitialised memory and launches
    nothing. ``acts``: returns nothing, so it is there for an effect.
    """

    name: str  # "aten::add.Tensor"
    op: str  # "add.Tensor"
    run: Any
    opens: str | None
    writes: tuple[tuple[int, ...], tuple[str, ...]]
    allocates: bool
    acts: bool
    random: bool
    refused: str | None  # why no graph can hold it
    checked: bool  # :func:`check_arguments` has to look at each call


_known: dict[Any, Facts] = {}


def facts(func: Any) -> Facts:
    """What there is to know about an ``OpOverload``."""
    found = _known.get(func)
    if found is None:
        found = _known[func] = _learn(func)
    return found


def check_arguments(known: Facts, args: tuple[Any, ...], kwargs: dict[str, Any], literals: set[int]) -> str | None:
    """Why CUDA can't capture this very call, or None. ``literals``: storages of Python scalars made into tensors."""
    if known.op == "lift_fresh":
        if args[0].dim():
            return _text_pageable(tuple(args[0].shape))
        return None
    if known.op == "one_hot":
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        return None if classes >= 0 else _text_dynamic("its width is the largest value", "Pass num_classes=")
    if known.op == "repeat_interleave.Tensor":
        if kwargs.get("output_size") is not None:
            return None
        return _text_dynamic("its length is the sum of repeats", "Pass output_size=")
    indices = [i for i in args[1] if isinstance(i, Tensor)]
    if not any(i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    if known.op in _MASKED_READ:
        return _text_dynamic("a boolean mask selects as many elements as it has True ones", "Use torch.where, or " + _low)
    # One mask and one Python scalar become masked_fill_, on CUDA too: no count is needed.
    accumulate = (args[3] if len(args) > 3 else kwargs.get("accumulate", False)) is True
    value = args[2] if len(args) > 2 else kwargs["values"]
    if len(indices) == 1 and not accumulate and value.dim() == 0 and _torch.storage_key(value) in literals:
        return None
    return _text_dynamic("a boolean mask is first turned into a list of positions", "Use torch.where, or " + _low)


def refusal(op: str, why: str) -> CaptureError:
    """The error for ``op`` at the user's line."""
    return CaptureError(f"{op} at {_where.caller()} can't be in a segment: {why}")


def text_host_read() -> str:
    """Why a host read is refused."""
    return (
        "it reads a tensor's values on the host. CUDA refuses that while it records (nothing has run yet), and every replay "
        f"would go on with the value seen at capture. {MEND}, or keep the value in a tensor."
    )


def text_host_factory(call: str) -> str:
    """Why a factory without a device is refused."""
    return (
        f"without device= it allocates on the host, and CUDA refuses the copy from there (pageable memory) while it records. "
        f"Write {call}(..., device=x.device)."
    )


def text_host_scalar() -> str:
    """Why a literal made on the device is refused."""
    return (
        "it makes a tensor of a Python value on the device by a copy from pageable host memory, which CUDA refuses while it "
        "records. Write torch.full((), value, device=...), or leave device= out (a CPU scalar is a kernel argument), or make "
        "it before the capture."
    )


_low = MEND[0].lower() + MEND[1:]


def _text_dynamic(what: str, mend: str) -> str:
    return (
        f"the shape of its result depends on values ({what}), which the host must read; CUDA refuses that while it records, "
        f"and a replay would keep the shape seen at capture. {mend}."
    )


def _text_pageable(shape: Sequence[int]) -> str:
    return (
        f"a Python list or array becomes a tensor of shape {tuple(shape)} by a copy from pageable host memory, which CUDA "
        "refuses while it records, and every replay would see the same values. Make it before the capture, hand it in as an "
        f"input, or {_low}."
    )


def _text_restorage() -> str:
    return (
        "it gives a tensor other memory, and the graph keeps the address it recorded. Allocate the right size at once "
        "(torch.empty), or copy into the old memory (copy_)."
    )


def _learn(func: Any) -> Facts:
    if not isinstance(func, torch._ops.OpOverload):
        raise refusal(str(func), f"the emulator records plain ops, not higher-order ones. {MEND}.")
    name, schema, tags = func.name(), func._schema, func.tags
    op = name.removeprefix("aten::")
    base = op.split(".")[0]
    checked = op in {"lift_fresh", "one_hot", "repeat_interleave.Tensor"} | _MASKED_READ | _MASKED_WRITE
    refused = None
    if op in _READS_HOST or torch.Tag.data_dependent_output in tags:
        refused = text_host_read()
    elif base in _DYNAMIC or (torch.Tag.dynamic_output_shape in tags and not checked):
        refused = _text_dynamic("it counts what it finds", f"{MEND}")
    elif base in _RESTORAGE and name.startswith("aten::"):
        refused = _text_restorage()
    written = [(i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    opens = None
    if refused is None and not checked:
        opens = _torch.python_kernel(name)
        if opens is None and _torch.has_kernel(name, "CompositeImplicitAutograd"):
            opens = "CompositeImplicitAutograd"
    return Facts(
        name=name,
        op=op,
        run=_torch.kernel(func),
        opens=opens,
        writes=(tuple(i for i, _ in written), tuple(n for _, n in written)),
        allocates=base in _ALLOCATES and not written and name.startswith("aten::"),
        acts=not schema.returns,
        random=torch.Tag.nondeterministic_seeded in tags,
        refused=refused,
        checked=checked,
    )
