"""What a forward did, its outputs and the tensors it changed, and how two forwards compare in that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.nested import take_apart
from segue.check.compare import tensors_in, value_difference, wrong_elements
from segue.check.oplog import InPlaceWrite, OpLog

_CTX_DEPTH = 4  # levels of a context that are looked through for tensors


@dataclass(frozen=True)
class OutcomeValue:
    """An output or a changed tensor.

    ``name``: what texts call it. ``value``: a copy of it. ``storage``: the address of the storage it came in, 0 where it has
    none. ``start``: the offset of its first element there; None where it isn't contiguous.
    """

    name: str
    value: Any
    storage: int
    start: int | None = 0


@dataclass
class Outcome:
    """The result of one forward: ``outputs`` and ``state`` by path, its ops, and the ``error`` that it raised instead."""

    outputs: dict[str, OutcomeValue] = field(default_factory=dict)
    state: dict[str, OutcomeValue] = field(default_factory=dict)
    log: OpLog = field(default_factory=OpLog)
    error: Exception | None = None


def outputs_of(given: Any, raw: Any) -> dict[str, OutcomeValue]:
    """The outputs ``given`` to the caller, each with the storage in which the forward returned it (``raw``)."""
    sources = [v for _, v, _ in take_apart(raw).leaves]
    found = {}
    for (path, value, _), source in zip(take_apart(given).leaves, sources, strict=True):
        found[path] = OutcomeValue(path, value, _storage(source))
    return found


def state_of(written: Mapping[int, tuple[Tensor, str]], ctx: Any) -> dict[str, OutcomeValue]:
    """Copies of all tensors of the context, by path, and of the tensors that forwards wrote elsewhere, by address.

    Args:
        written: storage address to the tensor, and the line that writes it.
        ctx: the live context, looked through a few levels deep.
    """
    held = {path: t for path, t in tensors_in(ctx, "ctx", _CTX_DEPTH).items() if _storage(t)}
    found = {
        path: OutcomeValue(
            path, t.detach().clone(), _storage(t), int(t.storage_offset()) if t.is_contiguous() else None
        )
        for path, t in held.items()
    }
    inside = {_storage(t) for t in held.values()}
    for address, (t, where) in written.items():
        if address not in inside:
            name = f"a tensor {list(t.shape)} of {t.dtype} that is written at {where}"
            found[str(address)] = OutcomeValue(name, t.detach().clone(), _storage(t))
    return found


def whole(t: Tensor) -> Tensor:
    """All of the storage that ``t`` is a part of: a contiguous view in its dtype, with rows like its own where that fits."""
    elements = t.untyped_storage().nbytes() // t.element_size()
    with torch.inference_mode(False):
        flat = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage(), 0, (elements,), (1,))
    shapes: list[tuple[int, ...]] = [tuple(t.shape), tuple(t.shape[1:])]
    for shape in shapes if t.is_contiguous() else [t.stride()[:1]]:
        size = torch.Size(shape).numel()
        if size and elements % size == 0:
            return flat.view(tuple(t.shape) if size == elements else (-1, *shape))
    return flat


@dataclass(frozen=True)
class PaddedWrites:
    """What padded rows may write without harm.

    ``trash``: rows of a cache that padded rows are declared to write to (a slot input's ``pad``). ``rows``, ``real``: row
    counts of the forward; in memory that it wrote as ``rows`` rows, those past the ``real`` ones are harmless.
    """

    trash: Sequence[int]
    rows: int
    real: int


def differing(got: Outcome, want: Outcome, exact: bool, padded: PaddedWrites) -> tuple[dict[str, int], list[str]]:
    """What differs between two outcomes.

    Returns:
        Each harmful difference in words, with the address of the storage in which ``want`` has it, and the harmless
        differences in words.
    """
    wrong: dict[str, int] = {}
    harmless: list[str] = []
    for path, value in want.outputs.items():
        if text := _value_differs(got.outputs.get(path), value, exact):
            wrong[f"{path} {text}"] = value.storage
    for path, value in want.state.items():
        mine = got.state.get(path)
        text = _value_differs(mine, value, exact)
        if not text:
            continue
        written = () if value.start is None else want.log.written.get(value.storage, ())
        if mine is not None and (why := _harmless(mine.value, value.value, exact, padded, written, value.start or 0)):
            harmless.append(f"{value.name} {why}")
        else:
            wrong[f"{value.name} {text}"] = value.storage
    return wrong, harmless


def _value_differs(got: OutcomeValue | None, want: OutcomeValue, exact: bool) -> str | None:
    if got is None:
        return "is missing"
    x, y = got.value, want.value
    if not isinstance(y, Tensor) or not isinstance(x, Tensor):
        same = type(x) is type(y) and (x == y or x != x)
        return None if same else f"is {x!r} instead of {y!r}"
    if x.shape != y.shape:
        return f"has shape {list(x.shape)} instead of {list(y.shape)}"
    return value_difference(x, y, exact)


def _harmless(
    x: Tensor, y: Tensor, exact: bool, padded: PaddedWrites, written: Sequence[InPlaceWrite], start: int
) -> str | None:
    """Why the difference between two tensors is harmless, or None. ``start``: the element of the storage they begin at."""
    if x.shape != y.shape or x.dtype is not y.dtype:
        return None
    wrong = wrong_elements(x, y, exact).contiguous()
    for d in range(wrong.dim()):
        others = [i for i in range(wrong.dim()) if i != d]
        at = (wrong.any(dim=others) if others else wrong).nonzero().flatten().tolist()
        if at and set(at) <= set(padded.trash):
            return f"holds in row {', '.join(map(str, at))} what padded rows wrote, as their pad= says"
    left = wrong.flatten()
    for one in written:
        t, begin = one.tensor, int(one.tensor.storage_offset()) - start
        if t.dtype is not y.dtype or begin < 0 or begin + _span(t) > left.numel():
            continue
        mask = left.as_strided(t.shape, t.stride(), begin)
        if one.cleared:
            mask.fill_(False)
        for d, size in enumerate(t.shape):
            if size == padded.rows > padded.real:
                mask.narrow(d, padded.real, size - padded.real).fill_(False)
    return None if left.any() else "holds what padded rows left there, past the real ones"


def _span(t: Tensor) -> int:
    """How many elements of memory lie between the first of ``t`` and its last, both counted."""
    if not t.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def _storage(value: Any) -> int:
    return _torch.address(value) if isinstance(value, Tensor) else 0
