"""The command: its verbs, what goes to stdout, and its exit codes."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from segue import environment
from segue.cli import app, bench, demo, main
from segue.cli.output import whole_file
from segue.errors import UsageError

run = CliRunner().invoke


def on_stdout(*arguments: str) -> Any:
    result = run(app, list(arguments))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_env_names_versions_and_the_device() -> None:
    facts = {row["what"]: row["value"] for row in on_stdout("env", "-o", "json")["rows"]}
    assert facts["torch"] == torch.__version__ and "device" in facts
    works = "yes" if torch.cuda.is_available() else "emulated"
    assert facts["GraphRunner, PrimeGraph"] == works and facts["segue.accelerate"] in (works, "no: transformers not installed")


def test_the_version_of_torch_is_its_own_where_the_wheels_metadata_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.importlib.metadata, "version", lambda name: "0.0")
    found = environment.facts()
    assert found["torch"] == torch.__version__ and found["segue-graphs"] == "0.0"


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "segue", "env"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("| what | value |\n")


def test_wrong_use_exits_2() -> None:
    assert run(app, ["nothing"]).exit_code == 2
    assert run(app, ["env", "-o", "yaml"]).exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device would run the benchmark")
def test_an_error_of_segues_goes_to_stderr_and_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["segue", "bench", "ttft"])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr()
    assert stopped.value.code == 2 and said.out == "" and said.err.startswith("segue: segue bench measures time")


def test_the_demo_on_random_weights_is_identical_everywhere() -> None:
    pytest.importorskip("transformers")
    out = on_stdout("demo", "--random", "--layers", "2", "--tokens", "3", "-o", "json")
    rows = out["rows"]
    assert [row["tokens"] for row in rows] == [1, 6, 17, 40, 63, 96, 210, 390, 140, 390]
    assert {row["verdict"] for row in rows} == {"identical"}
    assert {row["breaks"] for row in rows} == {2} and {row["segments"] for row in rows} == {3}
    assert all(row["bucket"] >= row["tokens"] for row in rows if row["prompt"] not in ("two chunks",))
    assert all(row["untouched"] == 0 and row["replayed"] > 0 for row in rows)
    if not torch.cuda.is_available():
        assert any("Emulated" in note and "no timing" in note for note in out["notes"])
        assert not any("ms" in column for row in rows for column in row)


def test_the_demo_exits_1_after_writing_its_results_when_a_text_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(demo, "verdict", lambda *_: "differs: sequence 0, token 1: 5 instead of 4")
    monkeypatch.setattr(demo.demo_prompts, "_RANDOM_LENGTHS", (1, 6))
    result = run(app, ["demo", "--random", "--layers", "1", "--tokens", "2"])
    assert result.exit_code == 1
    assert "differs: sequence 0, token 1" in result.stdout


def test_a_verdict_names_the_first_token_that_differs() -> None:
    want = torch.tensor([[7, 1, 2, 3], [7, 4, 5, 6]])
    assert demo.verdict(want, want.clone(), 1) == "identical"
    got = want.clone()
    got[1, 2] = 9
    assert demo.verdict(want, got, 1) == "differs: sequence 1, token 1: 9 instead of 5"
    assert demo.verdict(want, want[:, :3], 1) == "differs: sequence 0, token 2: nothing instead of 3"


def _commands(of: Any) -> list[str]:
    return list(typer.main.get_command(of).commands)  # type: ignore[attr-defined]


_COMMANDS = [[], *([name] for name in _commands(app)), *(["bench", name] for name in _commands(bench.app))]


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_help_has_examples_that_begin_with_the_command(command: list[str]) -> None:
    short, long = run(app, [*command, "-h"]), run(app, [*command, "--help"])
    assert short.exit_code == 0 and short.stdout == long.stdout
    shown = short.stdout.split("Examples:\n")[1].splitlines()
    assert shown and all(" ".join(["segue", *command]) in line for line in shown if line)
    assert not any(line.endswith("...") for line in short.stdout.splitlines()[1:]), "a summary is cut off"


def test_the_version_is_printed() -> None:
    result = run(app, ["--version"])
    assert result.exit_code == 0 and result.stdout == f"segue {importlib.metadata.version('segue-graphs')}\n"


_SLOW = """
import hashlib, time
def make():
    print('begun', flush=True)
    time.sleep(60)
def make_in_c():  # no signal reaches Python before it returns
    print('begun', flush=True)
    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)
"""


def interrupted(command: list[str], cwd: Path) -> tuple[str, str]:
    """What a command prints that is interrupted when it has said ``begun``. It must end within a second, and with 130."""
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None and running.stdout is not None
        while running.stderr.readline() != "begun\n":
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        start = time.perf_counter()
        assert running.wait(timeout=30) == 130 and time.perf_counter() - start < 2  # one on a busy machine
        return running.stdout.read(), running.stderr.read()


@pytest.mark.parametrize("made", ["make", "make_in_c"])
def test_ctrl_c_ends_a_command_at_once_with_130_and_says_what_it_did(tmp_path: Path, made: str) -> None:
    (tmp_path / "slow.py").write_text(_SLOW)
    out, err = interrupted([sys.executable, "-m", "segue", "check", f"slow.py:{made}"], tmp_path)
    assert out == "" and err == f"\nsegue: stopped by Ctrl-C; the last step was: loading slow.py:{made}\n"


def test_ctrl_c_amid_a_file_leaves_none(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from segue.cli import interrupts, output
from slow import make_in_c
sys.stdout = sys.stderr
try:
    with interrupts.ended_by_ctrl_c(), output.whole_file(Path("out/page.html")) as unfinished:
        unfinished.write_text("half")
        make_in_c()
except KeyboardInterrupt:  # it came before the call
    interrupts.stop()
"""
    (tmp_path / "slow.py").write_text(_SLOW)
    interrupted([sys.executable, "-c", code], tmp_path)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.md"
    with whole_file(path) as unfinished:
        unfinished.write_text("first")
        assert not path.exists() and unfinished.suffix == ".md"
    with pytest.raises(KeyboardInterrupt), whole_file(path) as unfinished:
        unfinished.write_text("half of")
        raise KeyboardInterrupt
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path]
    with pytest.raises(UsageError, match=r"a\.md/b can't be written: "), whole_file(path / "b"):
        pass
