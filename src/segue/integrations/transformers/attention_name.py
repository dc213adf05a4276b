"""The name under which a model looks up its attention: segue's while its body runs, its own at all other times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

NAME = "segue"


class AttentionName:
    """Switches ``config._attn_implementation`` of a decoder's configs.

    No mask function is registered under segue's name, so that a body makes no masks; and since the name stands only
    while a body runs, the untouched model, its masks and what else reads the name never see it.
    """

    def __init__(self, configs: Iterable[Any], name: str = NAME) -> None:
        self._segue = name
        self._configs = list({id(config): config for config in configs}.values())
        self._own: list[Any] = []
        self.swapped = False  # a body is running

    @property
    def name(self) -> str | None:
        """The model's own implementation: ``"sdpa"``, ``"eager"``, ..."""
        first = self._own[0] if self.swapped else self._configs[0]._attn_implementation
        return first  # type: ignore[no-any-return]

    @contextmanager
    def segue(self) -> Iterator[None]:
        """While a body runs: attention goes to the break."""
        own = [config._attn_implementation for config in self._configs]
        before, self._own, self.swapped = (self._own, self.swapped), own, True
        try:
            self._set([self._segue] * len(own))
            yield
        finally:
            self._set(own)
            self._own, self.swapped = before

    @contextmanager
    def own(self) -> Iterator[None]:
        """In a break: attention functions that read the name find the model's own, at capture as at a replay."""
        if not self.swapped:
            yield
            return
        self.swapped = False
        self._set(self._own)
        try:
            yield
        finally:
            self._set([self._segue] * len(self._configs))
            self.swapped = True

    def _set(self, names: list[Any]) -> None:
        for config, name in zip(self._configs, names, strict=True):
            config._attn_implementation = name
