"""``segue bench breaks`` in a size for tests: the table's shape, and that a wrong replay is called wrong."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from segue.bench import break_cost, timing
from segue.bench.break_programs import ProgramSize
from segue.capture import BreakableCapture
from segue.devices import Device

SIZE = ProgramSize(cuts=3, rows=8, valid=5, width=4, layers=2, long_rows=8, long_steps=2)
KINDS = ["no-op", "hand-off", "hand-off, tail cleared", "trim, hand-off, tail cleared", "out=", "out=, tail cleared"]


def test_every_kind_of_break_is_compared_with_eager(device: Device) -> None:
    result = break_cost.measure(device, SIZE, times=5)
    assert result.right
    assert [row["break"] for row in result.breaks] == KINDS
    assert {"segue", "bare, launched as segue does"} <= {row["program"] for row in result.bare}
    assert all(row["graphs"] == 4 for row in result.bare)
    rows = (*result.bare, *result.breaks, *result.looks, *result.gaps)
    assert all(row["replay = eager"] == "bit for bit" for row in rows)
    assert [row["parameters"] for row in result.looks] == ["2", "24", "24, checks deferred"]


def test_without_a_device_that_has_time_no_time_is_given() -> None:
    from segue.devices import resolve

    result = break_cost.measure(resolve("emulator"), SIZE, times=1)
    assert not result.gaps and "no time is meant" in "".join(result.notes)
    assert all(row["host us"] is None for row in result.bare)
    assert all(row["host us a break"] is None for row in result.breaks)


def test_times_are_given_per_break_and_per_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    from segue.devices import resolve

    emulator = resolve("emulator")
    monkeypatch.setattr(type(emulator), "traits", dataclasses.replace(emulator.traits, timing=True))
    if not torch.cuda.is_available():
        monkeypatch.setattr(timing, "device_in_turns", timing.host_in_turns)
    result = break_cost.measure(emulator, SIZE, times=10)
    assert result.right
    assert [row["program"] for row in result.gaps] == ["one graph", "segue", "bare, launched as segue does"]
    assert result.gaps[0]["device us a boundary"] is None and result.gaps[1]["device us a boundary"]
    assert all(float(row["host us"]) > 0 and row["against bare"].endswith("x") for row in result.bare)
    assert all(float(row["added us"]) > 0 for row in result.looks)
    handed_on = next(row for row in result.breaks if row["break"] == "hand-off")
    assert float(handed_on["its function alone us"]) > 0 and float(handed_on["host us a break"]) > 0


def test_a_replay_that_is_not_eager_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from segue.devices import resolve

    monkeypatch.setattr(BreakableCapture, "replay", lambda self, valid_rows=None: None)
    result = break_cost.measure(resolve("emulator"), SIZE, times=1)
    assert not result.right
    assert next(row for row in result.bare if row["program"] == "segue")["replay = eager"].startswith("NO: off")


@pytest.mark.cuda
def test_a_rival_that_is_not_installed_leaves_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from segue.devices import resolve

    monkeypatch.setitem(sys.modules, "breakable_cuda_graphs", None)
    result = break_cost.measure(resolve("cuda"), SIZE, times=2)
    assert "breakable-cuda-graphs is not installed" in "".join(result.notes)


def test_rounds_begin_with_each_run_in_turn_and_give_quartiles() -> None:
    seen: list[str] = []
    runs = {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}
    taken = timing.host_in_turns(runs, rounds=4, warm_up=1)
    assert "".join(seen) == "abbaabbaab"
    assert all(0 <= t.low <= t.median <= t.high for t in taken.values())
    assert str(timing.Spread(2e-6, 1e-6, 3.5e-6)) == "1.0 to 3.5"
