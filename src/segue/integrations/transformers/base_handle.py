"""What every handle of an accelerated model has, and the handle that does nothing, under ``SEGUE=off``."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MethodType, TracebackType
from typing import Any, Self, SupportsIndex

from torch import nn

from segue.errors import no_copy
from segue.integrations.transformers import handle_report
from segue.runner import CaptureSummary, Stats
from segue.runner.reasons import DISABLED
from segue.runner.stats import Counters


class _Here(threading.local):
    """How this thread asked for its forwards to run."""

    untouched = False
    breakable_only = False
    run: Callable[..., Any] | None = None  # instead of the runner
    declined: str | None = None  # why no full graph makes the step that is being served, which is counted when others do


class Handle(ABC):
    """A transformers model that replays captured graphs. Calls, and attributes that it hasn't itself, go to the model.

    :func:`segue.accelerate` returns one. To code that asks, it is of the model's class, and methods of the model that return the
    model return the handle. As a context manager it restores the model at the end.
    """

    _module: Any

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The model's, so that ``isinstance(handle, PreTrainedModel)`` holds."""
        return type(object.__getattribute__(self, "__dict__").get("_module", self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("_module", "_here"):  # not set yet, since the model was refused
            raise AttributeError(name)
        value = getattr(self._module, name)
        if type(value) is MethodType and value.__self__ is self._module:
            return MethodType(_giving(self, value.__func__), self._module)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._module, name, value)

    def __getitem__(self, at: Any) -> Any:
        return self._module[at]

    def __len__(self) -> int:
        return len(self._module)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._module)

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self._module)})

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        who = f"the handle of an accelerated {type(self._module).__name__}"
        raise no_copy(who, "Copy or pickle handle.module, and accelerate the copy.")

    def __repr__(self) -> str:
        return handle_report.line(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()

    @property
    def module(self) -> Any:
        """The whole model itself, without segue's names around it."""
        return self._module

    @property
    @abstractmethod
    def stats(self) -> Stats:
        """The runner's counts, with the forwards that ran untouched under ``eager`` and ``reasons``."""

    @abstractmethod
    def capture(self) -> CaptureSummary | None:
        """Capture the whole ladder now, largest bucket first, instead of each bucket at its second call. None: nothing was."""

    @abstractmethod
    def recapture(self) -> None:
        """Drop every graph and look at the model anew, so that each bucket is captured again. It takes in what has changed:
        weights that moved or were replaced, modules, hooks and modes."""

    @abstractmethod
    def sleep(self) -> None:
        """Free the graphs and their memory. Until :meth:`wake`, forwards run untouched, counted."""

    @abstractmethod
    def wake(self) -> CaptureSummary | None:
        """End :meth:`sleep`: look at the model anew, as :meth:`recapture` does, and capture the ladder if :meth:`capture` had.

        Returns what was captured; None where graphs come with the calls.
        """

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
        """What was replayed, what ran eager and what to change about that, what runs live between graphs, buckets and memory, in
        Markdown.
        """
        return handle_report.report(self)

    @property
    def strategies(self) -> Mapping[str, str]:
        """How forwards are served, by name of the strategy: empty where it is used, otherwise why this model can't have it."""
        return {}

    @property
    def boundaries(self) -> tuple[str, ...]:
        """What runs live before, between and after the graphs, in words."""
        return ()

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch caches that prime graphs fill, beside the graphs' own memory."""
        return 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of keys and values in which caches lie while they decode by full graphs."""
        return 0

    def untouched(self) -> AbstractContextManager[Any]:
        """Within this block, in this thread, the model runs its own forward, uncounted: what segue's results must equal."""
        return self._with("untouched", True)

    def breakable_only(self) -> AbstractContextManager[Any]:
        """Within this block, in this thread, everything runs by the breakable graphs: fresh prompts and steps too."""
        return self._with("breakable_only", True)

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

    def _begin(self, module: Any, model: Any) -> None:
        """What it has before it looks at the model. ``module``: what calls go to. ``model``: the transformers model in it."""
        self._module, self._model, self._here, self._counters = module, model, _Here(), Counters()

    def _reference(self) -> Callable[..., Any] | None:
        return None

    @contextmanager
    def _with(self, option: str, value: Any) -> Iterator[Any]:
        before = getattr(self._here, option)
        setattr(self._here, option, value)
        try:
            yield self._module
        finally:
            setattr(self._here, option, before)


def _giving(handle: Handle, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the model's that gives the handle where it would give the model, so that ``handle.eval()`` is a handle."""

    @functools.wraps(method)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(model, *args, **kwargs)
        return handle if result is model else result

    return call


class DisabledHandle(Handle):
    """The handle of any model under ``SEGUE=off``: it counts forwards and captures nothing.

    It stays disabled when the environment changes.
    """

    def __init__(self, module: Any) -> None:
        self._begin(module, module)
        inner = module.get_base_model() if hasattr(module, "get_base_model") else module  # of an adapter, which calls its forward
        base = getattr(inner, "base_model", inner)
        self._hook = base.register_forward_pre_hook(self._counted) if isinstance(base, nn.Module) else None

    @property
    def stats(self) -> Stats:
        """The forwards that were counted, all of them under ``eager``."""
        return self._counters.snapshot(0, 0, ())

    def capture(self) -> None:
        """Do nothing."""

    def recapture(self) -> None:
        """Do nothing."""

    def sleep(self) -> None:
        """Do nothing."""

    def wake(self) -> None:
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
            self._counters.fell_back(DISABLED)
