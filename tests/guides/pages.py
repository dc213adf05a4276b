"""The pages of the documentation, and what is in them: blocks of code, links, headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDES, ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("*/README.md"))]
_MARK = r"(?:<!-- (?P<mark>(?:raises|not run)[^>]*) -->\n)?"
_BLOCK = re.compile(_MARK + r"```(?P<language>\w*)[^\n]*\n(?P<code>.*?)\n```", re.DOTALL)
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line``: of its first line of code. ``mark``: ``raises NAME`` or ``not run: WHY``, by a comment."""

    language: str
    code: str
    line: int
    mark: str


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = path.read_text("utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code")) + 1
        yield Block(found["language"], found["code"], line, found["mark"] or "")


def links(path: Path) -> list[str]:
    """Where a page links to, code apart."""
    return [a or b for a, b in _LINK.findall(_CODE.sub("", path.read_text("utf-8")))]


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings."""
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    return {_slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
