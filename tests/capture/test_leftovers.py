"""What a forward leaves behind in the user's objects is named at capture; what a break changes, or nothing, is not."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from runner.rows import close
from segue.check import tiny_trunk
from segue.devices import Device
from segue.errors import CaptureError, LeftBehindError, UsageError
from segue.runner import GraphRunner, Input

pytestmark = pytest.mark.usefixtures("inference")
TRACE: list[Any] = []
COUNT = 0


@segue.break_point(trim=("x",))
def mix(x: Tensor) -> Tensor:
    return x + x.mean(0)


def _runner(fn: Any, device: Device, buckets: Any = (4, 8), **options: Any) -> GraphRunner:
    inputs = options.pop("inputs", {"x": Input(0, 0.0)})
    return GraphRunner(fn, inputs=inputs, buckets=buckets, device=device, pool=device.new_pool(), progress=False, **options)


def _x(device: Device, n: int = 3) -> Tensor:
    return torch.arange(float(n * 2), device=device.torch_device).view(n, 2)


class Model(torch.nn.Module):
    """``act`` is what each forward does beside its answer."""

    total = 0

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act
        self.last: Any = None
        self.trace: list[Any] = []
        self.seen: deque[Any] = deque()
        self.n = self._hidden = 0
        self.notes: dict[str, Any] = {}
        self.register_buffer("kept", torch.zeros(1))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        y = mix(x * 2)
        self.act(self, x, y)
        return y + 1


def _store(m: Model, x: Tensor, y: Tensor) -> None:
    m.last = y * 3


def _store_input(m: Model, x: Tensor, y: Tensor) -> None:
    m.last = x


def _store_handoff(m: Model, x: Tensor, y: Tensor) -> None:
    m.notes["y"] = y


def _store_buffer(m: Model, x: Tensor, y: Tensor) -> None:
    m.kept = y.sum(0)


def _store_inside(m: Model, x: Tensor, y: Tensor) -> None:
    m.last = SimpleNamespace(y=[y * 2])


def _append(m: Model, x: Tensor, y: Tensor) -> None:
    m.trace.append(y * 2)


def _append_deque(m: Model, x: Tensor, y: Tensor) -> None:
    m.seen.append(x.shape[0])


def _append_global(m: Model, x: Tensor, y: Tensor) -> None:
    TRACE.append(x.shape[0])


def _count(m: Model, x: Tensor, y: Tensor) -> None:
    m.n += x.shape[0]


def _count_hidden(m: Model, x: Tensor, y: Tensor) -> None:
    m._hidden += 1


def _count_global(m: Model, x: Tensor, y: Tensor) -> None:
    global COUNT
    COUNT += 1


def _count_class(m: Model, x: Tensor, y: Tensor) -> None:
    Model.total += 1


FAULTS = [
    (_store, r"Model\.last \(a tensor \(8, 2\)\), set at capture/test_leftovers\.py:\d+ in _store\. .*Return a tensor as an"),
    (_store_input, r"Model\.last \(a tensor \(8, 2\)\)"),
    (_store_handoff, r"Model\.notes\['y'\] \(a tensor \(8, 2\)\)"),
    (_store_buffer, r"Model\.kept \(a tensor \(2,\)\)"),
    (_store_inside, r"Model\.last \(a SimpleNamespace with tensors\)"),
    (_append, r"Model\.trace\[1\] \(a tensor \(8, 2\)\)"),
    (_append_deque, r"Model\.seen\[1\] \(absent to 8\)"),
    (_append_global, r"TRACE\[\d\] \(absent to 8\)"),
    (_count, r"Model\.n \(8 to 16\), set at capture/test_leftovers\.py:\d+ in _count\. "),
    (_count_hidden, r"Model\._hidden \(1 to 2\)"),
    (_count_global, r"COUNT \(\d to \d\)"),
    (_count_class, r"Model\.total \(\d to \d\)"),
]


@pytest.mark.parametrize(("act", "text"), FAULTS, ids=lambda v: getattr(v, "__name__", ""))
def test_what_a_forward_leaves_behind_is_named_at_capture(device: Device, act: Any, text: str) -> None:
    said = f"bucket 8: the forward leaves something behind that a replay wouldn't: .*{text}"
    lazy = _runner(Model(act).to(device.torch_device), device, [8])
    lazy(_x(device))
    with pytest.raises(CaptureError, match=said):
        lazy(_x(device))
    with pytest.raises(CaptureError, match=said):
        _runner(Model(act).to(device.torch_device), device, [8]).capture(_x(device))


def _table(m: Model, x: Tensor, y: Tensor) -> None:
    """Filled at the warm-up of each bucket, and only read afterwards."""
    n = x.shape[0]
    if n not in m.notes:
        m.notes[n] = torch.arange(n, device=x.device)  # type: ignore[index]
        m.trace.append(n)
        m.n += 1
    y.add_(m.notes[n][:, None])  # type: ignore[index]


def _temporary(m: Model, x: Tensor, y: Tensor) -> None:
    m.last, m.n = y, m.n + 1
    y.add_(m.last.sum(0))
    m.last, m.n = None, m.n - 1


def _same_again(m: Model, x: Tensor, y: Tensor) -> None:
    m.last, m.notes = m.kept[:1], {"scale": 2.0, "shape": (1, 2)}


@segue.break_point
def _bookkeeping(m: Model, y: Tensor) -> None:
    m.n += len(y)
    m.trace.append(y.clone())
    m.last = y.clone()
    m.notes[f"call {m.n}"] = {"rows": len(y)}
    Model.total += 1


def _in_a_break(m: Model, x: Tensor, y: Tensor) -> None:
    _bookkeeping(m, y)


@pytest.mark.parametrize("act", [_table, _temporary, _same_again, _in_a_break])
def test_what_changes_in_a_break_or_not_at_all_is_no_fault(device: Device, act: Any) -> None:
    model, eager = Model(act).to(device.torch_device), Model(act).to(device.torch_device)
    runner = _runner(model, device)
    for n in (4, 8, 4, 8, 4, 8, 4):
        assert close(runner(_x(device, n)), eager(_x(device, n)))
    assert runner.stats.replayed and (model.n, len(model.trace)) == (eager.n, len(eager.trace))
    with _runner(Model(act).to(device.torch_device), device) as captured:
        captured.capture(_x(device))
        assert close(captured(_x(device)), captured.reference(_x(device)))


def test_what_the_forward_hands_a_break_past_its_arguments_is_named(device: Device) -> None:
    """The break would find the last layer's number at every replay."""
    keep = SimpleNamespace(layer=0)

    @segue.break_point
    def scaled(x: Tensor) -> Tensor:
        return x * (1 + keep.layer)

    def forward(x: Tensor) -> Tensor:
        for i in range(3):
            keep.layer = i
            x = scaled(x)
        return x

    runner = _runner(forward, device, [4])
    runner(_x(device))
    with pytest.raises(CaptureError, match=r"the forward sets .*keep\.layer \(2 to 0\).* before the break, which names it"):
        runner(_x(device))


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_a_context_that_the_segments_fill_is_named_and_one_that_breaks_fill_is_not(device: Device, kind: Any) -> None:
    def put(ctx: Any, y: Tensor) -> None:
        (ctx["seen"] if kind is dict else ctx.seen).append(y)

    def forward(x: Tensor, ctx: Any) -> Tensor:
        y = mix(x)
        put(ctx, y * 2)
        return y

    @segue.break_point
    def noted(y: Tensor) -> None:
        put(segue.current_forward_ctx(), y.clone())

    def with_break(x: Tensor, ctx: Any) -> Tensor:
        y = mix(x)
        noted(y * 2)
        return y

    runner = _runner(forward, device, [4])
    runner(_x(device), ctx=kind(seen=[]))
    with pytest.raises(CaptureError, match=r"ctx(\.seen|\['seen'\])\[0\] \(a tensor \(4, 2\)\)"):
        runner(_x(device), ctx=kind(seen=[]))
    good = _runner(with_break, device, [4])
    for _ in range(3):
        ctx = kind(seen=[])
        good(_x(device), ctx=ctx)
        assert len(vars(ctx)["seen"] if kind is SimpleNamespace else ctx["seen"]) == 1


