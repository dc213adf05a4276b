"""Every private or version-dependent torch call, in one place, probed at import.

Nothing here needs a GPU, and nothing imports dynamo.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _len_torch_function_stack as _function_mode_depth
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils import _device as _device_module
from torch.utils._device import DeviceContext

_from_pointer: Callable[[int, torch.device, int], torch.UntypedStorage] | None = getattr(
    torch._C, "_construct_storage_from_data_pointer", None
)
_inference_guard: Any = torch._C._InferenceMode


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


def storage_span(t: Tensor) -> tuple[int, int]:
    """``(address, bytes)`` of the whole storage behind ``t``."""
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def inference_guard(enabled: bool) -> Any:
    """The guard object behind ``torch.inference_mode``, without its Python frame: holds until it is deleted."""
    return _inference_guard(enabled)


def open_composite(func: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel that ``func`` has at dispatch key ``key``, so that a dispatch mode sees the ops inside it."""
    return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)


def has_kernel(name: str, key: str) -> bool:
    """Whether operator ``name`` (``aten::linear``) has a kernel at dispatch key ``key``."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def outside_compiled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``fn`` where dynamo neither traces nor compiles it. Called while dynamo traces, so dynamo is imported already."""
    from torch._dynamo import disable

    return disable(fn)(*args, **kwargs)


outside_compiled._torchdynamo_disable = True  # type: ignore[attr-defined]


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


def abandon_graph(graph: torch.cuda.CUDAGraph, device: int, pool: Any) -> None:
    """End a stream capture that went wrong, and with it the routing of allocations to its pool. Never raises.

    Before 2.12 a failing ``capture_end`` left the routing standing (pytorch#180395), and the random generator believing that
    it was being captured, so that every later random op failed. A capture that ends properly tells it otherwise.
    """
    try:
        end_recording(graph)
    except Exception:
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(device, pool)
        with contextlib.suppress(Exception):
            proper = torch.cuda.CUDAGraph()
            proper.capture_begin(capture_error_mode="thread_local")
            end_recording(proper)
    with contextlib.suppress(Exception):
        graph.reset()


def memory_segments(pool: Any = None) -> list[dict[str, Any]]:
    """The allocator's segments (of one pool), without their histories where torch can leave them out."""
    kwargs: dict[str, Any] = {"include_traces": False} if _SNAPSHOT_TRACES else {}
    return list(torch.cuda.memory_snapshot(pool, **kwargs) if pool is not None else torch.cuda.memory_snapshot(**kwargs))


def raw_stream(device: int) -> int:
    """Handle of the current stream, without making a stream object."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def private_stream(device: torch.device) -> torch.cuda.Stream:
    """A non-blocking stream that ``torch.cuda.Stream()`` will never hand to anyone, where cuda-bindings is installed.

    torch's own streams come round-robin from a pool of 32, so a user's side stream would sooner or later be this one.
    """
    with torch.cuda.device(device):
        try:
            from cuda.bindings import runtime
        except ImportError:
            return torch.cuda.Stream(device)
        error, handle = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
        if int(error) != 0:
            return torch.cuda.Stream(device)
        return torch.cuda.ExternalStream(int(handle), device=device)


def _node_count(graph: torch.cuda.CUDAGraph) -> int | None:
    try:
        from cuda.bindings import runtime
    except ImportError:
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


def python_kernel(name: str) -> str | None:
    """Dispatch key of the Python kernel that ``torch.library`` registered for operator ``name`` on CPU tensors, if any."""
    namespace, op = name.split("::", 1)
    for key in ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        if f"{namespace}/{op}/{key}" in _python_kernels:
            return key
    return None


_python_kernels: set[str] = getattr(torch.library, "_impls", set())


def function_modes_on() -> Any:
    """Context: function modes see torch calls again, inside :func:`function_modes_off`."""
    return torch._C._EnableTorchFunction()


def function_modes_off() -> Any:
    """Context: torch calls reach no function mode and no ``__torch_function__``."""
    return torch._C.DisableTorchFunction()


def dispatch_modes_off() -> Any:
    """Context: ops reach no dispatch mode."""
    return torch._C._DisableTorchDispatch()


def autocast_off() -> Any:
    """Context: no op is cast, whatever autocast says."""
    return torch._C._DisableAutocast()


def put_function_mode_below(mode: Any) -> None:
    """Activate a function mode under those already active, so that they may leave before it does.

    A ``DeviceContext`` insists on the bottom of the stack.
    """
    above = [_pop_function_mode() for _ in range(_function_mode_depth())]
    if above and isinstance(above[-1], DeviceContext):
        _push_function_mode(above.pop())
    for other in (mode, *reversed(above)):
        _push_function_mode(other)


def take_function_mode_out(mode: Any) -> None:
    """Deactivate a function mode wherever it is in the stack. Nothing happens if it isn't there."""
    stack = [_pop_function_mode() for _ in range(_function_mode_depth())]
    for other in reversed(stack):
        if other is not mode:
            _push_function_mode(other)


def default_device_is_set() -> bool:
    """Whether ``torch.set_default_device`` or ``with torch.device(...)`` says where factories allocate."""
    return _device_module.CURRENT_DEVICE is not None


def fills_empty() -> bool:
    """Whether ``torch.empty`` writes what it allocates (deterministic algorithms ask for that)."""
    return torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory


def foreach_copy(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """``copy_`` of each source, fused where the tensors of one list share a dtype and device."""
    torch._foreach_copy_(destinations, sources)


def device_is_lost(error: BaseException) -> bool:
    """Whether ``error`` is one after which the device can't be used: a device error that is neither memory nor a capture's end."""
    return isinstance(error, torch.AcceleratorError) and not any(
        word in str(error) for word in ("out of memory", "capture", "cudaErrorStreamCapture")
    )
