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


def test_a_model_in_training_mode(make: Make, refused: Make, graphed: Make, ids: Make) -> None:
    model = make().train()
    assert "LlamaForCausalLM is in training mode" in refused(model)
    handle = graphed(model.eval())
    model.train()
    said = r"LlamaModel is in training mode.*model\.eval\(\)"
    with torch.inference_mode(), pytest.raises(segue.SegueError, match=said):
        handle(ids(1, 3))
    model.eval()
    with torch.inference_mode():
        handle(ids(1, 3))


def test_gradients_required(make: Make, graphed: Make, ids: Make) -> None:
    model = make()
    handle = graphed(model)
    with pytest.raises(segue.SegueError, match=r"LlamaModel with gradients required.*inference_mode\(\)"):
        handle(ids(1, 3))
    model.requires_grad_(False)
    handle(ids(1, 3))
    embeds = torch.zeros(1, 3, 64, device=model.device, requires_grad=True)
    with pytest.raises(segue.SegueError, match="gradients required"):
        handle(inputs_embeds=embeds)


def test_a_model_that_moved_to_another_device(make: Make, graphed: Make) -> None:
    handle = graphed(make())
    handle.model.to("meta")
    with torch.inference_mode(), pytest.raises(segue.SegueError, match=r"was accelerated on .* and is now on meta"):
        handle(torch.zeros(1, 3, dtype=torch.long, device="meta"))


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


def test_a_second_handle_on_one_model(make: Make, refused: Make, graphed: Make) -> None:
    model = make()
    graphed(model)
    with pytest.raises(segue.SegueError, match=r"accelerated already: call restore\(\)"):
        accelerate(model, device="emulator")


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
