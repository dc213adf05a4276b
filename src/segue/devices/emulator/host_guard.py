"""A function mode that sees host reads and host factories, which never reach the dispatcher on CPU tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from segue import _torch
from segue.devices import refusals
from segue.errors import CaptureError

Rule = Callable[["HostGuard", Any, tuple[Any, ...], dict[str, Any]], Any]


class HostGuard(TorchFunctionMode):
    """Refuses, while ``on``, calls that on CUDA would read a tensor on the host or copy from the host.

    ``refuse`` is called with each error. ``literals``: keys of the storages that would be CPU scalars on CUDA.
    """

    def __init__(self, refuse: Callable[[CaptureError], CaptureError], literals: Container[int]) -> None:
        super().__init__()
        self.on = True
        self.literals = literals
        self._refuse = refuse

    def enter(self) -> None:
        """Activate this mode below the user's modes, which may be left before the segment ends or after it."""
        _torch.put_function_mode_below(self)

    def leave(self) -> None:
        """Deactivate this mode, wherever in the stack it is by now."""
        self.on = False
        _torch.take_function_modes_out(lambda mode: mode is self)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Context: the mode is active in a Python kernel that runs inside this mode's own handler."""
        if _torch.function_mode_is_on(self):
            yield
            return
        _torch.push_function_mode(self)
        try:
            yield
        finally:
            _torch.take_function_modes_out(lambda mode: mode is self)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is None or not self.on:
            return func(*args, **kwargs)
        try:
            return rule(self, func, args, kwargs)
        except CaptureError as e:
            self._refuse(e)
            raise


def sweep() -> None:
    """Take the guards of finished segments off the stack of function modes.

    Torch puts a mode back when its handler returns, even if the segment ended meanwhile, at a break inside a Python kernel.
    """
    _torch.take_function_modes_out(lambda mode: isinstance(mode, HostGuard) and not mode.on)


def eager_compiled() -> AbstractContextManager[Any]:
    """Context: compiled functions run as the Python they were made of.

    If dynamo is not imported there are no compiled functions, and importing it takes seconds, so then this does nothing.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _read(guard: HostGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise refusals.refusal(f"Tensor.{func.__name__}()", refusals.HOST_READ)


def _to(guard: HostGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = (*args[1:2], *(kwargs[k] for k in ("device", "other") if k in kwargs))
    # On the emulator a tensor's .device is the CPU too, as a torch.device; only the string "cpu" must mean the host.
    if "cpu" in (a for a in target if isinstance(a, str)):
        raise refusals.refusal('Tensor.to("cpu")', refusals.HOST_READ)
    moves = any(isinstance(a, torch.device | Tensor) for a in target)
    if moves and _torch.storage_key(args[0]) in guard.literals:
        raise refusals.refusal("Tensor.to(...)", refusals.HOST_SCALAR)
    return func(*args, **kwargs)


def _factory(guard: HostGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = func(*args, **kwargs)
    if _on_host(args, kwargs) and (made.dim() or func.__name__ in refusals.RANDOM_FACTORIES):
        raise refusals.refusal(f"torch.{func.__name__}(...)", refusals.host_factory(f"torch.{func.__name__}"))
    return made


def _literal(guard: HostGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = kwargs.get("device")
    on_device = isinstance(place, torch.device) or (place is None and _torch.default_device_is_set())
    if on_device and isinstance(args[0] if args else kwargs.get("data", kwargs.get("obj")), _NUMBER):
        raise refusals.refusal(f"torch.{func.__name__}(...)", refusals.HOST_SCALAR)
    return func(*args, **kwargs)


def _new_tensor(guard: HostGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[1] if len(args) > 1 else kwargs.get("data"), _NUMBER):
        raise refusals.refusal("Tensor.new_tensor()", refusals.HOST_SCALAR)
    return func(*args, **kwargs)


def _deepcopy(guard: HostGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # On CUDA a deep copy is an op that a graph records; on CPU tensors the dispatcher doesn't see the copy, so it is made here.
    t, memo = args
    if type(t) is not Tensor:
        raise refusals.refusal("copy.deepcopy()", "the emulator doesn't see it. Use clone().")
    copied = memo[id(t)] = t.clone()
    return copied


def _one_hot(guard: HostGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    x = args[0] if args else kwargs.get("input", kwargs.get("tensor"))
    if not isinstance(classes, int) or classes <= 0 or x is None or x.dtype is not torch.int64:
        return func(*args, **kwargs)
    # The CPU kernel reads the values on the host to check them, and CUDA's kernel doesn't.
    return x.new_zeros((*x.shape, classes)).scatter_(-1, x.unsqueeze(-1), 1)


def _on_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("device") is not None or kwargs.get("out") is not None or _torch.default_device_is_set():
        return False
    return not any(isinstance(a, Tensor) for a in (*args, *kwargs.values()))


_NUMBER = (bool, int, float, complex)
_LITERALS = ("tensor", "as_tensor", "asarray")


def _rules() -> dict[Any, Rule]:
    found: dict[Any, Rule] = {getattr(Tensor, n): _read for n in refusals.READS}
    found.update({getattr(torch, n): _factory for n in refusals.FACTORIES})
    found.update({getattr(torch, n): _literal for n in _LITERALS})
    found.update({torch.fft.fftfreq: _factory, torch.fft.rfftfreq: _factory, torch.nn.functional.one_hot: _one_hot})
    found.update({Tensor.to: _to, Tensor.new_tensor: _new_tensor, Tensor.__deepcopy__: _deepcopy})
    return found


_RULES = _rules()
