"""Which memory a forward made itself, for the reference: in a capture the graph pool tells."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from segue import _torch


class Made(_torch.WatchingMode):
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
        return self._lives(_address(t))

    def wrote(self, t: Tensor) -> bool:
        """Whether an op that was seen has written ``t``'s memory. Versions don't tell it of all: fused ops move none."""
        return _address(t) in self._written

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._on:
            return result
        positions, names = _torch.written_arguments(func)
        if positions:
            targets = [args[i] for i in positions if i < len(args)] + [kwargs[n] for n in names if n in (kwargs or {})]
            self._written.update(map(_address, _tensors(tuple(targets))))
        made = [(a, t) for t in _tensors((result,)) if (a := _address(t)) and not self._lives(a)]
        if made:
            given = {_address(t) for t in _tensors((*args, *(kwargs or {}).values()))}
            self._storages.update((a, weakref.ref(t.untyped_storage())) for a, t in made if a not in given)
        return result

    def _lives(self, address: int) -> bool:
        storage = self._storages.get(address)
        return storage is not None and storage() is not None


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    found = []
    for v in values:
        if isinstance(v, Tensor):
            found.append(v)
        elif isinstance(v, list | tuple):
            found.extend(t for t in v if isinstance(t, Tensor))
    return found


def _address(t: Tensor) -> int:
    if t.layout is not torch.strided:
        return 0
    try:
        return _torch.storage_span(t)[0]
    except (RuntimeError, NotImplementedError):
        return 0
