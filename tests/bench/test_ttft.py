"""``segue bench ttft`` in a size for tests: every way has its row, a rival that is missing is a line, verdicts can be wrong."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from segue.devices import resolve
from segue.errors import UsageError

pytest.importorskip("transformers")

from segue.bench import decode, models, plots, ttft, ways
from segue.bench.decoder import SHAPES, Shape

SHAPE = Shape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48, vocabulary=61)
SEGUES = ["segue", "segue, breakable"]


def small(**options: Any) -> ttft.FirstToken:
    given = {"lengths": (3, 16), "times": 1, **options}
    return ttft.measure(resolve("emulator"), SHAPE, torch.float32, **given)


def fake_package(name: str, replayed: list[str]) -> ModuleType:
    """A package like breakable-cuda-graphs that runs everything at once; its replays do nothing."""
    package: Any = ModuleType(name)
    _, graph, recording = next(r for r in ways.RECORDERS.values() if r[0] == name)

    class Graph:
        def replay(self) -> None:
            replayed.append(name)

        def reset(self) -> None:
            replayed.append("reset")

    @contextmanager
    def record(graph: Graph) -> Iterator[None]:
        yield

    package.no_graph = lambda fn: fn
    setattr(package, graph, Graph)
    setattr(package, recording, record)
    return package


def test_every_way_has_a_row_with_its_startup_and_its_verdict() -> None:
    result = small()
    assert result.right and not result.missing and not result.between and not result.decode
    assert [(row["tokens"], row["way"]) for row in result.ways] == [(n, way) for n in (3, 16) for way in ("eager", *SEGUES)]
    assert [row["served by"] for row in result.ways] == [None, "prime", "breakable"] * 2
    for row in result.ways:
        assert row["ms"] > 0 and row["start-up s"] > 0 and row["host ms"] > 0
        assert row["replay = reference"] == (None if row["way"] == "eager" else "bit for bit")
        assert row["largest difference to eager"] < 1e-4
    assert set(result.startup[0]) == {"way", "1", "2"}
    eager, segue, _ = result.startup
    assert eager["2"] > eager["1"] and segue["1"] == segue["2"]  # the ladder is captured once


def test_lengths_between_buckets_are_a_table_of_their_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttft, "LENGTHS", (4,))
    monkeypatch.setattr(ttft, "LENGTHS_BETWEEN", (3, 5))
    result = small(lengths=None)
    assert [row["tokens"] for row in result.rows] == [4] and [row["tokens"] for row in result.between] == [3, 5]


def test_a_rival_that_is_missing_is_a_line_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("breakable_cuda_graphs", "piecewise_cuda_graphs", "gpuopt"):
        monkeypatch.setitem(sys.modules, module, None)
    result = small(lengths=(3,), rivals=ttft.RIVALS, batches=(2,))
    assert result.right
    reasons = {row["rival"]: row["reason"] for row in result.missing}
    assert set(reasons) == set(ttft.RIVALS)
    assert all("pip install --no-deps " + name in reasons[name] for name in (*ways.RECORDERS, decode.GPUOPT))
    assert all("no time is meant" in reasons[name] for name in (ways.DYNAMO, ways.REDUCE, decode.STATIC))


def test_a_rival_that_fails_at_one_length_is_a_line_and_has_rows_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(ways.Eager):
        def forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
            if ids.shape[1] == 3:
                raise ValueError("odd lengths are too much\nand more lines")
            return super().forward(ids, cache)

    monkeypatch.setattr(ttft, "forward_rival", lambda name, model, device, keeps_caches: Failing(name, model))
    result = small(rivals=[ways.REDUCE])
    assert result.missing == [{"rival": ways.REDUCE, "where": "3 tokens", "reason": "ValueError: odd lengths are too much"}]
    assert [row["tokens"] for row in result.ways if row["way"] == ways.REDUCE] == [16]
    assert [row[f"this / {ways.REDUCE}"] is None for row in result.ways] == [True] * 3 + [False] * 4
    assert result.right


def test_a_rivals_difference_to_eager_stands_beside_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(ways.Eager):
        def forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
            return super().forward(ids, cache) + 0.5

    monkeypatch.setattr(ttft, "forward_rival", lambda name, model, device, keeps_caches: Off(name, model))
    (row,) = (row for row in small(lengths=(3,), rivals=[ways.DYNAMO]).ways if row["way"] == ways.DYNAMO)
    assert row["largest difference to eager"] == pytest.approx(0.5)


@pytest.mark.parametrize("part", ["logits", "cache"])
def test_a_segue_that_gives_other_bits_than_its_reference_is_called_wrong(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, calls = ttft.last_logits, iter(range(100))

    def other(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        logits = given(model, ids, cache)
        if next(calls) == 0:  # the replay, before its reference
            changed = logits if part == "logits" else cache.layers[1].values
            changed.add_(1e-3)
        return logits

    monkeypatch.setattr(ttft, "last_logits", other)
    result = small(lengths=(3,))
    assert not result.right
    assert [row["replay = reference"] for row in result.ways] == [None, "NO", "bit for bit"]


def test_without_compiled_layers_that_were_asked_for_the_bench_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = ways.accelerate

    def refusing(model: Any, **options: Any) -> Any:
        if options.pop("compile", False):
            raise UsageError("no compiler here")
        return accelerate(model, **options)

    monkeypatch.setattr(ways, "accelerate", refusing)
    result = small(lengths=(3,), compile=True)
    assert not result.right and len(result.ways) == 3
    assert result.missing == [{"rival": "segue compiled", "where": "everywhere", "reason": "UsageError: no compiler here"}]


def test_compiled_layers_and_buckets_are_asked_of_accelerate_only_when_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate, asked = ways.accelerate, []

    def noting(model: Any, *, max_tokens: int, device: Any, **options: Any) -> Any:
        asked.append(options)
        return accelerate(model, max_tokens=max_tokens, device=device)

    monkeypatch.setattr(ways, "accelerate", noting)
    result = small(lengths=(3,), compile=True)
    assert asked == [{}, {"compile": True}]
    assert [row["way"] for row in result.ways] == ["eager", *SEGUES, "segue compiled", "segue compiled, breakable"]
    assert [row["way"] for row in result.captures] == ["segue", "segue compiled"]
    small(lengths=(3,), buckets=[4, 8])
    assert asked[2:] == [{"buckets": [4, 8]}]


def test_two_conversations_take_turns_and_their_caches_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Prompt:
        def __init__(self, i: int) -> None:
            self.ids, self.caches = torch.full((1, 1), i), [f"{i}-{call}" for call in (2, 1, 0)]

    class Noting(ways.Eager):
        def forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
            seen.append(cache)
            return ids

    seen: list[str] = []
    turns = ttft._Turns(Noting("noting", None), [Prompt(0), Prompt(1)])  # type: ignore[list-item]
    for _ in range(4):
        turns()
    assert seen == ["0-0", "1-0", "0-1", "1-1"] and turns._kept == ["0-1", "1-1"]
    result = small(lengths=(3,), conversations=2)
    assert result.right and "2 conversations take turns" in "".join(result.notes)


@pytest.mark.parametrize("name", ways.RECORDERS)
def test_a_recording_rival_fills_the_callers_cache_and_gives_eagers_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[str] = []
    module = ways.RECORDERS[name][0]
    monkeypatch.setitem(sys.modules, module, fake_package(module, replayed))
    model = models.load(SHAPE, torch.float32, torch.device("cpu"))
    prompt = models.FreshPrompt(model, 5, calls=6)
    rival = ways.forward_rival(name, model, resolve("emulator"), keeps_caches=False)
    recording_cache = prompt.caches[-ways.CALLS_TO_START]
    rival.start(prompt.ids, prompt.caches)
    logits = rival.forward(prompt.ids, prompt.caches.pop())
    expected_cache = prompt.caches.pop()
    expected = ways.Eager("eager", model).forward(prompt.ids, expected_cache)
    torch.testing.assert_close(logits, expected)
    for ours, theirs in zip(recording_cache.layers, expected_cache.layers, strict=True):
        torch.testing.assert_close(ours.values, theirs.values)
        assert ours.keys.shape == (1, 1, 5, 16)
    rival.close()
    assert replayed == [module, "reset"]
    assert model.config._attn_implementation == "sdpa"  # the copy's alone was changed


def test_compiled_whole_models_follow_the_rules_of_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: done.append(options) or model)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: done.append("step"))
    model = models.load(SHAPE, torch.float32, torch.device("cpu"))
    prompt = models.FreshPrompt(model, 5, calls=3)
    expected = ways.Eager("eager", model).forward(prompt.ids, prompt.caches.pop())
    for graphs in (True, False):
        way = ways.CompiledModel("compiled", model, graphs=graphs, keeps_caches=graphs)
        assert way.model is not model
        torch.testing.assert_close(way.forward(prompt.ids, prompt.caches.pop()), expected)
    (options, step, without_graphs) = done
    assert options["mode"] == "reduce-overhead" and options["dynamic"] is False and step == "step"
    assert without_graphs["dynamic"] is True and "mode" not in without_graphs


def test_a_copy_shares_weights_and_nothing_else() -> None:
    model = models.load(SHAPE, torch.float32, torch.device("cpu"))
    copy = models.sharing_copy(model)
    tensors = (*model.parameters(), *model.buffers())
    assert [t.data_ptr() for t in (*copy.parameters(), *copy.buffers())] == [t.data_ptr() for t in tensors]
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert copy.config is not model.config and copy.model.layers[0] is not model.model.layers[0]
    assert copy.model.config is copy.config


@pytest.mark.parametrize(("name", "billions"), [("0.6B", 0.596), ("1.7B", 1.72), ("8B", 8.19)])
def test_the_named_shapes_have_the_sizes_of_qwen3(name: str, billions: float) -> None:
    model = SHAPES[name].model(torch.bfloat16, torch.device("meta"))
    assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_model_that_transformers_can_not_load_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither one of 0\.6B, 1\.7B, 8B nor a model that transformers loads"):
        models.load(str(tmp_path), torch.float32, torch.device("cpu"))


def test_a_decoding_step_is_measured_beside_its_correctness() -> None:
    result = small(lengths=(3,), batches=(1, 2))
    assert result.right
    assert [(row["batch"], row["way"]) for row in result.decode] == [(b, way) for b in (1, 2) for way in ("eager", "segue")]
    for row in result.decode:
        assert row["step ms"] > 0 and row["start-up s"] > 0 and row["tokens as eager's"] == "32 of 32"
        assert row["replay = reference"] == (None if row["way"] == "eager" else "bit for bit")


def test_a_decoding_step_that_gives_other_tokens_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_verdict", lambda way, ids, tokens: "NO")
    assert not small(lengths=(3,), batches=(1,)).right


def test_a_static_cache_decodes_eagers_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = resolve("emulator")
    model = models.load(SHAPE, torch.float32, torch.device("cpu"))
    ids = models.FreshPrompt(model, 8, calls=0, batch=2).ids
    monkeypatch.setattr(type(emulator), "traits", dataclasses.replace(emulator.traits, timing=True))
    seconds, tokens = decode.decode_rival(decode.STATIC, model, emulator)(ids)  # transformers compiles it on CUDA alone
    assert seconds > 0 and tokens.shape == (2, 32)
    assert torch.equal(tokens, decode.by_generate(model)(ids)[1])


def test_gpuopt_that_falls_back_to_eager_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def generate_greedy(self, model: Any, inputs: Any, new_tokens: int, validate: bool) -> Any:
            reason = "RuntimeError: capture failed"
            return type("Result", (), {"fallback_reason": reason, "decode_ms": 1.0, "token_ids": inputs["input_ids"]})

    package: Any = ModuleType("gpuopt")
    package.CUDAGraphPool = Pool
    monkeypatch.setitem(sys.modules, "gpuopt", package)
    result = small(lengths=(3,), batches=(1,), rivals=[decode.GPUOPT])
    assert result.right
    assert [row["reason"] for row in result.missing] == ["it fell back to eager: RuntimeError: capture failed"]


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # torch.compile's advice for fp32
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch records one to begin with
def test_every_rival_that_is_installed_gives_eagers_logits_on_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    result = ttft.measure(
        resolve("cuda"), SHAPE, torch.float32, lengths=(16,), times=2, rivals=ttft.RIVALS, batches=(2,), conversations=2
    )
    assert result.right
    taking_part = {row["way"] for row in (*result.ways, *result.decode)}
    missing = {row["rival"]: row["reason"] for row in result.missing}
    assert {ways.DYNAMO, ways.REDUCE, decode.STATIC} <= taking_part, missing
    assert set(ttft.RIVALS) <= taking_part | set(missing)
    assert all("not installed" in missing[name] for name in ways.RECORDERS if name in missing), missing
    for row in result.ways:
        assert row["largest difference to eager"] < 1e-3 and row["kernel sum ms"] > 0, row


def test_the_plot_has_a_line_for_each_way(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = [{"way": way, "tokens": n, "ms": 1.0 + n} for way in ("eager", "segue") for n in (3, 16)]
    plots.draw(tmp_path / "plot.png", points, [{"way": "eager", "1": 0.1, "2": 0.2}, {"way": "segue", "1": 3.0, "2": 3.0}])
    assert (tmp_path / "plot.png").stat().st_size > 1000
    with pytest.raises(UsageError, match="--plot"):
        plots.draw(tmp_path / "plot.unknown", points, [])


def test_a_plot_without_matplotlib_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(UsageError, match="segue-graphs\\[plot\\]"):
        plots.require_matplotlib()
