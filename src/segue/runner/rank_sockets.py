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


class MissingRanks(Exception):
    """Ranks that didn't take part, each with what is known about it."""

    def __init__(self, ranks: dict[int, str]) -> None:
        super().__init__(", ".join(f"rank {rank} {why}" for rank, why in sorted(ranks.items())))


class RankSockets:
    """One socket to each other rank.

    Args:
        rank: this one. ``sockets``: to each other rank. ``seconds``: how long to wait for all of them.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], seconds: float) -> None:
        self._rank, self._others, self._seconds = rank, sorted(sockets.items()), seconds
        self._calls = 0
        self.close = weakref.finalize(self, _close, sockets.values())

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
        for rank, other in self._others:
            try:
                other.send(message)
            except OSError:
                missing[rank] = "is gone"
        for rank, other in self._others:
            if rank in missing:
                continue
            try:
                other.settimeout(max(0.0, self._seconds - (time.monotonic() - start)))
                answer = other.recv(len(message) + 8)  # of a longer message it tells that it is one
            except (TimeoutError, BlockingIOError):
                missing[rank] = "did not come"
                continue
            except OSError:
                answer = b""
            if not answer:
                missing[rank] = "is gone"
                continue
            call, came, *theirs = struct.unpack(f"{len(answer) // 8}q", answer)
            if call != self._calls or len(theirs) != len(values):
                missing[rank] = "is at another call"
            elif now - came > self._seconds * 1e6:
                missing[rank] = "waited, and has gone on without this one"
            rows.append(theirs)
        if missing:
            raise MissingRanks(missing)
        rows.insert(self._rank, rows.pop(0))
        return rows


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
        while len(sockets) < size - 1:  # the others wait in the queue already
            higher, _ = listening.accept()
            sockets[int.from_bytes(higher.recv(2), "little")] = higher
        return RankSockets(rank, sockets, seconds)


def _listening(until_connected: contextlib.ExitStack) -> tuple[socket.socket, str | None]:
    """A socket that other ranks of this host and user can connect to at a path; None if there can be none."""
    listening = until_connected.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        path = os.path.join(until_connected.enter_context(tempfile.TemporaryDirectory(prefix="segue-")), "rank")
        listening.bind(path)
        listening.listen(1024)
    except OSError:  # the path is too long, say
        return listening, None
    return listening, path


def _close(sockets: Iterable[socket.socket]) -> None:
    for other in sockets:
        other.close()
