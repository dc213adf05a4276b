"""Which memory a forward made itself. The reference needs this; in a capture the graph pool knows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from segue import _torch


class Allocations(_torch.WatchingMode):
    """Collects the memory that the ops of a forward make. Memory that the forward was given doesn't count, even if it writes
    there.

    Memory counts as made for as long as it lives. Afterwards a break may allocate something else at its address.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}  # by address
        self._written: set[int] = set()  # addresses
        self._on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Stop watching within this block, for a break. Some kernels can't run under a dispatch mode, and in a replay a break
        runs under none of segue's.
        """
        on_top = _torch.current_mode() is self
        if on_top:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._on = False
        try:
            yield
        finally:
            self._on = True
            if on_top:
                self.__enter__()  # type: ignore[no-untyped-call]

    def has(self, t: Tensor) -> bool:
        """Whether ``t`` lies in memory that an op made while this watched, so not in a break."""
        return self._lives(_torch.address(t))

    def wrote(self, t: Tensor) -> bool:
        """Whether an op wrote ``t``'s memory while this watched. Version counters don't tell, as fused ops under a mode raise
        none.
        """
        return _torch.address(t) in self._written

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._on:
            return result
        writes = _torch.written_arguments(func)
        if writes[0]:
            self._written.update(map(_torch.address, _torch.tensors(_torch.written(writes, args, kwargs), {})))
        made = [(a, t) for t in _torch.tensors((result,), {}) if (a := _torch.address(t)) and not self._lives(a)]
        if made:
            given = {_torch.address(t) for t in _torch.tensors(args, kwargs)}
            self._storages.update((a, weakref.ref(t.untyped_storage())) for a, t in made if a not in given)
        return result

    def _lives(self, address: int) -> bool:
        storage = self._storages.get(address)
        return storage is not None and storage() is not None
