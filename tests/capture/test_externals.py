"""Who owns what a graph reads: nothing dangles, nothing re-pointed goes unnoticed, nothing of another capture is read."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import segue
from segue.devices import Device

pytestmark = pytest.mark.usefixtures("inference")


@segue.break_point
def plus_one(y: Tensor) -> Tensor:
    return y + 1


class Model(nn.Module):
    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4, device=place), nn.Linear(4, 4, bias=False, device=place))
        self.register_buffer("table", torch.ones(4, device=place))
        self.cache = {"k": torch.ones(4, device=place)}
        self.unused = nn.Parameter(torch.ones(3, device=place))

    def forward(self, x: Tensor) -> Tensor:
        return plus_one(self.layer(x) * self.table) + self.cache["k"]


def _model(device: Device) -> Model:
    with torch.inference_mode(False), torch.no_grad():
        return Model(device.torch_device).requires_grad_(False)


def _captured(device: Device, model: Model) -> tuple[segue.BreakableCapture, Tensor, Tensor]:
    with torch.inference_mode(False):
        x = torch.ones(2, 4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device, root=model)
    with capture:
        out = model(x)
    return capture, x, out


def _swap_data(m: Model) -> None:
    m.layer[0].weight.data = m.layer[0].weight.data.clone()


def _new_parameter(m: Model) -> None:
    m.layer[1].weight = nn.Parameter(m.layer[1].weight.detach().clone(), requires_grad=False)


def _new_buffer(m: Model) -> None:
    m.table = m.table.clone()


def _new_cache(m: Model) -> None:
    m.cache["k"] = m.cache["k"].clone()


def _new_module(m: Model) -> None:
    m.layer[1] = nn.Linear(4, 4, bias=False, device=m.table.device)


def _cache_cleared(m: Model) -> None:
    m.cache = {"k": m.cache["k"].clone()}


def _gone(m: Model) -> None:
    m.table = None


def _freed(m: Model) -> None:
    m.layer[0].bias.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_swap_data, "layer.0.weight"),
        (_new_parameter, "layer.1.weight"),
        (_new_buffer, "table"),
        (_new_cache, r"cache\['k'\]"),
        (_gone, "table"),
        (_cache_cleared, r"\.cache was replaced"),
        (_new_module, r"layer\.1 was replaced"),
        (_freed, "layer.0.bias"),
    ],
)
def test_a_tensor_that_was_re_pointed_is_named_before_anything_is_written(
    device: Device, change: Callable[[Model], None], name: str
) -> None:
    model = _model(device)
    capture, x, out = _captured(device, model)
    before = out.clone()
    with torch.inference_mode(False), torch.no_grad():
        change(model)
    x.fill_(5)
    with pytest.raises(segue.SegueError, match=name):
        capture.replay()
    assert torch.equal(out, before)


@pytest.mark.parametrize("change", [_swap_data, _new_cache])
def test_with_overlap_nothing_but_the_first_segment_has_run_when_something_was_re_pointed(
    device: Device, change: Callable[[Model], None]
) -> None:
    """The first of the two uses layer 0, the second the cache."""
    model = _model(device)
    with torch.inference_mode(False):
        x, kept = (torch.ones(2, 4, device=device.torch_device) for _ in range(2))
    ran = []

    @segue.break_point
    def keep(y: Tensor) -> Tensor:
        ran.append(1)
        return kept.copy_(y)

    def forward() -> Tensor:
        return keep(model.layer[0](x)) * model.cache["k"] * 1

    capture = segue.BreakableCapture(device=device, root=forward, defer_checks=True)
    with capture:
        out = forward()
    x.fill_(2)
    capture.replay()
    assert torch.equal(out, model.layer[0](x) * model.cache["k"])
    before = kept.clone()
    with torch.inference_mode(False), torch.no_grad():
        change(model)
    x.fill_(5)
    for _ in range(2):
        with pytest.raises(segue.SegueError, match="has other memory than at capture"):
            capture.replay()
    assert torch.equal(kept, before) and len(ran) == 2


def test_with_overlap_a_first_segment_that_writes_something_waits_for_the_whole_look(device: Device) -> None:
    model = _model(device)
    with torch.inference_mode(False):
        x, state = (torch.ones(2, 4, device=device.torch_device) for _ in range(2))

    @segue.break_point
    def on(y: Tensor) -> Tensor:
        return y + 1

    def forward() -> Tensor:
        state.add_(x)
        return on(x * 2) * model.cache["k"]

    capture = segue.BreakableCapture(device=device, root=forward, defer_checks=True)
    with capture:
        forward()
    before = state.clone()
    _new_cache(model)
    with pytest.raises(segue.SegueError, match=r"cache\['k'\]"):
        capture.replay()
    assert torch.equal(state, before)


def test_an_in_place_update_simply_works_and_unused_parameters_may_change(device: Device) -> None:
    model = _model(device)
    capture, _, out = _captured(device, model)
    with torch.inference_mode(False), torch.no_grad():
        model.layer[0].weight.copy_(torch.full((4, 4), 2.0))
        model.unused.data = torch.zeros(3, device=device.torch_device)
    capture.replay()
    with torch.inference_mode(False), torch.no_grad():
        x = torch.ones(2, 4, device=device.torch_device)
        assert torch.equal(out, model(x))


def test_what_a_graph_reads_stays_alive_though_nobody_else_holds_it(device: Device) -> None:
    x = torch.ones(1024, device=device.torch_device)
    memo = [torch.full((1024,), 3.0, device=device.torch_device)]
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = plus_one(x * memo[0]) * 1
    memo.clear()
    gc.collect()
    churn = [torch.full((1024,), float("nan"), device=device.torch_device) for _ in range(64)]
    x.fill_(2)
    capture.replay()
    assert out.tolist() == [7.0] * 1024
    assert all(t.isnan().all() for t in churn)


def test_an_unnamed_tensor_that_was_re_pointed_is_noticed_while_it_lives(device: Device) -> None:
    with torch.inference_mode(False):
        x, w = torch.ones(4, device=device.torch_device), torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        x * w
    w.data = torch.zeros(4, device=device.torch_device)
    with pytest.raises(segue.SegueError, match=r"a tensor \(4,\) torch.float32, used by .*test_externals.py"):
        capture.replay()


def test_a_segment_that_reads_the_context_is_refused_when_the_tensor_there_is_another_one(device: Device) -> None:
    def ctx(value: float) -> SimpleNamespace:
        return SimpleNamespace(meta=SimpleNamespace(bias=torch.full((4,), value, device=device.torch_device)))

    x, first = torch.ones(4, device=device.torch_device), ctx(1.0)
    capture = segue.BreakableCapture(device=device)
    with segue.active_forward(first), capture:
        out = x + segue.current_forward_ctx().meta.bias
    first.meta.bias.fill_(5)
    with segue.active_forward(first):
        capture.replay()
    assert out.tolist() == [6.0] * 4
    with segue.active_forward(ctx(2.0)), pytest.raises(segue.SegueError, match=r"ctx\.meta\.bias is another tensor"):
        capture.replay()
    with pytest.raises(segue.SegueError, match=r"ctx\.meta\.bias is another tensor"):
        capture.replay()


def test_a_view_of_a_context_tensor_made_outside_the_break_is_refused_when_the_tensor_is_another_one(device: Device) -> None:
    @segue.break_point
    def add(y: Tensor, bias: Tensor) -> Tensor:
        return y + bias

    def ctx() -> SimpleNamespace:
        return SimpleNamespace(bias=torch.ones(8, device=device.torch_device))

    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with segue.active_forward(ctx()), capture:
        add(x * 2, segue.current_forward_ctx().bias[:4])
    with segue.active_forward(ctx()), pytest.raises(segue.SegueError, match=r"ctx\.bias is another tensor"):
        capture.replay()


def test_another_captures_output_in_the_same_pool_is_refused_as_an_operand_and_as_an_argument(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    first = segue.BreakableCapture(device=device, name="bucket 16")
    with first:
        out = x * 2
    second = segue.BreakableCapture(device=device, name="bucket 8")
    with pytest.raises(segue.SegueError, match=r"bucket 8.*bucket 16 made it"), second:
        out + 1
    third = segue.BreakableCapture(device=device, name="bucket 8")
    with pytest.raises(segue.SegueError, match=r"argument 'y' of a break.*bucket 16 made it"), third:
        plus_one(out)
    other = segue.BreakableCapture(pool=device.new_pool())
    with other:
        fine = out + 1
    assert fine.tolist() == [3.0] * 4


def test_a_memo_that_the_next_capture_replaces_does_not_dangle(device: Device) -> None:
    memo: dict[str, Tensor] = {}

    def forward(x: Tensor) -> Tensor:
        if memo.get("n") is None or memo["n"].shape != x.shape:
            memo["n"] = torch.full(x.shape, float(x.shape[0]), device=x.device)
        return plus_one(x * memo["n"]) * 1

    runs = {}
    for b in (16, 8):
        x = torch.ones(b, device=device.torch_device)
        forward(x)  # the warm-up makes the memo, outside the graph
        capture = segue.BreakableCapture(rows=b, device=device)
        with capture:
            out = forward(x)
        runs[b] = capture, x, out
    gc.collect()
    churn = [torch.full((16,), float("nan"), device=device.torch_device) for _ in range(64)]
    for b in (16, 8, 16):
        capture, x, out = runs[b]
        x.fill_(2)
        capture.pool.poison()
        capture.replay()
        assert out.tolist() == [2.0 * b + 1] * b
    del churn


def test_externals_tell_what_segments_read_and_write(device: Device) -> None:
    x, state = torch.ones(4, device=device.torch_device), torch.zeros(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        state.add_(x * 2)
        state.add_(1)
    by_pointer = {e.tensor.data_ptr(): e for e in capture.externals}
    assert by_pointer[state.data_ptr()].written and not by_pointer[x.data_ptr()].written
    assert "test_externals.py" in by_pointer[x.data_ptr()].where
    assert state.tolist() == [3.0] * 4
    capture.replay()
    assert state.tolist() == [6.0] * 4


W = torch.ones(4)


class _Box:
    pass


class _Slots:
    __slots__ = ("w",)


class _Class:
    w = torch.ones(4)


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._w = torch.ones(4)


BOX, SLOTS, INNER, MODULE = _Box(), _Slots(), _Box(), _Module()
BOX.w, SLOTS.w, INNER.w = torch.ones(4), torch.ones(4), torch.ones(4)  # type: ignore[attr-defined]
BOX.inner = INNER  # type: ignore[attr-defined]
NESTED: Any = [[[[[BOX]]]]]


def _helper(x: Tensor) -> Tensor:
    return x * W


@pytest.mark.parametrize(
    ("forward", "holder", "name"),
    [
        (lambda x: x * W, None, "W"),
        (lambda x: _helper(x), None, "W"),
        (lambda x: sum(x * W for _ in range(2)), None, "W"),
        (lambda x: x * BOX.w, BOX, "w"),  # type: ignore[attr-defined]
        (lambda x: x * SLOTS.w, SLOTS, "w"),
        (lambda x: x * _Class.w, _Class, "w"),
        (lambda x: x * MODULE._w, MODULE, "_w"),
        (lambda x: x * BOX.inner.w * len(NESTED), INNER, "w"),  # type: ignore[attr-defined]
        (lambda x: x * len(NESTED) * BOX.inner.w, INNER, "w"),  # type: ignore[attr-defined]
    ],
    ids=[
        "a global", "a global of a helper", "a global in a comprehension", "an object", "slots", "a class",
        "a module's private attribute", "near, then deep", "deep, then near",
    ],
)
def test_a_tensor_replaced_behind_a_global_name_is_noticed(
    forward: Callable[[Tensor], Tensor], holder: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(4)
    capture = segue.BreakableCapture(device="emulator", root=forward)
    with capture:
        forward(x)
    capture.replay()
    if holder is None:
        monkeypatch.setitem(globals(), name, torch.zeros(4))
    else:
        monkeypatch.setattr(holder, name, torch.zeros(4))
    with pytest.raises(segue.SegueError, match=name):
        capture.replay()


def test_what_is_made_anew_at_each_look_hides_nothing(device: Device) -> None:
    """An attribute's value that dies at once gives its id to the next one, which then seemed to be known already."""
    behind: dict[Any, Any] = {}

    class Door:
        __slots__ = ("door",)

        def __getattribute__(self, name: str) -> Any:
            return SimpleNamespace(inner=behind[self]) if name == "door" else object.__getattribute__(self, name)

    doors = [Door() for _ in range(9)]
    behind.update((door, SimpleNamespace(w=torch.ones(4, device=device.torch_device))) for door in doors)
    x = torch.ones(4, device=device.torch_device)

    def forward() -> None:
        for door in doors:
            x.mul_(door.door.inner.w)

    with segue.BreakableCapture(device=device, root=forward) as capture:
        forward()
    assert sum(name.endswith("inner.w") for name, _ in capture._program.externals.named) == 9


