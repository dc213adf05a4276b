"""Prime and breakable behind one runner: fresh prompts go to the one, everything else to the other, each counted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from prime.prompts import prompt
from segue.check import tiny_trunk
from segue.check.compare import difference
from segue.devices import Device
from segue.prime.prime_strategy import PrimeStrategy
from segue.runner import Breakable, GraphRunner, Input


@dataclass
class Forward:
    """A live context: the prompts of a call, and whether they go on where a session ended."""

    trunk: tiny_trunk.Dense
    lengths: Sequence[int]
    sessions: list[tiny_trunk.DenseCache] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sessions = self.sessions or [self.trunk.new_cache(40) for _ in self.lengths]


def fresh(ctx: Forward) -> list[tuple[int, Any]] | None:
    if any(session.length for session in ctx.sessions):
        return None
    return list(zip(ctx.lengths, ctx.sessions, strict=True))


@segue.break_point(trim=("x",))
def live(x: Tensor) -> Tensor:
    """The whole trunk on real rows; only a count of its tokens for a used session, which is enough to see who ran."""
    ctx: Forward = segue.current_forward_ctx()
    out, start = torch.empty_like(x), 0
    for n, session in zip(ctx.lengths, ctx.sessions, strict=True):
        rows = x[start : start + n]
        if session.length:
            out[start : start + n] = rows + session.length
        else:
            offsets = torch.tensor([0, n], dtype=torch.int32, device=x.device)
            out[start : start + n] = ctx.trunk.forward(rows, offsets, session)
        session.length += n
        start += n
    return out


def _runner(trunk: tiny_trunk.Dense, device: Device, **options: Any) -> GraphRunner:
    def forward(x: Tensor) -> Tensor:
        return live(x) * 1

    strategies = [PrimeStrategy(trunk, fresh, requests=2), Breakable()]
    inputs = {"x": Input(token_dim=0, pad=0.0)}
    return GraphRunner(forward, inputs=inputs, buckets=[8, 16], strategies=strategies, device=device, **options)


def _x(trunk: tiny_trunk.Dense, *lengths: int, device: Device) -> Tensor:
    with torch.inference_mode():
        return trunk.embed(torch.cat([prompt(n, device, seed=n) for n in lengths]))


def test_fresh_prompts_are_replayed_by_prime_and_all_else_by_breakable_in_the_same_buckets(
    device: Device, dense_trunk: Any
) -> None:
    with _runner(dense_trunk, device) as runner:
        for n in (7, 5, 8, 13, 16, 9, 1):
            x = _x(dense_trunk, n, device=device)
            mine, other = Forward(dense_trunk, [n]), Forward(dense_trunk, [n])
            got, want = runner(x, ctx=mine), runner.reference(x, ctx=other)
            assert difference(got, want) is None
            assert mine.sessions[0].length == other.sessions[0].length == n
            assert difference(mine.sessions[0].kv, other.sessions[0].kv) is None
            assert not mine.sessions[0].kv[..., n:, :].any()
            more = _x(dense_trunk, 3, device=device)
            torch.testing.assert_close(runner(more, ctx=Forward(dense_trunk, [3], mine.sessions)), more + n)
        stats = runner.stats
    assert stats.strategies == {"prime": 3, "breakable": 5} and stats.eager == 0
    assert stats.warmed == 3 and stats.captured == 3


def test_packed_prompts_fill_a_session_each(device: Device, dense_trunk: Any) -> None:
    with _runner(dense_trunk, device) as runner:
        for _ in range(3):
            x = _x(dense_trunk, 4, 9, device=device)
            mine, other = Forward(dense_trunk, [4, 9]), Forward(dense_trunk, [4, 9])
            got, want = runner(x, ctx=mine), runner.reference(x, ctx=other)
            assert difference(got, want) is None
            for a, b, n in zip(mine.sessions, other.sessions, (4, 9), strict=True):
                assert a.length == b.length == n and difference(a.kv, b.kv) is None
        assert runner.stats.strategies == {"prime": 1}


def test_more_prompts_than_a_graph_holds_go_to_breakable(device: Device, dense_trunk: Any) -> None:
    with _runner(dense_trunk, device) as runner:
        for _ in range(3):
            runner(_x(dense_trunk, 2, 3, 4, device=device), ctx=Forward(dense_trunk, [2, 3, 4]))
        assert runner.stats.strategies == {"breakable": 1}


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_session_without_room_is_refused_at_warm_up_capture_and_replay_and_stays_fresh(
    device: Device, dense_trunk: Any, calls: int
) -> None:
    with _runner(dense_trunk, device) as runner:
        x = _x(dense_trunk, 7, device=device)
        for _ in range(calls - 1):
            runner(x, ctx=Forward(dense_trunk, [7]))
        small = Forward(dense_trunk, [7], [dense_trunk.new_cache(6)])
        with pytest.raises(segue.SegueError, match="has room for 6 rows in keys and values, and the prompt has 7"):
            runner(x, ctx=small)
        assert small.sessions[0].length == 0 and not small.sessions[0].kv.any()
        runner(x, ctx=(good := Forward(dense_trunk, [7])))
        assert good.sessions[0].length == 7


def test_a_decision_for_prime_is_refused_where_the_session_is_used_by_then(device: Device, dense_trunk: Any) -> None:
    with _runner(dense_trunk, device) as runner:
        x = _x(dense_trunk, 7, device=device)
        for _ in range(3):
            runner(x, ctx=Forward(dense_trunk, [7]))
        decision = runner.admit(7)
        used = Forward(dense_trunk, [7])
        used.sessions[0].length = 2
        with pytest.raises(segue.SegueError, match="no batch of fresh prompts"):
            runner(x, ctx=used, decision=type(decision)(decision.bucket, "prime", decision.reason))


def test_a_shadow_run_compares_prime_with_its_own_reference(device: Device, dense_trunk: Any) -> None:
    with _runner(dense_trunk, device, verify_every=1) as runner:
        for _ in range(4):
            x = _x(dense_trunk, 7, device=device)
            runner(x, ctx=Forward(dense_trunk, [7]))
        assert runner.stats.strategies == {"prime": 2}


class Sharing(tiny_trunk.Dense):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def new_cache(self, rows: int, requests: int = 1) -> tiny_trunk.DenseCache:
        self.made.append(rows)
        return super().new_cache(rows, requests)

    def part(self, cache: tiny_trunk.DenseCache, rows: int) -> tiny_trunk.DenseCache:
        return tiny_trunk.DenseCache(cache.kv[..., :rows, :])


@pytest.mark.parametrize("order", [(7, 15), (15, 7)])
def test_buckets_share_one_scratch_cache_where_the_trunk_can_part_it(device: Device, order: tuple[int, int]) -> None:
    torch.manual_seed(0)
    trunk = Sharing().to(device.torch_device).eval().requires_grad_(False)
    prime = PrimeStrategy(trunk, fresh, requests=2, most_rows=16)
    inputs = {"x": Input(token_dim=0, pad=0.0)}
    runner = GraphRunner(lambda x: live(x) * 1, inputs=inputs, buckets=[8, 16], strategies=[prime, Breakable()], device=device)
    with runner:
        for n in (*order, *order, *order, *reversed(order)):
            x = _x(trunk, n, device=device)
            mine, other = Forward(trunk, [n]), Forward(trunk, [n])
            before = len(trunk.made)
            got, made = runner(x, ctx=mine), trunk.made[before:]
            assert difference(got, runner.reference(x, ctx=other)) is None
            assert difference(mine.sessions[0].kv, other.sessions[0].kv) is None
            assert len(made) <= 1
        assert prime.captured == {8, 16}
        kv = trunk.new_cache(16).kv
        assert prime.scratch_bytes == kv.numel() * kv.element_size()
    assert prime.captured == frozenset() and prime.scratch_bytes == 0


def test_without_parts_each_bucket_has_a_scratch_cache_that_is_counted(device: Device, dense_trunk: Any) -> None:
    prime = PrimeStrategy(dense_trunk, fresh)
    inputs = {"x": Input(token_dim=0, pad=0.0)}
    strategies = [prime, Breakable()]
    with GraphRunner(lambda x: live(x) * 1, inputs=inputs, buckets=[8, 16], strategies=strategies, device=device) as runner:
        for n in (7, 7, 15, 15):
            runner(_x(dense_trunk, n, device=device), ctx=Forward(dense_trunk, [n]))
        kv = dense_trunk.new_cache(8 + 16).kv
        assert prime.scratch_bytes == kv.numel() * kv.element_size()


def test_cuts_that_are_no_marks_of_the_trunk_are_refused_as_in_a_prime_graph(device: Device, dense_trunk: Any) -> None:
    strategies = [PrimeStrategy(dense_trunk, fresh, cuts=[99]), Breakable()]
    inputs = {"x": Input(token_dim=0, pad=0.0)}
    with GraphRunner(lambda x: live(x) * 1, inputs=inputs, buckets=[8], strategies=strategies, device=device) as runner:
        x = _x(dense_trunk, 7, device=device)
        runner(x, ctx=Forward(dense_trunk, [7]))
        with pytest.raises(segue.SegueError, match="99 is no mark of this trunk"):
            runner(x, ctx=Forward(dense_trunk, [7]))


def test_a_capture_holds_no_session_and_goes_with_its_program_at_once(device: Device, dense_trunk: Any) -> None:
    strategy = PrimeStrategy(dense_trunk, fresh)
    inputs = {"x": Input(token_dim=0, pad=0.0)}
    strategies = [strategy, Breakable()]
    with GraphRunner(lambda x: live(x) * 1, inputs=inputs, buckets=[8], strategies=strategies, device=device) as runner:
        x = _x(dense_trunk, 7, device=device)
        runner(x, ctx=Forward(dense_trunk, [7]))
        gc.collect()
        gc.disable()
        try:
            ctx = Forward(dense_trunk, [7])
            session = weakref.ref(ctx.sessions[0])
            runner(x, ctx=ctx)
            del ctx
            assert session() is None
            (program,) = strategy._programs
            forward = weakref.ref(program._forward)
            del program
            runner.close()
            assert forward() is None
        finally:
            gc.enable()
