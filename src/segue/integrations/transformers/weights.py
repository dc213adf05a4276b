"""Where a module's parameters and buffers are, as its graphs hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from segue.integrations.transformers import reasons
from segue.runner.reasons import Reason

_PLAIN = (Tensor, nn.Parameter)


class Weights:
    """The parameters and buffers of ``module``, which lies on ``device``, as they are when this is made.

    ``live``: modules in it that no graph holds.
    """

    def __init__(self, module: nn.Module, device: torch.device, live: Sequence[nn.Module] = ()) -> None:
        self._name, self._device = type(module).__name__, device
        slots: list[tuple[Any, str, str, bool]] = [
            (table, key, f"{path}.{key}" if path else key, any(m is one for one in live))
            for path, m in module.named_modules()
            for table in (m._parameters, m._buffers)
            for key in table
        ]
        self._slots = [(table, key) for table, key, *_ in slots]
        self._held = [(table, key, name, _identity(table[key])) for table, key, name, is_live in slots if not is_live]
        floats: Iterator[tuple[Any, str]] = (
            (table, key) for table, key in self._slots if isinstance(t := table[key], Tensor) and t.is_floating_point()
        )
        nothing: tuple[Any, str] = {}, ""
        self._table, self._key = next(floats, nothing)
        self._dtype = self._table[self._key].dtype if self._table else None

    def moved(self) -> Reason | None:
        """Whether the first of them is on another device or has another dtype. It takes a fraction of a microsecond."""
        first = self._table.get(self._key)
        if first is None or (first.device == self._device and first.dtype is self._dtype):
            return None
        if first.device != self._device:
            return reasons.moved(self._name, str(first.device), str(self._device))
        return reasons.moved(self._name, str(first.dtype), str(self._dtype))

    def require_gradients(self) -> bool:
        """Whether any of them does."""
        return any(t.requires_grad for table, key in self._slots if (t := table.get(key)) is not None)

    def replaced(self) -> Reason | None:
        """Whether any that graphs hold is another tensor, or has other memory. It looks at all of them."""
        for table, key, name, then in self._held:
            if _identity(table.get(key)) != then:
                return reasons.other_memory(name)
        return None


def _identity(t: Any) -> Any:
    """What stays the same for as long as a tensor keeps its memory. Some subclasses have no memory of their own."""
    return t.data_ptr() if type(t) in _PLAIN else id(t)
