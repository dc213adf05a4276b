"""What the emulator knows about each op: how to run it, and whether CUDA could capture it. It is worked out once per op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from segue import _torch_ops, _torch_ranks
from segue.devices import refusals

RE_STORED = (
    "it gives a tensor other memory, and a CUDA graph keeps the address it recorded. Allocate the right size at once "
    "(torch.empty), or copy into the old memory (copy_)."
)

_RE_STORES = {"resize_", "resize_as_", "set_", "_resize_output_", "resize_as_sparse_"}
_ALLOCATES = {"empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class OpInfo:
    """What the emulator knows about one op.

    ``op``: its name without ``aten::``. ``run``: its kernel. ``opens``: the dispatch key whose kernel is run under the capture's
    mode, so that the ops inside arrive one by one; None to record the op as it is. ``body``: the Python function of a custom op,
    which is run in the same way. ``writes``: positions and names of the arguments that the op writes in place. ``allocates``: it
    returns uninitialised memory and launches no kernel. ``acts``: it is called for an effect, as it returns nothing or ``talks``
    to other ranks. ``half``: it is one rank's half of a transfer, and is not waited for at once. ``random``: it draws random
    numbers. ``refused``: why no graph can hold it, or None. ``checked``: :func:`refusals.check_arguments` must look at each call.
    """

    op: str
    run: Any
    opens: str | None
    body: Callable[..., Any] | None
    writes: tuple[tuple[int, ...], tuple[str, ...]]
    allocates: bool
    acts: bool
    talks: bool
    half: bool
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


def _learn(func: Any) -> OpInfo:
    if not isinstance(func, torch._ops.OpOverload):
        raise refusals.refusal(
            str(func), f"the emulator of CUDA graphs records plain ops, not higher-order ones. {refusals.MEND}."
        )
    name, schema, tags = _torch_ops.op_name(func), func._schema, func.tags
    op = name.removeprefix("aten::")
    base = op.split(".")[0]
    checked = refusals.is_checked(func)
    refused = RE_STORED if base in _RE_STORES else refusals.op_refusal(func)
    writes = _torch_ops.written_arguments(func)
    opens = body = None
    if refused is None and not checked:
        opens, body = _torch_ops.python_kernel(name), _torch_ops.custom_op_body(name)
        if opens is None and _torch_ops.has_kernel(name, "CompositeImplicitAutograd"):
            opens = "CompositeImplicitAutograd"
    run, half, talks = _torch_ops.kernel(func), _torch_ranks.is_between_two(name), _torch_ranks.is_collective(name)
    return OpInfo(
        op=op,
        run=partial(_whole, run) if talks and not half else run,
        opens=opens,
        body=body,
        writes=writes,
        allocates=base in _ALLOCATES and not writes[0],
        acts=talks or not schema.returns,
        talks=talks,
        half=half,
        random=torch.Tag.nondeterministic_seeded in tags,
        refused=refused,
        checked=checked,
    )


def _whole(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a collective to its end. On CUDA the stream would wait for it."""
    return _torch_ranks.done(run(*args, **kwargs))
