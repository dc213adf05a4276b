"""``segue bench growth`` in a size for tests: a row for each point, exponents with their verdicts, and wrong replays."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.devices import Device, resolve
from segue.errors import UsageError

pytest.importorskip("transformers")

from segue.bench import growth, plots
from segue.bench.decoder import Shape

SHAPE = Shape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48, vocabulary=61)
SIZES = growth.Sizes(tokens=(1, 5, 16), layers=(1, 3), prompt=4, counts=(1, 3), largest=9)
SHARES = [f"{way} less its kernels ms" for way in ("auto", "breakable")]


def measure(device: Device, **options: Any) -> growth.Growth:
    return growth.measure(device, SHAPE, torch.float32, times=2, **{"sizes": SIZES, **options})


def rows_of(column: str, values: dict[int, float | None]) -> list[dict[str, Any]]:
    return [{"tokens": size, column: value} for size, value in values.items()]


def test_every_point_has_a_row_and_replays_as_its_reference(device: Device) -> None:
    result = measure(device)
    assert result.right
    assert {what: [row[what] for row in rows] for what, rows in result.rows.items()} == {
        "tokens": [1, 5, 16],
        "layers": [1, 3],
        "buckets": [1, 3],
    }
    timed = device.traits.timing
    for row in (*result.rows["tokens"], *result.rows["layers"]):
        assert row["replay = reference"] == "bit for bit"
        assert all((row[column] is not None) is timed for column in (*SHARES, "auto kernel sum ms", "breakable host ms"))
    one, three = result.rows["buckets"]
    assert one["pool beyond the largest bucket's MiB"] == 0 and three["pool MiB"] >= one["pool MiB"] > 0
    assert (three["driver MiB"] is not None) is device.traits.driver_memory
    assert [(row["with"], row["what"]) for row in result.growth][:3] == [*(("tokens", s) for s in SHARES), ("layers", SHARES[0])]
    if not timed:  # the pool alone is
        measured = {row["what"] for row in result.growth if row["verdict"] != "not measured"}
        assert measured == {"pool beyond the largest bucket's MiB"}


def test_without_a_device_that_has_time_the_sizes_are_small_and_no_time_is_given() -> None:
    result = growth.measure(resolve("emulator"), times=1)
    assert result.right and "no time is meant" in "".join(result.notes)
    assert [row["tokens"] for row in result.rows["tokens"]] == list(growth.SMALL_SIZES.tokens)
    assert all(row["start-up s"] is None for row in (*result.rows["layers"], *result.rows["buckets"]))


def test_a_share_is_what_a_call_takes_beyond_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = resolve("emulator")
    monkeypatch.setattr(type(emulator), "traits", dataclasses.replace(emulator.traits, timing=True))
    monkeypatch.setattr(growth.timing, "wall_in_turns", lambda runs, times: dict.fromkeys(runs, 5e-3))
    monkeypatch.setattr(growth.timing, "kernels", lambda run: 2e-3)
    result = measure(emulator)
    for row in (*result.rows["tokens"], *result.rows["layers"]):
        assert all(row[share] == pytest.approx(3.0) for share in SHARES) and row["auto host ms"] > 0
    three_layers = result.rows["layers"][1]
    assert three_layers["auto less its kernels, us a layer"] == pytest.approx(1000.0) and three_layers["start-up s"] > 0
    three_buckets = result.rows["buckets"][1]
    assert three_buckets["seconds a bucket"] == pytest.approx(three_buckets["start-up s"] / 3)
    assert result.growth[0]["exponent"] == pytest.approx(0.0, abs=1e-9)
    assert result.panels["tokens"][SHARES[0]] == [(n, pytest.approx(3.0)) for n in SIZES.tokens]


@pytest.mark.parametrize(
    ("values", "exponent", "verdict"),
    [
        ({1: 3.0, 16: 3.0, 256: 3.0}, 0.0, "at most linear"),
        ({4: 2.0, 8: 4.0, 64: 32.0}, 1.0, "at most linear"),
        ({1: 1.0, 2: 4.0, 4: 16.0}, 2.0, "MORE THAN LINEAR"),
        ({1: -0.5, 2: 1.0, 4: 2.0}, 1.0, "at most linear"),
        ({1: 0.0, 2: 0.0, 4: 0.0}, None, "at most linear: 0 at 4"),
        ({1: 0.0, 2: 0.0, 4: 1.0}, None, "one point above 0"),
        ({1: None, 2: None}, None, "not measured"),
    ],
)
def test_the_exponent_decides_what_is_linear(values: dict[int, float | None], exponent: float | None, verdict: str) -> None:
    row = growth._exponents(rows_of("ms", values), "tokens", "ms")
    assert row["verdict"] == verdict
    assert row["exponent"] == (None if exponent is None else pytest.approx(exponent, abs=1e-9))


def test_growth_that_only_the_largest_size_has_shows_in_the_last_step() -> None:
    row = growth._exponents(rows_of("ms", {1: 1.0, 16: 1.0, 256: 1.0, 1024: 16.0}), "tokens", "ms")
    assert row["verdict"] == "at most linear" and row["of the last step"] == pytest.approx(2.0)
    assert row["first"] == "1 at 1" and row["last"] == "16 at 1024"


@pytest.mark.parametrize("wrong", ["auto", "breakable"])
def test_a_replay_unlike_its_reference_is_called_wrong(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = growth._compare

    def other(handle: Any, ids: torch.Tensor) -> bool:
        return compare(handle, ids) and handle._here.breakable_only is (wrong == "auto")

    monkeypatch.setattr(growth, "_compare", other)
    result = measure(resolve("emulator"))
    assert not result.right
    assert {row["replay = reference"] for rows in result.rows.values() for row in rows} == {f"NO: {wrong}"}


def test_a_strategy_that_another_one_stands_in_for_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_compare", lambda handle, ids: True)
    result = measure(resolve("emulator"))
    assert not result.right
    assert result.rows["tokens"][0]["replay = reference"].startswith("NO: auto is not served by prime graphs")


def test_compiled_layers_have_no_bucket_of_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, accelerator = [], growth.Accelerator

    def noting(model: Any, most: int, device: Device, compile: bool, buckets: Any) -> Any:
        asked.append((compile, list(buckets)))
        return accelerator(model, most, device, compile, buckets)

    monkeypatch.setattr(growth, "Accelerator", noting)
    sizes = dataclasses.replace(SIZES, tokens=(1,), layers=(1,), counts=(1, 4), largest=4)
    assert measure(resolve("emulator"), sizes=sizes, compile=True).right
    assert asked == [(True, [4]), (True, [4]), (True, [2, 3, 4]), (True, [2]), (True, [4])]


def test_accelerators_are_given_back_before_the_next_point(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[Any] = []
    accelerator = growth.Accelerator

    def noting(*args: Any) -> Any:
        assert all(handle._restored for handle in alive)
        alive.append(accelerator(*args).handle)
        return type("Given", (), {"handle": alive[-1], "seconds": 1.0})

    monkeypatch.setattr(growth, "Accelerator", noting)
    measure(resolve("emulator"))
    assert len(alive) == 8 and all(handle._restored for handle in alive)


def test_the_plot_has_a_panel_for_each_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panels = {"tokens": {"auto": [(1, 1.0), (16, 2.0)], "breakable": []}, "layers": {"auto": []}}
    plots.draw_growth(tmp_path / "plot.svg", panels)
    assert (tmp_path / "plot.svg").stat().st_size > 1000
    with pytest.raises(UsageError, match="--plot"):
        plots.draw_growth(tmp_path / "plot.unknown", panels)


def test_a_plot_without_matplotlib_is_a_usage_error_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from segue.cli import app

    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    monkeypatch.setattr(growth, "measure", lambda *args, **options: pytest.fail("measured"))
    result = CliRunner().invoke(app, ["bench", "growth", "--plot", "plot.png"])
    assert isinstance(result.exception, UsageError) and "segue-graphs[plot]" in str(result.exception)
