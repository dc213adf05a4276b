"""What the CUDA device does on the host, with everything of CUDA replaced: it needs no GPU."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from segue.devices.aux_streams import Step
from segue.devices.cuda import device as cuda_device
from segue.devices.cuda import raw
from segue.devices.cuda.device import CudaDevice
from segue.devices.cuda.forked import ForkedRecording
from segue.devices.cuda.pool import CudaPool
from segue.devices.cuda.recording import CudaRecording, CudaSegment
from segue.devices.cuda.streams import Seen
from segue.errors import UnseenWorkError


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
    seen, kept, inside = Seen(), Event(), [Event()]
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
        segment = CudaSegment(graph, False, Seen(), 0, own_generator)
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
    recording._draws = False
    recording.run(torch.ops.aten.rand.default, ([2],), {"device": torch.device("cpu")})
    recording.run(torch.ops.aten.rand.generator, ([2],), {"generator": None, "device": torch.device("cpu")})
    assert not recording._draws
    recording.run(torch.ops.aten.rand.generator, ([2],), {"generator": torch.Generator(), "device": torch.device("cpu")})
    assert recording._draws


class Forked:
    """A recording on three streams that are numbers. ``stray``: what ran on each beside ops."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: bool = True) -> None:
        self.current, self.ran, self.log = 0, [0, 0, 0], []  # type: ignore[var-annotated]
        streams: Any = [SimpleNamespace(cuda_stream=i) for i in range(3)]
        capture = SimpleNamespace(
            reached=lambda stream: (stream, self.ran[stream]),
            mark=lambda stream: (stream, len(self.log)),
            wait=self.wait,
        )
        monkeypatch.setattr(raw, "StreamCapture", lambda streams, events: capture)
        monkeypatch.setattr(raw, "current_stream", lambda device: self.current)
        monkeypatch.setattr(raw, "captured_nodes", lambda device: sum(self.ran))
        monkeypatch.setattr(raw, "current_setter", lambda stream: lambda: setattr(self, "current", stream.cuda_stream))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[0])
        monkeypatch.setattr(CudaRecording, "__init__", lambda recording, pool: setattr(recording, "_device", 0))
        monkeypatch.setattr(CudaRecording, "run", lambda recording, func, args, kwargs: self.launch(func, args))
        monkeypatch.setattr(CudaRecording, "commit", lambda recording, at_once: self.log.append(f"committed on {self.current}"))
        monkeypatch.setattr(CudaRecording, "abort", lambda recording: self.log.append(f"given up on {self.current}"))
        pool: Any = None
        self.recording = ForkedRecording(pool, streams[1:], [], looks)

    def wait(self, stream: int, mark: tuple[int, int]) -> None:
        self.log.append(f"{stream} waits for {mark[0]}")
        self.ran[stream] += 1  # as waiting moves what the next node comes after

    def launch(self, func: Any, args: tuple[Any, ...]) -> Any:
        result = func(*args)
        if func is not _t:
            self.log.append(f"{str(func).split('.')[1]} on {self.current}")
            self.ran[self.current] += 1
        return result

    def op(self, func: Any, *args: Any, placed: Step | None = None) -> Any:
        return self.recording.run(func, args, {}, placed)


def on(stream: int, *before: tuple[int, int], **more: Any) -> Step:
    """How an op is recorded: on ``stream``."""
    return Step(stream, before, **{"release": False, "hold": (), "keep": ()} | more)


_mm, _sin, _add, _t = (
    torch.ops.aten.mm.default,
    torch.ops.aten.sin.default,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.t.default,
)


@pytest.mark.parametrize(
    ("how", "bindings", "begun"),
    [
        ({}, True, "plain"),
        ({"looks": True}, True, "0 aux, looks: True"),
        ({"forked": True}, True, "2 aux, looks: False"),
        ({"forked": True, "looks": True}, True, "2 aux, looks: True"),
        ({"forked": True}, False, "plain"),
    ],
)
def test_a_recording_forks_and_looks_where_cuda_bindings_are_and_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, bool], bindings: bool, begun: str
) -> None:
    device, pool = CudaDevice(0), SimpleNamespace()
    monkeypatch.setattr(device, "_aux_streams", lambda: ["a", "b"])
    monkeypatch.setattr(raw, "has_cuda_runtime", lambda: bindings)
    monkeypatch.setattr(cuda_device, "CudaRecording", lambda pool: "plain")
    monkeypatch.setattr(cuda_device, "ForkedRecording", lambda pool, aux, events, looks: f"{len(aux)} aux, looks: {looks}")
    assert device.begin(pool, **how) == begun  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.parametrize("looks", [True, False])
