"""What a rank finds out about the others by its sockets, each of which a test holds the other end of."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from segue.runner.rank_sockets import MissingRanks, RankSockets, connected


@pytest.fixture
def ends() -> Iterator[dict[int, tuple[socket.socket, socket.socket]]]:
    """For ranks 0 and 2: the socket that rank 1 has to it, and that one's other end."""
    pairs = {rank: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for rank in (0, 2)}
    yield pairs
    for pair in pairs.values():
        for end in pair:
            end.close()


def sockets_of(ends: dict[int, tuple[socket.socket, socket.socket]]) -> RankSockets:
    return RankSockets(1, {rank: mine for rank, (mine, _) in ends.items()}, 0.2)


def say(end: socket.socket, call: int, *values: int, ago: float = 0.0) -> None:
    end.send(struct.pack(f"{2 + len(values)}q", call, int((time.monotonic() - ago) * 1e6), *values))


def test_values_come_by_rank_and_call_by_call(ends: dict[int, tuple[socket.socket, socket.socket]]) -> None:
    sockets = sockets_of(ends)
    for call in (1, 2):  # rank 0 is a call ahead
        say(ends[0][1], call, call, -(2**62))
    for call in (1, 2):
        say(ends[2][1], call, 7, 8)
        assert [list(row) for row in sockets.values([5, 6])] == [[call, -(2**62)], [5, 6], [7, 8]]


def test_many_values_are_one_message(ends: dict[int, tuple[socket.socket, socket.socket]]) -> None:
    for _, end in ends.values():
        say(end, 1, *range(2000))
    assert [sum(row) for row in sockets_of(ends).values([1] * 2000)] == [1999000, 2000, 1999000]


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (lambda end: None, "rank 2 did not come"),
        (lambda end: end.close(), "rank 2 is gone"),
        (lambda end: say(end, 2, 7), "rank 2 is at another call"),
        (lambda end: say(end, 1, 7, 8), "rank 2 is at another call"),
        (lambda end: say(end, 1, *range(1000)), "rank 2 is at another call"),
        (lambda end: say(end, 1, 7, ago=0.3), "rank 2 waited, and has gone on without this one"),
    ],
)
def test_only_the_rank_that_took_no_part_is_named(ends, does, why) -> None:  # type: ignore[no-untyped-def]
    sockets, start = sockets_of(ends), time.monotonic()
    say(ends[0][1], 1, 9)
    does(ends[2][1])
    with pytest.raises(MissingRanks) as error:
        sockets.values([5])
    assert str(error.value) == why and time.monotonic() - start < 1


def test_no_rank_goes_on_if_one_came_too_late_for_another(ends: dict[int, tuple[socket.socket, socket.socket]]) -> None:
    say(ends[0][1], 1, 9, ago=0.15)  # in time for this one, and longer before rank 2 than any waits
    say(ends[2][1], 1, 9, ago=-0.1)
    with pytest.raises(MissingRanks, match=r"^rank 2 came too late for rank 0$"):
        sockets_of(ends).values([5])


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_doesnt_hide_that_its_rank_is_gone(ends: dict[int, tuple[socket.socket, socket.socket]]) -> None:
    sockets = sockets_of(ends)
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(0)
    try:
        sockets.close()
        ends[0][1].settimeout(5)
        assert ends[0][1].recv(8) == b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_all_ranks_wait_the_stated_time_together(ends: dict[int, tuple[socket.socket, socket.socket]]) -> None:
    start = time.monotonic()
    with pytest.raises(MissingRanks, match=r"^rank 0 did not come, rank 2 did not come$"):
        sockets_of(ends).values([5])
    assert 0.15 < time.monotonic() - start < 0.39


def test_without_a_way_to_another_rank_nobody_has_sockets() -> None:
    assert connected(0, 2, 1.0, lambda value: [value, None]) is None
    told = iter([["/nowhere", "/nowhere"], [True, False]])
    assert connected(1, 2, 1.0, lambda value: next(told)) is None
