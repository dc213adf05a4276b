"""Hand-offs that are copies of memory which others go on using: a forward may read such a copy, and must not write it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from segue import _source_lines, _torch
from segue.errors import CaptureError


class CopiedMemory:
    """The hand-offs of one forward, with the memory that each is a copy of.

    In eager, what a forward writes to a break's result arrives in whatever memory the break returned. If a break returns its own
    cache, that is the cache. If nobody else holds the memory, it is gone by then, and the write is the forward's own affair.
    """

    def __init__(self) -> None:
        # By storage: of the hand-off and of what it was copied from. Storages are found again by their one Python object.
        self._copies: dict[int, tuple[weakref.ref[Any], weakref.ref[Any] | None, str]] = {}

    def note(self, handoff: Tensor, source: Tensor, what: str, own: bool) -> None:
        """Note that ``handoff`` is a copy of ``source``; ``what``: the result in words. ``own``: the forward made ``source``."""
        own = own or not _torch.address(source) or self._find(source) is not None
        held = None if own else weakref.ref(source.untyped_storage())
        self._copies[_torch.storage_key(handoff)] = weakref.ref(handoff.untyped_storage()), held, what

    def check_write(self, op: Any, written: Iterable[Tensor]) -> None:
        """Check that an op, which is about to run, writes no copy of memory that somebody still holds.

        Raises:
            CaptureError: it does.
        """
        for t in written if self._copies else ():
            copy = self._find(t) if _torch.address(t) else None
            if copy is not None and copy[1] is not None and copy[1]() is not None:
                raise CaptureError(
                    f"{op} at {_source_lines.caller()} writes what a break returned. {copy[2]} is memory that lives on outside "
                    "the forward, as a cache does, and graphs have a copy of it, so the write would not arrive there. Write it "
                    "inside the break, or return a copy (clone()) if the forward only needs the values."
                )

    def _find(self, t: Tensor) -> tuple[weakref.ref[Any], weakref.ref[Any] | None, str] | None:
        copy = self._copies.get(_torch.storage_key(t))
        return copy if copy is not None and copy[0]() is t.untyped_storage() else None
