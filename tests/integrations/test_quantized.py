"""Models that are quantized by other packages, before they are accelerated and after their capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own

Make = Callable[..., Any]


def _right(handle: Any, prompts: list[torch.Tensor], times: int = 3) -> None:
    with torch.inference_mode():
        for _ in range(times):
            for prompt in prompts:
                for one_row in (0, 1):
                    got = handle(prompt, logits_to_keep=one_row).logits
                    with handle.untouched():
                        want = handle(prompt, logits_to_keep=one_row).logits
                    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def _torchao(config: str) -> Callable[[Any], None]:
    def quantize(model: Any) -> None:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model, getattr(quantization, config)())

    return quantize


def _bitsandbytes(model: Any) -> None:
    nn = pytest.importorskip("bitsandbytes").nn
    for layer in model.model.layers:
        own = layer.mlp.up_proj
        other = nn.Linear8bitLt(own.in_features, own.out_features, bias=False, has_fp16_weights=False)
        other.weight = nn.Int8Params(own.weight.detach().clone(), requires_grad=False, has_fp16_weights=False)
        layer.mlp.up_proj = other.to(model.device).eval()


WAYS: dict[str, Callable[[Any], None]] = {
    "torchao, weights": _torchao("Int8WeightOnlyConfig"),
    "torchao, activations too": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes": _bitsandbytes,
}


@pytest.mark.parametrize("strategy", ["auto", "breakable"])
@pytest.mark.parametrize("way", list(WAYS))
def test_quantized_after_its_capture_a_model_runs_untouched_until_recapture(
    way: str, strategy: str, make: Make, graphed: Make, ids: Make
) -> None:
    model, prompts = make().requires_grad_(False), [ids(1, 6), ids(2, 1)]
    handle = graphed(model, strategy=strategy)
    _right(handle, prompts)
    replayed = handle.stats.replayed
    WAYS[way](model)
    _right(handle, prompts)
    assert handle.stats.replayed == replayed and handle.stats.eager == 12
    assert all("recapture() takes it in" in reason for reason in handle.stats.reasons)
    handle.recapture()
    _right(handle, prompts)
    assert handle.stats.replayed > replayed and handle.stats.eager == 12


@pytest.mark.parametrize("strategy", ["auto", "breakable"])
@pytest.mark.parametrize("way", list(WAYS))
def test_a_quantized_model_is_served_and_new_weights_are_noticed(
    way: str, strategy: str, make: Make, graphed: Make, ids: Make
) -> None:
    model, other, prompts = make().requires_grad_(False), make().requires_grad_(False), [ids(1, 6), ids(2, 1)]
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    WAYS[way](model)
    WAYS[way](other)
    handle = graphed(model, strategy=strategy)
    _right(handle, prompts)
    replayed = handle.stats.replayed
    assert replayed > 0 and not handle.stats.reasons
    model.model.layers[1].mlp.up_proj.weight = other.model.layers[1].mlp.up_proj.weight
    _right(handle, prompts, times=1)
    assert handle.stats.replayed == replayed and handle.stats.eager == 4


class _Wrapping(torch.Tensor):
    """Holds another tensor, and no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        unwrapped = [arg.inner if isinstance(arg, cls) else arg for arg in args]
        return func(*unwrapped, **(kwargs or {}))


@pytest.mark.parametrize("strategy", ["auto", "breakable"])
def test_a_weight_that_wraps_others_is_noticed_when_it_is_replaced(
    strategy: str, make: Make, graphed: Make, ids: Make
) -> None:
    model, prompts = make().requires_grad_(False), [ids(1, 6)]
    projection = model.model.layers[1].mlp.up_proj
    projection.weight = torch.nn.Parameter(_Wrapping(projection.weight.detach()), requires_grad=False)
    handle = graphed(model, strategy=strategy)
    _right(handle, prompts)
    replayed = handle.stats.replayed
    assert replayed > 0 and not handle.stats.reasons
    projection.weight = torch.nn.Parameter(_Wrapping(projection.weight.inner * 2), requires_grad=False)
    _right(handle, prompts, times=1)
    assert handle.stats.replayed == replayed
    ((reason, count),) = handle.stats.reasons.items()
    name = "layers.1.mlp.up_proj.weight"
    assert reason == f"{name}: a tensor [96, 64] -> another tensor [96, 64]: recapture() takes it in" and count == 2
    handle.recapture()
    _right(handle, prompts)
    assert handle.stats.replayed > replayed
