"""Hand-offs: a break's results at fixed addresses. Whenever the break has run they are checked, copied and cleared of stale rows.

A result that is memory of an argument stays that memory, as in eager. Everything else is copied into a block of the graph
pool, because the next segment can only read where it was told to at capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.thread_state import state
from segue.capture.views import cut_rows, weak_ref_tensor
from segue.devices import Device
from segue.errors import CaptureError, ReplayError

Allocate = Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]


class Handoff:
    """One tensor of a break's result.

    Args:
        buffer: the memory that later segments read; of full size along ``dim``.
        dim: its token dimension, or None: then the result must have exactly the captured shape.
        exact: whether a result must have all rows or the valid ones, nothing between: set where a size that happened to be
            the number of valid rows was taken for the token dimension.
        alias: whether ``buffer`` is memory of an argument, which other results would overwrite.
    """

    __slots__ = ("_alias", "_dtype", "_exact", "_pointer", "_shape", "_views", "buffer", "dim", "full", "path", "where")

    def __init__(
        self, buffer: Tensor, dim: int | None, path: str, where: str, exact: bool = False, alias: bool = False
    ) -> None:
        self.buffer, self.dim, self.path, self.where = buffer, dim, path, where
        self.full = buffer.shape[dim] if dim is not None else 0
        self._shape, self._dtype, self._pointer = buffer.shape, buffer.dtype, buffer.data_ptr()
        self._exact, self._alias = exact, alias
        self._views: dict[int, tuple[Tensor, Tensor]] = {}

    def accept(self, t: Any) -> None:
        """Take what the break returned: check it, copy it unless it is this memory, clear the rows past the real ones.

        Raises:
            ReplayError: not a tensor of the captured dtype, device and shape (rows may be fewer).
        """
        if not isinstance(t, Tensor) or t.dtype is not self._dtype or t.device != self.buffer.device:
            raise self._changed(t)
        if t.layout is not torch.strided:
            raise self._changed(t)
        got, valid = self.full, state.valid
        if self._alias and t.numel() and (
            t.data_ptr() != self._pointer or (t.dim() == len(self._shape) and not _same_view(t, self.buffer))
        ):
            raise self._moved()
        if t.shape == self._shape:
            if t.data_ptr() != self._pointer:
                self.buffer.copy_(t)
            elif not _same_view(t, self.buffer):
                self.buffer.copy_(t.clone())  # the same memory, read in another order: it can't be copied onto itself
        else:
            got = self._check_rows(t, valid)
            self._cut(got)[0].copy_(t)
        self.clear(got if valid is None or got < valid else valid)

    def taker(self, zeros: Tensor) -> Callable[[Any], None]:
        """A function that does what :meth:`accept` does, for replays. It has what the usual cases need in local variables, and
        passes the other cases to :meth:`accept`.

        ``zeros``: a flat tensor of this dtype and device. A short tail is cleared by a copy from it, in one launch with the copy
        of the rows before the tail.
        """
        buffer, shape, dtype, pointer = self.buffer, self._shape, self._dtype, self._pointer
        place, full, dim, alias = buffer.get_device(), self.full, self.dim, self._alias
        copy, accept, thread, strided, fused_copy = buffer.copy_, self.accept, state, torch.strided, _torch.foreach_copy
        fused: dict[int, tuple[torch.Size, list[Tensor], Tensor]] = {}

        def take(t: Any) -> None:
            if type(t) is not Tensor or t.dtype is not dtype or t.get_device() != place or alias or t.layout is not strided:
                accept(t)
                return
            valid, got = thread.valid, t.shape
            if valid is None or valid >= full:
                if got == shape and t.data_ptr() != pointer:
                    copy(t)
                else:
                    accept(t)
                return
            parts = fused.get(valid)
            if parts is None:
                accept(t)
                if len(fused) >= _MOST_VIEWS:
                    fused.clear()
                if (made := self._fused(valid, zeros)) is not None:
                    fused[valid] = made
            elif got == parts[0]:
                fused_copy(parts[1], [t, parts[2]])
            elif got == shape and t.data_ptr() != pointer:
                fused_copy(parts[1], [t.narrow(dim, 0, valid), parts[2]])  # type: ignore[arg-type]
            else:
                accept(t)

        return take

    def _fused(self, valid: int, zeros: Tensor) -> tuple[torch.Size, list[Tensor], Tensor] | None:
        """What one fused copy needs: the shape of the rows before the tail, both parts, and zeros laid out as the tail is.
        None where there are no such rows, or too few zeros, or CUDA has no fused copy of this dtype."""
        if self._dtype not in _FUSED:
            return None
        head, tail = self._cut(valid)
        if not head.numel() or not tail.numel() or _span(tail) > zeros.numel():
            return None
        return head.shape, [_as_if_dense(head), tail], zeros.as_strided(tail.shape, tail.stride())

    def weaken(self) -> None:
        """Let go of the memory. The pool keeps it, and other tensors use it in the order of the capture."""
        self.buffer = weak_ref_tensor(self.buffer)
        self._views.clear()

    def clear(self, rows: int | None) -> None:
        """Zero the rows from ``rows`` on. With ``rows=None``, or without a token dimension, this does nothing."""
        if self.dim is not None and rows is not None and rows < self.full:
            self._cut(rows)[1].zero_()

    def _cut(self, n: int) -> tuple[Tensor, Tensor]:
        """The first ``n`` rows, and what has to be cleared after them."""
        views = self._views.get(n)
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            assert self.dim is not None
            views = self.buffer.narrow(self.dim, 0, n), _clearable(self.buffer.narrow(self.dim, n, self.full - n))
            self._views[n] = views
        return views

    def _check_rows(self, t: Tensor, valid: int | None) -> int:
        dim = self.dim
        if dim is None or t.dim() != len(self._shape):
            raise self._changed(t)
        rows = t.shape[dim]
        if rows > self.full or any(a != b for i, (a, b) in enumerate(zip(t.shape, self._shape, strict=True)) if i != dim):
            raise self._changed(t)
        if self._exact and rows != valid:
            raise ReplayError(
                f"{self.where}: {self.path} has {rows} rows where {valid} are valid. At capture its size was the number of "
                f"valid rows, so it was taken to have one row a token; if it hasn't, say break_point(token_dim=None)."
            )
        return rows

    def _moved(self) -> ReplayError:
        return ReplayError(
            f"{self.where}: {self.path} was memory of an argument at capture and is other memory now, or another view of it. The "
            "segments after it read both there, so taking it would overwrite the argument. Return the argument at every replay, "
            "or a copy of it (clone()) at capture too."
        )

    def _changed(self, t: Any) -> ReplayError:
        layout = f"{t.layout} " if isinstance(t, Tensor) and t.layout is not torch.strided else ""
        now = f"{layout}{t.dtype} {tuple(t.shape)} on {t.device}" if isinstance(t, Tensor) else f"a {type(t).__qualname__}"
        return ReplayError(
            f"{self.where}: {self.path} is {now}, but at capture it was {self._dtype} {tuple(self._shape)} on "
            f"{self.buffer.device}, and the next segment reads exactly that. A break must return the same structure, dtype "
            "and shape at every replay; only rows along its token dimension may be fewer."
        )


def first_result(
    t: Tensor,
    token_dim: int | None,
    *,
    rows: int | None,
    valid: int | None,
    cuts_rows: bool,
    argument_memory: bool,
    own_memory: bool,
    cut_memory: bool,
    allocate: Allocate,
    path: str,
    where: str,
) -> tuple[Tensor, Handoff]:
    """Settle a tensor that a break returned at capture or in the reference: what the forward goes on with, and its hand-off.

    Args:
        t: the tensor. ``token_dim``: its declared token dimension; None for none.
        rows: the bucket, and ``valid``: its real rows; None where they aren't known.
        cuts_rows: whether the break can have cut its arguments to the valid rows.
        argument_memory: whether ``t`` lies in memory of an argument. It stays there, unless it has to be copied.
        own_memory: whether ``t`` lies in memory that the forward made. Otherwise that may be the caller's state, whose rows are
            never cleared, so a result with one row a token of a bucket is copied.
        cut_memory: whether ``t`` lies in an argument that arrived as its valid rows. Then it gets memory of its own whatever
            their number is: otherwise the tail that is cleared would be the argument's whenever all rows are real.
        allocate: makes the memory of a copy. ``path`` and ``where``: what errors call the tensor and the break.

    The hand-off keeps the memory alive. A capture replaces its buffer by a weak view.

    Raises:
        CaptureError: ``t`` isn't strided.
    """
    if t.layout is not torch.strided:
        raise CaptureError(f"{where}: {path} is a {t.layout} tensor; a hand-off must be strided. Return its parts.")
    dim = token_dimension(t, token_dim)
    padded_up = (
        dim is not None
        and rows is not None
        and valid is not None
        and t.shape[dim] == valid < rows
        and (cuts_rows or valid != 1)
    )
    if dim is not None and rows is not None and not padded_up and t.shape[dim] != rows:
        dim = None
    token_shaped = dim is not None and rows is not None
    may_clear = own_memory and not _overlaps(t)
    alias = argument_memory and not padded_up and not (token_shaped and (cut_memory or not may_clear))
    if alias:
        kept = t
        dim = dim if may_clear else None
    else:
        shape = list(t.shape)
        if padded_up and dim is not None and rows is not None:
            shape[dim] = rows
        kept = allocate(shape, _strides(t, shape), t.dtype)
        (cut_rows(kept, valid, dim) if padded_up and dim is not None else kept).copy_(t)
    # Whether a single row is one a token can't be told, even of a break that cuts its rows.
    exact = padded_up and (not cuts_rows or valid == 1)
    handoff = Handoff(kept, dim, path, where, exact=exact, alias=alias)
    handoff.clear(valid)
    return kept, handoff


_MOST_VIEWS = 64  # row counts of one hand-off whose views are kept
_ZERO_BYTES = 2 << 20  # beyond, clearing a tail takes the device longer than the host
_zeros: dict[str, Tensor] = {}  # of each device, as bytes
_FUSED = {  # dtypes that CUDA copies in one launch; for others it raises an error
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2,
    torch.float8_e5m2fnuz, torch.complex128, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool,
}  # fmt: skip


def zeros_on(device: Device, dtype: torch.dtype) -> Tensor:
    """A flat tensor of zeros that every capture of the process may read, on any stream."""
    if device.name not in _zeros:
        with torch.inference_mode(False):
            _zeros[device.name] = torch.zeros(_ZERO_BYTES, dtype=torch.uint8, device=device.torch_device)
        device.synchronize()
    return _zeros[device.name].view(dtype)


def _span(t: Tensor) -> int:
    """The number of elements from the first to the last of a tensor that isn't empty, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def _as_if_dense(t: Tensor) -> Tensor:
    """``t`` with the strides that a dense tensor has in dimensions of size 1, because fused copies compare those strides too."""
    strides, step = list(t.stride()), 1
    for d in reversed(range(t.dim())):
        if t.shape[d] == 1:
            strides[d] = step
        step = strides[d] * t.shape[d]
    return t.as_strided(t.shape, strides)


