"""What Python decided by at capture: once it has changed, no replay goes on without a word; what decides nothing is no change."""

from __future__ import annotations

import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import segue
from capture import tables
from segue.capture.places import Places
from segue.devices import Device
from segue.errors import StateChangedError
from segue.prime import PrimeGraph, Rows

SCALE = 2.0
LEVEL: contextvars.ContextVar[float] = contextvars.ContextVar("LEVEL", default=1.0)


def shifted(x: Tensor) -> Tensor:
    return x + 1


@segue.break_point(trim=("x",))
def counted(x: Tensor, net: Any = None) -> Tensor:
    return x * 1.0


class Adapter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 4


class Config:
    """Like a config of transformers: some attributes have another name too."""

    attribute_map: ClassVar = {"width": "n_embd"}

    def __init__(self) -> None:
        self.n_embd, self.unread = 3, 1

    def __getattribute__(self, name: str) -> Any:
        alias = object.__getattribute__(self, "attribute_map").get(name, name)
        return object.__getattribute__(self, alias)


class Power:
    """A function that has state."""

    def __init__(self) -> None:
        self.by = 2

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        return output**self.by


class Stored:
    """A descriptor of the user's own."""

    def __get__(self, net: Any, cls: Any) -> Any:
        return net._stored


class Options:
    """A namespace, as configurations often are."""

    class Nested:
        level = 0.5


class Holder:
    def gain(self) -> float:
        return 0.25


class OtherHolder:
    def gain(self) -> float:
        return 3.25


LOCAL = threading.local()
LOCAL.level = 0.5


class Slotted:
    __slots__ = ("power", "table")

    def __init__(self) -> None:
        self.power = 2


