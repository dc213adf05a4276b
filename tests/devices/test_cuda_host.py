"""What the CUDA device does on the host, with everything of CUDA replaced: it needs no GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from segue.devices.cuda import raw
from segue.devices.cuda.op_checks import OpChecks
from segue.devices.cuda.pool import CudaPool
from segue.devices.cuda.recording import CudaRecording, CudaSegment
from segue.devices.cuda.side_streams import StreamEdges
from segue.errors import SegueError


class Graph:
    """Stands for a graph: its launch moves a generator by ``draws``."""

    def __init__(self, state: list[int], draws: int) -> None:
        self.state, self.draws = state, draws

    def replay(self) -> None:
        self.state[0] += self.draws


def test_of_the_events_a_segment_recorded_those_count_that_somebody_still_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told without weak references, which torch leaves dangling when an event dies."""

    class Event:
        __slots__ = ()  # no weak reference to it can be made

    monkeypatch.setattr(raw, "stream_is_capturing", lambda stream: True)
    seen, kept, inside = StreamEdges(), Event(), [Event()]
    for event in (kept, inside[0], Event()):
        seen.on_record(event, "the capture stream")
    del event
    assert seen.records == [kept, *inside]
    assert not seen.on_wait(kept, "the capture stream"), "it waits inside the graph"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], list[str]]:
    """How three launches of a segment are made: by torch, or plainly."""

    def of(draws: int, own_generator: bool) -> list[str]:
        state, seen = [0], []

        def by_torch(graph: Any) -> Callable[[], None]:
            return lambda: (seen.append("torch"), graph.replay())[0]

        monkeypatch.setattr(raw, "graph_launcher", by_torch)
        monkeypatch.setattr(raw, "random_state", lambda device: (7, state[0]))
        monkeypatch.setattr(raw, "plain_launcher", lambda graph, device: (lambda: seen.append("plain"), lambda: None))
        graph: Any = Graph(state, draws)
        segment = CudaSegment(graph, False, StreamEdges(), 0, own_generator)
        for _ in range(3):
            segment.launch()
        return seen

    return of


def test_only_a_graph_without_random_numbers_is_launched_past_torch(launches: Callable[[int, bool], list[str]]) -> None:
    assert launches(0, False) == ["torch", "plain", "plain"]
    assert launches(4, False) == ["torch"] * 3


def test_a_graph_that_draws_from_a_generator_of_its_own_is_launched_by_torch(
    launches: Callable[[int, bool], list[str]],
) -> None:
    """The default generator, by which the others are told apart, doesn't move for it."""
    assert launches(0, True) == ["torch"] * 3


def test_a_generator_that_an_op_is_given_is_noticed_while_it_is_recorded() -> None:
    recording = object.__new__(CudaRecording)
    recording._draws, recording._ops = False, OpChecks()
    recording.run(torch.ops.aten.rand.default, ([2],), {"device": torch.device("meta")})
    recording.run(torch.ops.aten.rand.generator, ([2],), {"generator": None, "device": torch.device("meta")})
    assert not recording._draws
    recording.run(torch.ops.aten.rand.generator, ([2],), {"generator": torch.Generator(), "device": torch.device("meta")})
    assert recording._draws


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(SegueError("bindings give no count"), "^bindings give no"), (RuntimeError("unjoined work"), "^a segment ended while")],
)
def test_an_error_of_segues_at_the_end_of_a_recording_keeps_its_text(
    raised: Exception, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(graph: Any) -> bool:
        raise raised

    abandoned: list[str] = []
    monkeypatch.setattr(raw, "end_graph", fails)
    monkeypatch.setattr(raw, "abandon_graph", abandoned.append)
    recording: Any = object.__new__(CudaRecording)
    recording._scope, recording._graph, recording._sides, recording._edges = ExitStack(), "graph", {}, StreamEdges()
    recording._origin = None
    with pytest.raises(SegueError, match=expected):
        recording.commit()
    assert abandoned == ["graph"]


def test_a_graph_that_the_driver_has_no_memory_for_is_an_out_of_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(graph: Any) -> bool:
        raise torch.AcceleratorError("CUDA error: out of memory\nCompile with")

    monkeypatch.setattr(raw, "end_graph", fails)
    monkeypatch.setattr(raw, "abandon_graph", lambda graph: None)
    recording: Any = object.__new__(CudaRecording)
    recording._scope, recording._graph, recording._sides, recording._edges = ExitStack(), "graph", {}, StreamEdges()
    recording._origin = None
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA error: out of memory$"):
        recording.commit()


@pytest.mark.parametrize("where", ["enter", "exit"])
def test_a_turn_that_fails_lets_others_have_theirs(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost device fails everywhere; a lock that nobody gives back would hang the next thread instead of telling it so."""

    def lost(*_: Any) -> int:
        raise RuntimeError("device lost")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    device: Any = SimpleNamespace(torch_device=torch.device("cuda", 0))
    pool = CudaPool(device)
    pool._stream = 5
    monkeypatch.setattr(raw, "current_stream", lambda index: 5)
    monkeypatch.setattr(raw, "current_device", lost if where == "enter" else lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: lost() if index == 1 else None)
    with pytest.raises(RuntimeError, match="device lost"), pool.turn():
        pass
    free: list[bool] = []
    other = threading.Thread(target=lambda: free.append(pool._lock.acquire(blocking=False)))
    other.start()
    other.join()
    assert free == [True] and not pool._devices
