"""Which memory a forward made itself, for the reference: in a capture the graph pool tells."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from segue import _torch


class Allocations(_torch.WatchingMode):
    """Collects where the ops of a forward put what they make. What it was given, it did not make, even if it wrote it.

    Memory counts as made for as long as it lives: afterwards its address may be that of something a break allocates.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}  # by address
        self._written: set[int] = set()  # addresses
        self._on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """In a break, which runs as in a replay: with no mode of segue's on, since some kernels can't run under one."""
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
        """Whether ``t`` lies in memory that was made since, and not in a break."""
        return self._lives(_torch.address(t))

    def wrote(self, t: Tensor) -> bool:
        """Whether an op that was seen has written ``t``'s memory. Versions don't tell: under a mode fused ops move none."""
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