class Net(nn.Module):
    """Everything that a forward may decide by, each of which moves the answer."""

    factor, stored = 1.5, Stored()

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4, device=place), nn.ReLU(), nn.LayerNorm(4, device=place))
        self.scale, self.adapter, self.note = 2.0, None, "unread"
        self.register_module("gate", None)
        self.register_parameter("bias", None)
        self.later: Any = None
        self.sizes, self.options, self.steps = [1.0, 2.0], {"alpha": 1.0, "deep": {"beta": [3.0]}}, deque([1.0])
        self.config, self.slotted, self.object = Config(), Slotted(), SimpleNamespace(inner=SimpleNamespace(gain=1.0))
        self._flag, self._stored, self._by_text, self.flags, self.power = False, 1.0, 1.0, {1}, Power()
        self.parts, self.more = nn.ModuleDict({"a": nn.Tanh(), "b": Adapter()}), nn.ModuleList()
        self.parts["a"].register_forward_hook(self.power)
        self.parts["a"].register_forward_hook(_doubled)
        self.tables: dict[int, Tensor] = {}
        self.steering: dict[int, float] = {}
        self.mask, self.holder = bytearray(b"\x02"), Holder()
        self.calls = 0

    @property
    def flag(self) -> bool:
        return self._flag

    def twice(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        if n not in self.tables:  # a table of constants by length
            self.tables[n] = torch.arange(n, device=x.device, dtype=x.dtype)[:, None]
        x = self.layers(x) * self.scale * self.factor + self.tables[n]
        x = counted(shifted(self.twice(x))) * SCALE * tables.factor + LEVEL.get()
        x = tables.bent(x)
        for part in (*self.parts.values(), *self.more):
            x = part(x)
        from capture.tables import factor as imported

        x = x * imported + self.steering.get(0, 0.0) + self.mask[0] + self.holder.gain()
        x = x + Options.Nested.level + LOCAL.level + float(os.environ.get("SEGUE_TEST_LEVEL", "0")) + vars(self)["calls"]
        x = F.softsign(x) * 3 + x
        if hasattr(self, "offset"):
            x = x + self.offset
        for size in self.sizes:
            x = x + size
        if 2 in self.flags:
            x = x - 1
        x = x * self.stored + self.__dict__["_by_text"]
        for alpha in self.options.values():
            x = x * 0.5 + (alpha if isinstance(alpha, float) else alpha["beta"][0])
        x = x + self.steps[-1] + self.config.width + self.slotted.power + self.object.inner.gain
        if self.flag:
            x = x + 0.25
        for bias in (self.bias, self.later):
            if bias is not None:
                x = x + bias
        for part in (self.adapter, self.gate):
            if part is not None:
                x = part(x)
        return x

    def unread_method(self) -> int:
        return len(self.note)


Change = Callable[[Net, pytest.MonkeyPatch], object]


def _class_forward(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    own = nn.ReLU.forward
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: own(self, x) * 3)


def _doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _other_class(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net.layers[1], "__class__", nn.Tanh)


def _patched(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    own = net.layers[0].forward
    monkeypatch.setattr(net.layers[0], "forward", lambda x: own(x) * 2)


def _rotate(d: dict[Any, Any]) -> None:
    d[first] = d.pop(first := next(iter(d)))


CHANGES: dict[str, tuple[Change, str]] = {
    "a submodule replaced": (lambda n, m: n.layers.__setitem__(1, nn.Identity().eval()), r"layers\.1: ReLU -> Identity"),
    "a submodule appended": (lambda n, m: n.layers.append(Adapter().eval()), r"layers\.3: nothing -> Adapter"),
    "a submodule removed": (lambda n, m: n.layers.__delitem__(2), r"layers\.2: LayerNorm -> nothing"),
    "a submodule that was None": (lambda n, m: setattr(n, "gate", Adapter().eval()), r"gate: None -> Adapter"),
    "an attribute that was None": (lambda n, m: setattr(n, "adapter", Adapter().eval()), r"adapter: (None|nothing) -> Adapter"),
    "a parameter that was None": (lambda n, m: setattr(n, "bias", _parameter(n)), r"bias: None -> a tensor"),
    "the first submodule of a list": (lambda n, m: n.more.append(Adapter().eval()), r"more\.0: nothing -> Adapter"),
    "the order of submodules": (lambda n, m: _rotate(n.parts._modules), r"parts: in the order \['a', 'b'\] -> \['b', 'a'\]"),
    "the order of a dict": (lambda n, m: _rotate(n.options), r"options: in the order \['alpha', 'deep'\] -> "),
    "the order of hooks": (lambda n, m: _rotate(n.parts["a"]._forward_hooks), r"parts\.a: the forward hooks .*Power.* -> "),
    "a hook once more": (lambda n, m: n.parts["a"].register_forward_hook(_doubled), r"parts\.a: the forward hooks "),
    "a number of a hook": (lambda n, m: setattr(n.power, "by", 3), r"by: 2 -> 3"),
    "what is called without its name": (lambda n, m: m.setattr(Power, "__call__", lambda *a: a[-1]), r"Power\.__call__: "),
    "a set": (lambda n, m: n.flags.add(2), r"flags: \{1\} -> \{1, 2\}"),
    "what a descriptor reads": (lambda n, m: setattr(n, "_stored", 3.0), r"_stored: 1\.0 -> 3\.0"),
    "what is read by its text": (lambda n, m: setattr(n, "_by_text", 3.0), r"_by_text: 1\.0 -> 3\.0"),
    "another class": (_other_class, r"layers\.1: ReLU -> Tanh"),
    "an instance's forward": (_patched, r"layers\.0: nothing -> .*_patched"),
    "a class's forward": (_class_forward, r"ReLU: .*forward.* -> .*_class_forward"),
    "a method of the class": (lambda n, m: m.setattr(Net, "twice", lambda self, x: x * 5), r"Net\.twice: .* -> "),
    "a method of the instance": (lambda n, m: setattr(n, "twice", MethodType(lambda s, x: x, n)), r"twice: nothing -> "),
    "a hook": (lambda n, m: n.layers[1].register_forward_hook(_doubled), r"layers\.1: no hook -> a forward hook, _doubled"),
    "a hook on the root": (lambda n, m: n.register_forward_hook(_doubled), r"[Nn]et: no hook -> a forward hook, _doubled"),
    "a number": (lambda n, m: setattr(n, "scale", 3.0), r"\.scale: 2\.0 -> 3\.0"),
    "a number of another type": (lambda n, m: setattr(n, "scale", 2), r"\.scale: 2\.0 -> 2\b"),
    "an eps": (lambda n, m: setattr(n.layers[2], "eps", 0.5), r"layers\.2\.eps: 1e-05 -> 0\.5"),
    "an attribute of the class": (lambda n, m: m.setattr(Net, "factor", 9.0), r"Net\.factor: 1\.5 -> 9\.0"),
    "that of the class hidden": (lambda n, m: setattr(n, "factor", 9.0), r"\.factor: nothing -> 9\.0"),
    "what a property reads": (lambda n, m: setattr(n, "_flag", True), r"_flag: False -> True"),
    "an item of a list": (lambda n, m: n.sizes.__setitem__(1, 7.0), r"sizes\[1\]: 2\.0 -> 7\.0"),
    "a list that grew": (lambda n, m: n.sizes.append(3.0), r"sizes: 2 items -> 3 items"),
    "another list": (lambda n, m: setattr(n, "sizes", [5.0]), r"\.sizes: \[1\.0, 2\.0\] -> \[5\.0\]"),
    "an item of a dict": (lambda n, m: n.options.__setitem__("alpha", 4.0), r"options\['alpha'\]: 1\.0 -> 4\.0"),
    "a name more in a dict": (lambda n, m: n.options.__setitem__("gamma", 4.0), r"options\['gamma'\]: nothing -> 4\.0"),
    "an item in the fourth level": (lambda n, m: n.options["deep"]["beta"].__setitem__(0, 8.0), r"\['beta'\]\[0\]: 3\.0 -> 8\.0"),
    "an item of a deque": (lambda n, m: n.steps.__setitem__(0, 6.0), r"steps\[0\]: 1\.0 -> 6\.0"),
    "a config value": (lambda n, m: setattr(n.config, "n_embd", 4), r"config\.n_embd: 3 -> 4"),
    "a slot": (lambda n, m: setattr(n.slotted, "power", 5), r"slotted\.power: 2 -> 5"),
    "an attribute of an object": (lambda n, m: setattr(n.object.inner, "gain", 5.0), r"object\.inner\.gain: 1\.0 -> 5\.0"),
    "a global": (lambda n, m: m.setitem(globals(), "SCALE", 5.0), r"SCALE: 2\.0 -> 5\.0"),
    "a helper rebound": (lambda n, m: m.setitem(globals(), "shifted", lambda x: x), r"shifted: shifted .* -> "),
    "a number in a module": (lambda n, m: m.setattr(tables, "factor", 5.0), r"tables\.factor: 2\.0 -> 5\.0"),
    "a helper in a module": (lambda n, m: m.setattr(tables, "bent", lambda x: x * 0), r"tables\.bent: bent .* -> "),
    "a context variable": (lambda n, m: LEVEL.set(5.0), r"LEVEL: 1\.0 -> 5\.0"),
    "a key more in a dict that no code fills": (lambda n, m: n.steering.update({0: 4.0}), r"steering\[0\]: nothing -> 4\.0"),
    "a byte": (lambda n, m: n.mask.__setitem__(0, 9), r"mask: b'\\x02' -> b'\\t'"),
    "the class of an object": (lambda n, m: setattr(n.holder, "__class__", OtherHolder), r"holder: Holder -> OtherHolder"),
    "a class within a class": (lambda n, m: m.setattr(Options.Nested, "level", 5.0), r"Nested\.level: 0\.5 -> 5\.0"),
    "a value of the thread": (lambda n, m: m.setattr(LOCAL, "level", 5.0), r"LOCAL\.level: 0\.5 -> 5\.0"),
    "an environment variable": (lambda n, m: m.setenv("SEGUE_TEST_LEVEL", "7"), r"os\.environ: .* -> "),
    "what vars() gives": (lambda n, m: setattr(n, "calls", 3), r"calls: 0 -> 3"),
    "a function of torch's": (lambda n, m: m.setattr(F, "softsign", torch.tanh), r"F\.softsign: softsign .* -> .*tanh"),
    "a class's __call__": (lambda n, m: m.setattr(Net, "__call__", _loud, raising=False), r"Net\.__call__: nothing -> _loud"),
    "a buffer that may be absent": (lambda n, m: n.register_buffer("offset", _parameter(n).data), r"offset: nothing"),
}


def _loud(net: Net, x: Tensor) -> Tensor:
    return net.forward(x) * 2


def _parameter(net: Net) -> nn.Parameter:
    return nn.Parameter(torch.ones(4, device=net.layers[0].weight.device), requires_grad=False)


def _net(device: Device) -> Net:
    torch.manual_seed(0)
    return Net(device.torch_device).eval().requires_grad_(False)


def _x(device: Device, rows: int = 8) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)).to(device.torch_device)


