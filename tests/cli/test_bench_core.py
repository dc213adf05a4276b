"""``segue bench`` where there is no CUDA device: verdicts, and no times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from segue.capture import BreakableCapture
from segue.cli import app
from segue.cli import bench as command
from segue.devices import resolve
from segue.errors import UsageError

run = CliRunner().invoke
TTFT = ("bench", "ttft")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device would run the benchmark in full")


@pytest.mark.parametrize("command", ["breaks", "memory", "runner", "prime", "growth"])
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


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a small model, which ``segue bench ttft`` measures on the emulator as if that had time."""
    pytest.importorskip("transformers")
    from segue.bench.decoder import Shape

    shape = Shape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48, vocabulary=61)
    shape.model(torch.float32, torch.device("cpu")).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(command, "_device_with_timing", lambda: resolve("emulator"))
    return str(tmp_path / "model")


def test_time_to_first_token_of_a_model_in_a_folder_with_every_option(model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, kept = tmp_path / "plot.svg", tmp_path / "kept.md"
    options = ["--rivals", "torch.compile,static-cache", "--decode", "--batch", "2", "--conversations", "2", "--plot", str(plot)]
    result = run(app, [*TTFT, "--model", model, "--tokens", "3", "--tokens", "16", "--times", "1", *options, "-f", str(kept)])
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert text == kept.read_text() and plot.stat().st_size > 1000
    assert text.startswith("# Time to first token") and f"model: {model}" in text and "2 conversations take turns" in text
    assert "| 16 | segue, breakable |" in text and "| 2 | segue |" in text
    assert "| torch.compile | everywhere | not compiled on device emulator" in text and "| static-cache | decode |" in text
    assert "reduce-overhead | everywhere" not in text and "Lengths between buckets" not in text
    assert "16 tokens: segue ready" in result.stderr


def test_a_plot_that_can_not_be_written_leaves_the_results(model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--tokens", "3", "--times", "1", "--rivals", "none", "--plot", str(tmp_path / "plot.unknown")]
    result = run(app, [*TTFT, "--model", model, *options])
    assert isinstance(result.exception, UsageError) and "| 3 | segue |" in result.stdout


def test_a_planted_difference_exits_1_after_the_results(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from segue.bench import ttft

    given, calls = ttft.last_logits, iter(range(100))
    monkeypatch.setattr(ttft, "last_logits", lambda *args: given(*args) + (1e-2 if next(calls) == 0 else 0))
    result = run(app, [*TTFT, "--model", model, "--tokens", "3", "--times", "1", "--rivals", "none", "-o", "json"])
    assert result.exit_code == 1, result.output
    verdicts = {row["way"]: row["replay = reference"] for row in json.loads(result.stdout)["rows"] if "served by" in row}
    assert verdicts == {"eager": None, "segue": "NO", "segue, breakable": "bit for bit"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"model": "0.6B", "lengths": None, "batches": (), "compile": False, "buckets": None, "conversations": 1}),
        (["--decode"], {"batches": (1, 8)}),
        (["--decode", "--batch", "4", "--batch", "2"], {"batches": [4, 2]}),
        (["--batch", "4"], {"batches": [4]}),
        (["--compile", "--model", "8B", "-n", "5"], {"compile": True, "model": "8B", "lengths": [5]}),
        (["-b", "4", "-b", "8", "--conversations", "2"], {"buckets": [4, 8], "conversations": 2}),
        (["--rivals", "none"], {"rivals": []}),
        (["--rivals", "reduce-overhead, gpuopt-runtime"], {"rivals": ["reduce-overhead", "gpuopt-runtime"]}),
    ],
)
def test_options_of_ttft_reach_the_measurement(
    options: list[str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from segue.bench import ttft

    asked: dict[str, Any] = {}

    def measure(device: Any, model: str, **given: Any) -> None:
        asked.update(given, model=model)

    monkeypatch.setattr(command, "_device_with_timing", lambda: resolve("emulator"))
    monkeypatch.setattr(command, "_publish", lambda *args: None)
    monkeypatch.setattr(ttft, "measure", measure)
    result = run(app, [*TTFT, *options])
    assert result.exit_code == 0, result.output
    assert {key: asked[key] for key in expected} == expected
    if "--rivals" not in options:
        assert asked["rivals"] == list(ttft.RIVALS)


def test_options_of_growth_reach_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from segue.bench import growth
    from segue.bench.decoder import SHAPES

    asked: list[Any] = []
    monkeypatch.setattr(command, "_publish", lambda *args: None)
    monkeypatch.setattr(growth, "measure", lambda device, shape, **given: asked.append((shape, given["times"], given["compile"])))
    for options in ([], ["--compile", "--model", "8B", "--times", "3"], ["--no-compile"]):
        result = run(app, ["bench", "growth", *options])
        assert result.exit_code == 0, result.output
    assert asked == [(None, 10, False), (SHAPES["8B"], 3, True), (None, 10, False)]
    result = run(app, ["bench", "growth", "--model", "Qwen/Qwen3-0.6B"])
    assert isinstance(result.exception, UsageError) and "none of 0.6B, 1.7B, 8B" in str(result.exception)


def test_growth_is_drawn_and_a_difference_exits_1_after_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    from segue.bench import growth

    monkeypatch.setattr(growth, "_compare", lambda handle, ids: False)
    result = run(app, ["bench", "growth", "--times", "1", "--plot", str(tmp_path / "plot.png")])
    assert result.exit_code == 1, result.output
    assert "NO: auto, breakable" in result.stdout and (tmp_path / "plot.png").stat().st_size > 1000


def test_a_rival_that_nobody_knows_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(command, "_device_with_timing", lambda: resolve("emulator"))
    result = run(app, [*TTFT, "--rivals", "reduce-overhead,tensorrt"])
    assert isinstance(result.exception, UsageError)
    assert str(result.exception).startswith("--rivals: tensorrt is none of torch.compile, reduce-overhead, breakable-cuda-graphs")
