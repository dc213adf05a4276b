"""The figures in README and docs are those of the committed results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from guides.pages import ROOT
from segue.bench import plots, saved_tables
from segue.bench.result import Row
from segue.errors import UsageError

RESULTS = ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="tests run outside a checkout")


def rows_of(name: str, *columns: str, **where: Any) -> list[Row]:
    rows = saved_tables.having(saved_tables.read(RESULTS / f"nvidia-h200-{name}.md"), *columns)
    return [row for row in rows if all(row[key] == value for key, value in where.items())]


def one(name: str, what: str, *columns: str, **where: Any) -> Any:
    (row,) = rows_of(name, what, *columns, *where, **where)
    return row[what]


def line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def test_the_readmes_table_is_that_of_the_results() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    ways = ("eager", "segue", "segue compiled", "reduce-overhead")
    for row in rows_of("ttft", "tokens", "eager ms"):
        assert line(row["tokens"], *(row[f"{way} ms"] for way in ways)) in text
    starts = {way: [row["start-up s"] for row in rows_of("ttft", "start-up s", "tokens", "way", way=way)] for way in ways}
    plain, fused = (f"{max(starts[way]):.0f} s, all lengths to 2048" for way in ("segue", "segue compiled"))
    rival = starts["reduce-overhead"]
    of_rival = f"{min(rival):.0f} to {max(rival):.0f} s for each length"
    assert f"| start-up | | {plain} | {fused} | {of_rival} |" in text
    steps = [one("steps", "step of generate() ms", way=way, batch=1) for way in (*ways[:3], "static-cache")]
    assert line("a step of `generate()` *", *steps).removesuffix(" |") in text
    eager, graphed = (one("ttft-long", f"{way} ms", tokens=8192) for way in ("eager", "segue"))
    assert f"8192 tokens take {graphed} ms against eager's {eager}" in " ".join(text.split())


def test_the_page_of_measurements_is_that_of_the_results() -> None:
    text = " ".join((ROOT / "docs" / "measurements.md").read_text("utf-8").split())
    kinds = {"dense": "1.46", "mixture": "2.73", "hybrid, gated delta rule": None, "latent attention": None}
    for batch, context in ((1, 128), (8, 2048)):
        places = {"batch": batch, "context": context}
        ways = ("eager", "segue, breakable", "segue", "segue compiled", "static-cache")
        steps = [one("steps", "step of generate() ms", way=way, **places) for way in ways]
        assert line(f"{batch} x {context}", *steps) in text
    for kind, fused in kinds.items():
        ways = ("eager", "segue", "segue compiled")[: 3 if fused else 2]
        prompts = [one("kinds", "ms", kind=kind, tokens=512, way=way) for way in ways]
        steps = [one("kinds", "step ms", kind=kind, way=way) for way in ways]
        assert " | ".join(f"{a} / {b}" for a, b in zip(prompts, steps, strict=True)) in text, kind
    (encoder,) = rows_of("encoder", "tokens", "eager ms", tokens=128)
    assert f"(reduce-overhead: {encoder['reduce-overhead ms']}) |" in text
    assert " | ".join(str(encoder[f"{way} ms"]) for way in ("eager", "segue", "segue compiled")) in text
    seconds = {row["way"]: row["seconds"] * 1000 for row in rows_of("encoder", "sentences", "way")}
    assert " | ".join(f"{seconds[way]:.3g}" for way in ("eager", "segue", "segue compiled")) in text
    assert f"(its own compile: {seconds['torch.compile, dynamic']:.3g})" in text
    for row in rows_of("ttft-between", "tokens", "eager"):
        columns = ["tokens", "eager", "segue", "segue compiled", "reduce-overhead", "torch.compile", "breakable-cuda-graphs"]
        assert line(*(f"{row[name]:g}" for name in [*columns, "piecewise-cuda-graphs"])) in text
    first, *_, last = rows_of("memory", "buckets", "pool MiB", "driver MiB")
    assert f"a pool of {last['pool MiB']:.0f} MiB where the largest alone takes {first['pool MiB']:.0f}" in text
    assert f"{last['driver MiB']:.0f} MiB of the driver instead of {first['driver MiB']:.0f}" in text
    assert one("ttft", "tokens as eager's", batch=1, way="segue compiled") in text


def test_the_picture_has_the_results_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    from typer.testing import CliRunner

    from segue.cli import app

    drawn: dict[str, Any] = {}
    draw = plots.draw_summary

    def note(path: Path, *tables: Any) -> None:
        drawn["tables"] = tables
        draw(path, *tables)

    monkeypatch.setattr(plots, "draw_summary", note)
    files = [str(RESULTS / f"nvidia-h200-{name}.md") for name in ("ttft", "growth", "ttft-between")]
    command = ["bench", "plots", *files[:2], "--others", files[2], "-f"]
    assert CliRunner().invoke(app, [*command, str(tmp_path / "a.svg")]).exit_code == 0
    assert CliRunner().invoke(app, [*command, str(tmp_path / "b.svg")]).exit_code == 0
    once = (tmp_path / "a.svg").read_bytes()
    assert once == (tmp_path / "b.svg").read_bytes(), "drawn again, it differs"
    committed = (ROOT / "docs" / "images" / "measured.svg").read_bytes()
    if f"Matplotlib v{matplotlib.__version__},".encode() in committed:  # another version draws other curves
        assert once == committed, "run make plots"
    ways, others, startup, buckets = drawn["tables"]
    assert {row["way"] for row in ways} >= {"eager", "reduce-overhead"} and others[0]["torch.compile"] == 11.96
    assert startup[-1]["4"] == 104 and buckets[-1]["driver MiB"] == 256


def test_what_is_no_file_of_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.md can't be read: No such file"):
        saved_tables.read(tmp_path / "none.md")
    (tmp_path / "text.md").write_text("no table")
    with pytest.raises(UsageError, match="has no table"):
        saved_tables.read(tmp_path / "text.md")
    (tmp_path / "table.md").write_text("One:\n\n| a | b |\n| --- | --- |\n| 1 | |\n\n| c |\n| --- |\n| x y |\n")
    assert saved_tables.read(tmp_path / "table.md") == {"One": [{"a": 1, "b": None}], "": [{"c": "x y"}]}
    with pytest.raises(UsageError, match="no table has the columns a, c"):
        saved_tables.having(saved_tables.read(tmp_path / "table.md"), "a", "c")
