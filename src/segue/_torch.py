"""Every private or version-dependent torch call, in one place, probed at import. What CUDA alone needs is beside its device.

Nothing here needs a GPU, and nothing imports dynamo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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


# Batch norm writes its running statistics in training, which the schemas of these don't say.
_SILENT = {"batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index"}
_SILENT |= {"batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the arguments that an ``OpOverload`` writes, or may write."""
    schema = getattr(func, "_schema", None)
    unsaid = {"running_mean", "running_var"} if schema is not None and schema.name.removeprefix("aten::") in _SILENT else set()
    written = [
        (i, a.name)
        for i, a in enumerate(getattr(schema, "arguments", ()))
        if a.name in unsaid or (a.alias_info is not None and a.alias_info.is_write)
    ]
    return tuple(i for i, _ in written), tuple(name for _, name in written)


def written(
    writes: tuple[tuple[int, ...], tuple[str, ...]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Of a call's arguments those that it writes; ``writes``: of its op, from :func:`written_arguments`."""
    positions, names = writes
    return [args[i] for i in positions if i < len(args)] + [kwargs[name] for name in names if name in kwargs]


# These give a tensor other memory, and let go of a block that others may be using.
RE_STORING = {"set_", "resize_", "resize_as_", "_resize_output_"}


def tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Tensors among an op's arguments, which nest at most one list deep."""
    found = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, list | tuple):
            found.extend(b for b in a if isinstance(b, Tensor))
    return found


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
