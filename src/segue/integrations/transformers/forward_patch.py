"""What stands in for a decoder's forward while it is accelerated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

Serve = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class ForwardPatch:
    """Calls ``serve(args, kwargs)``. Copied or pickled with its decoder, it turns into that one's own forward."""

    def __init__(self, decoder: Any, serve: Serve) -> None:
        functools.update_wrapper(self, decoder.forward)
        self._decoder, self._serve, self._before = decoder, serve, own_forward(decoder)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._serve(args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _plain, (self._decoder, self._before)

    def put(self) -> None:
        """Take the decoder's place."""
        self._decoder.forward = self

    def give_back(self) -> None:
        """Leave the decoder as it was."""
        if self._before is None:
            self._decoder.__dict__.pop("forward", None)
        else:
            self._decoder.forward = self._before


def own_forward(decoder: Any) -> Any:
    """The forward that stands in the decoder instead of its class's; None if there is none."""
    found = decoder.__dict__.get("forward")
    plain = isinstance(found, MethodType) and found.__func__ is type(decoder).forward and found.__self__ is decoder
    return None if plain else found


def _plain(decoder: Any, before: Any) -> Any:
    return MethodType(type(decoder).forward, decoder) if before is None else before
