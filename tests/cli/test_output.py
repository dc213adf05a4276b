"""Results are written as Markdown, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json

from segue.cli.output import Format, render

ROWS = [{"name": "a|b", "n": 1, "ms": 0.12345}, {"name": "two\nlines", "n": None, "more": 1234.5}]


def test_markdown_is_one_table_under_its_notes() -> None:
    assert render(ROWS, Format.MD, ["A note."]) == (
        "A note.\n\n| name | n | ms | more |\n| --- | --- | --- | --- |\n| a\\|b | 1 | 0.123 |  |\n| two lines |  |  | 1234 |\n"
    )


def test_json_keeps_values_and_notes() -> None:
    assert json.loads(render(ROWS, Format.JSON, ["A note."])) == {"notes": ["A note."], "rows": ROWS}


def test_csv_is_rows_alone() -> None:
    read = list(csv.DictReader(io.StringIO(render(ROWS, Format.CSV, ["A note."]))))
    assert read[0] == {"name": "a|b", "n": "1", "ms": "0.12345", "more": ""}
