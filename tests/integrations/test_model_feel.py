"""The handle is the model to transformers, torch, peft and the user's own code."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, pipeline

from segue.integrations.transformers import accelerate
from segue.integrations.transformers.base_handle import Handle

Make = Callable[..., Any]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0", padding_side="left")


def test_it_is_of_the_models_class(make: Make, graphed: Make) -> None:
    model = make()
    handle = graphed(model)
    assert isinstance(handle, PreTrainedModel) and isinstance(handle, nn.Module) and isinstance(handle, type(model))
    assert handle.__class__ is type(model) and handle.__class__.__name__ == "LlamaForCausalLM"
    assert isinstance(handle, Handle) and not isinstance(handle, type(make("qwen2")))


METHODS: dict[str, Callable[[Any], Any]] = {
    "to().eval()": lambda h: h.to(h.device).eval(),
    "train().eval()": lambda h: h.train().eval(),
    "half().float()": lambda h: h.half().float(),
    "requires_grad_": lambda h: h.requires_grad_(False),
    "apply": lambda h: h.apply(lambda _: None),
}


@pytest.mark.parametrize("what", list(METHODS))
def test_a_method_that_returns_the_model_returns_the_handle(what: str, make: Make, graphed: Make) -> None:
    handle = graphed(make())
    assert METHODS[what](handle) is handle


def test_its_methods_are_the_models(make: Make, graphed: Make) -> None:
    model = make()
    handle = graphed(model)
    assert handle.generate.__self__ is model and inspect.ismethod(handle.generate)
    assert inspect.signature(handle.generate) == inspect.signature(model.generate) and handle.generate.__doc__
    assert handle.model is model.model and handle.lm_head is model.lm_head and handle.module is model
    assert list(handle.state_dict()) == list(model.state_dict())
    assert [name for name, _ in handle.named_parameters()] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("use", "text"),
    [(len, "no len"), (iter, "not iterable"), (lambda handle: handle[0], "not subscriptable")],
)
def test_what_the_model_doesnt_do_neither_does_the_handle(use: Any, text: str, make: Make, graphed: Make) -> None:
    with pytest.raises(TypeError, match=text):
        use(graphed(make()))


def test_a_pipeline_takes_it_without_a_word_and_is_replayed(
    make: Make, graphed: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    model.generation_config.max_length = None
    given = {"max_new_tokens": 4, "do_sample": False}
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    texts = ["w1 w2 w3", "w4 w5 w6 w7 w8"]
    want = pipeline("text-generation", model=model, tokenizer=_tokenizer(), batch_size=2, device=model.device)(texts, **given)
    handle = graphed(model)
    caplog.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate = pipeline("text-generation", model=handle, tokenizer=_tokenizer(), batch_size=2, device=model.device)
        for _ in range(3):
            assert generate(texts, **given) == want
    assert "not supported" not in caplog.text and generate.model is handle
    assert handle.stats.replayed > 0 and handle.stats.eager == 0


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_trains_and_evaluates_it(make: Make, graphed: Make, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = make()
    handle = graphed(model)
    rows = [{"input_ids": torch.arange(1, 7) + i, "labels": torch.arange(1, 7) + i} for i in range(6)]
    use_cpu = model.device.type == "cpu"
    options = {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no", "report_to": [], "use_cpu": use_cpu}
    trainer = Trainer(model=handle, args=TrainingArguments(str(tmp_path), **options), train_dataset=rows, eval_dataset=rows)
    before = model.lm_head.weight.detach().clone()
    trainer.train()
    assert not torch.equal(model.lm_head.weight, before) and handle.stats.reasons == {"LlamaModel is in training mode": 2}
    trainer.save_model(str(tmp_path / "saved"))
    again = type(model).from_pretrained(tmp_path / "saved").to(model.device).eval()
    prompt = rows[0]["input_ids"][None].to(model.device)
    with torch.inference_mode():
        for _ in range(3):
            got = handle.eval()(prompt).logits
        torch.testing.assert_close(got, again(prompt).logits, rtol=1e-5, atol=1e-5)
    assert handle.stats.replayed == 1 and handle.stats.eager == 2


@pytest.mark.parametrize("loaded", [True, False])
def test_saving_a_model_leaves_its_graphs_in_use(loaded: bool, make: Make, graphed: Make, ids: Make, tmp_path: Path) -> None:
    model = make()
    model.config.dtype = model.dtype if loaded else None
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(3):
            handle(ids(1, 6))
        handle.save_pretrained(tmp_path)
        assert model.config.dtype == "float32"
        handle(ids(1, 6))
    assert handle.stats.replayed == 2 and not handle.stats.reasons


def test_its_repr_says_what_it_serves(make: Make, graphed: Make, ids: Make) -> None:
    handle = graphed(make())
    assert repr(handle) == (
        "<segue handle of LlamaForCausalLM; strategies: breakable, prime, first token, full; "
        "live: embedding, attention and cache in 3 LlamaAttention, head; captured buckets: none; no forward yet>"
    )
    with torch.inference_mode():
        for _ in range(3):
            handle(ids(2, 3))
        handle(ids(1, 100))
    assert "captured buckets: 8; 25.0% of 4 forwards were replayed>" in str(handle)
    sliding = graphed(make("mistral, sliding"), strategy="auto")
    assert "strategies: breakable, full;" in repr(sliding)


@pytest.mark.parametrize("again", ["handle", "module", "compiled module", "compiled handle"])
def test_an_accelerated_model_given_again_is_its_handle(again: str, make: Make, graphed: Make, ids: Make, device: Any) -> None:
    model = make()
    handle = graphed(model, max_tokens=16)
    with torch.inference_mode():
        for _ in range(3):
            handle(ids(1, 6))
    given: Any = model if "module" in again else handle
    given = torch.compile(given, backend="eager") if "compiled" in again else given
    assert accelerate(given, max_tokens=16, device=device) is handle
    with torch.inference_mode():
        handle(ids(1, 6))
    assert handle.stats.replayed == 2


def test_other_options_are_taken_by_the_same_handle(
    make: Make, graphed: Make, ids: Make, device: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = make(), ids(1, 30)
    handle = graphed(model, max_tokens=16, strategy="breakable")
    with torch.inference_mode():
        for _ in range(3):
            handle(ids(1, 6))
        handle(prompt)
    assert handle.stats.eager == 1
    assert accelerate(model, buckets=iter([8, 32]), device=device) is handle
    assert "LlamaForCausalLM is served by other options, anew: max_tokens: 16 -> 2048, strategy: 'breakable' -> " in caplog.text
    want = model.generate(prompt, max_new_tokens=3, do_sample=False)
    for _ in range(3):
        assert torch.equal(handle.generate(prompt, max_new_tokens=3, do_sample=False), want)
    assert handle.stats.eager == 1 and handle.stats.strategies["prime"] > 0
    handle.recapture()
    for options in ({"strategy": "no such"}, {"on_failure": "never"}, {"buckets": [0]}):
        with pytest.raises(RuntimeError, match=r"no such|never|bucket 0"):
            accelerate(handle, **{"buckets": [8, 32], "device": device, **options})
    with torch.inference_mode():
        for _ in range(3):
            handle(prompt)
    assert handle.stats.eager == 1 and list(handle.runner.ladder) == [8, 32]


def test_a_restored_handle_given_again_makes_a_new_one(make: Make, graphed: Make, ids: Make) -> None:
    handle = graphed(make())
    handle.restore()
    other = graphed(handle)
    assert other is not handle and other.module is handle.module
    with torch.inference_mode():
        for _ in range(3):
            handle(ids(1, 6))
    assert other.stats.replayed == 1


def test_a_compiled_model_is_served_without_its_wrapper(make: Make, graphed: Make, ids: Make) -> None:
    model = make()
    compiled = torch.compile(model, backend="eager")
    handle = graphed(compiled)
    assert handle.module is model
    with torch.inference_mode():
        for call in (handle, compiled):
            for _ in range(3):
                got = call(ids(1, 6)).logits
                with handle.untouched():
                    torch.testing.assert_close(got, model(ids(1, 6)).logits, rtol=1e-5, atol=1e-5)
    assert handle.stats.replayed == 4


class _Wrapper(nn.Module):
    """A user's own module around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.language_model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.language_model(ids).logits.softmax(-1)  # type: ignore[no-any-return]


def test_a_module_around_a_model_is_what_the_handle_stands_for(make: Make, graphed: Make, ids: Make) -> None:
    model = make()
    whole = _Wrapper(model).eval()
    handle = graphed(whole)
    assert handle.module is whole and handle.language_model is model
    with torch.inference_mode():
        for _ in range(3):
            got = handle(ids(1, 6))
            with handle.untouched():
                torch.testing.assert_close(got, whole(ids(1, 6)))
    assert handle.stats.replayed == 1
    bare = graphed(model)
    assert bare is not handle and bare.module is model, "one handle serves a model"
    with torch.inference_mode():
        handle(ids(1, 6))
    assert bare.stats.warmed == 1 and handle.stats.replayed == 1
