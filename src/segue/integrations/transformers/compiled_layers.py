"""Layers, compiled once for all lengths and used only while a body or a trunk runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn

from segue.capture.compiled import compile_dynamic


class CompiledLayers:
    """Puts compiled forwards in the places of those of ``modules``, parts of ``owner``, for as long as a body runs.

    The untouched model is never compiled. Dynamo compiles the code of all layers once, since they share it.
    """

    def __init__(self, owner: Any, modules: Sequence[nn.Module], on_failure: Literal["raise", "eager"]) -> None:
        self._owner = owner
        self.enabled = False  # they may run compiled, which they do first at a number of tokens that no other size equals
        self._forwards = [(m, compile_dynamic(m.forward, on_failure=on_failure)) for m in modules]

    @property
    def tokens_to_compile_at(self) -> int:
        """A number of tokens that equals no size of a weight, nor a number of heads: dynamo would take the two for one size."""
        config = vars(self._owner.config)
        sizes = {n for p in self._owner.parameters() for n in p.shape} | {v for v in config.values() if isinstance(v, int)}
        sizes |= {n // d for n in sizes for d in sizes if d and n % d == 0}
        return next(n for n in itertools.count(37) if n not in sizes)

    @property
    def seconds(self) -> float:
        """What compiling has taken so far."""
        return sum(compiled.seconds for _, compiled in self._forwards)

    @property
    def failed(self) -> str:
        """Why the layers run as their Python; empty where they are compiled."""
        return next((compiled.failed for _, compiled in self._forwards if compiled.failed), "")

    @contextmanager
    def as_they_are(self) -> Iterator[None]:
        """Within this block the layers run as their Python, in a body too."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this block the decoder's layers run compiled, once that is :attr:`enabled`; before, as they are."""
        if not self.enabled:
            yield
            return
        before = [vars(module).get("forward") for module, _ in self._forwards]
        try:
            for module, compiled in self._forwards:
                module.__dict__["forward"] = compiled
            yield
        finally:
            for (module, _), own in zip(self._forwards, before, strict=True):
                if own is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = own
