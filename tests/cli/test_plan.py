"""``segue plan``: reading lengths, the ladders, and what they are compared with."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from segue.cli import app, main
from segue.cli.length_samples import read_lengths
from segue.cli.plan import geometric_ladders, plans_for
from segue.errors import UsageError
from segue.runner import Ladder

run = CliRunner().invoke


@pytest.fixture
def write(tmp_path: Path):
    def file(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return file


def skewed() -> list[int]:
    draw = random.Random(0)
    return [max(1, int(draw.lognormvariate(4.5, 1.2))) for _ in range(2000)]


@pytest.mark.parametrize(
    "name, text, field",
    [
        ("a.txt", "5 7\n\n9\n", None),
        ("a.csv", "5\n7\n9\n", None),
        ("a.csv", "id,tokens\nx,5\ny,7\nz,9\n", None),
        ("a.csv", "id,rows\nx,5\ny,7\nz,9\n", "rows"),
        ("a.csv", "rows\n5\n7\n9\n", None),
        ("a.jsonl", "5\n7\n\n9\n", None),
        ("a.jsonl", '{"id": 1, "prompt_tokens": 5}\n{"prompt_tokens": 7}\n{"prompt_tokens": 9}\n', None),
        ("a.log", '{"rows": 5}\n{"rows": 7}\n{"rows": 9}\n', "rows"),
    ],
)
def test_lengths_are_read_from_text_csv_and_json_lines(write, name: str, text: str, field: str | None) -> None:
    assert read_lengths(write(name, text), field) == [5, 7, 9]


@pytest.mark.parametrize(
    "name, text, field, error",
    [
        ("a.txt", "5\nseven\n", None, r"a.txt, line 2: 'seven' is not a positive whole number of tokens"),
        ("a.txt", "5\n0\n", None, r"line 2: '0' is not a positive"),
        ("a.txt", "\n", None, r"holds no lengths"),
        ("a.csv", "tokens\n5\n7.5\n", None, r"line 3: '7.5' is not"),
        ("a.csv", "1,5\n2,7\n", None, r"has 2 columns and no header"),
        ("a.csv", "id,rows\n1,5\n", None, r"which field holds the lengths\? Say --field, one of id, rows"),
        ("a.csv", "id,rows\n1,5\n", "tokens", r"has no field 'tokens'; it has id, rows"),
        ("a.csv", "id,tokens\n1\n", None, r"line 2: there is no column 2"),
        ("a.jsonl", "{5}\n", None, r"line 1 isn't JSON"),
        ("a.jsonl", '{"tokens": true}\n', None, r"True is not a positive"),
        ("a.jsonl", '{"a": 1, "b": 2}\n', None, r"line 1: which field holds the lengths"),
    ],
)
def test_what_is_no_length_is_refused_with_its_line(write, name: str, text: str, field: str | None, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        read_lengths(write(name, text), field)


def test_the_best_ladder_pads_no_more_than_any_geometric_one_of_its_size() -> None:
    sample = skewed()
    plans = plans_for(sample, (4, 8, 16, 64))
    assert [p.k for p in plans] == [4, 8, 16, 64]
    for p in plans:
        assert p.ladder == Ladder.fit(sample, p.k) and p.share < p.geometric
        padded = p.ladder.padding(sample)
        assert p.share == pytest.approx(padded / (padded + sum(sample)))
    assert [p.share for p in plans] == sorted((p.share for p in plans), reverse=True)


@pytest.mark.parametrize("least, most, k, multiple", [(1, 2048, 4, 1), (3, 900, 16, 1), (5, 5, 8, 1), (1, 2048, 16, 8)])
def test_geometric_ladders_have_at_most_so_many_buckets_and_hold_the_longest(
    least: int, most: int, k: int, multiple: int
) -> None:
    for ladder in geometric_ladders(least, most, k, multiple):
        assert len(ladder) <= k and ladder.max >= most and all(b % multiple == 0 for b in ladder)


def test_geometric_ladders_begin_at_the_shortest_length_and_at_one_and_the_finest_is_among_them() -> None:
    assert [list(ladder)[:3] for ladder in geometric_ladders(1, 2048, 64)] == [[1, 2, 3], [1, 2, 4]]
    assert {next(iter(ladder)) for ladder in geometric_ladders(100, 2048, 16)[:2]} == {1, 100}


def test_plans_end_where_nothing_is_padded_any_more() -> None:
    plans = plans_for([3, 3, 5, 9], (2, 3, 4, 8))
    assert [(p.k, p.share) for p in plans] == [(2, 4 / 24), (3, 0.0)]


def test_the_table_is_on_stdout_with_memory_where_it_was_measured(write) -> None:
    source = write("a.txt", " ".join(map(str, skewed())))
    result = run(app, ["plan", source, "-k", "4", "-k", "8", "--per-bucket", "12MiB", "--pool", "300M", "-o", "json"])
    out = json.loads(result.stdout)
    assert result.exit_code == 0 and [row["memory MiB"] for row in out["rows"]] == [348.0, 396.0]
    assert out["rows"][0]["buckets"] == ", ".join(map(str, Ladder.fit(skewed(), 4)))
    assert out["notes"][0].startswith("2000 lengths, ") and "2000 lengths read" in result.stderr
    assert "next: GraphRunner(..., buckets=[" in result.stderr
    plain = run(app, ["plan", source, "-k", "4"]).stdout
    assert "| k | padding | geometric | buckets |" in plain


def test_lengths_come_from_stdin_too() -> None:
    result = run(app, ["plan", "-", "-k", "2", "--multiple-of", "4", "-o", "csv"], input="3 9 17\n")
    assert result.stdout == 'k,padding,geometric,buckets\n2,0.340909,0.340909,"12, 20"\n'


def test_a_plot_is_drawn_where_matplotlib_is_installed(write, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    result = run(app, ["plan", write("a.txt", "3 9 17"), "-k", "2", "--plot", str(picture)])
    assert result.exit_code == 0 and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["absent.txt"], "absent.txt can't be read"),
        (["{file}", "--per-bucket", "much"], "--per-bucket 'much' is no size; give bytes, or 12MiB"),
        (["{file}", "--plot", "a.png"], "--plot needs matplotlib: pip install 'segue-graphs[plot]'"),
    ],
)
def test_wrong_use_exits_2(write, monkeypatch, capsys, arguments: list[str], text: str) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = write("a.txt", "3 9 17")
    monkeypatch.setattr(sys, "argv", ["segue", "plan", *(a.format(file=file) for a in arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr()
    assert stopped.value.code == 2 and said.out == "" and text in said.err


def test_options_out_of_range_exit_2(write) -> None:
    assert run(app, ["plan", write("a.txt", "3"), "-k", "0"]).exit_code == 2
    assert run(app, ["plan"]).exit_code == 2


def test_a_byte_order_mark_is_no_part_of_the_lengths(tmp_path: Path) -> None:
    for name, text in {"a.txt": "5\n7\n9\n", "a.csv": "tokens\n5\n7\n9\n", "a.jsonl": "5\n7\n9\n"}.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert read_lengths(str(tmp_path / name)) == [5, 7, 9]
    result = run(app, ["plan", "-"], input="\ufeff5 7")
    assert result.exit_code == 0, result.output


def test_json_has_numbers_and_markdown_per_cent(write) -> None:
    row = json.loads(run(app, ["plan", write("a.txt", "10\n11\n12\n20\n"), "-k", "2", "-o", "json"]).stdout)["rows"][0]
    assert isinstance(row["padding"], float) and isinstance(row["geometric"], float)
    assert f"| {row['padding']:.1%} |" in run(app, ["plan", write("a.txt", "10\n11\n12\n20\n"), "-k", "2"]).stdout
