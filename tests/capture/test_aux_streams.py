"""Ops beside each other: what must wait waits, what needn't doesn't, and no block is used again too early."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.devices.conftest import CUDA
from torch import Tensor
from torch.nn import functional

import segue
from segue import _torch
from segue.capture import tracing, watch
from segue.capture.tracing import trace_of
from segue.devices import Device, resolve
from segue.devices.aux_streams import AuxStreams
from segue.devices.trace import Trace
from segue.errors import UnseenWorkError

N = 8


class Branching:
    """Captures on auxiliary streams, in a pool of its own."""

    def __init__(self, device: Device) -> None:
        self.device, self.pool = device, device.new_pool()
        self.captures: list[segue.BreakableCapture] = []

    def branch(self, part: Callable[[], Any]) -> Any:
        """Trace ``part``, capture it and launch it. Returns its result."""
        trace = trace_of(part, self.device, self.pool, self.device.default_stream(), "branches")
        capture = segue.BreakableCapture(pool=self.pool, name="branches", root=part, trace=trace)
        self.captures.append(capture)
        with capture:
            return part()

    def launch(self) -> None:
        """What was captured last, once more."""
        self.captures[-1].replay()
        self.device.synchronize()

    def close(self) -> None:
        for capture in self.captures:
            capture.close()


@pytest.fixture
def branching(device: Device) -> Any:
    made = Branching(device)
    with torch.inference_mode():
        yield made
    made.close()


def matrices(lab: Branching, count: int, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(N, N, generator=draw).to(lab.device.torch_device) for _ in range(count)]


def layer(x: Tensor, w: list[Tensor], cache: Tensor) -> Tensor:
    """As a decoder's: keys and values need nothing of the queries; the cache is written, then read."""
    q = (x @ w[0]).sin() * 2 + 1
    k = ((x @ w[1]).cos() * 3 - 1).exp().tanh()
    cache.copy_(x @ w[2])
    y = (q @ k.t()).softmax(-1) @ cache
    return x + (y @ w[3]).tanh() * (y @ w[4])


def several(x: Tensor, w: list[Tensor], cache: Tensor) -> Tensor:
    for _ in range(4):
        x = layer(x, w, cache)
    return x


def test_a_layer_in_branches_computes_the_same_in_every_order(branching: Branching) -> None:
    x, cache, *w = matrices(branching, 7)
    y = branching.branch(lambda: several(x, w, cache))
    for seed in range(6):
        x.copy_(matrices(branching, 1, seed)[0])
        apart = cache.clone()
        want = several(x, w, apart)
        cache.fill_(float("nan"))
        branching.pool.poison()
        branching.launch()
        assert torch.equal(y, want) and torch.equal(cache, apart)


@pytest.mark.parametrize("edge", ["follow", "hold", "keep", "floor", "readers"])
def test_an_edge_that_is_missing_shows_on_the_emulator(monkeypatch: pytest.MonkeyPatch, edge: str) -> None:
    """The two orders of the emulator's launches are there to find it."""
    place, follow = AuxStreams.place, AuxStreams._follow
    if edge == "follow":
        skipped = iter([False] * 3 + [True] * 1000)
        monkeypatch.setattr(AuxStreams, "_follow", lambda *a: None if a[1] == 0 and next(skipped) else follow(*a))
    elif edge == "floor":
        let_go = AuxStreams._let_go

        def without(self: AuxStreams) -> None:
            floor = list(self._floor)
            let_go(self)
            self._floor = floor

        monkeypatch.setattr(AuxStreams, "_let_go", without)
    elif edge == "readers":
        monkeypatch.setattr(watch, "_ops", {})
        monkeypatch.setattr(_torch, "written_arguments", lambda func: ((), ()))
    else:
        monkeypatch.setattr(AuxStreams, "place", lambda *a: (step := place(*a)) and step._replace(**{edge: ()}))
    lab = Branching(resolve("emulator"))
    with torch.inference_mode():
        assert _wrong(lab, 200), f"nothing differs without {edge}"
    lab.close()


def _wrong(lab: Branching, seeds: int = 40) -> bool:
    """Whether any of some random programs replays as it shouldn't."""
    for seed in range(seeds):
        program = _random_program(seed)
        inputs = matrices(lab, 3, seed)
        apart = [t.clone() for t in inputs]
        want = program(*apart)
        got = lab.branch(lambda program=program, inputs=inputs: program(*inputs))
        for _ in range(2):
            for t, fresh in zip(inputs, matrices(lab, 3, seed), strict=True):
                t.copy_(fresh)
            lab.pool.poison()
            lab.launch()
            if not torch.equal(got, want) or not all(map(torch.equal, inputs, apart)):
                return True
    return False