def token_dimension(t: Tensor, dim: int | None) -> int | None:
    """``dim`` as a non-negative dimension of ``t``, or None if it has no such dimension."""
    if dim is None or not -t.dim() <= dim < t.dim():
        return None
    return dim % t.dim()


def _clearable(t: Tensor) -> Tensor:
    """``t``, as bytes where CUDA may have no kernel that fills its dtype."""
    return t if t.dtype in _FUSED or t.stride(-1) != 1 else t.view(torch.uint8)


def _same_view(t: Tensor, other: Tensor) -> bool:
    """Whether two tensors of as many dimensions that begin at one address read it alike, as far as both reach."""
    return (
        all(a == b or n <= 1 for a, b, n in zip(t.stride(), other.stride(), t.shape, strict=True))
        and t.is_conj() == other.is_conj()
        and t.is_neg() == other.is_neg()
    )


def _overlaps(t: Tensor) -> bool:
    """Whether several elements share memory, as after ``expand``."""
    return any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True))


def _strides(t: Tensor, shape: Sequence[int]) -> Sequence[int]:
    """Strides for ``shape`` in the memory order of ``t``: later kernels choose by it, and bits depend on the choice."""
    if tuple(shape) == tuple(t.shape) and torch.ops.aten.is_non_overlapping_and_dense.default(t):
        return t.stride()
    order = sorted(range(t.dim()), key=lambda d: (t.stride(d), -d))
    strides, step = [0] * t.dim(), 1
    for d in order:
        strides[d] = step
        step *= max(1, shape[d])
    return strides
