"""``segue check``, ``inspect`` and ``plan`` of a transformers model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")

import segue
from segue.cli import app
from segue.cli.model_cases import CallResult, Case, cases_of
from segue.cli.model_check import check_model

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def accelerable() -> ModuleType:
    """The models of the tests, as the commands import them."""
    return importlib.import_module("accelerable")


def on_stdout(*arguments: str) -> Any:
    result = run(app, [*arguments, "-o", "json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_model_is_checked_in_all_that_it_is_used_for() -> None:
    out = on_stdout("check", "accelerable:model", "--max-tokens", "8")
    cases = [row["case"] for row in out["rows"]]
    assert cases[:3] == ["prefill, 1 token", "prefill, 5 tokens", "prefill, 8 tokens"]
    for what in ("logits of the last", "chunks of", "steps after", "batch padded left, and a step", "generate after"):
        assert any(what in case for case in cases), what
    for row in out["rows"]:
        assert row["verdict"] in ("equal", "equal to rounding") and row["tokens"] == "same"
        assert "eager" not in row["last round"] and "captured" not in row["last round"]
    assert {row["last round"] for row in out["rows"] if row["case"].startswith("prefill")} == {"1 prime"}
    assert all(row["caches"] is not None for row in out["rows"] if "generate" not in row["case"])


def test_a_folder_of_a_saved_model_is_checked_too(accelerable: ModuleType, tmp_path: Path) -> None:
    accelerable.model().save_pretrained(tmp_path)
    out = on_stdout("check", str(tmp_path), "--max-tokens", "4", "--strategy", "breakable", "--compile")
    assert {row["last round"].strip("0123456789 ") for row in out["rows"]} == {"breakable"}
    assert out["notes"][0].startswith("LlamaForCausalLM on ")


def test_a_wrong_result_exits_1_after_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    run_of = segue.GraphRunner.__call__
    monkeypatch.setattr(segue.GraphRunner, "__call__", lambda self, x, *args, **kwargs: run_of(self, x, *args, **kwargs) * 1.1)
    result = run(app, ["check", "accelerable:model", "--max-tokens", "8", "--strategy", "breakable", "-o", "json"])
    out = json.loads(result.stdout)
    assert result.exit_code == 1 and {row["verdict"] for row in out["rows"]} == {"WRONG"}
    assert any("prefill, 1 token: logits differs in " in note for note in out["notes"])
    assert "some results are wrong" in result.stderr


def test_a_call_that_segue_refuses_is_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise segue.ReplayError("weights moved")

    monkeypatch.setattr(segue.GraphRunner, "__call__", refuse)
    result = run(app, ["check", "accelerable:with_call", "--strategy", "breakable"])
    assert result.exit_code == 1 and "the example call: raised weights moved" in result.stdout


def test_what_runs_without_graphs_is_told_with_its_reason(accelerable: ModuleType) -> None:
    with segue.accelerate(accelerable.model(), max_tokens=32, device=accelerable.EMULATOR) as larger:
        (case,) = (case for case in cases_of(larger) if case.name == "prefill, 32 tokens")
    with accelerable.handle() as handle:
        report = check_model(handle, [case], lambda line: None)
    assert report.ok and report.rows[0]["last round"] == "1 eager" and report.rows[0]["verdict"] == "equal"
    assert len(report.notes) == 1 and report.notes[0].startswith("forwards without graphs: 3, because of: ")


def test_what_the_model_itself_can_not_do_is_left_out(accelerable: ModuleType) -> None:
    def impossible(model: Any) -> Any:
        raise NotImplementedError("no such thing")

    with accelerable.handle() as handle:
        report = check_model(handle, [Case("impossible", impossible)], lambda line: None)
    assert report.ok and report.rows == []
    assert report.notes == ["impossible: left out, as the model without segue raises NotImplementedError: no such thing"]


def test_what_the_model_itself_does_not_repeat_is_left_out(accelerable: ModuleType) -> None:
    given = (CallResult({"logits": torch.full((2,), float(i))}) for i in range(9))
    with accelerable.handle() as handle:
        report = check_model(handle, [Case("restless", lambda model: next(given))], lambda line: None)
    assert report.ok and report.rows == []
    assert report.notes[0].startswith("restless: left out, as the model without segue doesn't repeat itself: logits differs in ")


def test_texts_of_generate_are_compared_up_to_a_near_tie(accelerable: ModuleType) -> None:
    logits = [torch.tensor([[1.0, 2.0, 2.0]]), torch.tensor([[3.0, 0.0, 0.0]])]
    want = CallResult({"1": logits[0], "2": logits[1]}, {}, {"t": torch.tensor([1])}, torch.tensor([[1, 0]]))
    other = CallResult({"1": logits[0] + 1e-6, "2": logits[1] * 9}, {}, {"t": torch.tensor([2])}, torch.tensor([[2, 0]]))
    given = iter([want, want, other, other, other])
    with accelerable.handle() as handle:
        report = check_model(handle, [Case("text", lambda model: next(given))], lambda line: None)
        assert report.ok and report.rows[0]["tokens"] == "1 near tie" and report.rows[0]["verdict"] == "equal to rounding"
        wrong = CallResult({"1": logits[0] * 2, "2": logits[1]}, {}, {"t": torch.tensor([2])}, torch.tensor([[2, 0]]))
        given = iter([want, want, wrong, wrong, wrong])
        report = check_model(handle, [Case("text", lambda model: next(given))], lambda line: None)
    assert not report.ok and report.rows[0]["verdict"] == "WRONG" and "1 differs in 3 of 3 elements" in report.findings[0]


def test_a_model_of_which_nothing_could_be_compared_is_not_called_right() -> None:
    result = run(app, ["check", "accelerable:with_wrong_call"])
    assert isinstance(result.exception, segue.UsageError)
    assert "no call of it could be compared. the example call: left out, as the model" in str(result.exception)


def test_inspect_of_a_model_lists_breaks_memory_and_what_calls_came_to() -> None:
    out = on_stdout("inspect", "accelerable:model", "--max-tokens", "8")
    assert [row["bucket"] for row in out["rows"]] == [8, 4, 2, 1]
    assert {(row["segments"], row["breaks"]) for row in out["rows"]} == {(3, 2)}
    notes = "\n".join(out["notes"])
    assert "Break, 2 times in a bucket: attend (" in notes and "modeling_llama.py:" in notes
    assert "of the graph pool" in notes and "replayed: breakable" in notes and "graph memory" in notes


def test_inspect_of_a_model_shows_the_steps_of_a_bucket() -> None:
    rows = on_stdout("inspect", "accelerable:handle", "--bucket", "4")["rows"]
    assert [row["kind"] for row in rows] == ["segment", "break", "segment", "break", "segment"]
    assert all("modeling_llama.py:" in row["where"] for row in rows)


def test_a_plan_for_a_model_decodes_and_measures_memory(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("9 10 20 21 22")
    out = on_stdout("plan", str(tmp_path / "lengths.txt"), "-k", "2", "--model", "accelerable:model")
    (row,) = out["rows"]
    assert row["buckets"] == "1, 2, 4, 8, 10, 22" and row["memory MiB"] > 0
    assert "For decoding, 1, 2, 4, 8 are added to each ladder." in out["notes"]
    result = run(app, ["plan", str(tmp_path / "lengths.txt"), "-k", "2", "--model", "accelerable:model", "--compile"])
    assert "next: segue.accelerate(model, buckets=[2, 4, 8, 10, 22])" in result.stderr


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--model", "accelerable:handle"], "gives a handle, whose buckets are made already: give the model itself"),
        (["--model", "checkable:right"], "gives a GraphRunner and not a model"),
        (["--model", "accelerable:model", "--pool", "1MiB"], "--model measures what --per-bucket and --pool would say"),
        (["--compile"], "there is no --model: leave out --compile"),
        (["--trust-remote-code"], "there is no --model: leave out --trust-remote-code"),
    ],
)
def test_a_plan_for_what_is_no_model_is_refused(tmp_path: Path, arguments: list[str], text: str) -> None:
    (tmp_path / "lengths.txt").write_text("9 10")
    result = run(app, ["plan", str(tmp_path / "lengths.txt"), *arguments])
    assert isinstance(result.exception, segue.UsageError) and text in str(result.exception)


def test_segue_off_leaves_no_model_to_work_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEGUE", "off")
    for name in ("accelerable:model", "accelerable:handle"):
        for command in ("check", "inspect"):
            assert "no graphs to check" in str(run(app, [command, name]).exception)


def test_an_encoder_is_compared_at_lengths_and_with_padding_on_both_sides(accelerable: ModuleType) -> None:
    out = on_stdout("check", "accelerable:encoder", "--max-tokens", "16")
    names = [*(f"{n} token{'s' if n > 1 else ''}" for n in (1, 5, 9, 16)), "batch, padded right", "batch, padded left"]
    assert [row["case"] for row in out["rows"]] == names
    assert all(row["verdict"] in ("equal", "equal to rounding") and "eager" not in row["last round"] for row in out["rows"])
    with segue.accelerate(accelerable.encoder(), max_tokens=16, device=accelerable.EMULATOR) as handle:
        padded = cases_of(handle)[-1].run(handle).outputs["last_hidden_state"]
    assert padded.dim() == 2 and len(padded) < 3 * 4, "padded tokens are compared too"


def test_an_encoder_is_taken_apart_and_planned_for_without_decoding(tmp_path: Path) -> None:
    out = on_stdout("inspect", "accelerable:encoder", "--max-tokens", "16")
    assert {row["segments"] for row in out["rows"]} == {1} and "the whole forward is one graph" in out["notes"][0]
    (tmp_path / "lengths.txt").write_text("9 10 20 21 22")
    out = on_stdout("plan", str(tmp_path / "lengths.txt"), "-k", "2", "--model", "accelerable:encoder")
    assert [row["buckets"] for row in out["rows"]] == ["10, 22"] and len(out["notes"]) == 1
