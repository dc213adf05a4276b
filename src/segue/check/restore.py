"""Python values that a forward changes, put back so that the next forward starts where this one did."""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import torch

from segue.capture.object_graph import is_users, walk

_PLAIN = (bool, int, float, str, type(None))


class PlainValues:
    """Plain values (numbers, strings, None) held by name in what ``root`` reaches, as they are now.

    Only these, and only where they are: what a forward builds once and keeps (tables, memos) must stay, since graphs
    may have come to rely on it.
    """

    def __init__(self, root: Any) -> None:
        self._slots = [
            (place.holder, place.key, value)
            for place, value in walk(root, enter=is_users)
            if type(value) in _PLAIN and not isinstance(place.holder, tuple)
        ]

    def restore(self) -> None:
        """Put back every one that is another plain value now."""
        for holder, key, value in self._slots:
            now = _now(holder, key)
            if now is value or type(now) not in _PLAIN:
                continue
            if isinstance(holder, types.CellType):
                holder.cell_contents = value
            elif isinstance(holder, dict | list | deque):
                holder[key] = value
            else:
                object.__setattr__(holder, key, value)


class ContextContents:
    """Everything that a context holds, as it is now: attributes, items and their order; tensors by identity."""

    def __init__(self, root: Any) -> None:
        holders: dict[int, Any] = {}
        self._slots: list[tuple[Any, str, Any]] = []  # of objects with __slots__
        self._note(root, holders)
        for place, value in walk(root, enter=is_users):
            if isinstance(place.holder, dict | list | deque):
                holders[id(place.holder)] = place.holder
            elif not isinstance(place.holder, types.CellType | types.MethodType | tuple):
                self._slots.append((place.holder, place.key, value))
            self._note(value, holders)
        self._saved = [(holder, holder.copy()) for holder in holders.values()]

    def restore(self) -> None:
        """Put back what was there."""
        for holder, saved in self._saved:
            if isinstance(holder, list):
                holder[:] = saved
            elif isinstance(holder, deque):
                holder.clear()
                holder.extend(saved)
            elif len(holder) != len(saved) or any(holder.get(k, _EMPTY) is not v for k, v in saved.items()):
                holder.clear()
                holder.update(saved)
        for holder, name, value in self._slots:
            object.__setattr__(holder, name, value)

    def _note(self, value: Any, holders: dict[int, Any]) -> None:
        """Empty containers are held by nothing that the walk shows."""
        if isinstance(value, torch.Tensor | type | types.ModuleType | types.FunctionType) or not is_users(value):
            return
        for holder in (value, getattr(value, "__dict__", None)):
            if isinstance(holder, dict | list | deque):
                holders[id(holder)] = holder


_EMPTY: Any = object()


def _now(holder: Any, key: Any) -> Any:
    if isinstance(holder, types.CellType):
        try:
            return holder.cell_contents
        except ValueError:
            return _EMPTY
    if isinstance(holder, list | deque):
        return holder[key] if key < len(holder) else _EMPTY
    return holder.get(key, _EMPTY) if isinstance(holder, dict) else getattr(holder, key, _EMPTY)
