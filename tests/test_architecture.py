"""The layers can be read off the tree, and a test that breaks them fails."""

from __future__ import annotations

import ast
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

import segue
from architecture import violations

SOURCE = Path(segue.__file__).parent
DESIGN = Path(__file__).parents[1] / "DESIGN.md"


def test_data_goes_one_way_and_nobody_takes_what_is_private_to_others() -> None:
    assert violations(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("devices/protocol.py", "from segue.capture import BreakableCapture", "arrow upwards: segue.devices.protocol"),
        ("capture/views.py", "def f() -> None:\n    from segue.runner import GraphRunner", "arrow upwards: segue.capture.views"),
        ("errors.py", "from segue.devices import resolve", "arrow upwards: segue.errors imports segue.devices"),
        ("runner/ladder.py", "from segue.runner.runner import GraphRunner", "circle: "),
        (
            "capture/views.py",
            "def late() -> None:\n    from segue.capture.capture import BreakableCapture",
            "circle: ",
        ),
        ("check/compare.py", "from segue.capture.program import _run", "private import: segue.check.compare takes _run"),
        ("check/compare.py", "def peek(runner): return runner._strategy_for(None)", "private attribute: segue.check.compare"),
    ],
)
def test_what_breaks_the_layers_is_named(tmp_path: Path, file: str, line: str, found: str) -> None:
    copy = tmp_path / "segue"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    planted = copy / file
    planted.write_text(planted.read_text() + f"\n{line}\n")
    assert any(v.startswith(found) for v in violations(copy)), violations(copy)


def test_one_name_is_one_thing() -> None:
    names = Counter(
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.skipif(not DESIGN.exists(), reason="tests run outside a checkout")
def test_designs_table_has_every_file() -> None:
    table = DESIGN.read_text("utf-8").partition("| layer (")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+\.py)`", table))
    assert named <= {path.name for path in SOURCE.rglob("*.py")}
    layers = ("devices", "capture", "runner", "prime", "integrations")
    assert {path.name for layer in layers for path in (SOURCE / layer).rglob("*.py")} - {"__init__.py"} <= named
