"""What the repository promises about itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="tests run outside a checkout")


def test_the_package_asks_for_no_more_than_it_needs() -> None:
    assert PROJECT["name"] == "segue-graphs" and PROJECT["requires-python"] == ">=3.11"
    names = {re.split(r"[<>=\[]", need)[0] for need in PROJECT["dependencies"]}
    assert names == {"torch", "rich", "typer"}


def test_every_requirement_is_pinned_for_development() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    extras = PROJECT["optional-dependencies"]
    needs = [*PROJECT["dependencies"], *extras["transformers"], *extras["demo"], *extras["docs"], *extras["dev"]]
    names = {re.split(r"[<>=\[]", need)[0] for need in needs} - {"segue-graphs"}
    assert names <= pinned
    assert all("==" in line for line in lines)


@pytest.mark.parametrize("target", ["demo", "test", "slow", "docs", "families", "refusals"])
def test_make_does_all_set_up_first(target: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    command = ["make", "-n", target, "VENV=/nonexistent/venv"]
    steps = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment).stdout
    assert steps.index("-m venv") < steps.index("install -q -c") < steps.index("-e '.[demo,dev]'")
    assert ("segue demo" in steps) is (target == "demo")
    assert ("pytest" in steps and "mypy" in steps and "ruff check" in steps) is (target == "test")


def test_continuous_integration_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK) and "make test" in script.read_text()


def test_every_module_says_what_it_is_for() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        assert path.read_text().startswith('"""'), path
