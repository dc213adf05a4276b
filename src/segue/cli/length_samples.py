"""Reading a sample of lengths: whitespace-separated numbers, a CSV column, or JSON lines."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from segue.errors import UsageError

_FIELDS = ("tokens", "num_tokens", "n_tokens", "length", "len", "n", "input_tokens", "prompt_tokens")


def read_lengths(source: str, field: str | None = None) -> list[int]:
    """The lengths in a file, or on stdin where ``source`` is ``-``.

    ``.csv`` and ``.jsonl`` (or ``.ndjson``) files are recognized by their names. Anything else, stdin too, is JSON lines if it
    begins with a brace, and otherwise numbers between white space.
    ``field``: the column or key; by default the first of the usual names that is there, or the only one.

    Raises:
        UsageError: no such file, no lengths in it, or one that is not a positive whole number, with its line.
    """
    if source == "-":
        text, kind = sys.stdin.read().removeprefix("\ufeff"), ""
    else:
        path = Path(source)
        kind = path.suffix.lower()
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"{source} can't be read: {e}") from None
    if kind == ".csv":
        found = _from_csv(text, field, source)
    elif kind in (".jsonl", ".ndjson") or text.lstrip()[:1] == "{":
        found = _from_json_lines(text, field, source)
    else:
        found = ((line, word) for line, words in enumerate(text.splitlines(), 1) for word in words.split())
    lengths = [_length(value, source, line) for line, value in found]
    if not lengths:
        raise UsageError(f"{source} holds no lengths: give one number of tokens per forward")
    return lengths


def _from_csv(text: str, field: str | None, source: str) -> Iterator[tuple[int, str]]:
    reader = csv.reader(io.StringIO(text))
    header = next(reader, [])
    column = 0
    if field is not None or not all(_is_number(cell) for cell in header):
        column = header.index(_chosen(header, field, source))
    elif len(header) == 1:
        yield 1, header[0]
    else:
        raise UsageError(f"{source} has {len(header)} columns and no header: name the columns, and say --field")
    for row in reader:
        if row:
            if len(row) <= column:
                raise UsageError(f"{source}, line {reader.line_num}: there is no column {column + 1}")
            yield reader.line_num, row[column]


def _from_json_lines(text: str, field: str | None, source: str) -> Iterator[tuple[int, Any]]:
    for line, words in enumerate(text.splitlines(), 1):
        if not words.strip():
            continue
        try:
            value = json.loads(words)
        except json.JSONDecodeError as e:
            raise UsageError(f"{source}, line {line} isn't JSON: {e}") from None
        if isinstance(value, dict):
            value = value[_chosen(list(value), field, f"{source}, line {line}")]
        yield line, value


def _chosen(names: list[str], field: str | None, where: str) -> str:
    if field is not None:
        if field not in names:
            raise UsageError(f"{where} has no field {field!r}; it has {', '.join(names)}")
        return field
    usual = next((name for name in _FIELDS if name in names), None)
    if usual is None and len(names) != 1:
        raise UsageError(f"{where}: which field holds the lengths? Say --field, one of {', '.join(names)}")
    return usual or names[0]


def _length(value: Any, source: str, line: int) -> int:
    try:
        number = value if isinstance(value, int) and not isinstance(value, bool) else int(str(value).strip())
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f"{source}, line {line}: {value!r} is not a positive whole number of tokens")
    return number


def _is_number(cell: str) -> bool:
    return cell.strip().isdigit()
