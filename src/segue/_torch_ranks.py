"""Torch's private calls about several ranks: collectives as a capture sees them, and what ranks tell each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from segue._torch import inference_guard
from segue.errors import UsageError

_NO_TALK = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


def is_collective(op: str) -> bool:
    """Whether the operator of this name lets ranks talk to each other."""
    return op.startswith(("c10d::", "_c10d_functional")) and op not in _NO_TALK


def is_between_two(op: str) -> bool:
    """Whether an operator is one rank's half of a transfer, which the other half may be begun before."""
    return op in ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")


def done(result: Any) -> Any:
    """``result``, of a collective, when it is there: each of its tensors and works has been waited for. In the place of a work
    there is another one, since some works run ops each time they are waited for.
    """
    if isinstance(result, Tensor):
        return torch.ops._c10d_functional.wait_tensor(result)
    if isinstance(result, list | tuple):
        return type(result)(done(r) for r in result)
    if isinstance(result, torch.ScriptObject):
        work: Any = torch._C._distributed_c10d
        work.Work.unbox(result).wait()
        finished: Any = torch.futures.Future()
        finished.set_result(None)
        return work._create_work_from_future(finished).boxed()
    return result


def bound(run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """``run``, a collective, with its arguments, of which the process group is boxed for each run.

    Whoever lets go of a group last waits for gloo's threads, and these may wait for the GIL: Python's object of the group
    gives the GIL away meanwhile, and a box of it does not.
    """
    groups = {i: _group_in(arg) for i, arg in enumerate(args) if _is_boxed_group(arg)}
    kept = [None if i in groups else arg for i, arg in enumerate(args)]

    def again() -> Any:
        return run(*(groups[i].boxed() if i in groups else arg for i, arg in enumerate(kept)), **kwargs)

    return again


def _is_boxed_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and str(value).endswith(".c10d.ProcessGroup>")


def _group_in(boxed: Any) -> Any:
    distributed: Any = torch._C._distributed_c10d
    return distributed.ProcessGroup.unbox(boxed)


def let_go_of_tensors() -> None:
    """Let gloo's threads let go of the tensors of collectives that are done, for which they need the GIL. One that asks for it
    while Python ends makes the process abort.
    """
    time.sleep(0.02)


def is_process_group(group: Any) -> bool:
    """Whether ``group`` is a process group that this process is in."""
    return torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)


def group_seconds(group: Any) -> float:
    """How long the ranks of a process group wait for each other."""
    longest = [group._get_backend(device).options._timeout for device in group._device_types]
    return min((t.total_seconds() for t in longest), default=float("inf"))


def gloo_group(group: Any, seconds: float) -> Any:
    """A new gloo group of the ranks of ``group``, which all of them make together. ``seconds``: how long they wait."""
    ranks = torch.distributed.get_process_group_ranks(group)
    limit = timedelta(seconds=seconds)
    return torch.distributed.new_group(ranks, timeout=limit, backend="gloo", use_local_synchronization=True)


def registered_memory(group: Any, place: torch.device) -> torch.cuda.MemPool:
    """A memory pool that the group's NCCL registers, what it takes later too.

    Raises:
        UsageError: the group registers no memory on ``place``.
    """
    if not is_process_group(group):
        raise UsageError(f"group={group!r} is no process group that this process is in; give one of torch.distributed")
    try:
        backend = group._get_backend(place)
        register = backend.register_mem_pool
    except (RuntimeError, AttributeError) as e:
        why = "as only NCCL in newer versions of torch does; leave it out"
        raise UsageError(f"group= registers no memory on {place}, {why}") from e
    with torch.cuda.device(place):
        memory = torch.cuda.MemPool()
        try:
            register(memory)
        except RuntimeError as e:
            why = str(e).partition("\n")[0]
            raise UsageError(
                f"group= can't register memory on {place} yet ({why}). Make the group with device_id=, or run a collective first"
            ) from e
    return memory


def values_of_ranks(gloo: Any) -> Callable[[Sequence[int], set[int]], list[list[int]]]:
    """A function that gives the values of each rank, by rank, of which each gives as many. torch's own all-reduce of a few
    numbers takes twice as long, since gloo's goes round a ring and back.

    If it raises, it has put into its second argument the ranks whose values have arrived.
    """
    asked, size, calls = torch._C._distributed_c10d.AllToAllOptions(), gloo.size(), 0

    def values(mine: Sequence[int], arrived: set[int]) -> list[list[int]]:
        nonlocal calls
        calls += 1
        with inference_guard(True):
            row = [calls, *mine]
            numbers = torch.tensor(row * size, dtype=torch.int64, device="cpu")
            found = torch.zeros_like(numbers)
            rows = found.view(size, -1)
            try:
                gloo.alltoall_base(found, numbers, [], [], asked).wait()
            except Exception:
                arrived.update(rank for rank, theirs in enumerate(rows.tolist()) if theirs[0] == calls)
                raise
            return [theirs[1:] for theirs in rows.tolist()]

    return values


def objects_of_ranks(gloo: Any, value: Any) -> list[Any]:
    """What each rank gives, by rank. It is pickled."""
    given: list[Any] = [None] * gloo.size()
    with inference_guard(False):
        torch.distributed.all_gather_object(given, value, group=gloo)
    return given