def _runner(net: Any, device: Device, buckets: Any = (8, 16)) -> segue.GraphRunner:
    return segue.GraphRunner(net, {"x": segue.Input(0, 0.0)}, buckets, device=device, pool=device.new_pool(), progress=False)


@pytest.mark.parametrize("what", list(CHANGES))
def test_a_runner_names_the_change_and_recapture_takes_it_in(what: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, (change, text) = _net(device), _x(device), CHANGES[what]
    runner = _runner(net, device)

    def run() -> None:
        with torch.inference_mode():
            for _ in range(4):
                before = runner(x)
        replayed = runner.stats.replayed
        change(net, monkeypatch)
        with torch.inference_mode():
            want = net(x)
            assert not torch.equal(want, before) or what == "a number of another type"
            for _ in range(2):
                with pytest.raises(segue.ReplayError, match=text) as caught:
                    runner(x)
                assert "recapture()" in str(caught.value)
            assert runner.stats.replayed == replayed
            runner.recapture()
            for _ in range(3):
                torch.testing.assert_close(runner(x), want)
        assert runner.stats.replayed == replayed + 1

    contextvars.copy_context().run(run)
    runner.close()


@pytest.mark.parametrize("what", list(CHANGES))
def test_a_raw_capture_names_the_change_before_its_break_runs(
    what: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, (change, text) = _net(device), CHANGES[what]
    ran: list[int] = []

    @segue.break_point
    def noted(x: Tensor) -> Tensor:
        ran.append(1)
        return x + 0

    monkeypatch.setitem(globals(), "counted", noted)

    def run() -> None:
        with torch.inference_mode():
            x = _x(device)
            net(x)
            capture = segue.BreakableCapture(device=device, root=net, defer_checks=True)
            with capture:
                net(x)
            capture.replay()
        change(net, monkeypatch)
        before = len(ran)
        with torch.inference_mode(), pytest.raises(segue.ReplayError, match=text):
            capture.replay()
        assert len(ran) == before
        capture.close()

    contextvars.copy_context().run(run)


class NetTrunk:
    """``Net`` as a prime graph's trunk."""

    min_tokens = 1

    def __init__(self, net: Net) -> None:
        self.net = net
        self.place = net.layers[0].weight.device

    def embed(self, tokens: Tensor) -> Tensor:
        return tokens[:, None].to(torch.float32).expand(-1, 4)

    def new_cache(self, rows: int, requests: int = 1) -> Any:
        return SimpleNamespace(rows=torch.zeros(rows, 4, device=self.place), length=0)

    def reset(self, cache: Any) -> None:
        cache.rows.zero_()

    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        out: Tensor = self.net(x)
        cache.rows.copy_(out)
        return out

    def head(self, last: Tensor) -> Tensor:
        return last * 2

    def state(self, cache: Any) -> dict[str, Rows]:
        return {"rows": Rows(cache.rows)}

    def get_length(self, session: Any) -> int:
        return int(session.length)

    def set_length(self, session: Any, n: int) -> None:
        session.length = n


@pytest.mark.parametrize("what", list(CHANGES))
def test_a_prime_graph_names_the_change_and_no_session_is_touched(
    what: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "counted", lambda x: x * 1.0)
    net, (change, text) = _net(device), CHANGES[what]
    trunk = NetTrunk(net)

    def run() -> None:
        with torch.inference_mode(), PrimeGraph(trunk, 8, device=device, pool=device.new_pool()) as prime:
            ids = torch.arange(5, device=device.torch_device)
            prime.run(ids, trunk.new_cache(8))
            with torch.inference_mode(False):
                change(net, monkeypatch)
            session = trunk.new_cache(8)
            with pytest.raises(segue.ReplayError, match=rf"{text}(.|\n)*recapture\(\) on the prime graph of 8 rows"):
                prime.run(ids, session)
            assert session.length == 0 and not session.rows.any()
            prime.recapture()
            assert torch.equal(prime.run(ids, session).logits, prime.reference(ids).logits)

    contextvars.copy_context().run(run)


INNOCENT: dict[str, Change] = {
    "an equal object again": lambda n, m: setattr(n.object, "inner", SimpleNamespace(gain=1.0)),
    "another variable of the environment": lambda n, m: m.setenv("SEGUE_TEST_OTHER", "7"),
    "the same value again": lambda n, m: setattr(n, "scale", float("2.0")),
    "the same list again": lambda n, m: setattr(n, "sizes", [1.0, 2.0]),
    "the same set again": lambda n, m: setattr(n, "flags", {1}),
    "a set changed and undone": lambda n, m: (n.flags.add(2), n.flags.discard(2)),
    "an order turned twice": lambda n, m: [_rotate(d) for d in (n.parts._modules, n.options) for _ in range(2)],
    "an attribute that nobody reads": lambda n, m: setattr(n, "note", "read by no one"),
    "a new attribute that nobody reads": lambda n, m: setattr(n.layers[0], "remark", "hello"),
    "a config value that nobody reads": lambda n, m: setattr(n.config, "unread", 2),
    "a method that nobody calls": lambda n, m: m.setattr(Net, "unread_method", lambda self: 1),
    "a table more": lambda n, m: n.tables.__setitem__(99, torch.zeros(1)),
    "a weight in place": lambda n, m: n.layers[0].weight.mul_(1.0),
    "a mode that makes no difference": lambda n, m: n.layers[0].train(),
    "changed and undone": lambda n, m: (setattr(n, "scale", 9.0), setattr(n, "scale", 2.0)),
    "a submodule that came and went": lambda n, m: (setattr(n, "adapter", Adapter().eval()), setattr(n, "adapter", None)),
    "a hook that is gone again": lambda n, m: n.layers[0].register_forward_hook(_doubled).remove(),
    "a global that nobody reads": lambda n, m: m.setitem(globals(), "UNREAD", 1),
}


@pytest.mark.parametrize("what", list(INNOCENT))
def test_what_decides_nothing_leaves_the_graphs_in_use(what: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = _net(device), _x(device)
    runner = _runner(net, device)
    with torch.inference_mode():
        for _ in range(3):
            want = runner(x)
    with torch.no_grad():
        INNOCENT[what](net, monkeypatch)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(runner(x), want)
    assert runner.stats.replayed == 3 and runner.stats.captured == 1
    runner.close()


@pytest.mark.parametrize("key", ["alpha", "deep"])
def test_what_was_refused_and_came_back_is_served_again(key: str, device: Device) -> None:
    net, x = _net(device), _x(device)
    net.options = {key: net.options[key]}
    runner = _runner(net, device)
    with torch.inference_mode():
        for _ in range(3):
            want = runner(x)
        gone = net.options.pop(key)
        for _ in range(2):
            with pytest.raises(segue.ReplayError, match=rf"options\['{key}'\]: .* -> nothing"):
                runner(x)
        net.options[key] = gone
        assert torch.equal(runner(x), want)
    runner.close()


def test_what_takes_the_room_of_what_moved_is_seen(device: Device) -> None:
    """A parameter that was None moves from a module's attributes to its parameters, and back to None it stays there."""
    net, x = _net(device), _x(device)
    net.later = None
    runner = _runner(net, device)
    with torch.inference_mode():
        for _ in range(3):
            want = runner(x)
        attributes = dict(vars(net))
        net.later = nn.Parameter(torch.ones(4), requires_grad=False)
        net.later = None
        net.factor = 9.0
        assert len(attributes) == len(vars(net))
        with pytest.raises(segue.ReplayError, match=r"\.factor: nothing -> 9\.0"):
            runner(x)
        del net.factor
        assert torch.equal(runner(x), want)
        net.later = nn.Parameter(torch.ones(4), requires_grad=False)
        with pytest.raises(segue.ReplayError, match=r"\.later: None -> a tensor"):
            runner(x)
        vars(net).clear()
        vars(net).update(attributes)
        net._parameters.pop("later")
        assert torch.equal(runner(x), want)
    runner.close()


def test_a_forward_may_turn_its_tables_round(device: Device) -> None:
    class Recent(nn.Module):
        """The table that was used last is the last."""

        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[0]
            self.tables[n] = self.tables.pop(n, None) if n in self.tables else torch.arange(n, device=x.device)[:, None]
            return counted(x + self.tables[n])

    net = Recent().eval()
    runner = _runner(net, device)
    with torch.inference_mode():
        for n in (8, 8, 16, 16, 8, 16, 40, 8, 16, 8):  # 40 rows run eager
            x = _x(device, n)
            assert torch.equal(runner(x), net(x))
    assert runner.stats.replayed == 5
    runner.close()


def test_what_only_breaks_read_is_live(device: Device) -> None:
    class Live(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.served, self.gain = 0, 1.0

        @segue.break_point(trim=("x",))
        def attend(self, x: Tensor) -> Tensor:
            self.served += 1
            return x * self.gain

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(x + 1) * 2

    net, x = Live().eval(), _x(device)
    runner = _runner(net, device)
    with torch.inference_mode():
        for _ in range(4):
            runner(x)
        net.gain = 3.0
        assert torch.equal(runner(x), (x + 1) * 3 * 2)
    assert net.served == 5 and runner.stats.replayed == 3
    runner.close()


def test_a_table_by_length_that_a_later_bucket_fills_is_no_change(device: Device) -> None:
    class Memo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            key = f"rows {x.shape[0]}"
            if key not in self.tables:
                self.tables[key] = torch.arange(x.shape[0], device=x.device, dtype=x.dtype)[:, None]
            return counted(x + self.tables[key])

    net = Memo().eval()
    runner = _runner(net, device)
    with torch.inference_mode():
        for n in (8, 8, 8, 16, 16, 16, 8, 40, 8, 16):  # 40 rows run eager
            x = _x(device, n)
            assert torch.equal(runner(x), net(x))
    assert runner.stats.eager == 1 and runner.stats.replayed == 5
    runner.close()


def test_the_live_context_may_be_held_by_anybody(device: Device) -> None:
    class Engine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ctx: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return scaled(x + 1, self.ctx)

    @segue.break_point
    def scaled(x: Tensor, ctx: Any) -> Tensor:
        return x * ctx["scale"]

    net, x = Engine().eval(), _x(device)
    runner = _runner(net, device)
    with torch.inference_mode():
        for i in range(5):
            net.ctx = {"scale": float(i)}
            assert torch.equal(runner(x, ctx=net.ctx), (x + 1) * i)
    assert runner.stats.replayed == 3
    runner.close()


def test_a_tensor_in_a_module_of_the_users_own_is_looked_at(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "table", torch.ones(4, device=device.torch_device))

    def forward(x: Tensor) -> Tensor:
        assert tables.table is not None
        return x * tables.table

    runner, x = _runner(forward, device), _x(device)
    with torch.inference_mode():
        for _ in range(3):
            runner(x)
        monkeypatch.setattr(tables, "table", torch.zeros(4, device=device.torch_device))
        with pytest.raises(segue.ReplayError, match=r"tables\.table, used by .* has other memory"):
            runner(x)
    runner.close()


@pytest.mark.parametrize("where", ["deque", "object", "class", "function", "slot", "context variable", "deep dict"])
def test_a_tensor_is_looked_at_wherever_it_is_held(where: str, device: Device) -> None:
    place = device.torch_device
    one, other = torch.ones(4, device=place), torch.zeros(4, device=place)
    queue, holder, slotted = deque([one]), SimpleNamespace(a=SimpleNamespace(b={"c": SimpleNamespace(d=one)})), Slotted()
    slotted.table = one
    variable: contextvars.ContextVar[Tensor] = contextvars.ContextVar("variable")
    deep: Any = {"a": [{"b": [{"c": [{"d": one}]}]}]}

    class Held:
        table = one

    def helper(x: Tensor) -> Tensor:
        return x * helper.table  # type: ignore[attr-defined, no-any-return]

    helper.table = one  # type: ignore[attr-defined]
    read: dict[str, Callable[[Tensor], Tensor]] = {
        "deque": lambda x: x * queue[0],
        "object": lambda x: x * holder.a.b["c"].d,
        "class": lambda x: x * Held.table,
        "function": lambda x: helper(x),
        "slot": lambda x: x * slotted.table,
        "context variable": lambda x: x * variable.get(),
        "deep dict": lambda x: x * deep["a"][0]["b"][0]["c"][0]["d"],
    }
    again: dict[str, Callable[[], object]] = {
        "deque": lambda: queue.__setitem__(0, other),
        "object": lambda: setattr(holder.a.b["c"], "d", other),
        "class": lambda: setattr(Held, "table", other),
        "function": lambda: setattr(helper, "table", other),
        "slot": lambda: setattr(slotted, "table", other),
        "context variable": lambda: variable.set(other),
        "deep dict": lambda: deep["a"][0]["b"][0]["c"][0].__setitem__("d", other),
    }

    def run() -> None:
        variable.set(one)
        runner, x = _runner(read[where], device), _x(device)
        with torch.inference_mode():
            for _ in range(3):
                assert torch.equal(runner(x), x)
            again[where]()
            with pytest.raises(segue.ReplayError, match="other memory than at capture"):
                runner(x)
        runner.close()

    contextvars.copy_context().run(run)


def test_what_the_check_and_the_summary_say(device: Device) -> None:
    net, x = _net(device), _x(device)
    runner = _runner(net, device)
    with torch.inference_mode():
        summary = runner.capture(x)
        assert any(name.endswith("Net.scale") for name in summary.watched)
        assert not any(name.endswith("Net.note") for name in summary.watched)
        assert runner.check(x).ok
        net.scale = 3.0
        report = runner.check(x)
    assert [f.kind for f in report.findings] == ["stale"] and "Net.scale: 2.0 -> 3.0" in report.findings[0].text
    runner.close()


class Factories(dict[str, Any]):
    """Like transformers' table of activations: asked for one, it makes a new one."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


FACTORIES = Factories(relu=nn.ReLU, tanh=nn.Tanh)


def _activated(x: Tensor) -> Tensor:
    return FACTORIES["relu"](x)  # type: ignore[no-any-return]


def test_a_table_that_makes_what_it_is_asked_for_is_compared_by_what_it_holds(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = _x(device)
    runner = segue.GraphRunner(_activated, inputs={"x": segue.Input(token_dim=0, pad=0)}, buckets=[len(x)], device=device)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(runner(x), _activated(x))
        assert runner.stats.replayed == 1
        monkeypatch.setitem(FACTORIES, "relu", nn.Tanh)
        with pytest.raises(StateChangedError, match="relu"):
            runner(x)
    runner.close()


def test_many_changes_are_compared_quickly(device: Device) -> None:
    """28 layers of it, within what a kernel or two take to submit; the bound is for a busy machine."""
    import timeit

    net = nn.Sequential(*(_net(device) for _ in range(28)))
    decisions = Places(net).decisions
    assert decisions.changed() is None and len(decisions.paths) > 500
    assert min(timeit.repeat(decisions.changed, number=20, repeat=20)) / 20 < 300e-6


def test_the_error_says_which_change(device: Device) -> None:
    net, x = _net(device), _x(device)
    runner = _runner(net, device)
    with torch.inference_mode():
        for _ in range(3):
            runner(x)
        net.layers[1] = nn.Identity().eval()
        with pytest.raises(StateChangedError) as caught:
            runner(x)
    change = caught.value.change
    assert (change.kind, change.before, change.after) == ("module", "ReLU", "Identity")
    runner.close()
