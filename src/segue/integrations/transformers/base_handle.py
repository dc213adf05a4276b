"""What every handle of an accelerated model is: the model, for those who call it, and a few methods more."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from segue.errors import UsageError
from segue.integrations.transformers.report import report

if TYPE_CHECKING:
    from segue.runner import Stats


class _Here(threading.local):
    """What this thread asked for."""

    untouched = False
    run: Callable[..., Any] | None = None  # instead of the runner


class Handle(ABC):
    """A transformers model whose decoder replays captured graphs. Calls and attributes go to the model.

    Allocations by :func:`segue.accelerate`. As a context manager it restores the model at the end.
    """

    _model: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("_model", "_here"):  # not set yet: the model was refused
            raise AttributeError(name)
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._model, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._model)})

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise UsageError(
            f"the handle of an accelerated {type(self._model).__name__} can't be copied or pickled: its graphs belong to "
            "this process and this model. Copy or pickle handle.model, and accelerate the copy."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self._model

    @property
    @abstractmethod
    def stats(self) -> Stats:
        """The runner's counts, with the forwards that ran untouched under ``eager`` and ``reasons``."""

    @abstractmethod
    def capture(self) -> None:
        """Capture the whole ladder now, largest bucket first, instead of each bucket at its second call."""

    @abstractmethod
    def recapture(self) -> None:
        """Drop every graph, so that each bucket is captured anew: for weights that moved and modules that were replaced."""

    @abstractmethod
    def graphs_of(self, tokens: int) -> tuple[int | None, int, int]:
        """The bucket of a forward of ``tokens`` tokens, its segments and its breaks; 0 and 0 before its capture."""

    @abstractmethod
    def restore(self) -> None:
        """Give the model its own forward back and free the graphs. May be called again."""

    def close(self) -> None:
        """:meth:`restore`, by the name that everything with graphs has."""
        self.restore()

    def report(self) -> str:
        """What ran how, for people: Markdown."""
        return report(self)

    @contextmanager
    def untouched(self) -> Iterator[Any]:
        """Within this block, in this thread, the model runs its own forward, uncounted: what segue's results must equal."""
        before, self._here.untouched = self._here.untouched, True
        try:
            yield self._model
        finally:
            self._here.untouched = before

    @contextmanager
    def reference(self) -> Iterator[Any]:
        """Within this block, in this thread, forwards run the runner's reference, without graphs. Replays equal it bit
        for bit.
        """
        before, self._here.run = self._here.run, self._reference()
        try:
            yield self._model
        finally:
            self._here.run = before

    @property
    def scratch_bytes(self) -> int:
        """Memory of the scratch caches that prime graphs fill, beside the graphs' own."""
        return 0

    def _begin(self, model: Any) -> None:
        self._model, self._here = model, _Here()

    def _reference(self) -> Callable[..., Any] | None:
        return None
