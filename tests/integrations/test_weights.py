"""Weights that change after the capture: the call runs untouched and says what changed, and recapture() takes it in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import segue
from integrations.conftest import build
from segue.devices import Device
from segue.integrations.transformers import accelerate

Make = Callable[..., Any]


def _assigned(model: Any) -> None:
    model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()}, assign=True)


def _another_parameter(model: Any) -> None:
    projection = model.model.layers[1].mlp.up_proj
    projection.weight = nn.Parameter(projection.weight * 2)


def _other_data(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data * 2


def _other_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 2


def _another_layer(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])  # with a config of its own


class _Int8(nn.Module):
    """A linear layer whose weight is kept in 8 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer("q", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.q.to(x.dtype) * self.scale)


def _quantized(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj = _Int8(layer.mlp.up_proj).eval()


def _there_and_back(model: Any) -> None:
    device = model.device
    model.to("meta")
    model.to_empty(device=device)
    for p in model.parameters():
        nn.init.normal_(p, std=0.05)
    model.model.rotary_emb.inv_freq.fill_(0.1)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bfloat16": (lambda m: m.bfloat16(), "LlamaModel is in torch.bfloat16, and was in torch.float32 before"),
    "double": (lambda m: m.double(), "LlamaModel is in torch.float64, and was in torch.float32 before"),
    "assigned": (_assigned, "another tensor at "),
    "parameter": (_another_parameter, "another tensor at layers.1.mlp.up_proj.weight"),
    "data": (_other_data, "another tensor at layers.1.mlp.up_proj.weight"),
    "buffer": (_other_buffer, "another tensor at rotary_emb.inv_freq"),
    "layer": (_another_layer, "another module at layers.1"),
    "there and back": (_there_and_back, "another tensor at "),
    "quantized": (_quantized, "another module at layers.0.mlp.up_proj"),
}


@pytest.mark.parametrize("strategy", ["auto", "breakable"])
@pytest.mark.parametrize("what", list(CHANGES))
def test_a_change_is_run_untouched_and_counted_until_it_is_taken_in(
    what: str, strategy: str, make: Make, graphed: Make, ids: Make
) -> None:
    model, prompt = make(), ids(1, 6)
    handle = graphed(model, strategy=strategy)
    change, reason = CHANGES[what]
    with torch.inference_mode():
        for _ in range(4):
            for one_row in (0, 1):
                before = model(prompt, logits_to_keep=one_row).logits[:, -1]
        replayed = handle.stats.replayed
        change(model)
        for count in range(1, 4):
            for one_row in (0, 1):
                got = model(prompt, logits_to_keep=one_row).logits
                with handle.untouched():
                    assert torch.equal(got, model(prompt, logits_to_keep=one_row).logits)
            assert handle.stats.replayed == replayed and handle.stats.eager == 2 * count
        if what != "layer":
            assert not torch.equal(got[:, -1], before)
        for found, times in handle.stats.reasons.items():
            assert found.startswith(reason) and "recapture() takes it in" in found
            assert f"| {found} | {times} | Call handle.recapture()" in handle.report()
        handle.recapture()
        captured = handle.stats.captured
        for _ in range(4):
            for one_row in (0, 1):
                got = model(prompt, logits_to_keep=one_row).logits
                with handle.untouched():
                    want = model(prompt, logits_to_keep=one_row).logits
                tolerance = 5e-2 if what == "bfloat16" else 1e-5
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    stats = handle.stats
    assert stats.eager == 2 * count and stats.replayed >= replayed + 4 and stats.captured > captured


@pytest.mark.parametrize("what", ["bfloat16", "assigned", "layer", "there and back"])
def test_before_the_first_capture_a_change_is_taken_in_by_itself(what: str, make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 6)
    handle = graphed(model)
    with torch.inference_mode():
        CHANGES[what][0](model)
        for _ in range(3):
            got = model(prompt).logits
            with handle.untouched():
                torch.testing.assert_close(got, model(prompt).logits, rtol=5e-2, atol=5e-2)
    assert handle.stats.replayed == 1 and not handle.stats.reasons


@pytest.mark.filterwarnings("ignore")  # the emulator's, about a model on the CPU
def test_a_model_that_is_moved_before_its_capture_is_served_where_it_is(ids: Make, device: Device) -> None:
    with accelerate(build("llama", torch.device("cpu")), max_tokens=16) as handle:
        prompt = ids(1, 6)
        assert handle.to(device.torch_device).double() is handle
        with torch.inference_mode():
            for _ in range(3):
                got = handle(prompt).logits
                with handle.untouched():
                    torch.testing.assert_close(got, handle(prompt).logits)
            assert got.device == device.torch_device and handle.stats.replayed == 1 and not handle.stats.reasons
            handle.to("cpu")
            for _ in range(3):
                got = handle(prompt.cpu()).logits
                with handle.untouched():
                    torch.testing.assert_close(got, handle(prompt.cpu()).logits)
            moved = device.torch_device.type != "cpu"
            assert handle.stats.eager == 3 * moved
            handle.recapture()
            for _ in range(3):
                handle(prompt.cpu())
            assert handle.stats.eager == 3 * moved


def test_graphs_on_another_device_than_the_models_are_refused(device: Device) -> None:
    if device.torch_device.type == "cpu":
        pytest.skip("the emulator is the only device")
    with pytest.raises(segue.SegueError, match=r"LlamaForCausalLM is on cpu, and graphs are to be captured on cuda"):
        accelerate(build("llama", torch.device("cpu")), device=device)


def test_values_that_change_in_place_are_replayed_as_they_are(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 6)
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(3):
            model(prompt)
        model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()})
        got = model(prompt).logits
        with handle.untouched():
            torch.testing.assert_close(got, model(prompt).logits, rtol=1e-4, atol=1e-5)
    assert handle.stats.replayed == 2 and not handle.stats.reasons


def test_a_model_that_has_left_its_device_runs_there_and_says_so(make: Make, graphed: Make) -> None:
    handle = graphed(make())
    handle.to("meta")
    with torch.inference_mode():
        for _ in range(2):
            assert handle(torch.zeros(1, 3, dtype=torch.long, device="meta")).logits.is_meta
    ((reason, count),) = handle.stats.reasons.items()
    assert reason.startswith("LlamaModel is in meta, and was in ") and count == 2
    with pytest.raises(segue.SegueError, match=r"nothing is captured: LlamaModel is in meta.*recapture\(\)"):
        handle.capture()
    with pytest.raises(segue.SegueError, match="lies on meta"):
        handle.recapture()


def test_a_recapture_that_is_refused_leaves_the_graphs_in_use(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 6)
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(3):
            want = model(prompt).logits
        hook = model.model.layers[1].register_forward_hook(lambda *_: None)
        said = r"LlamaForCausalLM can't be served as it is now, and its graphs stay\. .*a forward hook"
        with pytest.raises(segue.SegueError, match=said):
            handle.recapture()
        hook.remove()
        assert torch.equal(model(prompt).logits, want)
    assert handle.stats.replayed == 2


def test_a_recapture_keeps_the_counts(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 6)
    handle = graphed(model)
    with torch.inference_mode():
        for _ in range(3):
            model(prompt)
        model(ids(1, 65))
        before = handle.stats
        handle.recapture()
        assert handle.stats.buckets == () and handle.stats.reasons == before.reasons
        for _ in range(3):
            model(prompt)
    after = handle.stats
    assert (after.warmed, after.captured, after.replayed) == tuple(
        2 * n for n in (before.warmed, before.captured, before.replayed)
    )
