"""Reads the tables back that ``segue bench -f`` wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from segue.bench.result import Row
from segue.errors import UsageError

_TABLE = re.compile(r"(?:(?P<title>[^\n]*):\n\n)?(?P<head>\|[^\n]*)\n\|(?: ?-+ ?\|)+\n(?P<body>(?:\|[^\n]*\n?)*)")


def read(path: Path) -> Mapping[str, Sequence[Row]]:
    """The tables of a file by their titles, which are the lines above them; an untitled one has the title ``""``.

    Numbers are int or float, empty cells None.

    Raises:
        UsageError: it isn't there, or holds no table.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as e:
        raise UsageError(f"{path} can't be read: {e.strerror or e}") from None
    tables = {}
    for found in _TABLE.finditer(text):
        head = _cells(found["head"])
        rows = (map(_value, _cells(line)) for line in found["body"].splitlines())
        tables[found["title"] or ""] = [dict(zip(head, row, strict=True)) for row in rows]
    if not tables:
        raise UsageError(f"{path} has no table, as the files that segue bench -f writes do")
    return tables


def having(tables: Mapping[str, Sequence[Row]], *columns: str) -> Sequence[Row]:
    """The first table that has all of ``columns``.

    Raises:
        UsageError: none has.
    """
    for rows in tables.values():
        if rows and all(name in rows[0] for name in columns):
            return rows
    raise UsageError(f"no table has the columns {', '.join(columns)}")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _value(cell: str) -> int | float | str | None:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell or None
