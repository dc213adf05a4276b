"""What every handle of an accelerated model has, and the handle that does nothing, under ``SEGUE=off``."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Self, SupportsIndex

from torch import nn

from segue import environment
from segue.errors import no_copy
from segue.runner import CaptureSummary, Stats
from segue.runner.memory_budget import mib
from segue.runner.stats import Counters


class _Here(threading.local):
    """How this thread asked for its forwards to run."""

    untouched = False
    without_prime = False
    run: Callable[..., Any] | None = None  # instead of the runner


class Handle(ABC):
    """A transformers model whose decoder replays captured graphs. Calls, and attributes that it hasn't itself, go to the model.

    :func:`segue.accelerate` returns one. As a context manager it restores the model at the end.
    """

    _model: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("_model", "_here"):  # not set yet, since the model was refused
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
        who = f"the handle of an accelerated {type(self._model).__name__}"
        raise no_copy(who, "Copy or pickle handle.model, and accelerate the copy.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()

    @property
    def model(self) -> Any:
        """The transformers model itself."""
        return self._model

    @property
    @abstractmethod
    def stats(self) -> Stats:
        """The runner's counts, with the forwards that ran untouched under ``eager`` and ``reasons``."""

    @abstractmethod
    def capture(self) -> CaptureSummary | None:
        """Capture the whole ladder now, largest bucket first, instead of each bucket at its second call. None: nothing was."""

    @abstractmethod
    def recapture(self) -> None:
        """Drop every graph, so that each bucket is captured anew. Needed after weights moved or modules were replaced."""

    @abstractmethod
    def graphs_of(self, tokens: int) -> tuple[int | None, int, int]:
        """The bucket of a forward of ``tokens`` tokens, its segments and its breaks; 0 and 0 before its capture."""

    @abstractmethod
    def restore(self) -> None:
        """Give the model its own forward back and free the graphs. May be called again."""

    def close(self) -> None:
        """Do what :meth:`restore` does. Everything with graphs has this name for it."""
        self.restore()

    def report(self) -> str:
        """A Markdown table: counts, strategies, buckets, padding, memory and the reasons for what ran untouched."""
        stats = self.stats
        rows = [
            ("warm-ups (first call of a bucket)", str(stats.warmed)),
            ("captured (second call)", str(stats.captured)),
            ("replayed", str(stats.replayed)),
            *((f"replayed: {name}", str(count)) for name, count in sorted(stats.strategies.items())),
            ("untouched (eager)", str(stats.eager)),
            *((f"untouched: {reason}", str(count)) for reason, count in sorted(stats.reasons.items())),
            ("buckets with a graph", ", ".join(map(str, stats.buckets)) or "none"),
            ("padded rows", f"{stats.padding_share:.1%}"),
            ("graph memory", mib(stats.pool_bytes)),
            ("scratch caches of prime graphs", mib(self.scratch_bytes)),
        ]
        name = type(self._model).__name__
        return "\n".join([f"| {name} | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows)])

    def untouched(self) -> AbstractContextManager[Any]:
        """Within this block, in this thread, the model runs its own forward, uncounted: what segue's results must equal."""
        return self._with("untouched", True)

    def without_prime(self) -> AbstractContextManager[Any]:
        """Within this block, in this thread, fresh prompts too run by the breakable graphs."""
        return self._with("without_prime", True)

    def reference(self) -> AbstractContextManager[Any]:
        """Within this block, in this thread, forwards run the runner's reference, without graphs. Replays equal it bit
        for bit.
        """
        return self.with_body(self._reference())

    def with_body(self, run: Callable[..., Any] | None) -> AbstractContextManager[Any]:
        """Within this block, in this thread, ``run`` is called in place of the runner; None means the runner.

        It is called as the runner is: ``run(x [N, D], position_ids [N], ctx=...)``, and returns [N, D].
        """
        return self._with("run", run)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch caches that prime graphs fill, beside the graphs' own memory."""
        return 0

    def _begin(self, model: Any) -> None:
        self._model, self._here = model, _Here()

    def _reference(self) -> Callable[..., Any] | None:
        return None

    @contextmanager
    def _with(self, option: str, value: Any) -> Iterator[Any]:
        before = getattr(self._here, option)
        setattr(self._here, option, value)
        try:
            yield self._model
        finally:
            setattr(self._here, option, before)


class DisabledHandle(Handle):
    """The handle of any model under ``SEGUE=off``: it counts forwards and captures nothing.

    It stays disabled when the environment changes.
    """

    def __init__(self, model: Any) -> None:
        self._begin(model)
        self._counters = Counters()
        base = getattr(model, "base_model", model)
        self._hook = base.register_forward_pre_hook(self._counted) if isinstance(base, nn.Module) else None

    @property
    def stats(self) -> Stats:
        """The forwards that were counted, all of them under ``eager``."""
        return self._counters.snapshot(0, 0, ())

    def capture(self) -> None:
        """Do nothing."""

    def recapture(self) -> None:
        """Do nothing."""

    def graphs_of(self, tokens: int) -> tuple[int | None, int, int]:
        """No bucket: (None, 0, 0)."""
        return None, 0, 0

    def restore(self) -> None:
        """End the counting."""
        if self._hook is not None:
            self._hook.remove()

    def _counted(self, module: nn.Module, args: Any) -> None:
        if not self._here.untouched:
            self._counters.fell_back(environment.DISABLED)
