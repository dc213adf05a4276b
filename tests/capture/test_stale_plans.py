"""A tensor that an earlier run made from its input and kept is refused as an operand; tables and state are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from runner.rows import close
from segue.capture.allocations import Allocations, made_from_input
from segue.check import tiny_trunk
from segue.devices import Device
from segue.errors import CaptureError
from segue.runner import GraphRunner, Input

pytestmark = pytest.mark.usefixtures("inference")
INPUTS = {"x": Input(0, 0.0), "lens": Input()}


@segue.break_point(trim=("x",))
def mix(x: Tensor) -> Tensor:
    return x + x.mean(0)


@segue.break_point(token_dim=None)
def doubled(lens: Tensor) -> Tensor:
    return lens * 2


@segue.break_point
def shifted(x: Tensor, by: Tensor) -> Tensor:
    return x + by.sum()


class Model:
    """``plan`` makes what is kept under the number of rows."""

    def __init__(self, plan: Any, device: Device, use: Any = None) -> None:
        self.plan, self.kept = plan, {}
        self.weight = torch.ones(2, 2, device=device.torch_device)
        self.use = use or (lambda m, x, p: x + p.sum())

    def __call__(self, x: Tensor, lens: Tensor) -> Tensor:
        key = x.shape[0]
        if key not in self.kept:
            self.kept[key] = self.plan(self, x, lens)
        return self.use(self, mix(x @ self.weight), self.kept[key]) * 2


def _runner(fn: Any, device: Device, **options: Any) -> GraphRunner:
    return GraphRunner(fn, inputs=INPUTS, buckets=[4, 8], device=device, pool=device.new_pool(), progress=False, **options)


def _call(device: Device, n: int = 3, value: float = 1.0) -> tuple[Tensor, Tensor]:
    x = torch.arange(float(n * 2), device=device.torch_device).view(n, 2)
    return x, torch.tensor([value, 2.0], device=device.torch_device)


def _copied(m: Model, x: Tensor, lens: Tensor) -> Tensor:
    out = torch.empty_like(lens)
    out.copy_(lens)
    return out


FROM_INPUTS = {
    "an op": lambda m, x, lens: lens * 10,
    "ops": lambda m, x, lens: (m.weight @ (lens + 1)).exp(),
    "a view": lambda m, x, lens: lens[1:],
    "indices": lambda m, x, lens: m.weight.index_select(0, lens.long() - 1),
    "a copy": _copied,
    "the other input": lambda m, x, lens: x.mean(0),
    "a break": lambda m, x, lens: doubled(lens) + 1,
}


@pytest.mark.parametrize("plan", FROM_INPUTS.values(), ids=FROM_INPUTS)
def test_a_tensor_kept_from_an_earlier_runs_input_is_refused_by_name(device: Device, plan: Any) -> None:
    said = r"Model\.kept\[\d\], used by aten.* at capture/test_stale_plans\.py:\d+ in .*, was made from an input by an earlier"
    runner = _runner(Model(plan, device), device)
    runner(*_call(device))
    with pytest.raises(CaptureError, match=said):
        runner(*_call(device, value=5.0))
    with pytest.raises(CaptureError, match=said):
        _runner(Model(plan, device), device).capture(*_call(device))


def test_a_plan_that_another_bucket_or_runner_made_is_refused_too(device: Device) -> None:
    class Once(Model):
        def __call__(self, x: Tensor, lens: Tensor) -> Tensor:
            if not self.kept:
                self.kept["plan"] = lens * 10
            return mix(x) + self.kept["plan"].sum()

    model = Once(None, device)
    _runner(model, device)(*_call(device))
    other = _runner(model, device)
    other(*_call(device, 7))
    with pytest.raises(CaptureError, match=r"Once\.kept\['plan'\]"):
        other(*_call(device, 7))


def test_a_breaks_argument_that_was_kept_is_refused(device: Device) -> None:
    runner = _runner(Model(lambda m, x, lens: lens * 10, device, lambda m, x, p: shifted(x, p)), device)
    runner(*_call(device))
    with pytest.raises(CaptureError, match=r"argument 'by' was made from an input by an earlier run"):
        runner(*_call(device))


FROM_CONSTANTS = {
    "arange": lambda m, x, lens: torch.arange(x.shape[0], device=x.device) * 1.0,
    "a weight": lambda m, x, lens: m.weight.t().contiguous(),
    "zeros_like": lambda m, x, lens: torch.zeros_like(x) + 1,
    "new_full": lambda m, x, lens: lens.new_full((2,), 3.0),
    "full_like": lambda m, x, lens: torch.full_like(lens, 3.0) @ m.weight,
    "a view of a table": lambda m, x, lens: m.weight.expand_as(m.weight)[: x.shape[1]],
}


@pytest.mark.parametrize("plan", FROM_CONSTANTS.values(), ids=FROM_CONSTANTS)
def test_tables_of_constants_and_weights_replay(device: Device, plan: Any) -> None:
    runner, eager = _runner(Model(plan, device), device), Model(plan, device)
    runner.capture(*_call(device))
    for n in (4, 8, 4):
        assert close(runner(*_call(device, n)), eager(*_call(device, n)))
    assert runner.stats.replayed == 3


def _in_place(m: Model, x: Tensor, p: Tensor) -> Tensor:
    p.mul_(0.5).add_(x.sum(0))
    return x + p


def _workspace(m: Model, x: Tensor, p: Tensor) -> Tensor:
    p.copy_(x)
    return p + 1


@pytest.mark.parametrize(
    ("plan", "use"),
    [
        (lambda m, x, lens: lens.clone(), _in_place),
        (lambda m, x, lens: x.clone(), _workspace),
        (lambda m, x, lens: lens.clone(), lambda m, x, p: shifted(x, p.copy_(x.sum(0)))),
    ],
    ids=["state", "workspace", "workspace of a break"],
)
def test_state_and_workspaces_that_the_graph_writes_replay(device: Device, plan: Any, use: Any) -> None:
    runner, eager = _runner(Model(plan, device, use), device), Model(plan, device, use)
    for n, value in ((4, 1.0), (4, 3.0), (8, 1.0), (8, 2.0), (4, 7.0), (8, 3.0)):
        assert close(runner(*_call(device, n, value)), eager(*_call(device, n, value)))
    assert runner.stats.replayed == 2


def test_a_buffer_written_in_place_by_every_forward_replays(device: Device) -> None:
    class Holds(Model):
        def __call__(self, x: Tensor, lens: Tensor) -> Tensor:
            self.weight[0].copy_(lens)
            return mix(x) @ self.weight

    runner, eager = _runner(Holds(None, device), device), Holds(None, device)
    for value in (1.0, 2.0, 3.0, 4.0):
        assert close(runner(*_call(device, 4, value)), eager(*_call(device, 4, value)))
    assert runner.stats.replayed == 2


class Planned(tiny_trunk.Dense):
    plan: Any = None

    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        if self.plan is None:
            self.plan = self.make(x, cu_seqlens)
        return super().forward(x, cu_seqlens, cache) + self.plan.sum()

    def make(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return cu_seqlens * 2.0


class Table(Planned):
    def make(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return torch.arange(x.shape[0], device=x.device) * 0.5


class Looks(Planned):
    """A view of the graph's own input, which every run fills anew."""

    def make(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return cu_seqlens[:1]


def _trunk(kind: type[Planned], device: Device) -> Planned:
    torch.manual_seed(1)
    return kind().to(device.torch_device).eval().requires_grad_(False)


def test_a_prime_graphs_plan_is_refused_and_its_table_is_not(device: Device) -> None:
    with pytest.raises(CaptureError, match=r"Prime\.trunk\.plan, used by .* was made from an input by an earlier run"):
        segue.PrimeGraph(_trunk(Planned, device), 16, device=device, cuts=[])
    for kind in (Table, Looks):
        trunk = _trunk(kind, device)
        prime = segue.PrimeGraph(trunk, 16, device=device, cuts=[])
        for n in (5, 9, 3):
            ids = torch.arange(n, device=device.torch_device)
            assert torch.equal(prime.run(ids, trunk.new_cache(16)).logits, prime.reference(ids).logits)


def test_nothing_is_remembered_of_memory_that_has_gone(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    with Allocations([x]) as made:
        kept, gone = x * 2, x * 3
    del gone
    made.keep(but=[x])
    assert made_from_input(kept) is not None and made_from_input(x) is None
    Allocations().keep()
    assert made_from_input(kept[1:]) is not None and made_from_input(torch.ones(4)) is None
