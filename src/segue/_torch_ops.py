"""What torch knows of its ops: what an op writes, and which kernels it has. Private calls, as in ``_torch``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from segue import _torch

_NEEDED = ("torch._C.DispatchKey", "torch._C._dispatch_has_kernel_for_dispatch_key", "torch.ops.aten.add.Tensor._op_dk")
_torch.require(*_NEEDED)

# Optional: without them the ops inside a Python kernel aren't seen, and the emulator records the op as a whole.
_python_kernels: set[str] = getattr(torch.library, "_impls", set())
_custom_ops: Any = getattr(getattr(getattr(torch, "_library", None), "custom_ops", None), "OPDEFS", {})

# In training these write their running statistics, and their schemas don't say so.
_SILENT = {"batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index"}
_SILENT |= {"batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the arguments that an ``OpOverload`` writes, or may write."""
    schema = getattr(func, "_schema", None)
    unsaid = _unsaid_writes("" if schema is None else schema.name)
    written = [
        (i, a.name)
        for i, a in enumerate(getattr(schema, "arguments", ()))
        if a.name in unsaid or (a.alias_info is not None and a.alias_info.is_write)
    ]
    return tuple(i for i, _ in written), tuple(name for _, name in written)


def _unsaid_writes(op: str) -> set[str]:
    """The arguments that an op writes though its schema doesn't say so."""
    if op.removeprefix("aten::") in _SILENT:
        return {"running_mean", "running_var"}
    if op.startswith("c10d::") and op != "c10d::send":
        return {"tensors", "output", "outputs", "output_tensor", "output_tensors", "output_lists"}
    return {"tensor", "tensors"} if op in ("_c10d_functional::irecv", "_c10d_functional::batch_p2p_ops") else set()


def written(writes: tuple[tuple[int, ...], tuple[str, ...]], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call that its op writes. ``writes``: of the op, from :func:`written_arguments`."""
    positions, names = writes
    return [args[i] for i in positions if i < len(args)] + [kwargs[name] for name in names if name in kwargs]


# Ops that give a tensor other memory. The tensor releases its old block, which others may be using.
RE_STORING = {"set_", "resize_", "resize_as_", "_resize_output_"}


def tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among an op's arguments. An op's arguments nest at most two lists deep."""
    found = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, list | tuple):
            for b in a:
                if isinstance(b, Tensor):
                    found.append(b)
                elif isinstance(b, list | tuple):
                    found.extend(c for c in b if isinstance(c, Tensor))
    return found


def open_composite(func: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel that ``func`` has at dispatch key ``key``, so that a dispatch mode sees the ops inside it."""
    return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)


def has_kernel(name: str, key: str) -> bool:
    """Whether operator ``name`` (``aten::linear``) has a kernel at dispatch key ``key``."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def kernel(func: Any) -> Any:
    """The callable behind an ``OpOverload``, without its Python frame."""
    return getattr(func, "_op", func)


def op_name(func: Any) -> str:
    """The name of an ``OpOverload``: ``aten::add.Tensor``."""
    return str(func.name())


def python_kernel(name: str) -> str | None:
    """Dispatch key of the Python kernel that ``torch.library`` registered for operator ``name`` on CPU tensors, or None."""
    namespace, op = name.split("::", 1)
    for key in ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        if f"{namespace}/{op}/{key}" in _python_kernels:
            return key
    return None


def custom_op_body(name: str) -> Callable[..., Any] | None:
    """The function that the custom op ``name`` runs on CPU tensors, or None if ``name`` is no ``torch.library.custom_op``."""
    bodies: dict[str | None, Callable[..., Any]] = getattr(_custom_ops.get(name), "_backend_fns", {})
    return bodies.get("cpu", bodies.get(None))
