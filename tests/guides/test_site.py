"""The guides build as a site, strictly: a broken link, a page that is on no menu, or an API name that is gone fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import segue
from guides.pages import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(), reason="tests run outside a checkout")


def test_the_site_builds_with_every_page_and_fetches_nothing(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package)
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "index"]
    pages = [tmp_path / "index.html", *(tmp_path / name / "index.html" for name in names)]
    for page in pages:
        text = page.read_text("utf-8")
        assert not re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"https?:", text), page
        assert ":class:" not in text and ":func:" not in text and ":meth:" not in text, page


def test_every_page_is_on_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert {p.name for p in (ROOT / "docs").glob("*.md")} == set(re.findall(r"[\w-]+\.md", menu))


def test_every_public_name_is_on_the_api_page_or_an_error() -> None:
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    named = set(re.findall(r"^::: segue\.(\w+)$", text, re.MULTILINE))
    errors = {name for name in segue.__all__ if name.endswith("Error")}
    assert named & set(segue.__all__) == set(segue.__all__) - errors
