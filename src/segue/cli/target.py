"""Loads ``MODULE:FACTORY``, the runner or trunk that a command works on."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from segue.errors import UsageError
from segue.runner import GraphRunner


@dataclass(frozen=True)
class Target:
    """A runner and an example call of it. ``ctx``: the call's context, or a function from a number of tokens to one."""

    runner: GraphRunner
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    ctx: Any = None


def said_on_stderr() -> contextlib.AbstractContextManager[object]:
    """Within this block, what the target prints goes to stderr, so that stdout has results only."""
    return contextlib.redirect_stdout(sys.stderr)


def load(name: str) -> Callable[[], Any]:
    """The factory behind ``package.module:attribute``, looked for in the current folder too.

    Raises:
        UsageError: there is no such module or callable. What the module raises while it is imported passes through.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"{name!r} isn't MODULE:FACTORY, as in my_model.serving:make_runner")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with said_on_stderr():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is None or not (module_name == e.name or module_name.startswith(f"{e.name}.")):
            raise
        raise UsageError(f"{name}: there is no module {e.name!r}, here or among the installed ones") from None
    factory: Any = module
    for part in attribute.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        raise UsageError(f"{name}: module {module_name!r} has no function {attribute!r}")
    made: Callable[[], Any] = factory
    return made


def runner_of(name: str) -> Target:
    """What the factory ``name`` returns: a runner, or ``(runner, args, kwargs[, ctx])`` of an example call.

    Raises:
        UsageError: it returns something else.
    """
    factory = load(name)
    with said_on_stderr():
        made = factory()
    parts = made if isinstance(made, tuple) else (made,)
    if isinstance(parts[0] if parts else None, GraphRunner):
        if len(parts) == 1:
            return Target(parts[0], kwargs={})
        if len(parts) in (3, 4) and isinstance(parts[1], tuple | list) and isinstance(parts[2], dict):
            return Target(parts[0], tuple(parts[1]), parts[2], *parts[3:])
    shape = f"({', '.join(type(p).__qualname__ for p in made)})" if isinstance(made, tuple) else type(made).__qualname__
    raise UsageError(
        f"{name} returned {shape}; it must return a segue.GraphRunner, or (runner, args, kwargs) or "
        "(runner, args, kwargs, ctx) with the arguments of an example call"
    )
