"""Copies of what owns graphs: a runner's runs the copied function without graphs, everything else says what to do."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import segue
from segue.check import tiny_trunk
from segue.devices import Device


class Holder(nn.Module):
    """A module that holds the runner of its own forward."""

    def __init__(self, device: Device, **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device=device.torch_device)
        self.runner = segue.GraphRunner(self.body, {"x": segue.Input(0, 0.0)}, [4, 8], device=device, progress=False, **options)
        self.eval()

    def body(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.runner(x)
        return answer


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("captured", [False, True])
def test_a_copied_modules_runner_runs_the_copy(device: Device, captured: bool) -> None:
    model = Holder(device, verify_every=0, max_padding=7, on_failure="eager", outputs="copy")
    x = torch.randn(3, 4, device=device.torch_device)
    for _ in range(3 if captured else 0):
        model(x)
    twin = copy.deepcopy(model)
    twin.linear.weight.zero_()
    twin.linear.bias.fill_(2.0)
    before = model.runner.stats.captured, model.runner.stats.replayed
    for _ in range(3):
        assert twin(x).tolist() == [[2.0] * 4] * 3
    assert (twin.runner.stats.captured, twin.runner.stats.replayed) == (1, 1)
    assert (model.runner.stats.captured, model.runner.stats.replayed) == before
    torch.testing.assert_close(model(x), model.body(x))
    assert twin.runner.fn.__self__ is twin and twin.runner.admission.max_padding == 7


class Child(nn.Module):
    """Holds the runner of its parent's forward, so that the copy of the child meets a parent that holds the child."""

    runner: Any = None


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("start", ["parent", "child", "runner"])
def test_a_copy_may_begin_anywhere_in_a_cycle(device: Device, start: str) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, device=device.torch_device))
            self.child = Child()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    parent = Parent().eval()
    parent.child.runner = segue.GraphRunner(
        parent.forward, {"x": segue.Input(0, 0.0)}, [4], device=device, state=[parent.weight], progress=False
    )
    whole = {"parent": parent, "child": parent.child, "runner": parent.child.runner}[start]
    copied = copy.deepcopy(whole)
    runner = {"parent": lambda: copied.child.runner, "child": lambda: copied.runner, "runner": lambda: copied}[start]()
    twin = runner.fn.__self__
    assert twin is not parent and twin.child.runner is runner and runner.state[0] is twin.weight
    twin.weight.fill_(3.0)
    x = torch.ones(2, 4, device=device.torch_device)
    assert [runner(x).sum().item() for _ in range(3)] == [24.0] * 3 and runner.stats.replayed == 1


def _owners(device: Device) -> dict[str, Any]:
    capture = segue.BreakableCapture(device=device, name="capture of a test", root=_owners)
    x = torch.ones(4, device=device.torch_device)
    with torch.inference_mode(), capture:
        x + 1
    trunk = tiny_trunk.build(device.torch_device.type)
    return {
        "the runner of": Holder(device).runner,
        "capture of a test": capture,
        "prime graph of 8 rows": segue.PrimeGraph(trunk, bucket=8, device=device, cuts=[]),
    }


@pytest.mark.parametrize("owner", ["the runner of", "capture of a test", "prime graph of 8 rows"])
def test_what_owns_graphs_is_pickled_by_nobody_and_says_what_to_do(device: Device, owner: str) -> None:
    owned = _owners(device)[owner]
    model = nn.Linear(2, 2)
    model.extra = owned
    for save in (pickle.dumps, copy.copy, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(segue.UsageError, match=rf"^{owner}.* can't be copied or pickled: its graphs belong .* new "):
            save(owned)
    with pytest.raises(segue.UsageError, match=owner):
        torch.save(model, io.BytesIO())
    if owner != "the runner of":
        with pytest.raises(segue.UsageError, match=owner):
            copy.deepcopy(model)
    torch.save(model.state_dict(), io.BytesIO())


def test_a_runner_whose_strategies_may_hold_graphs_is_not_copied(device: Device) -> None:
    class Preferred(segue.runner.Breakable):
        name = "preferred"

    strategies = [Preferred(), segue.runner.Breakable()]
    with pytest.raises(segue.UsageError, match=r"the runner of .*Holder.body.* can't be copied.*\(preferred\) may hold graphs"):
        copy.deepcopy(Holder(device, strategies=strategies))


@pytest.mark.usefixtures("inference")
def test_what_a_runner_hands_out_is_copied_or_says_what_to_do(device: Device) -> None:
    runner = Holder(device, outputs="lease", max_padding=7).runner
    x = torch.ones(3, 4, device=device.torch_device)
    leases = [runner(x) for _ in range(3)]
    for copied in (copy.deepcopy, copy.copy, lambda o: pickle.loads(pickle.dumps(o))):
        assert copied(runner.stats) == runner.stats
        with pytest.raises(segue.UsageError, match=r"a lease can't be copied .* Copy lease\.value"):
            copied(leases[-1])
    assert dataclasses.asdict(runner.stats)["replayed"] == 1


def test_every_error_reaches_another_process(device: Device) -> None:
    for name in segue.__all__:
        kind = getattr(segue, name)
        if isinstance(kind, type) and issubclass(kind, segue.SegueError):
            sent = pickle.loads(pickle.dumps(kind("why")))
            assert type(sent) is kind and str(sent) == "why"
