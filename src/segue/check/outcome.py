"""What a forward did: its outputs, and the tensors it changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.context_paths import children, is_plain
from segue.capture.nested import take_apart
from segue.check.compare import differs, wrong_elements
from segue.check.oplog import OpLog, Written

_CTX_DEEP = 4


@dataclass(frozen=True)
class Value:
    """A result: ``name`` for people, a copy of its ``value``, and the address of the ``storage`` it came in.

    ``start``: its first element there; None where it doesn't lie contiguous.
    """

    name: str
    value: Any
    storage: int
    start: int | None = 0


@dataclass
class Outcome:
    """Outputs by path, state by place. ``error``: what the forward raised instead."""

    outputs: dict[str, Value] = field(default_factory=dict)
    state: dict[str, Value] = field(default_factory=dict)
    log: OpLog = field(default_factory=OpLog)
    error: Exception | None = None


def outputs_of(given: Any, raw: Any) -> dict[str, Value]:
    """The outputs that a caller got, with the storages in which the forward returned them."""
    sources = [v for _, v, _ in take_apart(raw).leaves]
    found = {}
    for (path, value, _), source in zip(take_apart(given).leaves, sources, strict=True):
        found[path] = Value(path, value, _storage(source))
    return found


def state_of(written: Mapping[int, tuple[Tensor, str]], ctx: Any) -> dict[str, Value]:
    """Copies of the tensors that a forward wrote outside itself, by address, and of all in its context, by path."""
    found = {
        path: Value(path, t.detach().clone(), _storage(t), int(t.storage_offset()) if t.is_contiguous() else None)
        for path, t in context_tensors(ctx)
    }
    inside = {_storage(t) for _, t in context_tensors(ctx)}
    for address, (t, where) in written.items():
        if address not in inside:
            name = f"a tensor {list(t.shape)} of {t.dtype} that is written at {where}"
            found[str(address)] = Value(name, t.detach().clone(), _storage(t))
    return found


def whole(t: Tensor) -> Tensor:
    """All of the memory that ``t`` is a part of, contiguous, in its dtype, with rows like its own where that fits."""
    elements = t.untyped_storage().nbytes() // t.element_size()
    with torch.inference_mode(False):
        flat = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage(), 0, (elements,), (1,))
    shapes: list[tuple[int, ...]] = [tuple(t.shape), tuple(t.shape[1:])]
    for shape in shapes if t.is_contiguous() else [t.stride()[:1]]:
        size = torch.Size(shape).numel()
        if size and elements % size == 0:
            return flat.view(tuple(t.shape) if size == elements else (-1, *shape))
    return flat


def context_tensors(ctx: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a context holds, a few levels deep, with its path."""
    seen: dict[int, Any] = {}  # by id, and held, since the id of what is made anew at each look would be given out again
    todo: list[tuple[str, Any, int]] = [("ctx", ctx, 0)]
    while todo:
        path, value, depth = todo.pop()
        if isinstance(value, Tensor):
            if _storage(value):
                yield path, value
        elif not is_plain(value) and id(value) not in seen and depth < _CTX_DEEP:
            seen[id(value)] = value
            for (kind, key), child in children(value):
                todo.append((f"{path}.{key}" if kind == "attr" else f"{path}[{key!r}]", child, depth + 1))


@dataclass(frozen=True)
class Padded:
    """What padded rows may write without harm.

    ``trash``: rows that they are declared to write to (a slot input's ``pad``). ``rows``, ``real``: of the forward; in
    memory that it wrote as ``rows`` rows, those past the real ones.
    """

    trash: Sequence[int]
    rows: int
    real: int


def differing(got: Outcome, want: Outcome, exact: bool, padded: Padded) -> tuple[dict[str, int], list[str]]:
    """What differs between two outcomes, in words, with the storages in which it came; and what differs harmlessly."""
    wrong: dict[str, int] = {}
    harmless: list[str] = []
    for path, value in want.outputs.items():
        if text := _differ(got.outputs.get(path), value, exact):
            wrong[f"{path} {text}"] = value.storage
    for path, value in want.state.items():
        mine = got.state.get(path)
        text = _differ(mine, value, exact)
        if not text:
            continue
        written = () if value.start is None else want.log.written.get(value.storage, ())
        if mine is not None and (why := _harmless(mine.value, value.value, exact, padded, written, value.start or 0)):
            harmless.append(f"{value.name} {why}")
        else:
            wrong[f"{value.name} {text}"] = value.storage
    return wrong, harmless


def _differ(got: Value | None, want: Value, exact: bool) -> str:
    if got is None:
        return "is missing"
    x, y = got.value, want.value
    if not isinstance(y, Tensor) or not isinstance(x, Tensor):
        same = type(x) is type(y) and (x == y or x != x)
        return "" if same else f"is {x!r} instead of {y!r}"
    if x.shape != y.shape:
        return f"has shape {list(x.shape)} instead of {list(y.shape)}"
    return differs(x, y, exact)


def _harmless(x: Tensor, y: Tensor, exact: bool, padded: Padded, written: Sequence[Written], start: int) -> str:
    """Why two tensors that differ do so harmlessly, if they do. ``start``: where they begin in their storage."""
    if x.shape != y.shape or x.dtype is not y.dtype:
        return ""
    wrong = wrong_elements(x, y, exact).contiguous()
    for d in range(wrong.dim()):
        others = [i for i in range(wrong.dim()) if i != d]
        at = (wrong.any(dim=others) if others else wrong).nonzero().flatten().tolist()
        if at and set(at) <= set(padded.trash):
            return f"holds in row {', '.join(map(str, at))} what padded rows wrote, as their pad= says"
    left = wrong.flatten()
    for one in written:
        t, begin = one.tensor, int(one.tensor.storage_offset()) - start
        if t.dtype is not y.dtype or begin < 0 or begin + _reach(t) > left.numel():
            continue
        mask = left.as_strided(t.shape, t.stride(), begin)
        if one.cleared:
            mask.fill_(False)
        for d, size in enumerate(t.shape):
            if size == padded.rows > padded.real:
                mask.narrow(d, padded.real, size - padded.real).fill_(False)
    return "" if left.any() else "holds what padded rows left there, past the real ones"


def _reach(t: Tensor) -> int:
    """Elements from the first of ``t`` to its last."""
    if not t.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def _storage(value: Any) -> int:
    return _torch.address(value) if isinstance(value, Tensor) else 0
