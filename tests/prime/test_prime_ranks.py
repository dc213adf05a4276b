"""Ranks of a group take prime graphs together, or none of them does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import segue
from runner.two_ranks import TwoRanks, two_ranks
from segue.check import tiny_trunk
from segue.devices import resolve
from segue.prime.prime_strategy import PrimeStrategy


@pytest.fixture(scope="module", params=["emulator", pytest.param("cuda", marks=pytest.mark.cuda)])
def ranks(request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("no two CUDA devices")
    with two_ranks(request.param) as both:
        yield both


def _summed(y: Tensor) -> Tensor:
    """``y`` times the number of ranks, which a collective gives: so the result doesn't depend on the others' rows."""
    ones = torch.ones(1, device=y.device)
    dist.all_reduce(ones)
    return y * ones


class _Trunk(tiny_trunk.Dense):
    """A trunk with a collective in its graph."""

    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        return _summed(super().forward(x, cu_seqlens, cache))


class _Prompt:
    """A call's context: ``session`` holds what came before."""

    def __init__(self, trunk: _Trunk, n: int, session: Any) -> None:
        self.trunk, self.n, self.session = trunk, n, session


@segue.break_point(trim=("x",))
def _live(x: Tensor) -> Tensor:
    ctx: _Prompt = segue.current_forward_ctx()
    if not ctx.n:
        return x * 1
    offsets = torch.tensor([0, ctx.n], dtype=torch.int32, device=x.device)
    out = x + ctx.session.length if ctx.session.length else tiny_trunk.Dense.forward(ctx.trunk, x, offsets, ctx.session)
    ctx.session.length += ctx.n
    return out


def _no_graph(job: Any) -> Any:
    raise segue.CaptureError("no graph on this rank")


def _prompts(place: torch.device, ranks_calls: list[tuple[tuple[int, int], tuple[bool, bool]]], fails: bool) -> Any:
    mine = dist.get_rank()
    torch.manual_seed(0)
    with torch.inference_mode(False):
        trunk = _Trunk().to(place).eval().requires_grad_(False)

    def fresh(ctx: _Prompt) -> list[tuple[int, Any]] | None:
        return None if ctx.session.length or not ctx.n else [(ctx.n, ctx.session)]

    strategy = PrimeStrategy(trunk, fresh)
    if fails and mine == 1:
        strategy.capture = _no_graph  # type: ignore[method-assign]
    with segue.GraphRunner(
        lambda x: _summed(_live(x)), {"x": segue.Input(0, 0.0)}, [8, 16], strategies=[strategy, segue.Breakable()],
        device=resolve("emulator" if place.type == "cpu" else place), progress=False, group=dist.group.WORLD, on_failure="eager",
    ) as runner:  # fmt: skip
        for k, (lengths, used) in enumerate(ranks_calls):
            n = lengths[mine]
            x = trunk.embed(torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(10 * k + mine)).to(place))
            session, other = trunk.new_cache(40), trunk.new_cache(40)
            session.length = other.length = 3 if used[mine] else 0
            given = runner(x, ctx=_Prompt(trunk, n, session))
            with segue.active_forward(_Prompt(trunk, n, other)):
                want = _summed(_live(x))
            torch.testing.assert_close(given, want, msg=lambda text, k=k: f"call {k}: {text}")
            torch.testing.assert_close(session.kv[..., :n, :], other.kv[..., :n, :])
            assert session.length == other.length
        return dict(runner.stats.strategies), dict(runner.stats.reasons)


BOTH, ONE, NONE = (False, False), (True, False), (True, True)


def test_ranks_take_a_prime_graph_if_all_of_their_prompts_are_fresh(ranks: TwoRanks) -> None:
    calls = [((7, 5), BOTH), ((8, 3), BOTH), ((6, 8), BOTH), ((2, 1), BOTH), ((12, 4), BOTH), ((3, 9), BOTH), ((16, 2), BOTH)]
    assert ranks(_prompts, calls, False) == [({"prime": 3}, {})] * 2


def test_one_ranks_used_session_or_none_sends_all_to_breakable(ranks: TwoRanks) -> None:
    calls = [((7, 5), BOTH), ((8, 3), BOTH), ((7, 5), ONE), ((4, 6), ONE), ((8, 8), NONE), ((5, 0), BOTH), ((0, 5), BOTH)]
    calls.append(((4, 4), BOTH))
    assert ranks(_prompts, calls, False) == [({"prime": 1, "breakable": 3}, {})] * 2


def test_a_rank_whose_prime_graph_failed_sends_all_to_breakable(ranks: TwoRanks) -> None:
    calls = [((7, 5), BOTH), ((8, 3), BOTH), ((7, 5), BOTH), ((4, 6), BOTH), ((8, 8), BOTH)]
    first, second = ranks(_prompts, calls, True)
    assert first == ({"breakable": 1}, {}) and second == ({"breakable": 1}, {"a failed capture": 1})
