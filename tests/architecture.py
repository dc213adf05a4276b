"""The rules of DESIGN's layers, read off the imports of a source tree: no circle, no arrow upwards, nobody's private names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

# A layer may import those before it in this order, and itself. What lies beside the packages is below all of them.
LAYERS = ("devices", "capture", "runner", "prime", "integrations", "check", "bench", "cli")
_ROOT = "segue"
_TORCHS = (torch, torch.nn.Module(), torch.Tensor)  # have private names too, which are not for this test


class Module:
    """One file: its dotted name and its syntax tree."""

    def __init__(self, path: Path, root: Path) -> None:
        parts = (_ROOT, *path.relative_to(root).with_suffix("").parts)
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.tree = ast.parse(path.read_text())

    @property
    def package(self) -> str:
        """The layer it belongs to; empty for what lies beside the packages."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 and parts[1] in LAYERS else ""


def violations(root: Path) -> list[str]:
    """What breaks the rules in the package that lies in the folder ``root``, in words. Imports in functions count too."""
    modules = {m.name: m for m in (Module(path, root) for path in sorted(root.rglob("*.py")))}
    edges = {name: set(_imports(m, modules)) for name, m in modules.items()}
    return [*_circles(edges), *_upwards(modules, edges), *_private_imports(modules), *_private_attributes(modules)]


def _imports(module: Module, modules: dict[str, Module]) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in modules:
                    yield inner
                elif node.module in modules:
                    yield node.module


def _circles(edges: dict[str, set[str]]) -> Iterator[str]:
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> Iterator[str]:
        if name in path:
            yield "circle: " + " -> ".join([*path[path.index(name) :], name])
        elif name not in done:
            for other in sorted(edges[name]):
                yield from visit(other, [*path, name])
            done.add(name)

    for name in sorted(edges):
        yield from visit(name, [])


def _upwards(modules: dict[str, Module], edges: dict[str, set[str]]) -> Iterator[str]:
    for name, others in edges.items():
        if name in (_ROOT, f"{_ROOT}.__main__"):
            continue  # which put the layers together
        mine = modules[name].package
        for other in sorted(others):
            theirs = modules[other].package
            if other == _ROOT or (theirs and (not mine or LAYERS.index(theirs) > LAYERS.index(mine))):
                yield f"arrow upwards: {name} imports {other}"


def _private_imports(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(f"{_ROOT}."):
                continue
            for alias in node.names:
                if alias.name.startswith("_") and (node.module or "").split(".")[1] != module.package:
                    yield f"private import: {module.name} takes {alias.name} from {node.module}"


def _private_attributes(modules: dict[str, Module]) -> Iterator[str]:
    """``x._name`` where another package defines that name and one's own doesn't."""
    defined: dict[str, set[str]] = {}
    for module in modules.values():
        defined.setdefault(module.package, set()).update(_private_names(module.tree))
    for module in modules.values():
        others = set().union(*(names for package, names in defined.items() if package and package != module.package))
        foreign = others - defined[module.package]
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Attribute) or node.attr not in foreign or _is_self(node.value):
                continue
            if not any(hasattr(owner, node.attr) for owner in _TORCHS):
                yield f"private attribute: {module.name}, line {node.lineno}, uses {node.attr} of another package"


def _private_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            name = node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name.startswith("_") and not name.startswith("__"):
            yield name


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
