"""``segue bench`` where there is no CUDA device: verdicts, and no times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from segue.capture import BreakableCapture
from segue.cli import app

run = CliRunner().invoke
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device would run the benchmark in full")


@pytest.mark.parametrize("command", ["breaks", "memory", "runner", "prime"])
def test_without_cuda_the_verdicts_are_given_and_no_time(command: str, tmp_path: Path) -> None:
    kept = tmp_path / "results" / "kept.md"
    result = run(app, ["bench", command, "--times", "2", "-f", str(kept)])
    assert result.exit_code == 0, result.output
    assert result.stdout == kept.read_text()
    assert result.stdout.startswith("# ") and "no time is meant" in result.stdout
    assert "bit for bit" in result.stdout and "* commit: " in result.stdout


def test_every_table_is_in_the_json() -> None:
    result = run(app, ["bench", "breaks", "--times", "2", "-o", "json"])
    tables = {row["table"].split(",")[0].split(".")[0] for row in json.loads(result.stdout)["rows"]}
    assert tables == {
        "4 breaks that do nothing",
        "One kind of break each",
        "Seeing before each replay that parameters are where they were",
    }


def test_a_wrong_replay_exits_1_after_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BreakableCapture, "replay", lambda self, valid_rows=None: None)
    result = run(app, ["bench", "memory", "-b", "4", "--times", "1"])
    assert result.exit_code == 1
    assert "NO: off by" in result.stdout
