"""Arguments without a buffer of their own: the plain flags of a call, and structures around declared tensors."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from segue.capture.nested import around, parts_of
from segue.errors import InputError

PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)


def flag_key(value: Any, name: str) -> Any:
    """What stands for the flag ``name`` in the key of a call's variant. The type is part of it, since ``1 == True``.

    Raises:
        InputError: it is no plain value.
    """
    if isinstance(value, Tensor):
        raise InputError(f"argument {name!r} is a tensor that inputs doesn't declare; it would be frozen at its captured value")
    if isinstance(value, float | complex):
        return type(value), repr(value)  # 0.0 == -0.0, and NaN equals nothing
    if value is None or isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(flag_key(v, name) for v in value)
    raise InputError(
        f"argument {name!r} is a {type(value).__qualname__}: neither a declared input nor a plain flag. Hand it to the breaks in "
        "the live context (ctx=), or declare the tensors in it"
    )


def is_structure(declared: Any) -> bool:
    """Whether an argument is declared as a structure of inputs."""
    return isinstance(declared, Mapping | list | tuple)


def undeclared_parts(value: Any, declared: Any, name: str) -> Any:
    """What stands in the key for that which a structured argument holds beside its declared tensors.

    Raises:
        InputError: it is no structure, or holds something that is no plain value.
    """
    parts = None if value is None else parts_of(value)
    if parts is None:
        if value is not None:
            raise InputError(
                f"argument {name!r} is a {type(value).__qualname__}; its inputs are declared as a structure, so it must be a "
                "mapping, dataclass, tuple or list"
            )
        return None
    keys = _children(declared)
    shell: list[Any] = [type(value)]
    for key, child in parts:
        inner = keys.get(key)
        if inner is None:
            shell.append((key, flag_key(child, f"{name}.{key}")))
        elif is_structure(inner):
            shell.append((key, undeclared_parts(child, inner, f"{name}.{key}")))
    return tuple(shell)


def identities(value: Any, declared: Any) -> Any:
    """What a structured argument holds, by identity."""
    parts = parts_of(value) if value is not None and is_structure(declared) else None
    if parts is None:
        return id(value)
    inner = _children(declared)
    return [(key, identities(child, inner.get(key))) for key, child in parts]


def refilled(value: Any, declared: Any, tensors: Iterator[Any]) -> Any:
    """``value`` with its declared tensors replaced, in the order of the declaration."""
    if not is_structure(declared):
        return next(tensors)
    new = {key: refilled(_child(value, key), inner, tensors) for key, inner in _children(declared).items()}
    if value is None:
        return None
    parts = parts_of(value) or []
    return around(value, [key for key, _ in parts])([new.get(key, child) for key, child in parts])


def built(declared: Any, tensors: Iterator[Any]) -> Any:
    """Plain containers in the shape of a declaration."""
    if isinstance(declared, Mapping):
        return {key: built(child, tensors) for key, child in declared.items()}
    return [built(child, tensors) for child in declared] if isinstance(declared, list | tuple) else next(tensors)


def _children(declared: Any) -> dict[Any, Any]:
    return dict(declared) if isinstance(declared, Mapping) else dict(enumerate(declared))


def _child(value: Any, key: Any) -> Any:
    return None if value is None else dict(parts_of(value) or ()).get(key)
