"""Torch's private CUDA calls, and the CUDA runtime by cuda-bindings: the part of :mod:`segue._torch` that no other device needs.

It can be imported without a GPU. :func:`require_torch` says what a CUDA device needs of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from segue import _torch
from segue.errors import SegueError

_NEEDED = (
    *("torch._C._cuda_beginAllocateCurrentThreadToPool", "torch._C._cuda_endAllocateToPool", "torch._C._cuda_releasePool"),
    "torch._fused_sdp_choice",
    *("torch._C._cuda_getCurrentRawStream", "torch._C._cuda_getDevice", "torch._C._cuda_memoryStats"),
    *("torch.cuda.CUDAGraph.raw_cuda_graph", "torch.cuda.CUDAGraph.raw_cuda_graph_exec", "torch.cuda.CUDAGraph.instantiate"),
)
_RUNTIME = (
    *("cudaGraphLaunch", "cudaGraphExec_t", "cudaGraphGetNodes", "cudaError_t", "cudaGetLastError", "cudaStream_t"),
    *("cudaStreamCreateWithFlags", "cudaStreamNonBlocking", "cudaStreamBeginCapture", "cudaStreamEndCapture"),
    "cudaStreamCaptureMode",
)

_give_reference = ctypes.pythonapi.Py_IncRef
_give_reference.argtypes, _give_reference.restype = [ctypes.py_object], None


def require_torch() -> None:
    """Look up the private names of torch that a CUDA device needs.

    Raises:
        UnsupportedTorchError: names those that this torch lacks.
    """
    _torch.require(*_NEEDED)


def new_graph() -> torch.cuda.CUDAGraph:
    """A graph that can be inspected after its recording and before it is instantiated."""
    return torch.cuda.CUDAGraph(keep_graph=True)


def end_recording(graph: torch.cuda.CUDAGraph) -> None:
    """``capture_end`` without torch's warning about an empty graph: between two breaks there may be nothing to record."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        graph.capture_end()


def end_graph(graph: torch.cuda.CUDAGraph) -> bool:
    """End the recording. Returns whether the graph is empty, in which case it can't be instantiated."""
    end_recording(graph)
    return _node_count(graph) == 0


