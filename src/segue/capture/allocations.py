"""Which memory a forward made itself, and what of it from its inputs. The reference needs the first; in a capture the graph pool
knows. Captures need the second: a tensor that an earlier run made from its input is stale in a graph."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from segue import _source_lines, _torch, _torch_ops
from segue.capture.context_paths import DeepContext
from segue.capture.copied_memory import CopiedMemory
from segue.devices import generators

Storages = dict[int, tuple[weakref.ref[Any], str]]  # by address, with the line that made each
_kept: Storages = {}  # what earlier forwards have made from their inputs and somebody still holds


def made_from_input(t: Tensor) -> str | None:
    """The line of an earlier reference that made ``t``'s memory from an input of its own; None if none did.

    What a graph reads there is that call's, where eager would make it anew.
    """
    return _line(_kept, _torch.address(t))


def _line(storages: Storages, address: int) -> str | None:
    storage, line = storages.get(address, (None, ""))
    return line if storage is not None and storage() is not None else None


class MadeMemory(_torch.WatchingMode):
    """Knows the memory that ops make while it watches. What they were given doesn't count, even if they write there.

    Memory counts as made for as long as it lives. Afterwards something else may be allocated at its address.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}  # by address

    def has(self, t: Tensor) -> bool:
        """Whether ``t`` lies in memory that an op made while this watched."""
        return self._lives(_torch.address(t))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, set[int], list[Tensor]]:
        """Run an op. Returns its result, the addresses of its operands, and what of the result lies in memory that it made."""
        if kwargs:
            generators.note(kwargs)
        result = func(*args, **kwargs)
        given = {_torch.address(t) for t in _torch_ops.tensors(args, kwargs)}
        made = []
        for t in (result,) if isinstance(result, Tensor) else _torch_ops.tensors((result,), {}):
            address = _torch.address(t)
            if address and address not in given and not self._lives(address):
                self._storages[address] = weakref.ref(t.untyped_storage())
                made.append(t)
        return result, given, made

    def _lives(self, address: int) -> bool:
        storage = self._storages.get(address)
        return storage is not None and storage() is not None


class Allocations(MadeMemory):
    """Collects the memory that the ops of a forward make, and what of it depends on the forward's inputs. Breaks don't count.

    Args:
        inputs: of the forward. What is computed from their values, or from a break's results, is known as such. Shapes and dtypes
            are no values: ``zeros_like(x)`` comes from no input.
    """

    def __init__(self, inputs: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._written: set[int] = set()  # addresses
        self.used: set[int] = set()  # addresses of what ops used and this forward didn't make
        self.outside: list[Tensor] = []  # what of that they wrote
        self._from_inputs: Storages = {}
        self.copies, self.deep = CopiedMemory(), DeepContext()  # of the forward's hand-offs, and of its live context
        self._on = True
        for t in inputs:
            self.comes_from_input(t, "an input of that run")

    def comes_from_input(self, t: Tensor, line: str) -> None:
        """Note that ``t``'s memory holds what depends on an input."""
        if address := _torch.address(t):
            self._from_inputs[address] = weakref.ref(t.untyped_storage()), line

    def keep(self, but: Iterable[Tensor] = ()) -> None:
        """Remember for later captures what this forward has made from inputs and somebody holds. ``but``: fixed memory, which
        every later run fills anew."""
        for address in [a for a in _kept if _line(_kept, a) is None]:
            del _kept[address]
        fixed = {_torch.address(t) for t in but}
        _kept.update((a, s) for a, s in self._from_inputs.items() if a not in fixed and s[0]() is not None)

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

    def wrote(self, t: Tensor) -> bool:
        """Whether an op wrote ``t``'s memory while this watched. Version counters don't tell, as fused ops under a mode raise
        none.
        """
        return _torch.address(t) in self._written

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._on:
            return func(*args, **kwargs)
        writes = _torch_ops.written_arguments(func)
        written = _torch_ops.tensors(_torch_ops.written(writes, args, kwargs), {}) if writes[0] else []
        if written:
            self.copies.check_write(func, written)
        result, given, made = self.run(func, args, kwargs)
        self.used.update(a for a in given if not self._lives(a))
        if written:
            self._written.update(map(_torch.address, written))
            if not _source_lines.in_compiled_code():  # which writes into memory that it has allocated unseen
                self.outside += [t.detach() for t in written if not self.has(t)]
        if any(map(self._depends, given)) and not _reads_no_values(func):
            line = _source_lines.caller()
            for t in [*made, *(t for t in written if self.has(t))]:
                self.comes_from_input(t, line)
        return result

    def _depends(self, address: int) -> bool:
        if address in self._from_inputs and _line(self._from_inputs, address) is not None:
            return True
        return address in _kept and _line(_kept, address) is not None


@functools.cache
def _reads_no_values(func: Any) -> bool:
    """Whether an op takes shape, dtype and device of a tensor, and not what it holds."""
    name = str(getattr(getattr(func, "_schema", None), "name", "")).rpartition("::")[2]
    return name.endswith("_like") or name.startswith("new_")
