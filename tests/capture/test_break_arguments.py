"""What a break was given at capture: a replay gives it what eager would, or says by name that it can't."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue.devices import Device
from segue.runner import GraphRunner, Input

pytestmark = pytest.mark.usefixtures("inference")
Change = Callable[[Any], object]


@segue.break_point
def scaled(y: Tensor, w: Tensor) -> Tensor:
    return y * w


@segue.break_point
def first_of(y: Tensor, given: Any) -> Tensor:
    return y * given[0] * len(given)


class Attn(torch.nn.Module):
    """A module whose method is a break, and which holds no tensor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    @segue.break_point
    def core(self, y: Tensor) -> Tensor:
        return y * self.factor


class Pool:
    """A plain object of an engine's, as a KV cache's manager is."""

    def __init__(self, kv: Tensor) -> None:
        self.kv = kv


@segue.break_point
def with_pool(y: Tensor, pool: Pool) -> Tensor:
    return y + pool.kv


class Net(torch.nn.Module):
    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((2,), 2.0, device=place), requires_grad=False)
        self.caches = [torch.full((2,), 3.0, device=place)]
        self.tables = {"k": torch.full((2,), 4.0, device=place)}
        self.attn, self.pool = Attn(5.0), Pool(torch.full((2,), 6.0, device=place))
        self.lengths = [2, 3]
        self.unused = torch.ones(2, device=place)

    def forward(self, x: Tensor) -> Tensor:
        y = scaled(x * 1, self.w)
        y = scaled(y * 1, self.caches[0])
        y = scaled(y * 1, self.tables["k"])
        y = first_of(y * 1, self.caches)
        y = first_of(y * 1, self.lengths)
        return with_pool(self.attn.core(y * 1), self.pool) * 1


@pytest.fixture
def net(device: Device) -> Net:
    return Net(device.torch_device).eval()


@pytest.fixture
def runner(device: Device, net: Net) -> GraphRunner:
    """A runner of ``net`` with a captured bucket."""
    made = GraphRunner(net, inputs={"x": Input(0, 0.0)}, buckets=[4], device=device, pool=device.new_pool(), progress=False)
    x = torch.ones(3, 2, device=device.torch_device)
    for _ in range(3):
        assert torch.equal(made(x), net(x))
    assert made.stats.replayed == 1
    return made


def _other(t: Tensor) -> Tensor:
    return torch.full_like(t, 9.0)


def _set(obj: Any, name: str, value: Any) -> None:
    setattr(obj, name, value)


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("w", lambda n: _set(n, "w", torch.nn.Parameter(_other(n.w), requires_grad=False))),
        ("w", lambda n: n.load_state_dict({"w": _other(n.w)}, assign=True)),
        ("w", lambda n: _set(n.w, "data", _other(n.w))),
        ("caches", lambda n: n.caches.__setitem__(0, _other(n.w))),
        ("lengths", lambda n: _set(n, "lengths", [1])),
        ("tables", lambda n: n.tables.update(k=_other(n.w))),
        ("caches", lambda n: n.caches.append(_other(n.w))),
        ("lengths", lambda n: n.lengths.append(1)),
        ("lengths", lambda n: n.lengths.__setitem__(0, 7)),
        ("attn", lambda n: _set(n, "attn", Attn(7.0).eval())),
        ("pool", lambda n: _set(n, "pool", Pool(_other(n.w)))),
        ("core", lambda n: _set(n.attn, "core", lambda y: y * 8)),
    ],
)
def test_what_a_break_was_given_is_named_when_its_holder_has_another(
    device: Device, net: Net, runner: GraphRunner, named: str, change: Change
) -> None:
    change(net)
    x = torch.ones(3, 2, device=device.torch_device)
    with pytest.raises(segue.ReplayError, match=rf"Net\.(attn\.)?{named}\b.*recapture\(\)"):
        runner(x)
    runner.recapture()
    for _ in range(3):
        assert torch.equal(runner(x), net(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda n: n.w.fill_(9.0),
        lambda n: n.load_state_dict({"w": _other(n.w)}),
        lambda n: _set(n.pool, "kv", _other(n.w)),
        lambda n: _set(n.attn, "factor", 9.0),
        lambda n: _set(n, "unused", _other(n.w)),
        lambda n: _set(n, "w", n.w),
    ],
)
def test_what_a_break_sees_by_itself_is_followed(device: Device, net: Net, runner: GraphRunner, change: Change) -> None:
    change(net)
    x = torch.ones(2, 2, device=device.torch_device)
    replayed = runner.stats.replayed
    assert torch.equal(runner(x), net(x))
    assert runner.stats.replayed == replayed + 1


