"""Every private or version-dependent torch call, in one place, probed at import.

Nothing here needs a GPU, and nothing imports dynamo.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device as _device_module
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

_from_pointer: Callable[[int, torch.device, int], torch.UntypedStorage] | None = getattr(
    torch._C, "_construct_storage_from_data_pointer", None
)
_inference_guard: Any = torch._C._InferenceMode
_give_reference = ctypes.pythonapi.Py_IncRef
_give_reference.argtypes, _give_reference.restype = [ctypes.py_object], None


class WatchingMode(TorchDispatchMode):
    """A dispatch mode that sees ops and leaves compiled functions compiled, where other modes turn them eager.

    Without ``_should_skip_dynamo`` torch would wrap its handler in something that imports dynamo, which takes seconds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def current_mode() -> Any:
    """The dispatch mode that sees an op first, or None."""
    return _get_current_dispatch_mode()


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the arguments that an ``OpOverload`` writes, from its schema."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    written = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    return tuple(i for i, _ in written), tuple(name for _, name in written)


def written(
    writes: tuple[tuple[int, ...], tuple[str, ...]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Of a call's arguments those that it writes; ``writes``: of its op, from :func:`written_arguments`."""
    positions, names = writes
    return [args[i] for i in positions if i < len(args)] + [kwargs[name] for name in names if name in kwargs]


def tensor_at(
    address: int,
    nbytes: int,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    device: torch.device,
) -> Tensor:
    """A tensor over ``nbytes`` of memory at ``address`` that owns nothing.

    ``offset`` is in elements. It is a normal tensor, not an inference tensor, so it may be written in any grad mode.
    """
    if _from_pointer is None:  # pragma: no cover - present in every torch segue supports
        raise RuntimeError(f"torch {torch.__version__} can't build a tensor over a pointer; segue needs torch >= 2.11")
    with torch.inference_mode(False):
        storage = _from_pointer(address, device, nbytes)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, size, stride)


def storage_key(t: Tensor) -> int:
    """Identity of the storage behind ``t``: equal exactly for tensors that share one."""
    return int(t.untyped_storage()._cdata)


def address(t: Tensor) -> int:
    """Where the storage behind ``t`` begins; 0 where there is none: an empty or meta tensor, a sparse one, a wrapper."""
    if t.layout is not torch.strided:
        return 0
    try:
        return t.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def storage_span(t: Tensor) -> tuple[int, int]:
    """``(address, bytes)`` of the whole storage behind ``t``."""
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def inference_guard(enabled: bool) -> Any:
    """``torch.inference_mode`` without its Python frames: a context manager, in force from its making on."""
    return _inference_guard(enabled)


def open_composite(func: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel that ``func`` has at dispatch key ``key``, so that a dispatch mode sees the ops inside it."""
    return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)


def has_kernel(name: str, key: str) -> bool:
    """Whether operator ``name`` (``aten::linear``) has a kernel at dispatch key ``key``."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def dynamo_boundary(wrapper: Callable[..., Any]) -> None:
    """Make dynamo end its graph before calling ``wrapper``, and compile neither its frame nor those below it.

    What ``torch.compiler.disable`` does, without importing dynamo (0.8 s) for people who don't compile.
    """
    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    wrapper._torchdynamo_disable_msg = "a segue break point runs eagerly between two graphs"  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(wrapper.__code__, frames._FrameExecStrategy(skip, skip))


def new_graph() -> torch.cuda.CUDAGraph:
    """A graph whose structure can be asked for between recording and instantiation."""
    return torch.cuda.CUDAGraph(keep_graph=True)


def end_recording(graph: torch.cuda.CUDAGraph) -> None:
    """``capture_end`` that takes an empty graph for granted: between two breaks there may be nothing to record."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        graph.capture_end()


def finish_graph(graph: torch.cuda.CUDAGraph) -> bool:
    """End the recording and instantiate the graph, unless it has no nodes. Returns whether it is empty."""
    end_recording(graph)
    if _node_count(graph) == 0:
        return True
    graph.instantiate()
    return False


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
    launch, fine, stream = runtime.cudaGraphLaunch, runtime.cudaError_t.cudaSuccess, raw_stream
    handle = runtime.cudaGraphExec_t(int(graph.raw_cuda_graph_exec()))

    def run(_keeps: object = graph) -> None:
        (error,) = launch(handle, stream(device))
        if error is not fine:
            runtime.cudaGetLastError()  # or the next kernel of torch's would be blamed
            raise torch.AcceleratorError(f"CUDA error: {getattr(error, 'name', error)}, when a graph was launched")

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


def _end_raw_capture() -> Any:
    runtime = _cuda_runtime()
    stream = runtime.cudaStream_t(raw_stream(current_device()))
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
    """Changes whenever torch's allocator takes memory from the device or gives some back."""
    stats = torch._C._cuda_memoryStats(device)
    return int(stats["num_device_alloc"]), int(stats["reserved_bytes"]["all"]["current"])


def _no_cuda(*_: Any) -> int:
    raise RuntimeError("this torch is built without CUDA")


# Handle of a device's current stream, without making a stream object; and the index of the current device. In CUDA builds.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)
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


def has_cuda_runtime() -> bool:
    """Whether cuda-bindings is installed."""
    return _cuda_runtime() is not None


class StreamCapture:
    """The stream capture under way on the current stream, closer than torch lets one see it. Needs cuda-bindings.

    Its events and waits are raw, so that who watches torch's doesn't take them for the user's.

    Args:
        device: index of the current device.
        events: a store of events, which this one uses from the start and adds to.
    """

    def __init__(self, device: int, events: list[Any]) -> None:
        self._runtime = runtime = _cuda_runtime()
        self._events, self._used, self._fine = events, 0, runtime.cudaError_t.cudaSuccess
        self._origin = runtime.cudaStream_t(raw_stream(device))

    def reached(self) -> tuple[int, int]:
        """What tells one point of the stream it began on from another: of the nodes that come last there, how many there are,
        and the first."""
        found = self._runtime.cudaStreamGetCaptureInfo(self._origin)
        self._see(found[0])
        nodes = found[-3]
        return (len(nodes), int(nodes[0])) if nodes else (0, 0)

    def mark(self, stream: torch.cuda.Stream) -> Any:
        """An event at the point that ``stream`` has reached."""
        runtime = self._runtime
        if self._used == len(self._events):
            error, made = runtime.cudaEventCreateWithFlags(runtime.cudaEventDisableTiming)
            self._see(error)
            self._events.append(made)
        event = self._events[self._used]
        self._used += 1
        self._see(*runtime.cudaEventRecord(event, runtime.cudaStream_t(stream.cuda_stream)))
        return event

    def wait(self, stream: torch.cuda.Stream, event: Any) -> None:
        """Have what ``stream`` is given next come after ``event``."""
        self._see(*self._runtime.cudaStreamWaitEvent(self._runtime.cudaStream_t(stream.cuda_stream), event, 0))

    def _see(self, error: Any) -> None:
        if error is not self._fine:
            self._runtime.cudaGetLastError()
            raise RuntimeError(f"CUDA error: {getattr(error, 'name', error)}, when the streams of a capture were ordered")


def current_setter(stream: torch.cuda.Stream) -> Callable[[], None]:
    """What makes ``stream`` current, quickly and unobserved."""
    set_stream: Callable[..., None] = torch._C._cuda_setStream
    return functools.partial(
        set_stream, stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def _node_count(graph: torch.cuda.CUDAGraph) -> int | None:
    runtime = _cuda_runtime()
    if runtime is None:
        return None
    found = runtime.cudaGraphGetNodes(graph.raw_cuda_graph())
    return int(found[-1]) if int(found[0]) == 0 else None


_SNAPSHOT_TRACES = "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters


def alias(t: Tensor, like: Tensor | None = None) -> Tensor:
    """A normal tensor over ``t``'s storage, which it keeps alive; with the geometry and dtype of ``like``, or of ``t``.

    It is no inference tensor, belongs to no autograd graph, and is of no subclass.
    """
    like = t if like is None else like
    guard = _inference_guard(False)
    try:
        plain = torch.empty(0, dtype=like.dtype, device=t.device)
        return plain.set_(t.untyped_storage(), like.storage_offset(), like.size(), like.stride())
    finally:
        del guard


def lazy_bits(plain: Tensor, like: Tensor) -> Tensor:
    """``plain``, conjugated and negated lazily where ``like`` is: pointers and storages don't carry these bits."""
    if like.is_conj():
        plain = plain.conj()
    return torch._neg_view(plain) if like.is_neg() else plain


def kernel(func: Any) -> Any:
    """The callable behind an ``OpOverload``, without its Python frame."""
    return getattr(func, "_op", func)


def op_name(func: Any) -> str:
    """``aten::add.Tensor``."""
    return str(func.name())


def python_kernel(name: str) -> str | None:
    """Dispatch key of the Python kernel that ``torch.library`` registered for operator ``name``, for CPU tensors."""
    namespace, op = name.split("::", 1)
    for key in ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        if f"{namespace}/{op}/{key}" in _python_kernels:
            return key
    return None


def custom_op_body(name: str) -> Callable[..., Any] | None:
    """What a ``torch.library.custom_op`` runs on CPU tensors: the user's function, behind a switch of torch's."""
    bodies: dict[str | None, Callable[..., Any]] = getattr(_custom_ops.get(name), "_backend_fns", {})
    return bodies.get("cpu", bodies.get(None))


_python_kernels: set[str] = getattr(torch.library, "_impls", set())
_custom_ops: Any = getattr(torch._library.custom_ops, "OPDEFS", {})


def function_modes_on() -> Any:
    """Context: function modes see torch calls again, inside :func:`function_modes_off`."""
    return torch._C._EnableTorchFunction()


def function_modes_off() -> Any:
    """Context: torch calls reach no function mode and no ``__torch_function__``."""
    return torch._C.DisableTorchFunction()


def dispatch_modes_off() -> Any:
    """Context: ops reach no dispatch mode."""
    return torch._C._DisableTorchDispatch()


def autocast_state(device: str) -> torch.dtype | None:
    """What autocast casts to on devices of this type; None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # for some type of device


def autocast_off() -> Any:
    """Context: no op is cast, whatever autocast says."""
    return torch._C._DisableAutocast()


_function_mode_depth: Callable[[], int] = torch._C._len_torch_function_stack
_pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack
_push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack


def put_function_mode_below(mode: Any) -> None:
    """Activate a function mode under those already active, so that they may leave before it does.

    Only the context of ``torch.set_default_device`` stays lower: it insists on the bottom of the stack.
    """
    above = [_pop_function_mode() for _ in range(_function_mode_depth())]
    if above and isinstance(above[-1], DeviceContext) and default_device_is_set():
        _push_function_mode(above.pop())
    for other in (mode, *reversed(above)):
        _push_function_mode(other)


def push_function_mode(mode: Any) -> None:
    """Activate a function mode above all others."""
    _push_function_mode(mode)


def function_mode_is_on(mode: Any) -> bool:
    """Whether a function mode is in the stack. Inside its own handler it isn't."""
    return any(torch._C._get_function_stack_at(i) is mode for i in range(_function_mode_depth()))


def take_function_modes_out(unwanted: Callable[[Any], bool]) -> None:
    """Deactivate these function modes wherever they are in the stack, and leave the others as they are."""
    stack = [_pop_function_mode() for _ in range(_function_mode_depth())]
    for mode in reversed(stack):
        if not unwanted(mode):
            _push_function_mode(mode)


def default_device_is_set() -> bool:
    """Whether ``torch.set_default_device`` says where factories allocate. (``with torch.device`` adds ``device=``.)"""
    return _device_module.CURRENT_DEVICE is not None


def fills_empty() -> bool:
    """Whether ``torch.empty`` writes what it allocates (deterministic algorithms ask for that)."""
    fills: bool = getattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    return fills and torch.are_deterministic_algorithms_enabled()


# ``copy_`` of each source into its destination, fused where the tensors of a sequence share dtype and device.
foreach_copy: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = torch._foreach_copy_  # type: ignore[assignment]


def device_is_lost(error: BaseException) -> bool:
    """Whether the device can't be used after ``error``: a device error, and neither memory nor a capture's end."""
    return isinstance(error, torch.AcceleratorError) and not any(
        word in str(error) for word in ("out of memory", "capture", "cudaErrorStreamCapture")
    )


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the device, None where it isn't known."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