def _random_program(seed: int) -> Callable[..., Tensor]:
    """Products, chains, in-place writes and views over what is alive; most of it dies soon."""

    def run(*inputs: Tensor) -> Tensor:
        draw = random.Random(seed)
        alive = list(inputs)
        for _ in range(40):
            a, b = draw.choice(alive), draw.choice(alive)
            what = draw.randrange(8)
            if draw.random() < 0.05 and (capture := segue.BreakableCapture.current()) is not None:
                capture.cut()
            if what < 3:
                new = (a @ b).tanh()
            elif what == 3:
                new = a.sin() + b
            elif what == 4:
                new = torch.cat([a[: N // 2], b[N // 2 :]])
            elif what == 5:
                draw.choice(alive).copy_((a @ b).cos())
                continue
            elif what == 6:
                draw.choice(alive)[: N // 2].mul_(0.5)
                continue
            else:
                new = a.t().contiguous() - b
            alive.append(new)
            if len(alive) > 6:
                alive.pop(draw.randrange(3, len(alive) - 1))
        return torch.stack(alive).sum(0)

    return run


def test_random_programs_replay_as_they_ran(branching: Branching) -> None:
    assert not _wrong(branching)


class Log:
    """Places ops one by one. Marks are numbers of ops."""

    def __init__(self) -> None:
        self.counts, self.waits, self.marks = [0] * 3, [[], [], []], []  # type: ignore[var-annotated]
        self.aux = AuxStreams(2, 0)
        pool: Any = SimpleNamespace(owns=lambda t, look: False, blocks=list)
        recording: Any = SimpleNamespace(run=lambda func, args, kwargs: func(*args, **kwargs), shows=lambda func: False)
        self.watch = tracing._Tracing(pool, "log", Trace())
        self.watch.begin_segment(recording, 0)

    def run(self, func: Any, *args: Any, **kwargs: Any) -> tuple[Any, int, list[tuple[int, int]]]:
        """The op's result, its stream, and what that stream was told to wait for before it."""
        with torch.inference_mode(), self.watch:
            result = func(*args, **kwargs)
        step = self.aux.place(self.watch.trace.ops[-1])
        if step is None:
            return result, 0, []
        for stream, mark in step.before:
            if mark < 0:
                self.marks.append((stream, self.counts[stream]))
            else:
                self.waits[stream].append(self.marks[mark])
        self.counts[step.stream] += 1
        waited, self.waits[step.stream] = self.waits[step.stream], []
        return result, step.stream, waited


_mm, _sin, _add = torch.ops.aten.mm.default, torch.ops.aten.sin.default, torch.ops.aten.add.Tensor


def test_products_of_one_operand_start_beside_each_other_and_meet_where_both_are_needed() -> None:
    log = Log()
    x, w = torch.randn(N, N), torch.randn(N, N)
    h, *at = log.run(_sin, x)
    assert at == [0, []]
    q, *at = log.run(_mm, h, w)
    assert at == [0, []]
    q, *at = log.run(_sin, q)
    k, *at = log.run(_mm, h, w)
    assert at == [1, [(0, 1)]]  # it waits for h, and not for the queries
    k, *at = log.run(_sin, k)
    assert at == [1, []]
    v, *at = log.run(_mm, h, w)
    assert at == [2, [(0, 1)]]
    _, *at = log.run(_mm, h, w)
    assert at == [0, []]  # no stream is idle
    _, *at = log.run(_add, k, v)
    assert at == [0, [(1, 2), (2, 1)]]


def test_what_is_no_op_of_torchs_own_runs_alone() -> None:
    with torch.library._scoped_library("segue_aux", "DEF") as lib:
        lib.define("mystery(Tensor x) -> Tensor")
        lib.impl("mystery", lambda x: x.clone(), "CPU")
        log = Log()
        x, w = torch.randn(N, N), torch.randn(N, N)
        h = log.run(_sin, x)[0]
        log.run(_sin, log.run(_mm, h, w)[0])
        k, stream, _ = log.run(_mm, h, w)
        assert stream == 1
        _, *at = log.run(torch.ops.segue_aux.mystery.default, h)
        assert at == [0, [(1, 1)]]
        log.run(_sin, h)
        _, *at = log.run(_mm, k, w)  # of stream 1, but after whatever the mystery wrote
        assert at[0] in (1, 2) and at[1] and at[1][0] >= (0, 4)


def _running_stats(x: Tensor, w: Tensor, mean: Tensor) -> tuple[Tensor, ...]:
    """Batch norm writes them, which its schema doesn't say."""
    h = x.sin()
    q = (h @ w).tanh()
    k = functional.batch_norm(h @ w, mean[0], mean[1], training=True)
    return mean * 2 + q, k


def _other_storage(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """A tensor that another stream reads is given other memory by no op: its block is free at once."""
    h = x.sin()
    q = (h @ w).tanh()
    k = h @ v
    m = k.sin()
    u = k @ w
    k.data = q
    return u, m @ v + q


def _nothing_to_join(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """An op that waits for all, and runs nothing."""
    h = x.sin()
    q = (h @ w).tanh()
    k = h @ v
    m = k.sin()
    g = x.cos()
    later = g.sin()
    u = k @ g
    del k
    torch.cat([m[:0], u[:0]])
    return u, x @ v + q + later


def _fails_to_join(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    h = x.sin()
    q = (h @ w).tanh()
    k = h @ v
    m = k.sin()
    u = k @ w
    del k
    with contextlib.suppress(RuntimeError):
        torch.cat([m, u[:, :3]])
    return u, x @ v + q


@pytest.mark.parametrize("program", [_running_stats, _other_storage, _nothing_to_join, _fails_to_join])
def test_what_no_operand_shows_is_ordered_too(branching: Branching, program: Callable[..., tuple[Tensor, ...]]) -> None:
    inputs = matrices(branching, 3)
    before = [t.clone() for t in inputs]
    got = branching.branch(lambda: program(*inputs))
    for _ in range(4):
        apart = [t.clone() for t in before]
        want = program(*apart)
        for t, first in zip(inputs, before, strict=True):
            t.copy_(first)
        branching.pool.poison()
        branching.launch()
        assert all(map(torch.equal, got, want)) and all(map(torch.equal, inputs, apart))


def test_random_numbers_are_drawn_in_the_order_of_the_calls(branching: Branching) -> None:
    x, w = matrices(branching, 2)

    def draws() -> Tensor:
        h = x.sin()
        a = torch.rand_like(h @ w)
        b = torch.rand_like(h @ w)
        return a - 2 * b

    got = branching.branch(draws)
    for seed in range(4):
        torch.manual_seed(seed)
        want = draws()
        torch.manual_seed(seed)
        branching.launch()
        assert torch.equal(got, want)


def test_a_composite_op_that_copies_nothing_is_in_nobodys_way() -> None:
    log = Log()
    x, w = torch.randn(N, N), torch.randn(N, N)
    h = log.run(torch.ops.aten.reshape.default, log.run(_sin, x)[0], [N, N])[0]
    _, *at = log.run(_mm, h, w)
    assert at == [0, []]


def test_an_op_that_fills_out_runs_alone_for_the_old_block_may_be_freed_inside_it() -> None:
    log = Log()
    x, w = torch.randn(N, N), torch.randn(N, N)
    h = log.run(_sin, x)[0]
    log.run(_sin, log.run(_mm, h, w)[0])
    k, stream, _ = log.run(_mm, h, w)
    assert stream == 1
    _, stream, _ = log.run(_mm, k, w)
    assert stream == 1, "it stays with its operand"
    _, *at = log.run(torch.ops.aten.sin.out, x, out=k)
    assert at == [0, [(1, 2)]]
    _, stream, waited = log.run(_mm, h, w)
    assert stream == 1 and waited == [(0, 4)]


@pytest.mark.parametrize("parts", [[0, 1], [1, 0], [2, 1, 0], [2, 1, 3]])
def test_memory_from_outside_that_overlaps_is_refused(branching: Branching, parts: list[int]) -> None:
    """Its order can't be told by storages."""
    base = torch.zeros(3 * N, N, device=branching.device.torch_device)
    address, row = base.data_ptr(), N * base.element_size()

    def rows(start: int, count: int) -> Tensor:
        """A storage of its own over some rows of ``base``."""
        return _torch.tensor_at(address + start * row, count * row, base.dtype, (count, N), (N, 1), 0, base.device)

    over = [base, rows(2 * N, N), rows(0, N), rows(N // 2, 2 * N)]
    branching.branch(lambda: over[2].sin() + over[1].sin())
    with pytest.raises(UnseenWorkError, match="branches: two of the tensors that the forward uses overlap"):
        branching.branch(lambda: [over[i].sin() for i in parts])


def test_a_forward_that_takes_another_way_than_it_was_traced_on_is_refused(branching: Branching) -> None:
    x, *w = matrices(branching, 3)
    before = [x, *w]
    calls = [0]

    def other_op() -> Tensor:
        calls[0] += 1
        return x.sin() @ w[0] if calls[0] < 2 else x.cos() @ w[0]

    def other_memory() -> Tensor:
        calls[0] += 1
        h = x.sin()
        q = h @ w[0]
        w[1].mul_(2)
        return q @ (h if calls[0] < 2 else q)

    def other_buffer() -> Tensor:
        calls[0] += 1
        return (x @ w[0]) @ w[calls[0] % 2]

    def more() -> Tensor:
        calls[0] += 1
        y = x @ w[0]
        return y if calls[0] < 2 else y + 1

    for part in (other_op, other_memory, other_buffer, more):
        calls[0] = 0
        with pytest.raises(UnseenWorkError, match=r"at .*test_aux_streams.py:\d+.* is not what the forward did there"):
            branching.branch(part)
    assert all(map(torch.equal, before, matrices(branching, 3)))
    assert torch.equal(branching.branch(lambda: x + 1), x + 1)


def test_a_forward_that_ends_before_its_trace_did_is_refused(branching: Branching) -> None:
    (x,), calls = matrices(branching, 1), [0]

    def less() -> Tensor:
        calls[0] += 1
        return x.sin() if calls[0] > 1 else x.sin().cos()

    with pytest.raises(UnseenWorkError, match=r"branches: the forward ended before aten.cos.default, which it did when"):
        branching.branch(less)


def test_an_interrupt_that_arrives_as_a_trace_begins_leaves_everything_as_it_was(
    branching: Branching, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, (x,) = branching.device.begin, matrices(branching, 1)

    def interrupted(*args: Any, **how: bool) -> Any:
        signal.raise_signal(signal.SIGINT)
        return begin(*args, **how)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(branching.device, "begin", interrupted)
        branching.branch(lambda: x + 1)
    assert torch.equal(branching.branch(lambda: x + 1), x + 1)


def test_a_plan_that_can_not_be_made_leaves_everything_as_it_was(branching: Branching, monkeypatch: pytest.MonkeyPatch) -> None:
    (x,) = matrices(branching, 1)

    def broken(self: AuxStreams, op: Any) -> Any:
        raise ArithmeticError("no plan")

    with monkeypatch.context() as patched, pytest.raises(ArithmeticError, match="no plan"):
        patched.setattr(AuxStreams, "place", broken)
        branching.branch(lambda: x + 1)
    assert torch.zeros(2, device=branching.device.torch_device).tolist() == [0.0, 0.0]
    assert torch.equal(branching.branch(lambda: x + 1), x + 1)


def test_buffers_that_take_turns_without_changing_who_shares_memory_are_followed(branching: Branching) -> None:
    x, *w = matrices(branching, 3)
    calls = [0]

    def alternates() -> Tensor:
        calls[0] += 1
        return (x @ w[calls[0] % 2]).sin()

    got = branching.branch(alternates)
    branching.launch()
    assert torch.equal(got, (x @ w[0]).sin())


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_kernels_that_no_op_tells_of_are_refused(branching: Branching) -> None:
    x, w, out = matrices(branching, 3)

    def beside() -> None:
        h = x.sin()
        q = (h @ w).sin()
        k = h @ w
        with _torch.dispatch_modes_off():
            out.add_(1)
        out.copy_(q + k)

    with pytest.raises(UnseenWorkError, match="a kernel that no op tells of"):
        branching.branch(beside)
    assert torch.equal(branching.branch(lambda: x + 1), x + 1)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize(("lent", "message"), [(False, "4 kernels and copies, and the forward had 3"), (True, "no op tells of")])
def test_a_kernel_that_came_after_the_trace_is_noticed(branching: Branching, lent: bool, message: str) -> None:
    x, w, out = matrices(branching, 3)
    calls = [0]

    def forward() -> None:
        calls[0] += 1
        h = x.sin()
        if calls[0] > 1:
            with _torch.dispatch_modes_off():
                out.add_(1)
        out.copy_(h @ w)

    trace = trace_of(forward, branching.device, branching.pool, branching.device.default_stream(), "branches")
    if lent:
        trace.lend()
    with pytest.raises(UnseenWorkError, match=message), segue.BreakableCapture(pool=branching.pool, root=forward, trace=trace):
        forward()
    assert torch.equal(branching.branch(lambda: x + 1), x + 1)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_a_forward_with_streams_of_its_own_is_refused(branching: Branching) -> None:
    x, w = matrices(branching, 2)
    side = torch.cuda.Stream()

    def forks() -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x @ w
        torch.cuda.current_stream().wait_stream(side)
        return y

    with pytest.raises(UnseenWorkError, match="another stream current"):
        branching.branch(forks)
    assert torch.equal(branching.branch(lambda: x + 1), x + 1)