def test_ops_are_recorded_where_they_are_placed_and_all_that_was_forked_is_joined(
    monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    forked, x = Forked(monkeypatch, looks), torch.randn(4, 4)
    h = forked.op(_sin, x, placed=on(0, (0, -1)))
    q = forked.op(_mm, h, x, placed=on(0, (0, -1)))
    k = forked.op(_mm, forked.op(_t, h), x, placed=on(1, (1, 1)))
    forked.op(_add, q, k, placed=on(0, (1, -1), (0, 2)))
    forked.op(_mm, h, x, placed=on(1))
    assert forked.current == 1 and forked.recording.size() == 5 + 2
    forked.recording.commit()
    assert forked.log == [
        "sin on 0", "mm on 0", "1 waits for 0", "mm on 1", "0 waits for 1", "add on 0", "mm on 1", "0 waits for 1",
        "committed on 0",
    ]  # fmt: skip


def test_what_one_stream_made_and_another_uses_is_held_as_long_as_it_was_placed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    forked = Forked(monkeypatch)
    x, y, z = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    gone = [weakref.ref(t.untyped_storage()) for t in (x, y, z)]
    forked.op(torch.ops.aten.cat.default, [x, y], placed=on(1, hold=(1,), keep=(0,)))
    forked.op(_sin, z, placed=on(0))
    del x, y, z
    assert [ref() is None for ref in gone] == [False, False, True]
    forked.op(_sin, torch.randn(4), placed=on(0, release=True))
    assert [ref() is None for ref in gone] == [False, True, True]
    forked.recording.commit()
    assert gone[0]() is None


def test_a_kernel_that_nobody_saw_is_noticed_at_the_next_op_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    forked, x = Forked(monkeypatch), torch.randn(4, 4)
    h = forked.op(_sin, x, placed=on(0))
    forked.op(_mm, h, x, placed=on(1, (1, -1)))
    forked.ran[1] += 1
    with pytest.raises(UnseenWorkError, match=r"before .*test_cuda_host.py:\d+.* a kernel that no op tells of"):
        forked.op(_sin, h, placed=on(0))
    with pytest.raises(UnseenWorkError, match="a kernel that no op tells of"):
        forked.recording.size()
    forked.recording.abort()
    assert forked.log[-1] == "given up on 0"


def test_an_op_that_waited_and_failed_is_not_taken_for_a_kernel_that_nobody_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    forked, x = Forked(monkeypatch), torch.randn(4, 4)
    forked.op(_mm, x, x, placed=on(1, (0, -1), (1, 0)))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        forked.op(_mm, x, x[:3], placed=on(0, (1, -1), (0, 1)))
    forked.op(_sin, x, placed=on(0))
    forked.current = 2
    with pytest.raises(UnseenWorkError, match="another stream current"):
        forked.op(_sin, x, placed=on(0))


@pytest.mark.parametrize("where", ["enter", "exit"])
def test_a_turn_that_fails_lets_others_have_theirs(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost device fails everywhere; a lock that nobody gives back would hang the next thread instead of telling it so."""

    def lost(*_: Any) -> int:
        raise RuntimeError("device lost")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    device: Any = SimpleNamespace(index=0, torch_device=torch.device("cpu"))
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


@pytest.mark.parametrize("layout", [("edges",), ()], ids=["CUDA 13", "CUDA 12"])
def test_how_far_a_capture_has_got_is_read_from_either_cuda_bindings(
    monkeypatch: pytest.MonkeyPatch, layout: tuple[str, ...]
) -> None:
    last: list[int] = []
    runtime = SimpleNamespace(
        cudaError_t=SimpleNamespace(cudaSuccess="fine"),
        cudaStream_t=int,
        cudaStreamGetCaptureInfo=lambda stream: ("fine", "active", 7, "graph", last, *layout, len(last)),
    )
    monkeypatch.setattr(raw, "_cuda_runtime", lambda: runtime)
    stream: Any = SimpleNamespace(cuda_stream=5)
    capture = raw.StreamCapture([stream], [])
    assert capture.reached(0) == (0, 0)
    last.extend([40, 41])
    assert capture.reached(0) == (2, 40)
