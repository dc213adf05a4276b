"""The package as people get it: what is in the wheel and the sdist, and that an empty environment runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="tests run outside a checkout")


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints, without this process's paths. It must end well."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", str(folder), cwd=ROOT)
    return folder


def the(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def test_the_wheel_has_the_package_and_all_that_it_reads(built: Path) -> None:
    names = set(zipfile.ZipFile(the(built, "*.whl")).namelist())
    files = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "segue").rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert {name for name in names if ".dist-info/" not in name} == files
    assert {"segue/py.typed", "segue/cli/inspect_page.html"} <= names


def test_a_wheel_of_the_sdist_is_that_of_the_checkout(built: Path, tmp_path: Path) -> None:
    with tarfile.open(the(built, "*.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    source = the(tmp_path, "segue_graphs-*")
    assert all((source / name).is_file() for name in ("LICENSE", "CHANGELOG.md", "docs/index.md", "tests/test_install.py"))
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), cwd=source)
    assert the(tmp_path, "*.whl").read_bytes() == the(built, "*.whl").read_bytes()


@pytest.mark.slow  # 40 s: torch alone is unpacked in 13; needs a package index
def test_an_empty_environment_runs_it(built: Path, tmp_path: Path) -> None:
    venv, wheel = tmp_path / "venv", the(built, "*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python, segue = venv / "bin" / "python", venv / "bin" / "segue"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "-q", "--no-compile")
    constraints = ("-c", ROOT / "constraints.txt")
    run(*pip, *constraints, wheel, cwd=tmp_path)
    version = wheel.name.split("-")[1]
    assert run(python, "-c", "import segue; print(segue.__file__)", cwd=tmp_path).startswith(str(venv))
    assert run(segue, "--version", cwd=tmp_path) == f"segue {version}\n"
    facts = run(segue, "env", cwd=tmp_path)
    assert "| segue.accelerate | no: transformers not installed |" in facts and f"| segue-graphs | {version} |" in facts
    run(*pip, *constraints, f"{wheel}[transformers]", cwd=tmp_path)
    table = run(segue, "demo", "--random", "--layers", "1", "--tokens", "2", cwd=tmp_path)
    assert table.count("| identical |") == 10
