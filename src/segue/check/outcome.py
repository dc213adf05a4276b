"""What a forward did: its outputs, and the tensors it changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.context import children, is_plain
from segue.check.compare import differs, wrong_elements
from segue.check.oplog import OpLog
from segue.runner.tree import take_apart

_CTX_DEEP = 4


@dataclass(frozen=True)
class Value:
    """A result: ``name`` for people, a copy of its ``value``, and the address of the ``storage`` it came in."""

    name: str
    value: Any
    storage: int


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
    """Copies of the tensors that a forward wrote outside itself, by address, and of all those in its context, by path."""
    found = {path: Value(path, t.detach().clone(), _storage(t)) for path, t in context_tensors(ctx)}
    inside = {_storage(t) for _, t in context_tensors(ctx)}
    for address, (t, where) in written.items():
        if address not in inside:
            name = f"a tensor {list(t.shape)} of {t.dtype} that is written at {where}"
            found[str(address)] = Value(name, t.detach().clone(), _storage(t))
    return found


def whole(t: Tensor) -> Tensor:
    """All of the memory that ``t`` is a part of, in its dtype and with rows of its size."""
    if not t.is_contiguous() or t.untyped_storage().nbytes() == t.nbytes:
        return t
    elements = t.untyped_storage().nbytes() // t.element_size()
    with torch.inference_mode(False):
        flat = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage(), 0, (elements,), (1,))
    row = t.shape[1:].numel() if t.dim() else 1
    return flat.view(-1, *t.shape[1:]) if row and elements % row == 0 else flat


def context_tensors(ctx: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a context holds, a few levels deep, with its path."""
    seen: set[int] = set()
    todo: list[tuple[str, Any, int]] = [("ctx", ctx, 0)]
    while todo:
        path, value, depth = todo.pop()
        if isinstance(value, Tensor):
            if _storage(value):
                yield path, value
        elif not is_plain(value) and id(value) not in seen and depth < _CTX_DEEP:
            seen.add(id(value))
            for (kind, key), child in children(value):
                todo.append((f"{path}.{key}" if kind == "attr" else f"{path}[{key!r}]", child, depth + 1))


def differing(got: Outcome, want: Outcome, exact: bool, trash: Sequence[int] = ()) -> tuple[dict[str, int], list[str]]:
    """What differs between two outcomes: in words, with the storages in which it came; and what differs harmlessly.

    ``trash``: rows that padded rows are declared to write to (a slot input's ``pad``).
    """
    wrong: dict[str, int] = {}
    harmless: list[str] = []
    for path, value in want.outputs.items():
        if text := _differ(got.outputs.get(path), value, exact):
            wrong[f"{path} {text}"] = value.storage
    for path, value in want.state.items():
        mine = got.state.get(path)
        text = _differ(mine, value, exact)
        if not text or mine is None:
            continue
        if rows := _rows_of(mine.value, value.value, exact, trash):
            harmless.append(f"{value.name} holds in row {rows} what padded rows wrote, as their pad= says")
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


def _rows_of(x: Tensor, y: Tensor, exact: bool, trash: Sequence[int]) -> str:
    """The row outside of which two tensors agree, if it is one that padding is declared to go to."""
    if x.shape != y.shape or not trash:
        return ""
    wrong = wrong_elements(x, y, exact)
    for d in range(x.dim()):
        others = [i for i in range(x.dim()) if i != d]
        at = (wrong.any(dim=others) if others else wrong).nonzero().flatten().tolist()
        if at and set(at) <= set(trash):
            return ", ".join(map(str, at))
    return ""


def _storage(value: Any) -> int:
    try:
        return _torch.storage_span(value)[0] if isinstance(value, Tensor) else 0
    except (RuntimeError, NotImplementedError):
        return 0

