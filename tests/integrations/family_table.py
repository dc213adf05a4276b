"""``python -m integrations.family_table FILE``: writes the table of families for two releases of transformers.

Each family runs in a process of its own, so that one that crashes, hangs or wants too much memory is a row like any other. The
second release is fetched into ``build`` once, and runs at the same time as the installed one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from integrations.families import FAMILIES, Family
from integrations.family_checks import COLUMNS, Cell, check, shortened
from integrations.family_flows import ids
from segue import environment

OTHER_RELEASE = "5.17.0"

_ROOT = Path(__file__).parent.parent.parent
_SECONDS = 30  # for one family; most take three
_MEMORY = 8 * 2**30  # bytes of address space for one family
_EXPLAINED = """\
What `segue.accelerate` makes of tiny random models of each family, on the emulator, in fp32, beside the untouched model.

* `=` is bit-equal; a figure is the largest difference, relative to the largest value where that is above 1. Tokens are identical.
* Each cell is measured on calls that replayed, after a warm-up and a capture.
* An empty cell makes no sense for the family. `n/a`: the untouched model can't do it.
* What is refused, untouched or wrong is explained below each table.

*prefill*: logits of prompts that fill a bucket. *padded*: of prompts that don't. *chunk*: a prompt in two parts, and one token
more. *decode*: twelve greedy tokens and their logits. *batch*: prompts of several lengths, padded. *beams*: three. *cache*: every
tensor and number in it. *prime*: fresh prompts, and a batch of them, as one graph. *steps*: decode, batch, beams
and cache with steps of one token as full graphs; in the other columns all is breakable. *compile*: padded,
decode and batch with `compile=True`."""

_MODEL = re.compile(r"^[A-Z]\w+(For[A-Z]\w+|Model)( \(\S+\))?")  # how many texts begin
_UNKNOWN = "not in this release"

Row = dict[str, Cell]


def main() -> None:
    """Measure, and write FILE; with ``--json`` measure this release alone and write that."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true", help="this release alone, as JSON")
    parser.add_argument("--only", nargs="*", help="families")
    given = parser.parse_args()
    names = given.only or list(FAMILIES)
    if given.json:
        found = {name: {column: asdict(cell) for column, cell in row.items()} for name, row in _measured(names)}
        given.file.write_text(json.dumps({"release": transformers.__version__, "rows": found}))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "other.json"
        other = _start_other(result, names)
        rows = dict(_measured(names))
        sections = [_section(transformers.__version__, rows), _other_section(other, result)]
    text = "\n\n".join(["# Families", _EXPLAINED, _provenance(), *sections])
    given.file.parent.mkdir(exist_ok=True)
    given.file.write_text(text + "\n")


def _measured(names: list[str]) -> Iterator[tuple[str, Row]]:
    """The rows of families in this release of transformers, one after the other."""
    warnings.simplefilter("ignore")  # of what many families do, none of which is for this table
    torch.set_num_threads(1)  # a process that forks must have no others
    transformers.logging.set_verbosity_error()
    FAMILIES["llama"].make().generate(ids(1, 3), max_new_tokens=2)  # imports what each family's process would import again
    gc.collect()
    gc.freeze()  # each capture collects garbage, and what was imported isn't any
    for name in names:
        row = isolated(FAMILIES[name])
        print(f"{transformers.__version__} {name}: " + _line(row), file=sys.stderr, flush=True)
        yield name, row


def isolated(family: Family) -> Row:
    """The row of a family, measured in a child of this process."""
    if not family.known:
        return {"mechanism": Cell(_UNKNOWN)}
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer(writer, lambda: check(family))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    if not said:
        return {"mechanism": Cell.fault("WRONG: died", f"the process ended with {_ending(status)}")}
    return {column: Cell(**cell) for column, cell in json.loads(said).items()}


def _answer(writer: int, measure: Callable[[], Row]) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        signal.alarm(_SECONDS)
        row = measure()
    except BaseException as e:
        row = {"mechanism": Cell.fault("WRONG: the harness failed", f"{type(e).__name__}: {e}")}
    with os.fdopen(writer, "wb") as out:
        out.write(json.dumps({column: asdict(cell) for column, cell in row.items()}).encode())


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"no answer in {_SECONDS} s" if number == signal.SIGALRM else signal.Signals(number).name
    return f"exit status {os.waitstatus_to_exitcode(status)}"


def _start_other(result: Path, names: list[str]) -> subprocess.Popen[bytes] | str:
    """Start the measurements on the other release; or why that can't be."""
    folder = _ROOT / "build" / f"transformers-{OTHER_RELEASE}"
    if not (folder / "transformers").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), f"transformers=={OTHER_RELEASE}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"transformers {OTHER_RELEASE} could not be fetched: {_last_line(done.stderr)}"
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "integrations.family_table", str(result), "--json", "--only", *names]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})


def _other_section(other: subprocess.Popen[bytes] | str, result: Path) -> str:
    if isinstance(other, str):
        return f"## transformers {OTHER_RELEASE}\n\nNot measured: {other}"
    if other.wait():
        return f"## transformers {OTHER_RELEASE}\n\nNot measured: the process ended with exit status {other.returncode}"
    found = json.loads(result.read_text())
    rows = {name: {column: Cell(**cell) for column, cell in row.items()} for name, row in found["rows"].items()}
    return _section(found["release"], rows)


def _section(release: str, rows: dict[str, Row]) -> str:
    known = {name: row for name, row in rows.items() if row["mechanism"].text != _UNKNOWN}
    families = {FAMILIES[name].name for name in known}
    held = [name for name, row in known.items() if all(cell.ok for cell in row.values())]
    head = [f"## transformers {release}", f"{len(families)} families in {len(known)} rows; every column of {len(held)} holds."]
    lines = ["| family | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    lines += [f"| {name} | " + " | ".join(_texts(row)) + " |" for name, row in rows.items()]
    notes = [f"* *{column}* of {', '.join(names)}: {note}" for (column, note), names in _noted(rows).items()]
    return "\n\n".join([*head, "\n".join(lines), *(["\n".join(notes)] if notes else [])])


def _texts(row: Row) -> list[str]:
    return [shortened(row[column]) if column in row else "" for column in COLUMNS]


def _noted(rows: dict[str, Row]) -> dict[tuple[str, str], list[str]]:
    """Families by what is said of a column of theirs. That their models have different names makes no difference."""
    noted: dict[tuple[str, str], list[str]] = {}
    for name, row in rows.items():
        for column, cell in row.items():
            if cell.note:
                note = _MODEL.sub("the model", " ".join(cell.note.split()), count=1)
                noted.setdefault((column, note), []).append(name)
    return noted


def _line(row: Row) -> str:
    return " | ".join(f"{column} {shortened(row[column])}" for column in COLUMNS if column in row)


def _provenance() -> str:
    lines = [line for line in environment.provenance().splitlines() if not line.startswith("* command")]
    return "\n".join([*lines, "* command: `make families`"])


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no reason given")


if __name__ == "__main__":
    main()
