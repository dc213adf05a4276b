"""What a command works on: a runner, a model or its handle, or a prime graph, found by the text that the user gave."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from segue.cli import failures, handles, locate, saved_models
from segue.cli.output import log
from segue.cli.saved_models import Precision
from segue.errors import SegueError, UsageError
from segue.prime import PrimeGraph
from segue.runner import GraphRunner

MODELS = (
    "A folder of a saved transformers model; the name of one in transformers' cache; or package.module:NAME or file.py:NAME, "
    "where NAME is a model, or a function without arguments that returns one."
)
RUNNERS = (
    f"{MODELS} NAME may also be or return a handle of segue.accelerate or a segue.GraphRunner; or (model, args, kwargs) or "
    "(runner, args, kwargs[, ctx]) with an example call, where ctx may be a function of the number of tokens."
)
TARGETS = f"{RUNNERS} Or a segue.PrimeGraph, or a trunk."


@dataclass(frozen=True)
class ModelOptions:
    """How a target that is a model is loaded and accelerated. None means that the option wasn't given."""

    max_tokens: int | None = None
    strategy: str | None = None
    compile: bool = False
    dtype: Precision | None = None
    trust_remote_code: bool = False

    def refuse(self, why: str) -> None:
        """Raise UsageError, which begins with ``why``, if an option was given that says how to accelerate a model."""
        given = {"--max-tokens": self.max_tokens, "--strategy": self.strategy, "--compile": self.compile or None}
        _refuse(given, why)

    def refuse_loading(self, why: str) -> None:
        """Raise UsageError, which begins with ``why``, if an option was given that says how to load a saved model."""
        given = {"--dtype": self.dtype, "--trust-remote-code": self.trust_remote_code or None}
        _refuse(given, why)


MAX_TOKENS = 256  # of a model's forwards where nobody says: every bucket up to it is captured
_WANTED = (
    "a segue.GraphRunner, or (runner, args, kwargs[, ctx]) with the arguments of an example call, a transformers model or "
    "(model, args, kwargs), a handle of segue.accelerate, a segue.PrimeGraph or a trunk"
)
_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="Of a model: the most tokens of a forward with a graph; 256 by default.")
]
Strategy = Annotated[str | None, typer.Option("--strategy", help="Of a model: auto (the default), breakable or prime.")]
Compile = Annotated[bool, typer.Option("--compile", help="Of a model: capture compiled layers.")]
DType = Annotated[
    Precision | None,
    typer.Option("--dtype", help="Of a saved model: its dtype. By default as saved, and float32 without a CUDA device."),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Of a saved model: run the Python code that comes with it.")
]


@dataclass(frozen=True)
class ExampleCall:
    """An example call. ``ctx``: its context, or a function from a number of tokens to one."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    ctx: Any = None


@dataclass(frozen=True)
class Target:
    """What was found: a runner, a handle, a prime graph or a trunk; and the example call, if one was given with it."""

    name: str
    value: Any
    call: ExampleCall | None = None


def find(name: str, options: ModelOptions, **defaults: Any) -> Target:
    """What ``name`` gives. A model is accelerated as ``options`` say.

    ``defaults``: arguments of :func:`segue.accelerate` for what they leave open.

    Raises:
        UsageError: nothing is found under that name, or something that no command knows; or an option doesn't fit.
        SegueError: the model can't be accelerated, and why.
    """
    log.last = f"loading {name}"  # told if Ctrl-C comes
    given = _given(name, options)
    parts = given if isinstance(given, tuple) else (given,)
    value, call = (parts[0] if parts else None), None
    if isinstance(given, tuple) and len(parts) > 1:
        most = 4 if isinstance(value, GraphRunner) else 3
        if not (3 <= len(parts) <= most and isinstance(parts[1], tuple | list) and isinstance(parts[2], dict)):
            raise _unknown(name, given)
        call = ExampleCall(tuple(parts[1]), parts[2], *parts[3:])
    if isinstance(value, GraphRunner | PrimeGraph) or handles.is_handle(value) or is_trunk(value):
        options.refuse(f"{name} gives a {type(value).__name__}, which is made already")
    elif isinstance(value, nn.Module):
        value = _accelerated(value, options, defaults)
    else:
        raise _unknown(name, given)
    return Target(name, value, call)


def is_trunk(value: Any) -> bool:
    """Whether this is a :class:`segue.Trunk`."""
    return not isinstance(value, type) and hasattr(value, "new_cache") and hasattr(value, "min_tokens")


def made_by(name: str) -> Any:
    """What ``package.module:name`` or ``file.py:name`` is, or returns if it is a function.

    Raises:
        UsageError: there is no such thing, or it needs arguments.
    """
    value = locate.named(name)
    if _is_ready(value) or isinstance(value, tuple):
        return value
    if not callable(value):
        raise UsageError(f"{name} is no function but {_kind(value)}; it must be, or return, {_WANTED}")
    if needed := _needed_arguments(value):
        raise UsageError(
            f"{name} needs {'arguments' if len(needed) > 1 else 'the argument'} {', '.join(needed)}, and is called without any: "
            "give defaults, or name a function that needs none"
        )
    try:
        with locate.users_code(name):
            return value()
    except SegueError as e:
        if (line := failures.place(e)) is not None:
            e.add_note(f"raised while {name} ran: {line}")
        raise


def _given(name: str, options: ModelOptions) -> Any:
    """A saved model, or what the user's code gives."""
    if ":" in name:
        options.refuse_loading(f"{name} is no saved model, and makes what it gives itself")
        return made_by(name)
    if not (name and Path(name).is_dir()):
        if (whole := _importable(name)) is not None:
            raise UsageError(f"{name} names a whole {whole}: say what in it, as in {name}:make_model")
        if not _REPOSITORY.fullmatch(name):
            raise UsageError(f"{name!r} is no folder, seen from {os.getcwd()}, and can't be the name of a model")
    return saved_models.load(name, options.dtype, options.trust_remote_code)


def _importable(name: str) -> str | None:
    """``file`` or ``module`` if that is what ``name``, which has no colon, would be; None otherwise."""
    if locate.is_file(name) and (Path(name).is_file() or name.endswith(".py")):
        return "file"
    top, parts = name.partition(".")[0], name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    return "module" if Path(f"{top}.py").is_file() or importlib.util.find_spec(top) is not None else None


def _accelerated(model: nn.Module, options: ModelOptions, defaults: dict[str, Any]) -> Any:
    given = {"max_tokens": options.max_tokens, "strategy": options.strategy, "compile": options.compile or None}
    with locate.said_on_stderr():
        return handles.accelerated(model, **{**defaults, **{key: value for key, value in given.items() if value is not None}})


def _is_ready(value: Any) -> bool:
    """Whether a callable is itself what a command works on, and no function that makes it."""
    return isinstance(value, GraphRunner | PrimeGraph | nn.Module) or handles.is_handle(value) or is_trunk(value)


def _refuse(given: dict[str, Any], why: str) -> None:
    if found := [option for option, value in given.items() if value is not None]:
        raise UsageError(f"{why}: leave out {' and '.join(found)}")


def _needed_arguments(factory: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # what is written in C may have none to see
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _unknown(name: str, given: Any) -> UsageError:
    return UsageError(f"{name} returned {_kind(given)}; it must return {_WANTED}")


def _kind(value: Any) -> str:
    if value is None:
        return "None (is a return missing?)"
    return f"({', '.join(type(p).__qualname__ for p in value)})" if isinstance(value, tuple) else type(value).__qualname__
