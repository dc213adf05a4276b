"""Private and version-dependent torch calls. Those about ops, modes and ranks have files beside this one.

The private names that segue can't do without are looked up when this is imported, and one error names all that are missing. No
function here needs a GPU, and none imports dynamo.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device as _device_module
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from segue.errors import SegueError

_NEEDED = (
    *("torch._C._InferenceMode", "torch._C._construct_storage_from_data_pointer", "torch.UntypedStorage._cdata"),
    *("torch._C._EnableTorchFunction", "torch._C.DisableTorchFunction", "torch._C._DisableTorchDispatch"),
    *("torch._C._is_any_autocast_enabled", "torch._C._DisableAutocast"),
    *("torch._C._len_torch_function_stack", "torch._C._get_function_stack_at"),
    *("torch._C._pop_torch_function_stack", "torch._C._push_on_torch_function_stack"),
    *("torch._C._dynamo.eval_frame._FrameAction", "torch._C._dynamo.eval_frame._FrameExecStrategy"),
    *("torch._C._dynamo.eval_frame.set_code_exec_strategy", "torch._neg_view", "torch._foreach_copy_"),
    "torch.Generator._cdata",
    *("torch.utils._device.CURRENT_DEVICE", "torch.utils._python_dispatch._get_current_dispatch_mode"),
    *("torch._C._storage_Use_Count", "torch._C._to_dlpack"),
    *("torch._C._is_tracing", "torch.autograd.profiler._is_profiler_enabled"),
)


class UnsupportedTorchError(SegueError, ImportError):
    """This version of torch lacks a private name that segue needs.

    What to do: install another torch, or a newer segue. The text names what is missing.
    """


def unsupported(*missing: str) -> UnsupportedTorchError:
    """The error that names what this torch lacks. ``missing``: dotted names that begin with ``torch``."""
    return UnsupportedTorchError(
        f"torch {torch.__version__} lacks {', '.join(missing)}, which segue needs. segue supports torch >= 2.11: install such a "
        "torch, or, if this one is newer than your segue, a newer segue."
    )


def require(*names: str) -> None:
    """Look up each of ``names`` (``torch._C._InferenceMode``).

    Raises:
        UnsupportedTorchError: names all that are missing.
    """
    missing = [name for name in names if not _exists(name)]
    if missing:
        raise unsupported(*missing)


def _exists(name: str) -> bool:
    found: Any = torch
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


require(*_NEEDED)
_inference_guard: Any = torch._C._InferenceMode
PROFILER: Any = torch.autograd.profiler  # its _is_profiler_enabled says whether a profiler records, in any thread


class WatchingMode(TorchDispatchMode):
    """A dispatch mode that sees ops and leaves compiled functions compiled. Other modes make them run eagerly.

    ``_should_skip_dynamo`` is there because torch would otherwise wrap the handler in a function that imports dynamo, which
    takes seconds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]
        handler = cls.__dict__.get("__torch_dispatch__")
        code = getattr(inspect.unwrap(getattr(handler, "__func__", handler)), "__code__", None) if handler else None
        if code is not None:
            skip_in_dynamo(code)  # it runs below compiled frames too, and dynamo would compile it

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell torch that compiled functions may run compiled under this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def current_mode() -> Any:
    """The dispatch mode that sees an op first, or None."""
    return _python_dispatch._get_current_dispatch_mode()


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

    ``size``, ``stride`` and ``offset`` are in elements. The tensor is no inference tensor, so it may be written in any grad mode.
    """
    with torch.inference_mode(False):
        storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, size, stride)


def storage_key(t: Tensor) -> int:
    """Identity of the storage behind ``t``, which is equal exactly for tensors that share a storage."""
    return int(t.untyped_storage()._cdata)


def storage_users(t: Tensor) -> int:
    """How many tensors share the storage behind ``t``, ``t`` included."""
    storage = t.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # the storage's own Python object is counted too


def with_own_storage(t: Tensor) -> Tensor:
    """The same memory, which it keeps alive, behind a storage of its own, so that who looks at this part of it can be counted."""
    with torch.inference_mode(False):
        return torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(t))


def address(t: Tensor) -> int:
    """Address at which the storage behind ``t`` begins; 0 if ``t`` has none, as an empty, meta, sparse or wrapper tensor."""
    if t.layout is not torch.strided:
        return 0
    try:
        return t.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def storage_span(t: Tensor) -> tuple[int, int]:
    """``(address, bytes)`` of the whole storage behind ``t``.

    Raises:
        RuntimeError: ``t`` has no storage.
    """
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def is_wrapper(t: Tensor) -> bool:
    """Whether ``t`` is of a class that wraps other tensors and has no memory of its own, as ``DTensor`` does."""
    if type(t).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return False
    try:
        t.untyped_storage().data_ptr()
    except RuntimeError:
        return t.layout is torch.strided
    return False


def is_under_way(t: Tensor) -> bool:
    """Whether ``t`` stands for the result of a functional collective that may not be done yet."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    return collectives is not None and isinstance(t, collectives.AsyncCollectiveTensor)


def result_under_way(t: Any) -> Tensor:
    """The tensor that a collective under way writes."""
    result: Tensor = t.elem
    return result


