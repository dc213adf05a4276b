"""Several ranks: collectives in graphs give what they give in eager, and ranks of a group run each call alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import segue
from runner.two_ranks import TwoRanks, two_ranks

INPUTS = {"x": segue.Input(0, 0.0)}


@pytest.fixture(scope="module", params=["emulator", pytest.param("cuda", marks=pytest.mark.cuda)])
def ranks(request: pytest.FixtureRequest) -> Iterator[TwoRanks]:
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("no two CUDA devices")
    with two_ranks(request.param) as both:
        yield both


def runner_of(fn: Any, place: torch.device, buckets: Any = (4, 8), **options: Any) -> segue.GraphRunner:
    device = "emulator" if place.type == "cpu" else place
    return segue.GraphRunner(fn, INPUTS, buckets, device=device, progress=False, **options)


def _all_reduce(y: Tensor) -> Tensor:
    dist.all_reduce(y)
    return y


def _async_all_reduce(y: Tensor) -> Tensor:
    work = dist.all_reduce(y, async_op=True)
    assert work is not None
    work.wait()
    return y


def _all_gather(y: Tensor) -> Tensor:
    parts = [torch.empty_like(y) for _ in range(2)]
    dist.all_gather(parts, y)
    return parts[0] - 2 * parts[1]


def _all_gather_into(y: Tensor) -> Tensor:
    out = torch.empty(2 * len(y), y.shape[1], device=y.device)
    dist.all_gather_into_tensor(out, y)
    return out[: len(y)] - 2 * out[len(y) :]


def _reduce_scatter(y: Tensor) -> Tensor:
    out = torch.empty_like(y)
    dist.reduce_scatter_tensor(out, torch.cat([y, 3 * y]))
    return out


def _broadcast(y: Tensor) -> Tensor:
    dist.broadcast(y, 1)
    return y


def _all_to_all(y: Tensor) -> Tensor:
    out = torch.empty(2 * len(y), y.shape[1], device=y.device)
    dist.all_to_all_single(out, torch.cat([y, 3 * y]))
    return out[: len(y)] - 2 * out[len(y) :]


def _coalesced(y: Tensor) -> Tensor:
    z = 2 * y
    with dist._coalescing_manager():
        dist.all_reduce(y)
        dist.all_reduce(z)
    return y + z


def _exchange(y: Tensor) -> Tensor:
    other, out = 1 - dist.get_rank(), torch.empty_like(y)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, y, other), dist.P2POp(dist.irecv, out, other)]):
        work.wait()
    return out


def _functional_all_reduce(y: Tensor) -> Tensor:
    return _functional().all_reduce(y, "sum", dist.group.WORLD) + 1


def _functional_gather(y: Tensor) -> Tensor:
    both = _functional().all_gather_tensor(y, 0, dist.group.WORLD)
    return both[: len(y)] - 2 * both[len(y) :]


def _functional_scatter(y: Tensor) -> Tensor:
    return _functional().reduce_scatter_tensor(torch.cat([y, 3 * y]), "sum", 0, dist.group.WORLD) + 1


def _functional_all_to_all(y: Tensor) -> Tensor:
    both = _functional().all_to_all_single(torch.cat([y, 3 * y]), None, None, dist.group.WORLD)
    return both[: len(y)] - 2 * both[len(y) :]


def _functional_coalesced(y: Tensor) -> Tensor:
    a, b = _functional().all_reduce_coalesced([y, 2 * y], "sum", dist.group.WORLD)
    return a + b


@segue.break_point
def _twice(y: Tensor) -> Tensor:
    return y * 2


@segue.break_point
def _reducing(y: Tensor) -> Tensor:
    y = y * 1
    dist.all_reduce(y)
    return y


def _under_way_at_a_break(y: Tensor) -> Tensor:
    return _twice(_functional().all_reduce(y, "sum", dist.group.WORLD)) + 1


def _in_a_break(y: Tensor) -> Tensor:
    return _reducing(y) + 1


def _functional() -> Any:
    from torch.distributed import _functional_collectives

    return _functional_collectives


def _replays_beside_eager(place: torch.device, collective: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        return collective(x * (1.0 + dist.get_rank())) * 2

    runner = runner_of(forward, place)
    wrong = []
    for n, k in ((4, 1), (4, 2), (4, 3), (2, 4), (4, 5)):
        x = torch.full((n, 2), float(k), device=place)
        given, eager = runner(x), forward(x)
        if not torch.equal(given, eager):
            wrong.append((n, given.tolist(), eager.tolist()))
    return wrong, runner.stats.replayed


@pytest.mark.parametrize(
    "collective",
    [
        _all_reduce, _async_all_reduce, _all_gather, _all_gather_into, _reduce_scatter, _broadcast, _all_to_all, _coalesced,
        _exchange, _functional_all_reduce, _functional_gather, _functional_scatter, _functional_all_to_all,
        _functional_coalesced, _under_way_at_a_break, _in_a_break,
    ],
)  # fmt: skip
def test_a_collective_gives_at_each_replay_what_it_gives_in_eager(ranks: TwoRanks, collective: Any) -> None:
    assert ranks(_replays_beside_eager, collective) == [([], 3), ([], 3)]


def _barrier(place: torch.device) -> Any:
    def forward(x: Tensor) -> Tensor:
        dist.barrier()
        return x * 2

    runner, x = runner_of(forward, place), torch.ones(3, 2, device=place)
    runner(x)
    with pytest.raises(segue.CaptureError, match=r"c10d::barrier at .*test_ranks.py:\d+.*waits? for all ranks.*break point"):
        runner(x)


def test_a_barrier_in_a_segment_is_refused_by_name(ranks: TwoRanks) -> None:
    ranks(_barrier)


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(_twice(torch.relu(self.up(x))))  # type: ignore[no-any-return]


def _tensor_parallel(place: torch.device) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    with torch.inference_mode(False):
        whole = _Mlp().to(place).eval().requires_grad_(False)
        split = _Mlp().to(place).eval().requires_grad_(False)
        split.load_state_dict(whole.state_dict())
        mesh = init_device_mesh(place.type, (2,))
        parallelize_module(split, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    runner = runner_of(split, place)
    for n in (4, 4, 4, 2, 4):
        x = torch.randn(n, 8, generator=torch.Generator().manual_seed(n)).to(place)
        given = runner(x)
        torch.testing.assert_close(given, split(x))
        torch.testing.assert_close(given, whole(x))
    return runner.stats.replayed


def test_a_tensor_parallel_module_gives_what_one_rank_gives(ranks: TwoRanks) -> None:
    assert ranks(_tensor_parallel) == [3, 3]
