"""sentence-transformers: the transformers model inside a ``SentenceTransformer`` or ``CrossEncoder`` replays captured graphs.

Tokenizing, pooling and normalizing stay the package's own. It is not imported here: who has such a model has imported it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from segue.errors import UsageError
from segue.integrations.transformers.base_handle import Handle
from segue.runner import CaptureSummary, Stats

_PACKAGE = "sentence_transformers"


def is_one(model: Any) -> bool:
    """Whether ``model`` is a module of sentence-transformers, or of a class derived from one."""
    return isinstance(model, nn.Module) and any(cls.__module__.split(".")[0] == _PACKAGE for cls in type(model).__mro__)


def transformer_in(model: nn.Module) -> Any:
    """The one transformers model inside ``model``.

    Raises:
        UsageError: there is none, or there are several.
    """
    from transformers import PreTrainedModel

    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    if len(found) == 1:
        return next(iter(found.values()))
    who = type(model).__name__
    if not found:
        parts = ", ".join(type(m).__name__ for m in model.children()) or "nothing"
        raise UsageError(f"{who} holds no transformers model that could be captured, only {parts}. Run it as it is.")
    several = ", ".join(f"{name} ({type(m).__name__})" for name, m in found.items())
    raise UsageError(f"{who} holds several transformers models: {several}. Accelerate each by itself, in place.")


class SentenceHandle(Handle):
    """The handle of a sentence-transformers model: ``encode``, ``predict``, ``similarity`` and all else are the model's own.

    Its counts and graphs are those of the transformers model inside, whose handle is ``inner``.
    """

    def __init__(self, model: Any, inner: Handle) -> None:
        self._begin(model)
        self._inner = inner

    @property
    def stats(self) -> Stats:
        """The counts of the transformers model's handle."""
        return self._inner.stats

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch caches that prime graphs fill, where the model is a decoder."""
        return self._inner.scratch_bytes

    def capture(self) -> CaptureSummary | None:
        """Capture ahead of traffic, as the transformers model's handle does."""
        return self._inner.capture()

    def recapture(self) -> None:
        """Drop every graph, so that each bucket is captured anew."""
        self._inner.recapture()

    def graphs_of(self, tokens: int) -> tuple[int | None, int, int]:
        """The bucket of a forward of ``tokens`` tokens, its segments and its breaks; 0 and 0 before its capture."""
        return self._inner.graphs_of(tokens)

    def restore(self) -> None:
        """Give the transformers model its own forward back and free the graphs. May be called again."""
        self._inner.restore()

    def __len__(self) -> int:
        return len(self._model)

    def __getitem__(self, at: Any) -> Any:
        return self._model[at]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._model)

    def _reference(self) -> Callable[..., Any] | None:
        return self._inner._reference()

    @contextmanager
    def _with(self, option: str, value: Any) -> Iterator[Any]:
        with self._inner._with(option, value):
            yield self._model