def waited(t: Any) -> Tensor:
    """The result of a collective that was under way. What uses it on the current stream comes after the collective."""
    done: Tensor = t.trigger_wait()
    return done


def inference_guard(enabled: bool) -> Any:
    """``torch.inference_mode`` without its Python frames: a context manager that is in force as soon as it is made."""
    return _inference_guard(enabled)


def skip_in_dynamo(code: CodeType) -> None:
    """Make dynamo compile neither frames of ``code`` nor those below them."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


class PassingMode(WatchingMode):
    """A dispatch mode that passes every op on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def compiled_graphs() -> int:
    """How many graphs dynamo has compiled in this process."""
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return 0 if counters is None else int(counters["stats"]["unique_graphs"])


def is_compile_error(error: Exception) -> bool:
    """Whether compiling failed, rather than the function that was compiled, or a guard inside a capture."""
    from torch._dynamo import exc

    return isinstance(error, exc.TorchDynamoException) and not isinstance(error, exc.RecompileError)


def is_tracing() -> bool:
    """What ``torch.jit.is_tracing`` says, in a quarter of its time."""
    return bool(torch._C._is_tracing())


def mark_static_address(t: Tensor) -> None:
    """Tell dynamo, if anything has imported it, that a tensor stays where it is."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.mark_static_address(t)


def dynamo_boundary(wrapper: Callable[..., Any], why: str) -> None:
    """Make dynamo end its graph before calling ``wrapper``, and compile neither its frame nor those below it.

    ``why``: what dynamo says where it was asked for one whole graph.

    ``torch.compiler.disable`` does the same, but imports dynamo, which takes 0.8 s, also for people who don't compile.
    """
    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    wrapper._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    skip_in_dynamo(wrapper.__code__)


def alias(t: Tensor, like: Tensor | None = None, strides: Sequence[int] | None = None) -> Tensor:
    """A plain tensor over ``t``'s storage, which it keeps alive, with the geometry and dtype of ``like`` or else of ``t``, or
    with other ``strides``.

    It is no inference tensor, belongs to no autograd graph, and is of no subclass.
    """
    like = t if like is None else like
    guard = _inference_guard(False)
    try:
        plain = torch.empty(0, dtype=like.dtype, device=t.device)
        return plain.set_(t.untyped_storage(), like.storage_offset(), like.size(), like.stride() if strides is None else strides)
    finally:
        del guard


def lazy_bits(plain: Tensor, like: Tensor) -> Tensor:
    """``plain`` with the lazy conjugate and negative bits of ``like``. A tensor made from a pointer or a storage has neither."""
    if like.is_conj():
        plain = plain.conj()
    return torch._neg_view(plain) if like.is_neg() else plain


def generator_key(generator: torch.Generator) -> int:
    """Identity of the generator behind the object ``generator``."""
    return int(generator._cdata)  # type: ignore[attr-defined]


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


any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # whether autocast is on for any type of device


def autocast_off() -> Any:
    """Context: no op is cast, whatever autocast says."""
    return torch._C._DisableAutocast()


_function_mode_depth: Callable[[], int] = torch._C._len_torch_function_stack
_pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack
_push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack


def put_function_mode_below(mode: Any) -> None:
    """Activate a function mode below those already active, so that they may be left before it is.

    Only the context of ``torch.set_default_device`` stays below it, since torch requires that at the bottom of the stack.
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
    """Whether a function mode is on the stack. While its own handler runs it is not."""
    return any(torch._C._get_function_stack_at(i) is mode for i in range(_function_mode_depth()))


def take_function_modes_out(unwanted: Callable[[Any], bool]) -> None:
    """Deactivate the function modes that are ``unwanted``, wherever they are on the stack, and leave the others active."""
    stack = [_pop_function_mode() for _ in range(_function_mode_depth())]
    for mode in reversed(stack):
        if not unwanted(mode):
            _push_function_mode(mode)


def default_device_is_set() -> bool:
    """Whether ``torch.set_default_device`` is in force. It does not count ``with torch.device``, whose mode adds ``device=``."""
    return _device_module.CURRENT_DEVICE is not None


def fills_empty() -> bool:
    """Whether ``torch.empty`` writes what it allocates, as it does when deterministic algorithms are asked for."""
    fills: bool = getattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    return fills and torch.are_deterministic_algorithms_enabled()


# Copies each source into its destination, in one kernel where the tensors of a sequence share dtype and device.
foreach_copy: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = torch._foreach_copy_  # type: ignore[assignment]


def device_is_lost(error: BaseException) -> bool:
    """Whether the device can't be used after ``error``, which then is a device error but none of memory or of a capture."""
    return isinstance(error, torch.AcceleratorError) and not any(
        word in str(error) for word in ("out of memory", "capture", "cudaErrorStreamCapture")
    )


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the device in bytes; None where it isn't known."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def uncompiled(module: Any) -> Any:
    """The module that ``torch.compile`` was given, where ``module`` is what it returned; otherwise ``module``."""
    return getattr(module, "__dict__", {}).get("_modules", {}).get("_orig_mod", module)
