"""Declarations of a forward's arguments: which dimension of each has one row a token, and what pads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, Literal

import torch
from torch import Tensor

from segue import _torch
from segue.errors import InputError, UsageError

Pad = bool | int | float | Literal["edge"]
Declared = Mapping[str, Any]  # name -> Input, or a mapping or sequence of these for a structured argument


@dataclass(frozen=True)
class Input:
    """A declared tensor argument. It gets a fixed buffer, which every replay refreshes whole.

    Args:
        token_dim: the dimension with one row a token. None: a fixed shape.
        pad: what fills the rows past the real ones: a number of the input's dtype, or ``"edge"`` (the last real row
            again). A token- or request-shaped input must say, because engines contradict each other on it.
        optional: the argument may be None; with and without it are two variants, each with graphs of its own.
        shape: sizes of all dimensions, None at the token or request dimension. Given with ``dtype`` for every input, it
            lets ``capture()`` go without an example. Otherwise the first call shows it, and a later one of another size, such as
            of a larger batch, runs eager. With another number of features it is refused.
        dtype: likewise.
        request_dim: the dimension with one row a request (sequence); these have a ladder of their own
            (``request_buckets``).
        extra: rows beyond one a token or request, as the 1 of ``cu_seqlens`` with its requests + 1 entries.

    Raises:
        UsageError: a contradiction between these.
    """

    token_dim: int | None = None
    pad: Pad | None = None
    optional: bool = False
    shape: Sequence[int | None] | None = None
    dtype: torch.dtype | None = None
    request_dim: int | None = None
    extra: int = 0

    def __post_init__(self) -> None:
        for name, value in (("token_dim", self.token_dim), ("request_dim", self.request_dim), ("extra", self.extra)):
            if not (value is None or isinstance(value, int)) or isinstance(value, bool):
                raise UsageError(f"{self}: {name}={value!r} is no whole number")
        if self.token_dim is not None and self.request_dim is not None:
            raise UsageError(f"{self}: an input has a token_dim or a request_dim, not both")
        if self.dim is None and (self.pad is not None or self.extra):
            raise UsageError(
                f"{self}: pad and extra mean something only with a token_dim or request_dim; a fixed shape has no tail"
            )
        if self.dim is not None and self.pad is None:
            raise UsageError(
                f"{self}: pad= has no default. Say what the rows past the real ones hold: 0 is right for hidden states, often "
                "wrong for lengths, positions and slots"
            )
        if self.pad is not None and self.pad != "edge" and not isinstance(self.pad, Number):
            raise UsageError(f'{self}: pad is a number or "edge"')
        if self.shape is not None and self.dim is not None:
            sizes = list(self.shape)
            if not -len(sizes) <= self.dim < len(sizes) or sizes[self.dim] not in (None, -1):
                raise UsageError(f"{self}: shape gives all dimensions, with None at dimension {self.dim}")

    @property
    def dim(self) -> int | None:
        """The dimension that grows, along whichever axis."""
        return self.token_dim if self.token_dim is not None else self.request_dim


class Spec:
    """What every tensor of one input must be: dtype, device and the sizes around the dimension that grows."""

    __slots__ = ("device", "dim", "dtype", "head", "rank", "tail")

    def __init__(self, dtype: torch.dtype, device: torch.device, shape: Sequence[int | None], dim: int | None) -> None:
        self.dtype, self.device, self.rank = dtype, device, len(shape)
        self.dim = None if dim is None else dim % self.rank
        cut = self.rank if self.dim is None else self.dim
        self.head: tuple[Any, ...] = tuple(shape[:cut])
        self.tail: tuple[Any, ...] = tuple(shape[cut + 1 :])

    def sizes(self, rows: int) -> tuple[int, ...]:
        """The shape of a tensor with ``rows`` rows; ``rows`` doesn't matter for a fixed shape."""
        grown = () if self.dim is None else (rows,)
        return (*self.head, *grown, *self.tail)

    def describe(self) -> str:
        """Shape and dtype as text, as in ``[rows, 64] of torch.float32``."""
        sizes: list[Any] = [*self.head, *(() if self.dim is None else ("rows",)), *self.tail]
        return f"[{', '.join(map(str, sizes))}] of {self.dtype}"


