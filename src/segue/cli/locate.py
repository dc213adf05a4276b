"""Finds what ``package.module:name`` or ``file.py:name`` names, by importing the module or running the file."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from segue.errors import UsageError


def named(target: str) -> Any:
    """What ``target`` names: an attribute, at any depth, of a module or of a file.

    Modules are looked for in the current folder too. A file that lies in a package is imported as a part of that package, and
    any file can import what lies beside it.

    Raises:
        UsageError: no such file, module or attribute, or code that isn't Python. What the module raises while it is imported
            passes through.
    """
    place, _, attributes = target.rpartition(":")
    if not (place and attributes):
        raise UsageError(f"{target!r} isn't package.module:NAME or file.py:NAME, as in serving.py:make_model")
    found: Any = _file(place) if is_file(place) else _module(place)
    owner = place
    for name in attributes.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise UsageError(f"{owner} has no {name!r}{_instead(found, name)}") from None
        owner = f"{owner}{':' if owner == place else '.'}{name}"
    return found


def is_file(place: str) -> bool:
    """Whether ``place`` is meant as a file and not as a module."""
    return place.endswith(".py") or os.sep in place


def said_on_stderr() -> contextlib.AbstractContextManager[object]:
    """Within this block, what the target prints goes to stderr, so that stdout has results only."""
    return contextlib.redirect_stdout(sys.stderr)


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
    """Run a target's code, which may print. ``what``: its name, for errors.

    Raises:
        UsageError: the code can't be parsed, or left the process by ``sys.exit``.
    """
    with said_on_stderr():
        try:
            yield
        except SyntaxError as e:
            code = f": {e.text.strip()}" if e.text else ""
            raise UsageError(f"{e.filename or what}, line {e.lineno}: {type(e).__name__}: {e.msg}{code}") from None
        except SystemExit as e:
            raise UsageError(
                f"{what} called sys.exit({e.code!r}), so it gives nothing to work on. What a script does belongs under "
                "if __name__ == '__main__'."
            ) from None


def _instead(owner: Any, name: str) -> str:
    """What may have been meant: close names, else the functions that a module defines."""
    if close := difflib.get_close_matches(name, [n for n in dir(owner) if not n.startswith("_")], n=3):
        return f"; did you mean {' or '.join(close)}?"
    names = [n for n, f in vars(owner).items() if _is_own(f, owner) and n[0] != "_"] if isinstance(owner, ModuleType) else []
    return f"; it has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else ""


def _is_own(value: Any, module: ModuleType) -> bool:
    return isinstance(value, FunctionType) and value.__module__ == module.__name__


def _file(place: str) -> ModuleType:
    path = Path(place).expanduser()
    if not path.is_file():
        ending = "" if path.suffix else f". {place}.py is one" if path.with_suffix(".py").is_file() else ""
        raise UsageError(f"there is no file {place}, seen from {os.getcwd()}{ending}")
    path = path.resolve()
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts, folder = [folder.name, *parts], folder.parent
    _first_on_path(folder)
    with users_code(place):
        if len(parts) > 1 and path.parent in _folders_of_package(parts[:-1]):
            return importlib.import_module(".".join(parts))
        name = path.stem
        known = sys.modules.get(name)
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known
        return _run(f"segue_target_{name}" if known is not None or name in sys.stdlib_module_names else name, path)


def _folders_of_package(parts: list[str]) -> list[Path]:
    """Where the package of this dotted name, as Python finds it, has its files: another one of the name may come first."""
    return [Path(folder).resolve() for folder in importlib.import_module(".".join(parts)).__path__]


def _run(name: str, path: Path) -> ModuleType:
    """Run a file as the module ``name``, which other modules can then import."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no file of Python code: its name must end in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{name!r} is the name of no module, and of no file as it doesn't end in .py")
    _first_on_path(Path.cwd())
    try:
        with users_code(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is None or not (name == e.name or name.startswith(f"{e.name}.")):
            raise
        raise UsageError(f"{name}: there is no module {e.name!r}, here or among the installed ones") from None


def _first_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
