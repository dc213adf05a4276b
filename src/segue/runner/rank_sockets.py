"""Sockets between the ranks of one host. What ranks agree on goes through them in a tenth of the time of a gloo collective."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_HEAD = 2  # numbers before the values: of the call, and when its rank came, in microseconds of the host's clock
_all: weakref.WeakSet[RankSockets] = weakref.WeakSet()


class MissingRanks(Exception):
    """Ranks that didn't take part, each with what is known about it."""

    def __init__(self, ranks: dict[int, str]) -> None:
        super().__init__(", ".join(f"rank {rank} {why}" for rank, why in sorted(ranks.items())))


class RankSockets:
    """One socket to each other rank.

    Args:
        rank: this one. ``sockets``: to each other rank. ``seconds``: the most that may lie between the first and the last one's
            call.

    A child that this process forks has none of them, so that the others notice when this process ends.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], seconds: float) -> None:
        self._rank, self._others = rank, sorted(sockets.items())
        self._calls, self._limit = 0, int(seconds * 1e6)
        self._patience = seconds + min(1.0, seconds / 4)  # so that who comes in time is heard in time
        self.close = weakref.finalize(self, _close, sockets.values())
        _all.add(self)

    def values(self, values: Sequence[int]) -> list[Sequence[int]]:
        """The values of each rank, by rank, of which each gives as many.

        Raises:
            MissingRanks: not all came in time.
        """
        self._calls += 1
        start = time.monotonic()
        now = int(start * 1e6)
        message = struct.pack(f"{_HEAD + len(values)}q", self._calls, now, *values)
        rows: list[Sequence[int]] = [values]
        missing: dict[int, str] = {}
        came = {self._rank: now}
        for rank, other in self._others:
            try:
                other.send(message)
            except OSError:
                missing[rank] = "is gone"
        for rank, other in self._others:
            if rank in missing:
                continue
            try:
                other.settimeout(max(0.0, self._patience - (time.monotonic() - start)))
                answer = other.recv(len(message) + 8)  # of a longer message it tells that it is one
            except (TimeoutError, BlockingIOError):
                missing[rank] = "did not come"
                continue
            except OSError:
                answer = b""
            if not answer:
                missing[rank] = "is gone"
                continue
            call, came[rank], *theirs = struct.unpack(f"{len(answer) // 8}q", answer)
            if call != self._calls or len(theirs) != len(values):
                missing[rank] = "is at another call"
            rows.append(theirs)
        if not missing and max(came.values()) - min(came.values()) > self._limit:  # all ranks see this alike
            missing = self._late(came)
        if missing:
            raise MissingRanks(missing)
        rows.insert(self._rank, rows.pop(0))
        return rows

    def _late(self, came: dict[int, int]) -> dict[int, str]:
        """The ranks that haven't met, of all that came: those that this one was too late for, else those that were too late."""
        mine, first = came[self._rank], min(came, key=came.__getitem__)
        gone = [rank for rank, then in came.items() if mine - then > self._limit]
        if gone:
            return dict.fromkeys(gone, "waited, and has gone on without this one")
        late = [rank for rank, then in came.items() if then - came[first] > self._limit]
        return dict.fromkeys(late, f"came too late for rank {first}")


def connected(rank: int, size: int, seconds: float, tell: Callable[[Any], list[Any]]) -> RankSockets | None:
    """The sockets of a rank to all others; None, on all of them, if they aren't all on one host. All ranks call it together.

    ``tell``: gives each rank what every rank has told, by rank. ``seconds``: how long they wait for each other later.
    """
    sockets: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as until_connected:
        listening, path = _listening(until_connected)
        paths = tell(path)
        found = None not in paths
        for other in range(rank if found else 0):
            sockets[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sockets[other].connect(paths[other])
                sockets[other].send(bytes([rank % 256, rank // 256]))
            except OSError:  # of another host, or another user's
                found = False
        if not all(tell(found)):
            _close(sockets.values())
            return None
        while listening is not None and len(sockets) < size - 1:  # the others wait in the queue already
            higher, _ = listening.accept()
            sockets[int.from_bytes(higher.recv(2), "little")] = higher
        return RankSockets(rank, sockets, seconds)


def _listening(until_connected: contextlib.ExitStack) -> tuple[socket.socket, str] | tuple[None, None]:
    """A socket that other ranks of this host and user can connect to, and its path; None if there can be none."""
    try:
        listening = until_connected.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        path = os.path.join(until_connected.enter_context(tempfile.TemporaryDirectory(prefix="segue-")), "rank")
        listening.bind(path)
        listening.listen(1024)
    except (OSError, AttributeError):  # the path is too long, say, or the system has no such sockets
        return None, None
    return listening, path


def _close_in_child() -> None:
    for sockets in list(_all):
        sockets.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _close(sockets: Iterable[socket.socket]) -> None:
    for other in sockets:
        other.close()
