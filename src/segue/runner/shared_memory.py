"""Inputs that share memory with something that the forward writes. Each input has a buffer of its own, so the write would not be
seen where eager sees it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from segue import _torch
from segue.capture.aliasing import overlap
from segue.errors import InputError
from segue.runner.inputs import Leaf


class SharedMemory:
    """The check that the inputs of a call lie apart from what the forward writes.

    Args:
        leaves: the declared inputs.
        written: places of the inputs that the forward writes.
        outside: what it writes that is no input.
        used: addresses of the storages of all that it uses and that is no input.
    """

    def __init__(
        self, leaves: Sequence[Leaf], written: Collection[int], outside: Sequence[Tensor], used: Collection[int]
    ) -> None:
        self._leaves, self._written, self._used = leaves, sorted(written), used
        self._outside: dict[int, list[Tensor]] = {}
        for t in outside:
            self._outside.setdefault(_torch.address(t), []).append(t)

    def __bool__(self) -> bool:
        """Whether any call could be refused."""
        return bool(self._written or self._outside)

    def check(self, tensors: Sequence[Tensor | None]) -> None:
        """Raise InputError if two of a call's tensors, or one of them and another, share memory that is written."""
        places = [None if t is None else _torch.address(t) or None for t in tensors]
        for slot in self._written:
            a = tensors[slot]
            if a is None or not a.numel():
                continue
            for other, b in enumerate(tensors):
                if other != slot and b is not None and places[other] == places[slot] and overlap(a, b):
                    raise self._refusal(slot, f"input {self._leaves[other].name!r}", slot)
            if places[slot] in self._used:
                raise self._refusal(slot, "a tensor that the forward uses besides", slot)
        for slot, place in enumerate(places):
            a = tensors[slot]
            if a is not None and place in self._outside and any(overlap(a, b) for b in self._outside[place]):
                raise self._refusal(slot, "a tensor that the forward writes", None)

    def check_late(self, tensors: Sequence[Tensor | None], written: Collection[int]) -> None:
        """Do the same for inputs that a forward, which has run, was the first to write. A break may write one at some calls."""
        if new := set(written).difference(self._written):
            SharedMemory(self._leaves, new, (), self._used).check(tensors)

    def _refusal(self, slot: int, what: str, written: int | None) -> InputError:
        writes = "" if written is None else f", and the forward writes {self._leaves[written].name!r}"
        return InputError(
            f"input {self._leaves[slot].name!r} shares memory with {what}{writes}. Each input is copied into a buffer of its "
            "own, so the forward would not see there what it has written. Pass a copy (clone()), or declare one input and let "
            "the forward take views of it"
        )
