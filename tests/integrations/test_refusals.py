"""Models and calls that segue can't serve are refused by name, with the cause and the remedy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import segue
from segue.devices import Device
from segue.integrations.transformers import accelerate

Make = Callable[..., Any]


@pytest.fixture
def refused(device: Device) -> Callable[[Any], str]:
    """The text with which ``accelerate`` refuses a model, which must be left as it was."""

    def text(model: Any, **options: Any) -> str:
        with pytest.raises(segue.SegueError) as caught:
            accelerate(model, max_tokens=16, device=device, **options)
        base = getattr(model, "base_model", model)
        assert "forward" not in vars(base) or type(vars(base)["forward"]).__name__ != "ForwardPatch"
        return str(caught.value)

    return text


def test_a_thing_that_is_no_transformers_model(refused: Make) -> None:
    text = refused(nn.Linear(2, 2))
    assert "PreTrainedModel, not a Linear" in text and "segue.GraphRunner" in text


def test_a_model_in_training_mode(make: Make, refused: Make, graphed: Make) -> None:
    model = make().train()
    assert "LlamaForCausalLM is in training mode" in refused(model)
    handle = graphed(model.eval())
    model.train()
    with pytest.raises(segue.SegueError, match=r"nothing is captured: LlamaModel is in training mode\. Call model\.eval\(\)"):
        handle.capture()
    with pytest.raises(segue.SegueError, match=r"LlamaForCausalLM is in training mode.*model\.eval\(\)"):
        handle.recapture()


def test_a_model_without_memory_or_on_two_devices(make: Make, refused: Make) -> None:
    model = make()
    model.model.layers[0].to("meta")
    assert "and meta: a captured graph belongs to one device" in refused(model)


def test_attention_of_a_models_own(make: Make, refused: Make) -> None:
    model = make()

    class Own(type(model.model.layers[1].self_attn)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return self.o_proj(self.q_proj(hidden_states).cumsum(1)), None

    model.model.layers[1].self_attn.__class__ = Own
    text = refused(model)
    assert "LlamaForCausalLM (llama)" in text and "2 times (layers [0, 2])" in text
    assert "with its layers alone in graphs" in text and "segue.GraphRunner" in text


def test_a_decoder_that_looks_at_other_tokens_outside_attention(make: Make, refused: Make) -> None:
    model = make()

    class Mixing(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x.cumsum(dim=1)

    model.model.layers[0].mlp.__class__ = Mixing
    assert "differs from the untouched model's" in refused(model)


def test_a_forward_hook_inside_the_decoder(make: Make, refused: Make) -> None:
    model = make()
    model.model.layers[2].mlp.register_forward_hook(_look)
    text = refused(model)
    assert "_look (integrations/test_refusals.py:" in text and "is registered on layers.2.mlp" in text


def test_a_decoder_whose_model_is_accelerated(make: Make, graphed: Make, ids: Make) -> None:
    model = make()
    handle = graphed(model)
    with pytest.raises(segue.SegueError, match=r"accelerated already: call restore\(\)"):
        accelerate(model.model, device="emulator")
    assert torch.equal(handle.generate(ids(1, 4), max_new_tokens=3), model.generate(ids(1, 4), max_new_tokens=3))


def test_a_module_with_several_models(make: Make, refused: Make) -> None:
    text = refused(nn.ModuleList([make(), make("qwen2")]))
    assert "holds 2 transformers models (LlamaForCausalLM, Qwen2ForCausalLM)" in text and "one by one" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": "full"}, "strategy='full' is not one"),
        ({"on_failure": "retry"}, "on_failure='retry' is neither"),
        ({"buckets": [0]}, "bucket 0 is not a positive whole number"),
        ({"buckets": []}, "at least one bucket"),
    ],
)
def test_an_option_that_means_nothing(options: dict[str, Any], text: str, make: Make, refused: Make) -> None:
    assert text in refused(make(), **options)


def test_without_transformers_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import segue\n"
        "try:\n    segue.accelerate(object())\n"
        "except segue.SegueError as e:\n    print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'segue-graphs[transformers]'" in done.stdout


def _look(module: nn.Module, args: Any, output: Any) -> None:
    return None
