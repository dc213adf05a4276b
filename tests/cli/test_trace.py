"""``segue trace``: what it reads from a profiler's trace, its table, its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from segue.capture.named_ranges import PREFIX
from segue.cli import app, trace_plot, trace_table
from segue.cli.chrome_trace import CALL, LAUNCH, REST, Span, read
from segue.errors import UsageError

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def traced(*arguments: str) -> Any:
    result = run(app, ["trace", *arguments, "--output", "json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def cuda_trace(tmp_path: Path) -> Path:
    """A trace as kineto writes it: a call of two segments and a break between, and a range of another thread.

    Host, in us:   call 100-200; staging 110-120, segment 0 120-130, break 130-160 (a range in it), segment 1 160-170.
    Device:        copy 118-122 of staging; 125-135 and 135-145 of segment 0; 150-155 of the break; 180-190 of segment 1.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0}]

    def host(name: str, start: float, end: float, thread: int = 1) -> None:
        events.append(_event("user_annotation", PREFIX + name, start, end, thread))
        events.append(_event("gpu_user_annotation", PREFIX + name, start + 5, end + 5, 7))

    def launched(at: float, *work: tuple[float, float], cat: str = "kernel") -> None:
        number = len(events)
        events.append(_event("cuda_runtime", "cudaGraphLaunch", at, at + 2, 1, correlation=number))
        events.extend(_event(cat, "k", start, end, 7, correlation=number) for start, end in work)

    host(f"{CALL}prompt", 100, 200)
    host("staging, bucket 4", 110, 120)
    host("segment 0", 120, 130)
    host("break mix (m.py:3)", 130, 160)
    host("segment 0", 135, 140)  # of another runner, inside the break
    host("segment 1", 160, 170)
    host("segment 9", 112, 114, thread=2)
    launched(115, (118, 122), cat="gpu_memcpy")
    launched(121, (125, 135), (135, 145))
    launched(148, (150, 155))
    launched(162, (180, 190))
    launched(20, (30, 40))  # before the call
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def _event(cat: str, name: str, start: float, end: float, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": thread, "args": args}


def test_device_work_belongs_to_the_step_that_launched_it(cuda_trace: Path) -> None:
    (call,) = read(cuda_trace)
    assert call.name == "prompt" and call.host == Span(100, 200)
    assert [step.name for step in call.steps] == ["staging, bucket 4", "segment 0", "break mix (m.py:3)", "segment 1", REST]
    assert [step.host_time for step in call.steps] == [10, 10, 30, 10, 40]
    assert [step.device_time for step in call.steps] == [4, 20, 5, 10, 0]
    assert call.steps[1].device == [Span(125, 145)]


def test_where_the_device_is_idle_it_is_told_what_it_waited_for(cuda_trace: Path) -> None:
    (call,) = read(cuda_trace)
    staging, first, mix, second, _ = call.steps
    assert [step.idle for step in (staging, first, mix, second)] == [18, 3, 5, 25]
    assert staging.waited == {REST: 10, "staging, bucket 4": 5, LAUNCH: 3}
    assert first.waited == {LAUNCH: 3}  # the launch was made while the device still copied
    assert mix.waited == {"break mix (m.py:3)": 3, LAUNCH: 2}
    assert second.waited == {"break mix (m.py:3)": 5, "segment 1": 2, LAUNCH: 18}


def test_the_table_sums_up_kinds_or_lists_steps(cuda_trace: Path) -> None:
    calls = read(cuda_trace) * 3
    kinds = {row["what"]: row for row in trace_table.by_kind(calls)}
    assert list(kinds) == ["staging, bucket 4", "segments", "break mix (m.py:3)", REST, "the whole call"]
    assert (kinds["segments"]["times"], kinds["segments"]["host us"], kinds["segments"]["device us"]) == (2, 20, 30)
    assert kinds["segments"]["device idle us"] == 28
    assert kinds["segments"]["waited for"] == "its launch 21, break mix (m.py:3) 5"
    assert (kinds["the whole call"]["host us"], kinds["the whole call"]["device us"]) == (100, 39)
    steps = [row["what"] for row in trace_table.by_step(calls)]
    assert steps == ["staging, bucket 4", "segment 0", "break mix (m.py:3)", "segment 1", REST, "the whole call"]


def test_a_timeline_shows_host_above_device_in_the_format_of_its_name(cuda_trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (call,) = read(cuda_trace)
    trace_plot.draw(tmp_path / "a.svg", call)
    trace_plot.draw(tmp_path / "a.png", call)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn.startswith("<?xml") and drawn.index("<!-- device -->") < drawn.index("<!-- host -->")
    for kind in ("staging", "segment", "break", REST):
        assert f"<!-- {kind} -->" in drawn
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match=r"--plot a\.unknown: "):
        trace_plot.draw(tmp_path / "a.unknown", call)


def test_a_models_prompt_and_step_are_traced(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "new" / "trace.json", tmp_path / "plot.svg"
    files = ["-o", str(out), "--plot", str(plot)]
    rows = traced("accelerable:model", "-n", "8", "--max-tokens", "8", "--strategy", "breakable", *files)["rows"]
    for call, bucket in (("prompt of 8 tokens", 8), ("step", 1)):
        mine = {row["what"]: row for row in rows if row["call"] == call}
        assert mine["segments"]["times"] == 3 and f"staging, bucket {bucket}" in mine
        (attend,) = (row for what, row in mine.items() if what.startswith("break attend ("))
        assert attend["times"] == 2 and all(row["host us"] > 0 for row in mine.values())
    names = [e["name"] for e in json.loads(out.read_text())["traceEvents"] if e.get("cat") == "user_annotation"]
    assert f"{PREFIX}{CALL}step" in names and f"{PREFIX}segment 2" in names
    assert plot.stat().st_size > 1000


def test_a_runners_example_call_and_a_prime_graphs_prompt_are_traced() -> None:
    rows = traced("checkable:frozen", "--calls", "2", "--steps")["rows"]
    assert [row["what"] for row in rows][1:3] == ["segment 0", next(r["what"] for r in rows if "break mix" in r["what"])]
    assert rows[0]["call"] == "the example call" and rows[0]["what"] == "staging, bucket 8"
    for target in ("checkable:trunk", "checkable:graph"):
        rows = traced(target, "-n", "4")["rows"]
        assert rows[0]["call"] == "prompt of 4 tokens" and "copy-out" in {row["what"] for row in rows}


def test_a_runner_without_an_example_call_is_refused() -> None:
    result = run(app, ["trace", "checkable:alone"])
    assert "let it return (runner, args, kwargs) with an example call" in str(result.exception)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_has_times_of_its_own() -> None:
    pytest.importorskip("transformers")
    rows = traced("accelerable:model", "-n", "8", "--max-tokens", "8", "--strategy", "breakable")["rows"]
    segments = [row for row in rows if row["what"] == "segments"]
    assert len(segments) == 2 and all(row["device us"] > 0 for row in segments)
    assert all(row["device idle us"] > 0 and row["waited for"] for row in rows if row["what"] == "the whole call")
