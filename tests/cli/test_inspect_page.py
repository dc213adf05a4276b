"""The page of ``segue inspect --html``: what is on it, and that a screen reader and a machine without a network can read it."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from segue.check.summary import BucketSummary, HandoffSummary, StepSummary
from segue.cli import app
from segue.cli.inspect_page import Inspection, page
from segue.runner import Stats

run = CliRunner().invoke
_VOID = {"meta", "br"}


class Page(HTMLParser):
    """The tags of a page with their attributes, the ids, and the text; closing tags must match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def written(tmp_path: Path, *arguments: str, exit_code: int = 0) -> tuple[str, Page]:
    file = tmp_path / "page.html"
    result = run(app, ["inspect", *arguments, "--html", str(file)])
    assert result.exit_code == exit_code, result.output
    return file.read_text("utf-8"), Page(file.read_text("utf-8"))


def test_a_screen_reader_finds_its_way_and_nothing_is_fetched(tmp_path: Path) -> None:
    text, page = written(tmp_path, "checkable:right")
    for landmark in ("h1", "main", "header", "nav", "footer", "title"):
        assert len(page.all(landmark)) == 1, landmark
    assert page.all("html") == [{"lang": "en"}]
    ids = {attributes["id"] for _, attributes in page.tags if attributes.get("id")}
    for anchor in page.all("a"):
        assert (anchor["href"] or "").startswith("#") and (anchor["href"] or "")[1:] in ids
    assert all(section["aria-labelledby"] in ids for section in page.all("section")) and len(page.all("section")) == 6
    assert page.all("th") and {head.get("scope") for head in page.all("th")} == {"col", "row"}
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(a.get("aria-label") for _, a in page.tags if a.get("role") in ("img", "region"))
    assert not re.search(r"https?:|//|url\(|@import|<script|<link|<img|\bsrc=", text)
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text and "$" not in text


def test_the_page_shows_steps_handoffs_owners_memory_and_padding(tmp_path: Path) -> None:
    text, page = written(tmp_path, "checkable:right")
    assert "Bucket 8 : 2 segments, 1 break" in page.text and "Bucket 4 : 2 segments, 1 break" in page.text
    assert re.search(r"Break mix \(cli/checkable.py:\d+\) called at cli/checkable.py:\d+ in _forward", page.text)
    assert "hands on result : [8, 4] float32, tokens in dimension 0, 128 B" in page.text
    assert re.search(r"_forward: WEIGHT the function \[4, 4\] float32 64 B read by aten.matmul", page.text)
    assert "inputs['x'] the runner (input buffer) [8, 4] float32 128 B" in page.text
    assert "5 to 8 38% 19%" in page.text and "at most 75%" in text
    assert "It has not run." in page.text and "no call was made" in page.text


def test_layers_that_are_alike_are_shown_once() -> None:
    attend = StepSummary("break", "attend", "m.py:3 in forward", handoffs=(HandoffSummary("result", (8, 4), "float32", 128, 0),))
    first, *middle, last = (StepSummary("segment", f"segment {i}", "m.py:9 in forward", ops=5) for i in range(6))
    steps = [first, *(step for segment in middle for step in (attend, segment)), attend, replace(last, ops=2)]
    stats = Stats(0, 0, 0, 0, {}, 0.0, 0, 0)
    shown = Page(page(Inspection("t", "s", [BucketSummary(8, tuple(steps), (), 0, 0)], [8], stats, [], [], None, "f"))).text
    assert "6 segments, 5 breaks" in shown and "4 times, up to segment 4: Break attend called at m.py:3" in shown
    assert shown.count("Break attend") == 2 and "Segment 5 , 2 ops" in shown and "Segment 3" not in shown


def test_a_tensor_of_the_context_that_a_segment_reads_is_owned_by_the_context(tmp_path: Path) -> None:
    _, page = written(tmp_path, "checkable:contextual")
    assert re.search(r"\['scale'\] the live context \[4\] float32 16 B read by aten.mul", page.text)


def test_findings_of_a_check_are_on_the_page_and_exit_1(tmp_path: Path) -> None:
    _, page = written(tmp_path, "checkable:faulty", "--check", exit_code=1)
    assert "Replays may differ from eager. padding at cli/checkable.py:" in page.text and "1 finding" in page.text


def test_a_models_page_has_its_counters_and_what_the_check_compared(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    _, page = written(tmp_path, "accelerable:model", "--max-tokens", "4", "--strategy", "breakable", "--check")
    assert "LlamaForCausalLM on " in page.text and "After prefill, 1 token;" in page.text
    assert re.search(r"replayed by breakable \d+", page.text) and "buckets with a graph 1, 2, 4" in page.text
    assert "LlamaModel.layers.N.mlp.up_proj.weight \xd7 2 the function [48, 32] float32 12 KiB" in page.text
    assert "calls with segue three times" in page.text and "No finding." in page.text


def test_what_users_name_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "a&b<i>.py").write_text((Path(__file__).parent / "checkable.py").read_text())
    text, page = written(tmp_path, f"{tmp_path}/a&b<i>.py:right")
    assert "<i>.py" not in text and "a&b<i>.py:right" in page.text