class Worker(nn.Module):
    """Keeps a workspace, which grows with the longest call."""

    def __init__(self, place: torch.device, where: str) -> None:
        super().__init__()
        self.ws, self.where = torch.zeros(8, 4, device=place), where

    def room(self, n: int) -> Tensor:
        if self.ws.shape[0] < n:
            with torch.inference_mode(False):
                self.ws = torch.zeros(n, 4, device=self.ws.device)
        return self.ws[:n]

    @segue.break_point
    def seen(self, y: Tensor) -> Tensor:
        return y + 1

    def forward(self, x: Tensor) -> Tensor:
        room = self.room(x.shape[0])
        if self.where == "added to":
            return self.seen(room.add_(x))
        if self.where == "read first":
            before = room * 1
            return self.seen(before + torch.mul(x, 2, out=room))
        torch.mul(x, 2, out=room)
        return self.seen(room * 3)


class Open(Worker):
    @segue.break_point
    def seen(self, y: Tensor) -> Tensor:
        return y + self.ws[: y.shape[0]]


@pytest.mark.parametrize("where", ["overwritten", "added to", "read first", "read by a break"])
def test_a_workspace_that_a_longer_call_grows_is_held_for_the_graphs_that_overwrite_it(device: Device, where: str) -> None:
    worker = (Open if where == "read by a break" else Worker)(device.torch_device, where).eval()
    runner = segue.GraphRunner(
        worker, {"x": segue.Input(0, 0.0)}, [8], device=device, pool=device.new_pool(), progress=False
    )
    x = torch.ones(8, 4, device=device.torch_device)
    for _ in range(3):
        runner(x)
    runner(torch.ones(32, 4, device=device.torch_device))
    assert runner.stats.eager == 1 and worker.ws.shape[0] == 32
    if where == "overwritten":
        for scale in (1, 5):
            assert torch.equal(runner(x * scale), x * scale * 6 + 1)
        assert runner.stats.replayed == 3
    else:
        with pytest.raises(segue.ReplayError, match=r"\.ws, used by .* has other memory"):
            runner(x)
    runner.close()


