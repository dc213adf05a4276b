"""A decoder's layers and final norm, compiled once for all lengths and used only while its body or its trunk runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn

from segue.capture.compiled import Compiled, compile_dynamic


class CompiledLayers:
    """Puts compiled forwards in the place of those of a decoder's layers and final norm, for as long as a body runs.

    The untouched model is never compiled. Dynamo compiles the code of all layers once, since they share it.

    ``parts``: gives the modules that are compiled; by default the decoder's layers and final norm.
    """

    def __init__(
        self, decoder: Any, on_failure: Literal["raise", "eager"], parts: Callable[[Any], list[nn.Module]] | None = None
    ) -> None:
        self._decoder, self._parts = decoder, parts or _layers_and_norm
        self._on_failure: Literal["raise", "eager"] = on_failure
        self.enabled = False  # they may run compiled, which they do first at a number of tokens that no other size equals
        self._earlier = 0.0  # what compiling took for layers that are there no more
        self._forwards: list[tuple[nn.Module, Compiled]] = []
        self.wrap()

    def wrap(self) -> None:
        """Compile the layers that the decoder has now, when they are called next."""
        self._earlier, self.enabled = self.seconds, False
        self._forwards = [(m, compile_dynamic(m.forward, on_failure=self._on_failure)) for m in self._parts(self._decoder)]

    @property
    def tokens_to_compile_at(self) -> int:
        """A number of tokens that equals no size of a weight, nor a number of heads: dynamo would take the two for one size."""
        config = vars(self._decoder.config)
        sizes = {n for p in self._decoder.parameters() for n in p.shape} | {v for v in config.values() if isinstance(v, int)}
        sizes |= {n // d for n in sizes for d in sizes if d and n % d == 0}
        return next(n for n in itertools.count(37) if n not in sizes)

    @property
    def seconds(self) -> float:
        """What compiling has taken so far."""
        return self._earlier + sum(compiled.seconds for _, compiled in self._forwards)

    @property
    def failed(self) -> str:
        """Why the layers run as their Python; empty where they are compiled."""
        return next((compiled.failed for _, compiled in self._forwards if compiled.failed), "")

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


def _layers_and_norm(decoder: Any) -> list[nn.Module]:
    norm = getattr(decoder, "norm", None)
    return [*decoder.layers, *([norm] if isinstance(norm, nn.Module) else [])]
