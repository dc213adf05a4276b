"""Gradients and training mode are refused at every call, wherever the module or tensor is that would need them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from runner.rows import close
from segue.errors import InputError, UsageError
from segue.runner import Input

LAYER = nn.Linear(4, 4)
LENGTHS = (3, 3, 3, 99)  # warm-up, capture, replay, eager


class Holder:
    def __init__(self, layer: nn.Module) -> None:
        self.layers = {"first": layer}

    def run(self, x):
        return self.layers["first"](x)


class Noisy(nn.Module):
    """Its parent reads no mode, it does, through a helper in its own class."""

    def forward(self, x):
        return self.noise(x)

    def noise(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


def reaching(layer: nn.Module, how: str):
    if how == "module":
        return layer
    if how == "closure":
        return lambda input: layer(input)
    if how == "default":
        return lambda input, layer=layer: layer(input)
    if how == "partial":
        return functools.partial(lambda layer, input: layer(input), layer)
    if how == "method of an object":
        held = Holder(layer)
        return lambda input: held.run(input)
    return lambda input: LAYER(input)


WAYS = ["module", "closure", "default", "partial", "method of an object", "global"]


@pytest.mark.parametrize("how", WAYS)
def test_a_parameter_that_requires_grad_is_refused_by_name_in_grad_mode_only(make, device, how):
    global LAYER
    LAYER = nn.Linear(4, 4).to(device.torch_device).eval()
    fn = reaching(LAYER, how)
    inputs = {"input": Input(0, 0.0)}
    runner = make(fn, inputs, [4])
    for n in LENGTHS:
        x = torch.randn(n, 4, device=device.torch_device)
        with pytest.raises(InputError, match=r"weight requires grad while grad mode is on.*inference_mode\(\)"):
            runner(input=x)
        with torch.no_grad():
            assert close(runner(input=x), LAYER(x))
    LAYER.requires_grad_(False)
    for n in LENGTHS:
        x = torch.randn(n, 4, device=device.torch_device)
        assert close(runner(input=x), LAYER(x))
    LAYER.bias.requires_grad_()
    with pytest.raises(InputError, match="bias requires grad"):
        runner(input=torch.randn(3, 4, device=device.torch_device))


def test_a_tensor_of_a_closure_that_requires_grad_is_refused(make, model):
    scale = torch.ones(4, device=model.device, requires_grad=True)
    runner = make(lambda x: x * scale, {"x": Input(0, 0.0)}, [4])
    with pytest.raises(InputError, match=r"<lambda>: scale requires grad"):
        runner(model.x(3))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.Dropout, Noisy])
@pytest.mark.parametrize("how", WAYS)
def test_a_submodule_that_goes_into_training_mode_after_the_capture_is_refused_at_every_call(make, device, kind, how):
    global LAYER
    noisy = kind(4) if kind is nn.BatchNorm1d else kind()
    LAYER = nn.Sequential(nn.Linear(4, 4), noisy).to(device.torch_device).eval().requires_grad_(False)
    runner = make(reaching(LAYER, how), {"input": Input(0, 0.0)}, [4])
    for n in LENGTHS:
        x = torch.randn(n, 4, device=device.torch_device)
        assert close(runner(input=x), LAYER(x))
    LAYER[1].train()
    for n in LENGTHS:
        with pytest.raises(UsageError, match=rf"{kind.__name__} .*is in training mode.*\.eval\(\)"):
            runner(input=torch.randn(n, 4, device=device.torch_device))
    LAYER.eval()
    x = torch.randn(3, 4, device=device.torch_device)
    assert close(runner(input=x), LAYER(x)) and runner.stats.replayed == 2


@pytest.mark.parametrize("n", [3, 99])
def test_a_model_in_training_mode_is_refused_at_the_first_call(make, device, n):
    layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device.torch_device).requires_grad_(False)
    with pytest.raises(UsageError, match=r"BatchNorm1d '.*<lambda>: layer.1' is in training mode"):
        make(lambda x: layer(x), {"x": Input(0, 0.0)}, [4])(torch.randn(n, 4, device=device.torch_device))


def test_a_layer_without_a_mode_may_be_left_as_it_was_made(make, device):
    layer = nn.Linear(4, 4).to(device.torch_device).requires_grad_(False)
    runner = make(lambda x: layer(x), {"x": Input(0, 0.0)}, [4])
    for n in LENGTHS:
        x = torch.randn(n, 4, device=device.torch_device)
        assert close(runner(x), layer(x))


def test_a_global_with_the_name_of_an_attribute_is_not_taken_for_reached(make, device):
    class Box:
        layer = nn.Linear(4, 4).to(device.torch_device).requires_grad_(False)

    space = {"Box": Box, "layer": nn.Dropout()}
    exec("def fn(x):\n    return Box.layer(x)", space)
    x = torch.randn(3, 4, device=device.torch_device)
    assert close(make(space["fn"], {"x": Input(0, 0.0)}, [4])(x), Box.layer(x))


FRESH = {
    "GELU": nn.GELU,
    "Identity": nn.Identity,
    "Sequential": lambda: nn.Sequential(nn.SiLU(), nn.LayerNorm(4)),
}


@pytest.mark.parametrize("fresh", FRESH)
def test_a_fresh_layer_whose_mode_makes_no_difference_may_be_put_into_a_model(make, device, fresh):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device.torch_device).eval().requires_grad_(False)
    runner = make(model, {"input": Input(0, 0.0)}, [4])
    for n in LENGTHS:
        runner(torch.randn(n, 4, device=device.torch_device))
    model[1] = FRESH[fresh]().to(device.torch_device).requires_grad_(False)
    assert model[1].training
    runner.recapture()
    for n in LENGTHS:
        x = torch.randn(n, 4, device=device.torch_device)
        assert close(runner(x), model(x))
    assert runner.stats.replayed >= 1
    model[1] = nn.Dropout()
    with pytest.raises(UsageError, match=r"Dropout '1' is in training mode"):
        runner.recapture()


def drops(module, x):
    return nn.functional.dropout(x, 0.5, module.training)


class ByAHelper(nn.Module):
    """Hands itself to a function that looks at its mode."""

    def forward(self, x):
        return drops(self, x)


def test_a_layer_whose_helper_looks_at_its_mode_is_refused_in_training_mode(make, device):
    model = nn.Sequential(ByAHelper()).to(device.torch_device).eval()
    model[0].train()
    with pytest.raises(UsageError, match=r"ByAHelper '.*0' is in training mode"):
        make(model, {"input": Input(0, 0.0)}, [4])(torch.randn(3, 4, device=device.torch_device))
