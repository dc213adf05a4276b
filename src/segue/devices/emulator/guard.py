"""Host reads and host factories, which never reach the dispatcher on CPU tensors: a function mode sees them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from segue import _torch
from segue.devices.emulator import rules
from segue.errors import CaptureError

_READS = """item tolist numpy cpu is_nonzero apply_ map_ map2_ __array__ __bool__ __int__ __float__ __complex__ __index__ __repr__
__format__ __contains__ __dlpack__ __deepcopy__ __reduce_ex__""".split()
_RANDOM = "rand randn randint randperm normal".split()
_FACTORIES = """zeros ones empty full arange range linspace logspace eye tril_indices triu_indices empty_strided empty_permuted
hann_window hamming_window bartlett_window blackman_window kaiser_window""".split()
_LITERALS = "tensor as_tensor asarray scalar_tensor".split()


class HostGuard(TorchFunctionMode):
    """Refuses, while ``on``, what CUDA would read from the host or put there. ``refuse`` is told of each refusal."""

    def __init__(self, refuse: Callable[[CaptureError], CaptureError]) -> None:
        super().__init__()
        self.on = True
        self._refuse = refuse

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is None or not self.on:
            return func(*args, **kwargs)
        try:
            return rule(func, args, kwargs)
        except CaptureError as e:
            self._refuse(e)
            raise


def eager_compiled() -> AbstractContextManager[Any]:
    """Run compiled functions as the Python they were made of. Without dynamo there are none, and it isn't imported for this."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise rules.refusal(f"Tensor.{func.__name__}()", rules.text_host_read())


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Another tensor's .device is a torch.device: only the written word means the host.
    if "cpu" in (a for a in (*args[1:2], kwargs.get("device")) if isinstance(a, str)):
        raise rules.refusal('Tensor.to("cpu")', rules.text_host_read())
    return func(*args, **kwargs)


def _factory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = func(*args, **kwargs)
    if _host(args, kwargs) and (made.dim() or func.__name__ in _RANDOM):
        raise rules.refusal(f"torch.{func.__name__}(...)", rules.text_host_factory(f"torch.{func.__name__}"))
    return made


def _literal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = kwargs.get("device")
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    copies = isinstance(place, torch.device) or (place is None and _torch.default_device_is_set())
    if copies and func is not torch.scalar_tensor and isinstance(data, bool | int | float | complex):
        raise rules.refusal(f"torch.{func.__name__}(...)", rules.text_host_scalar())
    return func(*args, **kwargs)


def _new_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[1] if len(args) > 1 else kwargs.get("data"), bool | int | float | complex):
        raise rules.refusal("Tensor.new_tensor()", rules.text_host_scalar())
    return func(*args, **kwargs)


def _one_hot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    x = args[0] if args else kwargs.get("input", kwargs.get("tensor"))
    if not isinstance(classes, int) or classes <= 0 or x is None or x.dtype is not torch.int64:
        return func(*args, **kwargs)
    # The CPU kernel reads values on the host to check them, CUDA's doesn't.
    zeros = x.new_zeros((*x.shape, classes))
    return zeros.scatter_(-1, x.unsqueeze(-1), 1)


def _host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("device") is not None or kwargs.get("out") is not None or _torch.default_device_is_set():
        return False
    return not any(isinstance(a, Tensor) for a in (*args, *kwargs.values()))


def _table() -> dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]:
    table: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {}
    table.update({getattr(Tensor, n): _read for n in _READS if hasattr(Tensor, n)})
    table.update({getattr(torch, n): _factory for n in _FACTORIES + _RANDOM if hasattr(torch, n)})
    table.update({getattr(torch, n): _literal for n in _LITERALS if hasattr(torch, n)})
    table.update({torch.fft.fftfreq: _factory, torch.fft.rfftfreq: _factory})
    table.update({Tensor.to: _to, Tensor.new_tensor: _new_tensor, torch.nn.functional.one_hot: _one_hot})
    return table


_RULES = _table()
