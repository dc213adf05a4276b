"""Results as Markdown, JSON or CSV, on stdout; everything else on stderr."""

from __future__ import annotations

import csv
import enum
import io
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from segue.errors import UsageError

Row = Mapping[str, Any]


class _Log(Console):
    """Progress on stderr. ``last``: what was done last, in words; the line that was printed last, where nobody sets another."""

    last = ""

    def print(self, *objects: Any, **options: Any) -> None:
        self.last = " ".join(map(str, objects))
        super().print(*objects, **options)


log = _Log(stderr=True, highlight=False, soft_wrap=True, markup=False)


class Format(enum.StrEnum):
    """How results are written."""

    MD = "md"
    JSON = "json"
    CSV = "csv"


unfinished = set[str]()  # folders of files that are being written

FormatOption = Annotated[Format, typer.Option("-o", "--output", help="How the results are written to stdout.")]


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, in a folder beside ``path``, that takes its place when the block ends without an error.

    So what stands at ``path`` is never half written, even if the command is interrupted. Missing folders are made.

    Raises:
        UsageError: one can't write there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".segue-", dir=path.parent) as folder:
            unfinished.add(folder)
            try:
                written = Path(folder) / path.name
                yield written
                written.replace(path)
            finally:
                unfinished.discard(folder)
    except OSError as e:
        raise UsageError(f"{path} can't be written: {e.strerror or e}") from None


def render(rows: Sequence[Row], form: Format, notes: Sequence[str] = ()) -> str:
    """The rows as text that ends in a newline. Notes stand above them in Markdown and beside them in JSON; CSV has none."""
    if form is Format.JSON:
        whole = {"notes": list(notes), "rows": [dict(row) for row in rows]}
        return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
    if form is Format.CSV:
        out = io.StringIO()
        writer = csv.DictWriter(out, fieldnames=_columns(rows), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()
    return "\n\n".join([*notes, table(rows)]) + "\n"


def table(rows: Sequence[Row]) -> str:
    """A Markdown table. Each cell is one line; the cell of a missing column or of None is empty."""
    columns = _columns(rows)
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(c)) for c in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def examples(*commands: str) -> str:
    """The end of a command's help: what may be typed."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])  # \b: lines stay as they are