class Leaf:
    """One declared tensor: the parameter it comes in, how to reach it there, and its specification once known."""

    __slots__ = ("declared", "extra", "get", "name", "optional", "request", "slot", "spec", "token")

    def __init__(self, name: str, slot: int, path: tuple[Any, ...], declared: Input) -> None:
        self.name, self.slot, self.declared = name, slot, declared
        self.get: Callable[[Any], Any] | None = _reach(path) if path else None
        self.optional, self.extra = declared.optional, declared.extra
        self.token, self.request = declared.token_dim is not None, declared.request_dim is not None
        self.spec: Spec | None = None

    def settle(self, device: torch.device) -> None:
        """Take the specification from the declaration, if that has both shape and dtype.

        Raises:
            InputError: ``pad`` is no value of the dtype.
        """
        d = self.declared
        if d.shape is not None and d.dtype is not None:
            self.spec = Spec(d.dtype, device, d.shape, d.dim)
            self._check_pad(d.dtype)

    def learn(self, t: Tensor, device: torch.device) -> Spec:
        """The specification that a first tensor shows.

        Raises:
            InputError: the tensor doesn't fit what is declared.
        """
        d = self.declared
        if d.dim is not None and not -t.dim() <= d.dim < t.dim():
            raise InputError(
                f"input {self.name!r} has shape {list(t.shape)}, without the dimension {d.dim} that is declared to hold its rows"
            )
        if d.dtype is not None and t.dtype is not d.dtype:
            raise InputError(f"input {self.name!r} has dtype {t.dtype}, and is declared as {d.dtype}")
        if d.shape is not None:
            sizes: list[int | None] = list(t.shape)
            if d.dim is not None and len(sizes) == len(d.shape):
                sizes[d.dim] = d.shape[d.dim]
            if sizes != list(d.shape):
                raise InputError(f"input {self.name!r} has shape {list(t.shape)}, and is declared as {list(d.shape)}")
        self._check_pad(t.dtype)
        return Spec(t.dtype, device, t.shape, d.dim)

    def refuse(self, t: Any, spec: Spec | None, device: torch.device) -> InputError:
        """The error for a value that doesn't fit ``spec``."""
        who = f"input {self.name!r}"
        if not isinstance(t, Tensor):
            return InputError(f"{who} is declared as a tensor and is a {type(t).__qualname__}")
        if _torch.is_wrapper(t):
            return InputError(
                f"{who} is of type {type(t).__qualname__}, which wraps another tensor and has no memory of its own. Hand over "
                "the tensor inside it (.to_local() of a DTensor)"
            )
        if t.layout is not torch.strided:
            return InputError(f"{who} has layout {t.layout}; a fixed buffer holds strided tensors only")
        if t.device != device and t.device.type != "cpu":
            return InputError(f"{who} is on {t.device}, and the runner is on {device}. Move it: {self.name}.to({str(device)!r})")
        if t.requires_grad and torch.is_grad_enabled():
            return InputError(
                f"{who} requires grad while grad mode is on, and graphs record no gradients. Call the runner under "
                "torch.inference_mode(), or pass the tensor detached"
            )
        assert spec is not None
        if t.dtype is not spec.dtype:
            return InputError(
                f"{who} has dtype {t.dtype}, and the runner's buffers hold {spec.dtype}. Convert it, or make a second runner"
            )
        if t.dim() != spec.rank:
            return InputError(f"{who} has {t.dim()} dimensions, {list(t.shape)}; the runner's buffers hold {spec.describe()}")
        return InputError(f"{who} has shape {list(t.shape)}; the runner's buffers hold {spec.describe()}")

    def is_of_another_size(self, t: Any, spec: Spec) -> bool:
        """Whether a value that is refused is of another size than in the first call, and else what it was.

        The last dimension holds a row's features. The others are sizes that calls may choose, such as of a batch.
        """
        if self.declared.shape is not None or not isinstance(t, Tensor) or t.dim() != spec.rank or t.dtype is not spec.dtype:
            return False
        if t.layout is not torch.strided or _torch.is_wrapper(t) or (t.requires_grad and torch.is_grad_enabled()):
            return False
        return spec.rank == 1 or spec.dim == spec.rank - 1 or t.shape[-1] == spec.sizes(0)[-1]

    def _check_pad(self, dtype: torch.dtype) -> None:
        pad = self.declared.pad
        if pad is None or isinstance(pad, str) or dtype.is_floating_point or dtype.is_complex:
            return
        if not math.isfinite(pad) or torch.tensor(pad, device="cpu").to(dtype).item() != pad:
            raise InputError(f"input {self.name!r}: pad={pad} is no value of {dtype}")


def leaves(inputs: Declared, names: Sequence[str], where: str) -> list[Leaf]:
    """The declared tensors in the order of the parameters ``names``, nested ones one by one (``meta.indptr``).

    Raises:
        UsageError: a declaration of a name that is no parameter, or of something else than an input.
    """
    for name in inputs:
        if name not in names:
            raise UsageError(f"inputs declares {name!r}, and {where} has no such parameter; it has {', '.join(names) or 'none'}")
    found = [
        Leaf(label, slot, path, declared)
        for slot, name in enumerate(names)
        if name in inputs
        for label, path, declared in _flatten(inputs[name], name, ())
    ]
    if not any(leaf.token for leaf in found):
        raise UsageError(f"no input of {where} has a token_dim, so no call has a token count to choose a bucket by")
    return found


def _flatten(declared: Any, label: str, path: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...], Input]]:
    if isinstance(declared, Input):
        yield label, path, declared
    elif isinstance(declared, Mapping):
        for key, child in declared.items():
            yield from _flatten(child, f"{label}.{key}", (*path, key))
    elif isinstance(declared, list | tuple):
        for i, child in enumerate(declared):
            yield from _flatten(child, f"{label}[{i}]", (*path, i))
    else:
        raise UsageError(
            f"inputs[{label!r}] is a {type(declared).__qualname__}; it must be a segue.Input, or a structure of them"
        )


def _reach(path: tuple[Any, ...]) -> Callable[[Any], Any]:
    def get(value: Any) -> Any:
        for key in path:
            if value is None:
                return None
            if isinstance(value, Mapping):
                value = value.get(key)
            elif isinstance(key, int):
                value = value[key] if key < len(value) else None
            else:
                value = getattr(value, key, None)
        return value

    return get