def test_a_break_whose_method_or_name_stands_for_another_function_is_named(
    device: Device, net: Net, runner: GraphRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(3, 2, device=device.torch_device)
    lone = segue.BreakableCapture(device=device)
    with lone:
        out = net(x)
    changes = {
        r"Attn\.core": lambda patch: patch.setattr(Attn, "core", segue.break_point(lambda self, y: y)),
        "core": lambda patch: patch.setitem(vars(net.attn), "core", lambda y: y),
    }
    for named, change in changes.items():
        with monkeypatch.context() as patch:
            change(patch)
            with pytest.raises(segue.ReplayError, match=rf"{named}.*recapture\(\)"):
                runner(x)
            with pytest.raises(segue.ReplayError, match=rf"{named} was replaced since the capture, and break Attn.core"):
                lone.replay()
    assert torch.equal(runner(x), net(x))
    lone.replay()
    assert torch.equal(out, net(x))


def test_a_break_of_a_lone_capture_whose_name_stands_for_another_function_is_named(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(2, device=device.torch_device)
    lone = segue.BreakableCapture(device=device)
    with lone:
        scaled(x * 1, x)
    monkeypatch.setitem(globals(), "scaled", lambda y, w: y)
    with pytest.raises(segue.ReplayError, match="scaled was replaced since the capture, and break scaled"):
        lone.replay()


def test_a_list_of_a_lone_capture_is_followed(device: Device) -> None:
    x, ws = torch.ones(2, device=device.torch_device), [torch.full((2,), 2.0, device=device.torch_device)]
    lone = segue.BreakableCapture(device=device)
    with lone:
        out = first_of(x * 1, ws) * 1
    ws[:] = [x * 7, x, x]
    lone.replay()
    assert out.tolist() == [21.0, 21.0]


def test_a_lone_captures_argument_that_was_given_other_memory_is_named(device: Device) -> None:
    x, w = torch.ones(2, device=device.torch_device), torch.full((2,), 2.0, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = scaled(x * 1, w) * 1
    w.fill_(3)
    capture.replay()
    assert out.tolist() == [3.0, 3.0]
    w.data = torch.ones(2, device=device.torch_device)
    with pytest.raises(segue.ReplayError, match=r"break scaled .* as 'w'.*other memory than at capture"):
        capture.replay()


def test_a_destination_that_was_given_other_memory_is_named(device: Device) -> None:
    x, dst = torch.ones(2, device=device.torch_device), torch.zeros(2, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        segue.break_here(lambda y: y + 1, dst, x * 1)
    dst.data = torch.zeros(2, device=device.torch_device)
    with pytest.raises(segue.ReplayError, match="the destination"):
        capture.replay()


def test_a_list_that_the_forward_goes_on_to_fill_is_what_it_was_at_each_break(device: Device) -> None:
    x = torch.ones(2, device=device.torch_device)
    w = torch.full((2,), 2.0, device=device.torch_device)

    def forward(x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for _ in range(3):
            kept.append(w)
            x = first_of(x * 1, kept)
        return x * 1

    capture = segue.BreakableCapture(device=device)
    with capture:
        out = forward(x)
    capture.replay()
    assert torch.equal(out, forward(x))


def _keeping(keep: dict[str, Any], give: Callable[[Any], Any]) -> Any:
    @segue.break_point
    def make(y: Tensor) -> Tensor:
        keep["t"] = give(y * 10)
        return y + 1

    return make


def test_a_tensor_that_a_break_makes_and_keeps_is_refused_where_a_graph_or_a_break_takes_it(device: Device) -> None:
    keep: dict[str, Any] = {}
    make, make_object = _keeping(keep, lambda t: t), _keeping(keep, lambda t: [SimpleNamespace(t=t[:1])])
    takers = {
        "aten.add.Tensor": lambda x: make(x * 2) + keep["t"],
        r"break scaled .* as 'w'": lambda x: scaled(make(x * 2) * 1, keep["t"]) * 1,
        r"break first_of .* as 'given\[0\]'": lambda x: first_of(make(x * 2), [keep["t"]]) * 1,
        r"break with_pool .* as 'pool'": lambda x: with_pool(make(x * 2), Pool(keep["t"])) * 1,
        "aten.sum.default": lambda x: make_object(x * 2) * keep["t"][0].t.sum(),
    }
    for name, forward in takers.items():
        x = torch.ones(4, 2, device=device.torch_device)
        with (
            pytest.raises(segue.CaptureError, match=rf"{name} at .*a break made during the capture and didn't hand on"),
            segue.BreakableCapture(device=device),
        ):
            forward(x)
        lazy = GraphRunner(forward, inputs={"x": Input(0, 0.0)}, buckets=[4], device=device, pool=device.new_pool())
        lazy(x)
        with pytest.raises(segue.CaptureError, match=name):
            lazy(x)


def test_memory_that_was_there_before_the_breaks_is_no_break_of_theirs(device: Device) -> None:
    place = device.torch_device
    registry = {"kv": torch.full((4, 2), 2.0, device=place)}
    found: dict[str, Tensor] = {}

    @segue.break_point
    def look_up(y: Tensor) -> Tensor:
        found["view"] = registry["kv"][:2]
        return y + 1

    def forward(x: Tensor) -> Tensor:
        y = look_up(x * 2)
        return scaled(y * 1, found["view"]) + found["view"]

    x = torch.ones(2, 2, device=place)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = forward(x)
    registry["kv"].fill_(5)
    capture.replay()
    assert torch.equal(out, forward(x))


def test_a_cache_that_a_break_makes_once_is_no_fault_after_a_first_forward(device: Device) -> None:
    place, kept = device.torch_device, {}

    @segue.break_point
    def ensure(y: Tensor) -> Tensor:
        if "kv" not in kept:
            kept["kv"] = torch.zeros(4, 2, device=place)
        return y

    def forward(x: Tensor) -> Tensor:
        return scaled(ensure(x * 1) * 1, kept["kv"] + 1) * kept["kv"].add(1)

    runner = GraphRunner(forward, inputs={"x": Input(0, 0.0)}, buckets=[4], device=device, pool=device.new_pool())
    x = torch.ones(4, 2, device=place)
    for k in range(4):
        assert torch.equal(runner(x), forward(x)), k
        kept["kv"].fill_(k)
    assert runner.stats.replayed == 2