class Cache(nn.Module):
    """Its cache is allocated by whoever serves it, and read by others too."""

    def __init__(self, place: torch.device, reads: bool) -> None:
        super().__init__()
        self.cache, self.reads = torch.zeros(16, 4, device=place), reads

    def forward(self, x: Tensor) -> Tensor:
        rows = self.cache[: x.shape[0]]
        rows.copy_(x * 2)
        return plus_one(rows * 3 if self.reads else x)


@pytest.mark.parametrize("reads", [True, False])
def test_a_cache_that_is_allocated_anew_is_no_workspace(device: Device, reads: bool) -> None:
    net = Cache(device.torch_device, reads).eval()
    runner = segue.GraphRunner(
        net, {"x": segue.Input(0, 0.0)}, [8], device=device, pool=device.new_pool(), progress=False
    )
    x = torch.ones(8, 4, device=device.torch_device)
    for _ in range(3):
        runner(x)
    net.cache = torch.zeros(16, 4, device=device.torch_device)
    with pytest.raises(segue.ReplayError, match=r"\.cache, used by .* has other memory"):
        runner(x)
    assert not net.cache.any()
    runner.close()


def test_a_number_on_the_host_that_the_forward_makes_is_nothing_to_watch(device: Device) -> None:
    def forward(x: Tensor) -> Tensor:
        scale = torch.tensor(3.0, dtype=torch.float64, device="cpu")  # as dynamo makes one of each float, to guard on it
        return x * scale.mul_(1.0)

    with torch.inference_mode(False):
        x = torch.ones(2, 4, device=device.torch_device)
    with segue.BreakableCapture(device=device, root=forward) as capture:
        out = forward(x)
    capture.replay()
    assert torch.equal(out, x * 3.0)
    assert device.torch_device.type == "cpu" or [e.seen.device.type for e in capture.externals] == [device.torch_device.type]
