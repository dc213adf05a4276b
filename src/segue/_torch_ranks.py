"""Torch's private calls about several ranks: collectives as a capture sees them, and what ranks tell each other."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from segue._torch import inference_guard
from segue.errors import UsageError

_BLOCK = 16  # values that ranks send each other before they know that they send as many
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
    """A new gloo group of the ranks of ``group``, which all of them make together. ``seconds``: how long they wait.

    torch doesn't know it. What torch calls a group depends on how many others each rank has, and torch keeps it for ever.
    """
    distributed: Any = torch.distributed
    _, store = distributed.distributed_c10d._world.pg_map[group]
    made = store.add(f"segue/{group.rank()}", 1)  # by this rank; the others have made as many
    own = distributed.PrefixStore(f"segue/{made}", store)
    return distributed.ProcessGroupGloo(own, group.rank(), group.size(), timedelta(seconds=seconds))


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


def values_of_ranks(gloo: Any) -> Callable[[Sequence[int], set[int]], list[list[int] | None]]:
    """A function that gives the values of each rank, by rank; None for a rank that gives another number of values. torch's own
    all-reduce of a few numbers takes twice as long, since gloo's goes round a ring and back.

    If it raises, it has put into its second argument the ranks whose values have arrived.
    """
    size, calls = gloo.size(), 0

    def values(mine: Sequence[int], arrived: set[int]) -> list[list[int] | None]:
        nonlocal calls
        calls += 1
        head = [calls, len(mine)]
        row = [*head, *mine, *[0] * (_BLOCK - 2 - len(mine))]
        with inference_guard(True):
            found = torch.zeros(size, _BLOCK, dtype=torch.int64, device="cpu")
            try:
                _exchange(gloo, row[:_BLOCK], found)
            except Exception:
                arrived.update(rank for rank, theirs in enumerate(found.tolist()) if theirs[0] == calls)
                raise
            rows: list[list[int]] = found.tolist()
            alike = [theirs[:2] == head for theirs in rows]
            if len(row) > _BLOCK and all(alike):
                found = torch.zeros(size, len(row) - _BLOCK, dtype=torch.int64, device="cpu")
                _exchange(gloo, row[_BLOCK:], found)
                rows = [[*first, *rest] for first, rest in zip(rows, found.tolist(), strict=True)]
        return [theirs[2 : 2 + len(mine)] if same else None for theirs, same in zip(rows, alike, strict=True)]

    return values


def objects_of_ranks(gloo: Any, value: Any) -> list[Any]:
    """What each rank gives, by rank. It is pickled."""
    mine = pickle.dumps(value)
    with inference_guard(True):
        sizes = torch.zeros(gloo.size(), 1, dtype=torch.int64, device="cpu")
        _exchange(gloo, [len(mine)], sizes)
        longest = int(sizes.max())
        found = torch.zeros(gloo.size(), longest, dtype=torch.uint8, device="cpu")
        _exchange(gloo, list(mine.ljust(longest)), found)
        return [pickle.loads(bytes(theirs[:size])) for theirs, (size,) in zip(found.tolist(), sizes.tolist(), strict=True)]


def _exchange(gloo: Any, row: list[int], found: Tensor) -> None:
    """Put the row of each rank into ``found`` [ranks, n]. Rows of different sizes end gloo's process."""
    given = torch.tensor(row * gloo.size(), dtype=found.dtype, device="cpu").view_as(found)
    gloo.alltoall_base(found, given, [], [], torch._C._distributed_c10d.AllToAllOptions()).wait()
