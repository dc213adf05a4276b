"""Torch's private CUDA calls, and the CUDA runtime by cuda-bindings: the part of :mod:`segue._torch` that no other device needs.

Nothing here needs a GPU to be imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_give_reference = ctypes.pythonapi.Py_IncRef
_give_reference.argtypes, _give_reference.restype = [ctypes.py_object], None


def new_graph() -> torch.cuda.CUDAGraph:
    """A graph whose structure can be asked for between recording and instantiation."""
    return torch.cuda.CUDAGraph(keep_graph=True)


def end_recording(graph: torch.cuda.CUDAGraph) -> None:
    """``capture_end`` that takes an empty graph for granted: between two breaks there may be nothing to record."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        graph.capture_end()


def end_graph(graph: torch.cuda.CUDAGraph) -> bool:
    """End the recording. Returns whether the graph is empty: such a one can't be instantiated."""
    end_recording(graph)
    return _node_count(graph) == 0


def graph_launcher(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """``graph.replay`` without its Python frame."""
    replay = getattr(torch._C._CUDAGraph, "replay", None)
    return graph.replay if replay is None else replay.__get__(graph)


def plain_launcher(graph: torch.cuda.CUDAGraph, device: int) -> tuple[Callable[[], None], Callable[[], None]] | None:
    """``cudaGraphLaunch`` on the current stream with nothing around it, and what forbids it, for when the graph is destroyed.

    Only for a graph that draws no random numbers, since torch's own replay sets the generators, and only while ``device`` is
    the current one. None where cuda-bindings isn't installed.
    """
    runtime = _cuda_runtime()
    if runtime is None:
        return None
    launch, fine, stream = runtime.cudaGraphLaunch, runtime.cudaError_t.cudaSuccess, current_stream
    handle = runtime.cudaGraphExec_t(int(graph.raw_cuda_graph_exec()))

    def run(_keeps: object = graph) -> None:
        (error,) = launch(handle, stream(device))
        if error is not fine:
            raise _failure(error, "a graph was launched")

    def gone(*_: Any) -> tuple[Any]:
        raise RuntimeError("a graph was launched after it had been destroyed")

    def forbid() -> None:
        nonlocal launch
        launch = gone

    return run, forbid


def random_state(device: int) -> tuple[int, int]:
    """Seed and offset of the device's default generator: a graph that draws random numbers moves it when it is launched."""
    generator = torch.cuda.default_generators[device]
    return generator.initial_seed(), generator.get_offset()


def abandon_graph(graph: torch.cuda.CUDAGraph) -> None:
    """End a stream capture that went wrong, on the current stream. Never raises.

    Before 2.12 ``capture_end`` gives up when CUDA has invalidated the capture (pytorch#180395): allocations stay routed to the
    pool, nothing can be recorded into it again, and the random generator believes that it is being captured. So the invalid
    capture is ended without torch, and an empty one put in its place for ``capture_end`` to end in good order.
    """
    try:
        end_recording(graph)
    except Exception:
        with contextlib.suppress(Exception):
            _replace_invalid_capture()
            try:
                end_recording(graph)
            except Exception:
                _end_raw_capture()
    with contextlib.suppress(Exception):
        graph.reset()


@functools.cache
def _cuda_runtime() -> Any:
    """cuda-bindings, which comes with torch on Linux; None without it. An import statement takes 100 us each time."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None


def _failure(error: Any, when: str) -> Exception:
    """What to raise for an error of the CUDA runtime, which forgets it: or the next kernel of torch's would be blamed."""
    _cuda_runtime().cudaGetLastError()
    return torch.AcceleratorError(f"CUDA error: {getattr(error, 'name', error)}, when {when}")


def _end_raw_capture() -> Any:
    runtime = _cuda_runtime()
    stream = runtime.cudaStream_t(current_stream(current_device()))
    runtime.cudaStreamEndCapture(stream)
    runtime.cudaGetLastError()
    return stream


def _replace_invalid_capture() -> None:
    stream, runtime = _end_raw_capture(), _cuda_runtime()
    runtime.cudaStreamBeginCapture(stream, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)


@contextlib.contextmanager
def allocating_from(pool: Any, device: int) -> Iterator[None]:
    """Route this thread's allocations to a graph pool, as ``torch.cuda.use_mem_pool`` does for a ``MemPool``.

    A pool that is a mere handle lives as long as its graphs do; a ``MemPool`` would be a second owner.
    """
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def memory_segments(pool: Any) -> list[dict[str, Any]]:
    """The allocator's segments of one pool, without their histories where torch can leave them out.

    Torch 2.11 lets go of a reference to each number of the pool's id that was never its own: after some calls they
    are freed, and other objects lie in their place. So it gets copies, each with a reference to lose.
    """
    kwargs: dict[str, Any] = {"include_traces": False} if _SNAPSHOT_TRACES else {}
    numbers = tuple(int(str(n)) for n in pool)
    for lost in (*numbers, False):
        _give_reference(lost)
    return list(torch.cuda.memory_snapshot(numbers, **kwargs))


def allocator_mark(device: int) -> tuple[int, int]:
    """ModuleSnapshot whenever torch's allocator takes memory from the device or gives some back."""
    stats = torch._C._cuda_memoryStats(device)
    return int(stats["num_device_alloc"]), int(stats["reserved_bytes"]["all"]["current"])


def _no_cuda(*_: Any) -> int:
    raise RuntimeError("this torch is built without CUDA")


# Handle of a device's current stream, without making a stream object; and the index of the current device. In CUDA builds.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _no_cuda)


def stream_is_capturing(stream: torch.cuda.Stream) -> bool:
    """Whether ``stream`` is part of a stream capture."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def private_stream(device: torch.device) -> torch.cuda.Stream:
    """A non-blocking stream that ``torch.cuda.Stream()`` will never hand to anyone, where cuda-bindings is installed.

    torch's own streams come round-robin from a pool of 32, so a user's side stream would sooner or later be this one.
    """
    with torch.cuda.device(device):
        runtime = _cuda_runtime()
        if runtime is None:
            return torch.cuda.Stream(device)
        error, handle = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
        if int(error) != 0:
            return torch.cuda.Stream(device)
        return torch.cuda.ExternalStream(int(handle), device=device)


def _node_count(graph: torch.cuda.CUDAGraph) -> int | None:
    runtime = _cuda_runtime()
    if runtime is None:
        return None
    found = runtime.cudaGraphGetNodes(graph.raw_cuda_graph())
    return int(found[-1]) if int(found[0]) == 0 else None


_SNAPSHOT_TRACES = "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters
