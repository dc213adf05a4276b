"""Layers compiled once for all lengths: the same answers as the untouched model, and graphs that equal the compiled reference."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from integrations.conftest import build
from segue import Ladder, _torch, accelerate
from segue.capture.compiled import Compiled, compile_dynamic
from segue.devices import Device
from segue.errors import CaptureError, UsageError
from segue.integrations.transformers import names

pytestmark = pytest.mark.filterwarnings("default")  # what inductor warns of while it is imported is not ours


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def prompt(n: int, model: Any, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(100 * seed + n)
    return torch.randint(3, model.config.vocab_size, (1, n), generator=draw).to(model.device)


def forward(model: Any, ids: Tensor) -> tuple[Tensor, Any]:
    cache = names.new_cache(model.config)
    with torch.inference_mode():
        out = model(ids, use_cache=True, logits_to_keep=1, **{names.cache_name(model.forward): cache})
    return out.logits.clone(), [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


@pytest.mark.parametrize("strategy", ["auto", "breakable"])
def test_compiled_graphs_equal_the_compiled_reference_and_nearly_the_untouched_model(device: Device, strategy: str) -> None:
    model = build("qwen3", device.torch_device)
    lengths = (5, 16, 30, 2, 1)
    untouched = {n: forward(model, prompt(n, model)) for n in lengths}
    with accelerate(model, max_tokens=32, strategy=strategy, compile=True, device=device) as graphed:
        summary = graphed.capture()
        assert summary is not None and summary.buckets == (32, 16, 8, 4, 2) and summary.seconds > summary.compile_seconds >= 0
        assert (summary.compile_seconds > 0) is device.traits.compiled
        for n in (*lengths, *lengths[::-1]):
            ids = prompt(n, model)
            graphed.runner.pool.poison()
            logits, cache = forward(model, ids)
            with graphed.reference():
                want, want_cache = forward(model, ids)
            assert torch.equal(logits, want)
            layers = zip(cache, want_cache, strict=True)
            assert all(torch.equal(a, b) for got, exp in layers for a, b in zip(got, exp, strict=True))
            assert torch.allclose(logits, untouched[n][0], rtol=1e-4, atol=1e-4)
        served = graphed.stats.strategies[{"auto": "prime"}.get(strategy, strategy)]
        assert graphed.stats.eager == 0 and served == 2 * len(lengths)
    for n in lengths:
        assert torch.equal(forward(model, prompt(n, model))[0], untouched[n][0]), "the model runs as it did"


def test_nothing_compiles_after_the_capture(device: Device) -> None:
    model = build("llama", device.torch_device)
    with accelerate(model, buckets=[8, 24], compile=True, device=device) as graphed:
        graphed.capture()
        counters: Any = torch._dynamo.utils.counters
        before = counters["stats"]["unique_graphs"]
        for n in (3, 8, 20, 24):
            forward(model, prompt(n, model))
        model.generate(prompt(6, model), max_new_tokens=4, do_sample=False)
        assert counters["stats"]["unique_graphs"] == before
        assert graphed.stats.warmed <= 2 + 4 and not graphed.stats.eager  # two buckets, and four batches of steps


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_prime_graphs_and_steps_compile_nothing_more(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by_inductor = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **options: compile_by_inductor(fn, backend="eager", **options))
    monkeypatch.setattr("segue.devices.runs_compiled", lambda place: True)

    def compiled(strategy: str) -> int:
        torch._dynamo.reset()
        before, model = _torch.compiled_graphs(), build(family, torch.device("cpu"))
        with accelerate(model, buckets=[8, 24], strategy=strategy, compile=True, device="emulator") as graphed:
            graphed.capture()
            assert strategy == "breakable" or graphed.strategies["prime"] == graphed.strategies["full"] == ""
        return _torch.compiled_graphs() - before

    assert compiled("auto") == compiled("breakable") > 0


def test_the_untouched_model_is_never_compiled(device: Device) -> None:
    model = build("llama", device.torch_device)
    with accelerate(model, max_tokens=16, compile=True, device=device) as graphed:
        for _ in range(3):
            forward(model, prompt(7, model))
            assert not any("forward" in vars(m) for layer in model.model.layers for m in layer.modules())
        with graphed.untouched():
            assert forward(model, prompt(7, model))[0].shape[-1] == model.config.vocab_size
        assert "forward" not in vars(model.model.norm)
    assert "forward" not in vars(model) and "forward" not in vars(model.model)


def test_tokens_of_generate_are_those_of_the_untouched_model_in_float32(device: Device) -> None:
    model = build("mistral", device.torch_device)
    given = [prompt(n, model) for n in (4, 11, 23)]
    want = [model.generate(ids, max_new_tokens=12, do_sample=False) for ids in given]
    with accelerate(model, max_tokens=32, compile=True, device=device):
        for _ in range(3):
            for ids, tokens in zip(given, want, strict=True):
                assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), tokens)


def test_recapture_takes_replaced_layers_in(device: Device) -> None:
    model = build("llama", device.torch_device)
    with accelerate(model, max_tokens=16, compile=True, device=device) as graphed:
        graphed.capture()
        model.model.layers[1].mlp = copy.deepcopy(model.model.layers[1].mlp)
        model.model.layers[1].mlp.down_proj.weight.data.mul_(3.0)
        with graphed.untouched():
            want = forward(model, prompt(9, model))[0]
        graphed.recapture()
        for _ in range(3):
            assert torch.allclose(forward(model, prompt(9, model))[0], want, rtol=1e-4, atol=1e-4)


def test_buckets_are_a_list_a_ladder_or_lengths_to_fit(device: Device) -> None:
    model = build("llama", device.torch_device)
    for buckets in ([24, 6], Ladder([6, 24]), Ladder.fit([5, 6, 20, 24], k=2)):
        with accelerate(model, max_tokens=8, buckets=buckets, device=device) as graphed:
            assert list(graphed.runner.ladder) == [6, 24]
            assert graphed.runner.admit(24).bucket == 24, "max_tokens gives way"
    with accelerate(model, max_tokens=100, device=device) as graphed:
        assert list(graphed.runner.ladder) == [1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 100]


def test_what_can_not_be_compiled_says_so_or_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from torch._dynamo import exc

    class NoCompiler:
        def __call__(self, *args: Any) -> Tensor:
            raise exc.TorchDynamoException("Cannot find a working triton installation")

    monkeypatch.setattr(torch, "compile", lambda fn, **options: NoCompiler())
    monkeypatch.setattr("segue.devices.runs_compiled", lambda place: True)

    def double(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(CaptureError, match=r"double .*could not be compiled: .*triton.* leave out compile=True"):
        compile_dynamic(double)(torch.ones(2))
    retried = compile_dynamic(double, on_failure="eager")
    with caplog.at_level(logging.WARNING, "segue"):
        for _ in range(2):
            assert torch.equal(retried(torch.ones(2)), torch.full((2,), 2.0))
    assert len(caplog.records) == 1 and isinstance(retried, Compiled) and "triton" in retried.failed


def test_options_of_the_helper_that_mean_nothing() -> None:
    with pytest.raises(UsageError, match="compiles a function"):
        compile_dynamic(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="neither"):
        compile_dynamic(len, on_failure="retry")  # type: ignore[arg-type]
