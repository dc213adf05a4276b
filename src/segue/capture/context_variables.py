"""Objects that the caller's context variables hold: a replay reads them from what the variables hold then."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import Any

from segue.capture.context_paths import ContextMap, getter, is_plain
from segue.errors import ReplayError

_LEVELS = 4  # below a variable's value that are looked at


class LiveVariables:
    """Finds objects in the context variables of one capture, by identity.

    What the forward has set itself since the capture began is another matter: at a replay nobody sets it.

    ``began``: the variables when the capture began.
    """

    def __init__(self, began: Context) -> None:
        self._began = {variable: value for variable, value in began.items() if not is_plain(value)}
        self._map: ContextMap | None = None  # made when somebody asks, for it may be large

    def find(self, value: Any, name: str, where: str) -> Callable[[], Any] | None:
        """A function that reads ``value``'s place; None if no variable holds it.

        ``name``: the argument that it is, and ``where``: what errors call the break.
        """
        if not self._began:
            return None
        if self._map is None:
            self._map = ContextMap(self._began, None, _LEVELS)
        path = self._map.find(value)
        if not path or path[0][1].get(None) is not self._began[path[0][1]]:
            return None
        variable, get = path[0][1], getter(path[1:])

        def read() -> Any:
            try:
                return get(variable.get())
            except (LookupError, AttributeError, TypeError) as e:
                raise ReplayError(
                    f"{where}: argument {name!r} came from the context variable {variable.name!r} at capture, which has nothing "
                    "there now. Set it for each forward, to an object of the same shape."
                ) from e

        return read