def test_a_dict_that_the_caller_gave_is_not_silently_left_empty(device: Device) -> None:
    def forward(batch: dict[str, Tensor]) -> Tensor:
        y = batch["x"] * 2
        batch["hidden"] = y
        return y + 1

    runner = _runner(forward, device, [4], inputs={"batch": {"x": Input(0, 0.0)}})
    with pytest.raises(UsageError, match=r"the forward changed what the argument 'batch' holds"):
        runner({"x": _x(device)})
    batch = {"x": _x(device, 9)}
    assert close(runner(batch), _x(device, 9) * 2 + 1) and close(batch["hidden"], _x(device, 9) * 2), "eager gets the caller's"


class Memo(torch.nn.Module):
    """It keeps a table for each length, and may read a number out of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, torch.Tensor] = {}
        self.seen: list[torch.Tensor] = []
        self.asks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        if n not in self.tables:
            self.tables[n] = torch.arange(n, device=x.device, dtype=x.dtype)[:, None] + 1
        if self.asks:
            self.seen.append(x * 2)
            return x * x.sum().item()
        return x * self.tables[n]


@pytest.mark.parametrize("asks", [False, True])
def test_a_failed_capture_leaves_no_graph_memory_in_the_forwards_hands(asks: bool, device: Device) -> None:
    model, x = Memo(), _x(device)
    model.eval()
    runner = _runner(model, device, [8])
    with torch.inference_mode():
        want = runner(x)
        model.tables.clear()
        model.asks = asks
        with pytest.raises(CaptureError):
            runner(x)
        assert not model.tables and not model.seen
        model.asks = False
        assert torch.equal(model(x), want)
        runner.recapture()
        for _ in range(3):
            assert torch.equal(runner(x), want)
    runner.close()


def test_a_failed_capture_is_not_run_again_when_it_left_something_behind(device: Device) -> None:
    model = Model(_count).to(device.torch_device)
    runner = _runner(model, device, [8], on_failure="eager")
    runner(_x(device))
    with pytest.raises(CaptureError, match="leaves something behind"):
        runner(_x(device))
    assert model.n == 16
    assert close(runner(_x(device)), mix(_x(device) * 2) + 1) and model.n == 19


def test_a_check_reports_what_is_left_behind(device: Device) -> None:
    report = _runner(Model(_count).to(device.torch_device), device).check(_x(device))
    assert [f.kind for f in report.findings] == ["refused"] and "Model.n (" in report.findings[0].text


def test_a_prime_graphs_trunk_that_leaves_something_behind_is_named(device: Device) -> None:
    class Keeps(tiny_trunk.Dense):
        last: Any = None

        def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
            self.last = super().forward(x, cu_seqlens, cache)
            return self.last

    trunk = Keeps().to(device.torch_device).eval().requires_grad_(False)
    with pytest.raises(CaptureError, match=r"prime graph of 16 rows: .*Prime\.trunk\.last \(a tensor \(16, 32\)\)"):
        segue.PrimeGraph(trunk, 16, device=device, cuts=[])


numpy = pytest.importorskip("numpy")


def _host_generators() -> dict[str, Any]:
    own, of_numpy, old = random.Random(1), numpy.random.default_rng(1), numpy.random.RandomState(1)
    return {
        "random": lambda: random.random(),
        "own": lambda: own.random(),
        "of_numpy": lambda: float(of_numpy.random()),
        "old": lambda: float(old.rand()),
        "numpy.random.rand": lambda: float(numpy.random.rand()),
    }


@pytest.mark.parametrize("name", ["random", "own", "of_numpy", "old", "numpy.random.rand"])
def test_a_number_drawn_on_the_host_is_refused(device: Device, name: str) -> None:
    draw = _host_generators()[name]
    runner = _runner(lambda x: x * draw(), device)
    x = _x(device)
    runner(x)
    with pytest.raises(LeftBehindError, match=rf"the state of .*{name}, from which it draws random numbers on the host"):
        runner(x)
    runner.close()


def test_a_number_drawn_in_a_break_is_drawn_anew_at_each_replay(device: Device) -> None:
    @segue.break_point
    def noise(x: Tensor) -> Tensor:
        return x * random.random()

    def forward(x: Tensor) -> Tensor:
        return noise(x * 2) + (1 if len(x) else random.random())  # a draw that doesn't happen

    runner = _runner(forward, device)
    x = _x(device)
    for seed in range(4):
        random.seed(seed)
        got = runner(x)
        random.seed(seed)
        assert torch.equal(got, forward(x))
    assert runner.stats.replayed == 2
    runner.close()


@pytest.mark.parametrize("bucket_first", [False, True])
def test_a_number_that_a_break_sets_and_a_segment_reads_is_named(bucket_first: bool, device: Device) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.longest, self.served = 0.0, 0

        @segue.break_point(trim=("x",))
        def plan(self, x: Tensor) -> Tensor:
            self.longest = float(x.sum())
            self.served += 1  # which no segment reads
            return x * 1

        def forward(self, x: Tensor) -> Tensor:
            return self.plan(x * 2) + self.longest

    runner = _runner(Net().eval(), device)
    with pytest.raises(CaptureError, match=r"the break sets .*Net\.longest, which the forward reads outside it"):
        if bucket_first:
            runner.capture(_x(device))
        for _ in range(2):
            runner(_x(device))
    runner.close()
