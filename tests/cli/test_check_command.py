"""``segue check`` and ``segue inspect``: what they print, where, and how they exit."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from segue.check.prime_gate import GateReport
from segue.cli import app, main

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What goes to stderr when the command refuses; nothing may go to stdout."""
    monkeypatch.setattr(sys, "argv", ["segue", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr()
    assert stopped.value.code == 2 and said.out == ""
    return said.err


def test_a_right_runner_passes_and_exits_0() -> None:
    result = run(app, ["check", "checkable:right"])
    assert result.exit_code == 0 and "on emulator: ok. " in result.stdout and "No finding." in result.stdout
    assert "checking checkable:right" in result.stderr
    assert run(app, ["check", "checkable:alone"]).exit_code == 0


def test_a_finding_exits_1_after_the_table_and_names_the_line() -> None:
    import checkable

    result = run(app, ["check", "checkable:faulty"])
    assert result.exit_code == 1
    assert f"| padding | {checkable.fault('_faulty')} | bucket 8, 7 tokens" in result.stdout
    assert "no break point was met" in result.stdout
    assert "mend the lines in the column 'where'" in result.stderr


def test_the_perplexity_of_a_text_is_said_with_the_gate(tmp_path: Path) -> None:
    text = tmp_path / "ids.txt"
    text.write_text("1 2 3, 4 5\n6 7 8 9 10 11")
    result = run(app, ["check", "prime", "checkable:trunk", "--bucket", "8", "--text", str(text)])
    assert result.exit_code == 0 and "Perplexity: " in result.stdout and "over 9 tokens." in result.stdout


def test_findings_are_rows_of_json_and_csv() -> None:
    import checkable

    result = run(app, ["check", "checkable:frozen", "-o", "json"])
    out = json.loads(result.stdout)
    assert result.exit_code == 1 and out["notes"][0].startswith("check of _scaled")
    assert [(row["kind"], row["where"]) for row in out["rows"]] == [("frozen", checkable.fault("_scaled"))]
    rows = list(csv.DictReader(io.StringIO(run(app, ["check", "checkable:frozen", "-o", "csv"]).stdout)))
    assert rows[0]["kind"] == "frozen" and "aten::mul.Tensor got other=0.125" in rows[0]["finding"]


def test_the_gate_of_a_prime_graph_runs_under_the_word_prime(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(app, ["check", "prime", "checkable:trunk", "--bucket", "8", "--requests", "2", "-o", "json"])
    out = json.loads(result.stdout)
    assert result.exit_code == 0 and out["notes"] == ["The gate of prime graph of 8 rows and 2 requests."]
    assert {row["way"] for row in out["rows"]} == {"up", "down"} and "8 tokens, up" in result.stderr
    wrong = GateReport([{"prompt": "3 tokens", "logits": "DIFFERS: logits"}], ["3 tokens, up: logits: 1 element"])
    monkeypatch.setattr("segue.check.prime_gate.check_prime", lambda *_, **__: wrong)
    result = run(app, ["check", "prime", "--bucket", "8"])
    assert result.exit_code == 1 and "3 tokens, up: logits: 1 element" in result.stdout


def test_the_gate_runs_on_whatever_gives_a_trunk_or_a_graph() -> None:
    result = run(app, ["check", "checkable:trunk", "--bucket", "8", "-o", "json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["notes"] == ["The gate of prime graph of 8 rows."]
    result = run(app, ["check", "checkable:graph", "-o", "json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["notes"] == ["The gate of prime graph of 4 rows."]


def test_inspect_lists_what_each_bucket_consists_of() -> None:
    out = json.loads(run(app, ["inspect", "checkable:right", "-o", "json"]).stdout)
    assert [row["bucket"] for row in out["rows"]] == [8, 4]
    row = out["rows"][0]
    assert (row["segments"], row["breaks"], row["ops"], row["hand-offs"], row["hand-off KiB"]) == (2, 1, 3, 1, 0.1)
    assert (row["outside tensors, named"], row["unnamed"]) == (1, 0) and row["pool MiB, so far"] > 0
    result = run(app, ["inspect", "checkable:faulty"])
    assert result.exit_code == 0 and "No break point was met" in result.stdout and "capturing bucket 4" in result.stderr


def test_inspect_shows_the_steps_of_one_bucket() -> None:
    result = run(app, ["inspect", "checkable:right", "--bucket", "4", "-o", "json"])
    rows = json.loads(result.stdout)["rows"]
    assert [row["kind"] for row in rows] == ["segment", "break", "segment"]
    assert [row["ops"] for row in rows] == [2, None, 1] and rows[1]["hand-offs"] == 1
    assert rows[1]["what"].startswith("mix (cli/checkable.py:") and "in _forward" in rows[1]["where"]


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["check", "no_such_module:make"], "there is no module 'no_such_module', here or among the installed ones"),
        (["check", "checkable:absent"], "checkable has no 'absent'; it has mix, right, faulty, frozen, alone, nothing, "),
        (["check", "checkable:WEIGHT"], "checkable:WEIGHT is no function but Tensor; it must be, or return, "),
        (["check", "checkable:nothing"], "returned (str, int); it must return a segue.GraphRunner, or (runner, args, "),
        (["check", "checkable:right", "checkable:right"], "follows the word prime only"),
        (["check", "prime", "checkable:nothing"], "returned a tuple; it must return a segue.Trunk or a PrimeGraph"),
        (["check", "prime", "--text", __file__], "it must be a file of token ids, whole numbers between white space"),
        (["check", "checkable:right", "--text", __file__], "--text are for trunks, and checkable:right gives a GraphRunner"),
        (["inspect", "checkable:right", "--bucket", "5"], "--bucket 5 isn't in the ladder, 4, 8"),
    ],
)
def test_wrong_use_is_told_on_stderr_and_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert text in refused(monkeypatch, capsys, *arguments)


def test_segue_off_leaves_nothing_to_check_or_inspect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEGUE", "off")
    assert "no graphs to check" in refused(monkeypatch, capsys, "check", "checkable:right")
    assert "no graphs to take apart" in refused(monkeypatch, capsys, "inspect", "checkable:right")


@pytest.mark.parametrize("command", ["check", "inspect"])
@pytest.mark.parametrize("target, text", [("raising", "no weights here"), ("raising_forward", "no forward here")])
def test_what_a_factory_or_forward_raises_exits_2_and_not_1_which_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, target: str, text: str
) -> None:
    said = refused(monkeypatch, capsys, command, f"checkable:{target}")
    assert f"segue: ValueError: {text}" in said and "Traceback" in said


def test_what_a_factory_and_a_forward_print_stays_off_stdout() -> None:
    for command in ("check", "inspect"):
        result = run(app, [command, "checkable:chatty", "-o", "json"])
        assert result.exit_code == 0 and json.loads(result.stdout)["rows"] is not None
        assert "loading" in result.stderr and "running" in result.stderr