def graph_launcher(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """``graph.replay`` without its Python frame."""
    replay = getattr(torch._C._CUDAGraph, "replay", None)
    return graph.replay if replay is None else replay.__get__(graph)


def plain_launcher(graph: torch.cuda.CUDAGraph, device: int) -> tuple[Callable[[], None], Callable[[], None]] | None:
    """Two functions: one calls ``cudaGraphLaunch`` on the current stream, the other makes later calls of the first an error.

    Call the second when the graph is destroyed. The first is only for a graph that draws no random numbers, since torch's own
    replay sets the generators, and may only be called while ``device`` is current. None where cuda-bindings isn't installed.
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


def register_generators(graph: torch.cuda.CUDAGraph, device: int, found: list[torch.Generator]) -> set[int]:
    """Make the generators of ``device`` among those found known to a graph that is about to be recorded, which torch demands.
    Returns the keys of all that it may draw from.
    """
    default = _torch.generator_key(torch.cuda.default_generators[device])  # which torch registers by itself
    mine = {_torch.generator_key(g): g for g in found if g.device.type == "cuda" and g.device.index in (None, device)}
    mine.pop(default, None)
    for generator in mine.values():
        graph.register_generator_state(generator)
    return {default, *mine}


def captures_stop_random_ops() -> bool:
    """Whether random ops of other threads fail while a graph is recorded. Before 2.13 torch counts the device's generator as
    captured, whatever thread draws from it, and whether the graph draws or not.
    """
    return bool(torch.torch_version.TorchVersion(torch.__version__) < "2.13")


def settle_attention_order(place: torch.device) -> None:
    """Have torch choose its order of attention backends now. It does so at the process's first attention on a CUDA device, and
    whoever compared the order before and after would take that for somebody's change.
    """
    x = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16, device=place)
    torch._fused_sdp_choice(x, x, x)


def random_state(device: int) -> tuple[int, int]:
    """Seed and offset of the device's default generator: a graph that draws random numbers moves it when it is launched."""
    generator = torch.cuda.default_generators[device]
    return generator.initial_seed(), generator.get_offset()


def abandon_graph(graph: torch.cuda.CUDAGraph) -> None:
    """End a stream capture that went wrong, on the current stream. Never raises.

    Before 2.12 ``capture_end`` raises at once when CUDA has invalidated the capture (pytorch#180395). Allocations then stay
    routed to the pool, nothing can be recorded into it again, and the random generator still counts as captured. So the invalid
    capture is ended without torch, and an empty one is begun in its place, which ``capture_end`` can end.
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
    """The module of cuda-bindings, which comes with torch on Linux, or None without it.

    It is cached because an import statement takes 100 us each time. A version that lacks a name is not used, with a warning.
    """
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None
    lacking = [name for name in _RUNTIME if not hasattr(runtime, name)]
    if not lacking:
        return runtime
    warnings.warn(f"segue goes without cuda-bindings {_bindings_version()}, which lacks {', '.join(lacking)}", stacklevel=2)
    return None


def _bindings_version() -> str:
    try:
        return importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return "(of unknown version)"


def _failure(error: Any, when: str) -> Exception:
    """The exception for an error of the CUDA runtime. It clears the error, or torch would report it for its next kernel."""
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

    segue's pools are handles, which live as long as their graphs. A ``MemPool`` would be a second owner of the memory.
    """
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def memory_segments(pool: Any) -> list[dict[str, Any]]:
    """The allocator's segments of one pool, on every device, without their histories where torch can leave them out.

    Each has ``device``, ``address``, ``total_size`` and ``blocks``; each block has ``size`` and ``state``. Sizes are in bytes.

    Raises:
        UnsupportedTorchError: this torch's snapshots can't be asked for one pool, or lack one of these.
    """
    parameters = _snapshot_parameters()
    if "mempool_id" not in parameters:
        raise _torch.unsupported("torch.cuda.memory_snapshot(mempool_id=...)")
    kwargs: dict[str, Any] = {"include_traces": False} if "include_traces" in parameters else {}
    # Torch 2.11 drops a reference to each number of the id that it doesn't own. After some calls a number would be freed and
    # its memory used again, so torch gets copies, each with one reference more.
    numbers = tuple(int(str(n)) for n in pool)
    for lost in (*numbers, False):
        _give_reference(lost)
    found = list(torch.cuda.memory_snapshot(mempool_id=numbers, **kwargs))
    for segment in found:
        lacking = _SEGMENT_KEYS - segment.keys() or {k for b in segment["blocks"] for k in _BLOCK_KEYS - b.keys()}
        if lacking:
            raise _torch.unsupported(*(f"torch.cuda.memory_snapshot()[...][{key!r}]" for key in sorted(lacking)))
    return [s for s in found if tuple(s.get("segment_pool_id", numbers)) == numbers]


_SEGMENT_KEYS, _BLOCK_KEYS = {"device", "address", "total_size", "blocks"}, {"size", "state"}


@functools.cache
def _snapshot_parameters() -> frozenset[str]:
    return frozenset(inspect.signature(torch.cuda.memory_snapshot).parameters)


def allocator_mark(device: int) -> tuple[int, int]:
    """Two numbers, at least one of which changes whenever torch's allocator takes memory from the device or gives some back.

    Raises:
        UnsupportedTorchError: this torch's statistics lack one of the two.
    """
    stats = torch._C._cuda_memoryStats(device)
    try:
        return int(stats["num_device_alloc"]), int(stats["reserved_bytes"]["all"]["current"])
    except KeyError as e:
        raise _torch.unsupported(f"torch._C._cuda_memoryStats()[...][{e.args[0]!r}]") from None


def _no_cuda(*_: Any) -> int:
    raise RuntimeError("this torch is built without CUDA")


# The handle of a device's current stream, without making a stream object, and the index of the current device.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _no_cuda)


def stream_is_capturing(stream: torch.cuda.Stream) -> bool:
    """Whether ``stream`` is part of a stream capture."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def private_stream(device: torch.device) -> torch.cuda.Stream:
    """A non-blocking stream that no call of ``torch.cuda.Stream()`` returns, where cuda-bindings is installed.

    torch hands out its own streams round-robin from a pool of 32, so a user's side stream could be the same as one of these.
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
    """How many nodes the graph has; None where that isn't known.

    Raises:
        SegueError: this version of cuda-bindings gives no count.
    """
    runtime = _cuda_runtime()
    if runtime is None:
        return None
    error, *found = runtime.cudaGraphGetNodes(graph.raw_cuda_graph())
    if int(error) != 0:
        return None
    # Between versions of CUDA the list of nodes got a list of edges beside it. The count is the only number.
    count = next((n for n in found if isinstance(n, int)), None)
    if count is None:
        raise SegueError(
            f"cudaGraphGetNodes of cuda-bindings {_bindings_version()} returns no count of nodes, so segue can't tell whether a "
            "graph is empty. Install another version of cuda-bindings."
        )
    return count
