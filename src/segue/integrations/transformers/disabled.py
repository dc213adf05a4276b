"""The handle under ``SEGUE=off``: the model itself, with its forwards counted."""

from __future__ import annotations

from typing import Any

from torch import nn

from segue import environment
from segue.integrations.transformers.base_handle import Handle
from segue.runner import Stats
from segue.runner.stats import Counters


class DisabledHandle(Handle):
    """Takes any model, looks at nothing, captures nothing, and stays off when the environment changes."""

    def __init__(self, model: Any) -> None:
        self._begin(model)
        self._counters = Counters()
        base = getattr(model, "base_model", model)
        self._hook = base.register_forward_pre_hook(self._counted) if isinstance(base, nn.Module) else None

    @property
    def stats(self) -> Stats:
        return self._counters.snapshot(0, 0, ())

    def capture(self) -> None:
        """Nothing."""

    def recapture(self) -> None:
        """Nothing."""

    def graphs_of(self, tokens: int) -> tuple[int | None, int, int]:
        """No bucket."""
        return None, 0, 0

    def restore(self) -> None:
        """End the counting."""
        if self._hook is not None:
            self._hook.remove()

    def _counted(self, module: nn.Module, args: Any) -> None:
        if not self._here.untouched:
            self._counters.fell_back(environment.DISABLED)
