"""What the ranks of a process group tell each other about a call: over sockets on one host, else over a gloo group of segue's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from segue import _torch_ranks
from segue.errors import RankError, UsageError
from segue.runner.rank_sockets import MissingRanks, connected

LONGEST_WAIT = 60.0  # seconds, unless the user says otherwise

_groups: weakref.WeakKeyDictionary[Any, dict[float, RankGroup]] = weakref.WeakKeyDictionary()


class RankGroup:
    """The ranks of one process group. All must make the same calls of it in the same order. Once one was missed, it is of no use.

    Args:
        group: the user's process group, of any backend.
        seconds: how long a rank waits for the others.
        sockets: whether ranks of one host may use sockets.

    Raises:
        RankError: another rank didn't make it too in time, or is gone.
    """

    def __init__(self, group: Any, seconds: float, sockets: bool = True) -> None:
        self.rank, self.size, self.seconds = group.rank(), group.size(), seconds
        self.runners = 0  # that have asked for it, on this rank
        self._lost, self._sockets = False, None
        with self._all_come("make a runner"):
            self._gloo = _torch_ranks.gloo_group(group, seconds)
            self._sockets = connected(self.rank, self.size, seconds, self._objects) if sockets else None
        self._values = self._over_gloo() if self._sockets is None else self._sockets.values

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over all ranks. Each gives as many.

        Raises:
            RankError: another rank didn't come in time, or is gone.
        """
        with self._all_come():
            return list(map(max, *self._values(values))) if self.size > 1 else list(values)

    def all(self, value: Any) -> list[Any]:
        """What each rank gives, by rank. It takes several times as long as :meth:`largest`.

        Raises:
            as :meth:`largest`.
        """
        with self._all_come():
            return self._objects(value)

    def _objects(self, value: Any) -> list[Any]:
        return _torch_ranks.objects_of_ranks(self._gloo, value)

    def _over_gloo(self) -> Callable[[Sequence[int]], list[Sequence[int]]]:
        values_of_ranks = _torch_ranks.values_of_ranks(self._gloo)

        def values(mine: Sequence[int]) -> list[Sequence[int]]:
            arrived: set[int] = set()
            try:
                rows = values_of_ranks(mine, arrived)
            except Exception as e:
                absent = set(range(self.size)) - arrived - {self.rank}
                raise (MissingRanks(dict.fromkeys(absent, "did not come, or is gone")) if absent else e) from e
            if elsewhere := [rank for rank, row in enumerate(rows) if row is None]:
                raise MissingRanks(dict.fromkeys(elsewhere, "is at another call"))
            return [row for row in rows if row is not None]

        return values

    @contextmanager
    def _all_come(self, doing: str = "agree on a call") -> Iterator[None]:
        if self._lost:
            raise self._is_lost()
        try:
            yield
        except Exception as e:
            self._lost = True
            raise self._missed(e, doing) from e
        except BaseException:  # Ctrl-C, say: the others may have this call's values of this rank, which will never have theirs
            self._lost = True
            if self._sockets is not None:
                self._sockets.close()
            raise

    def _missed(self, error: Exception, doing: str) -> RankError:
        who = str(error) if isinstance(error, MissingRanks) else f"not all came ({str(error).partition(chr(10))[0][:200]})"
        return RankError(
            f"rank {self.rank} of {self.size} waited up to {self.seconds:g} s for the others to {doing}, and {who}. "
            "Every rank of the group must make the runner and each call of it, one without work with 0 rows. If a rank only "
            "takes longer, give group_timeout=; after this error make a new group and runner on all ranks."
        )

    def _is_lost(self) -> RankError:
        return RankError(
            f"rank {self.rank} of {self.size} missed the others at an earlier call, so they can't agree any more. Make a new "
            "group and runner on all ranks."
        )


def rank_group(group: Any, seconds: float | None) -> RankGroup:
    """The ranks of ``group``, made at the first call by all of them together. ``seconds``: how long to wait for a rank; None: as
    long as the group itself does, and at most a minute.

    Raises:
        UsageError: ``group`` is no process group, or this process isn't in it. RankError: as :class:`RankGroup`.
    """
    if not _torch_ranks.is_process_group(group):
        raise UsageError(
            f"group={group!r} is no process group that this process is in; give one of torch.distributed, as dist.group.WORLD"
        )
    if seconds is None:
        seconds = min(LONGEST_WAIT, _torch_ranks.group_seconds(group))
    elif isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds <= 0:
        raise UsageError(f"group_timeout={seconds!r} must be a number of seconds above 0")
    made = _groups.setdefault(group, {})
    if seconds not in made:
        made[seconds] = RankGroup(group, seconds)
    return made[seconds]

