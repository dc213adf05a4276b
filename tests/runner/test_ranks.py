"""Several ranks: collectives in graphs give what they give in eager, and ranks of a group run each call alike."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import segue
from runner.two_ranks import TwoRanks, two_ranks
from segue import _torch_ranks
from segue.devices import Device
from segue.runner import rank_group

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


def _sum_over_ranks(x: Tensor) -> Tensor:
    """Each row, twice, plus the sum of all real rows of all ranks."""
    y = x * 2
    return y + _sum_of_rows(y)


@segue.break_point(trim=("y",), token_dim=None)
def _sum_of_rows(y: Tensor) -> Tensor:
    total = y.sum(0, keepdim=True)
    dist.all_reduce(total)
    return total


def _rows(n: int, k: int, place: torch.device) -> Tensor:
    return torch.full((n, 2), float(k), device=place)


def _calls(place: torch.device, lengths: list[tuple[int, int]], **options: Any) -> Any:
    """Calls of these lengths on each rank. Returns what was wrong, and the counts."""
    mine = dist.get_rank()
    wrong = []
    with runner_of(_sum_over_ranks, place, group=dist.group.WORLD, **options) as runner:
        for k, both in enumerate(lengths):
            given = runner(_rows(both[mine], k, place))
            if not torch.equal(given, torch.full((both[mine], 2), 2.0 * k + 2 * k * sum(both), device=place)):
                wrong.append((k, given))
        s = runner.stats
        return wrong, s.warmed, s.captured, s.replayed, dict(s.reasons), s.buckets


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([(3, 3)] * 4, (1, 1, 2, {}, (4,))),
        ([(3, 7), (7, 2), (8, 5), (1, 6), (4, 3), (2, 3), (3, 2)], (2, 2, 3, {}, (4, 8))),
        ([(3, 0), (0, 3), (4, 0), (0, 2), (0, 0)], (1, 1, 3, {}, (4,))),
        ([(3, 9), (9, 0), (3, 3)], (1, 0, 0, {"no bucket fits": 2}, ())),
    ],
    ids=["same length", "different lengths", "one idle", "one too long"],
)
def test_ranks_take_the_bucket_of_the_longest(ranks: TwoRanks, lengths: Any, counts: Any) -> None:
    assert ranks(_calls, lengths) == [([], *counts)] * 2


def _fails_on_rank_1(x: Tensor) -> Tensor:
    if dist.get_rank() == 1 and segue.is_breakable_capture_active() and len(x) == 4:
        x.sum().item()
    return _sum_over_ranks(x)


def _one_capture_fails(place: torch.device, ahead: bool) -> Any:
    with runner_of(_fails_on_rank_1, place, group=dist.group.WORLD, on_failure="eager") as runner:
        if ahead:
            runner.capture(_rows(3, 1, place))
        for k in range(1, 6):
            given = runner(_rows(3, k, place))
            assert torch.equal(given, torch.full((3, 2), 14.0 * k, device=place)), (k, given)
        for k in range(1, 4):
            given = runner(_rows(6, k, place))
            assert torch.equal(given, torch.full((6, 2), 26.0 * k, device=place)), (k, given)
        s, here = runner.stats, runner.admit(3)
        return s.captured, s.replayed, dict(s.reasons), (here.bucket, here.strategy, here.reason), runner.admit(6).bucket


@pytest.mark.parametrize("ahead", [False, True], ids=["lazily", "ahead"])
def test_a_rank_whose_capture_failed_drags_all_to_eager_with_its_reason(ranks: TwoRanks, ahead: bool) -> None:
    first, second = ranks(_one_capture_fails, ahead)
    why = "a failed capture"
    if ahead:
        assert first == (2, 3, {why: 5}, (None, "eager", why), 8)
        assert second == (1, 3, {why: 6}, (None, "eager", why), 8)
    else:
        assert first == (2, 1, {why: 3}, (None, "eager", why), 8)
        assert second == (1, 1, {why: 4}, (None, "eager", why), 8)


def _one_capture_raises(place: torch.device, ahead: bool) -> Any:
    with runner_of(_fails_on_rank_1, place, [4], group=dist.group.WORLD) as runner:
        error: Any = None
        try:
            if ahead:
                runner.capture(_rows(3, 1, place))
            runner(_rows(3, 1, place))
            assert torch.equal(runner(_rows(3, 2, place)), torch.full((3, 2), 28.0, device=place))
        except segue.SegueError as e:
            error = type(e).__name__
        assert torch.equal(runner(_rows(3, 2, place)), torch.full((3, 2), 28.0, device=place))
        return error, dict(runner.stats.reasons)


@pytest.mark.parametrize(("ahead", "on_the_other"), [(False, None), (True, "RankError")], ids=["lazily", "ahead"])
def test_nobody_waits_for_a_rank_whose_capture_raises(ranks: TwoRanks, ahead: bool, on_the_other: str | None) -> None:
    reasons = {"the ranks' graphs of this bucket are not at the same stage": 1}
    assert ranks(_one_capture_raises, ahead) == [(on_the_other, reasons), ("CaptureError", reasons)]


def _captured_at_the_second_attempt(place: torch.device, ahead: bool, on_failure: Any, mended: Path) -> Any:
    def forward(x: Tensor) -> Tensor:
        return _sum_over_ranks(x) if os.path.exists(mended) else _fails_on_rank_1(x)

    with runner_of(forward, place, group=dist.group.WORLD, on_failure=on_failure) as runner:
        try:
            if ahead:
                runner.capture(_rows(3, 1, place))
            else:
                for k in (1, 2):
                    runner(_rows(3, k, place))
        except segue.SegueError as e:
            assert on_failure == "raise", e
        mended.touch()
        runner.capture(_rows(3, 1, place))
        for n in (3, 7):
            assert torch.equal(runner(_rows(n, 2, place)), torch.full((n, 2), 4.0 + 8.0 * n, device=place))
        return runner.stats.buckets, runner.stats.replayed, runner.admit(3).bucket


@pytest.mark.parametrize("on_failure", ["raise", "eager"])
@pytest.mark.parametrize("ahead", [False, True], ids=["lazily", "ahead"])
def test_all_ranks_capture_again_what_one_could_not(ranks: TwoRanks, ahead: bool, on_failure: str, tmp_path: Path) -> None:
    assert ranks(_captured_at_the_second_attempt, ahead, on_failure, tmp_path / "mended") == [((4, 8), 2, 4)] * 2


def _fails_after_a_collective(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    if dist.get_rank() == 1 and segue.is_breakable_capture_active():
        x.sum().item()
    return y


def _a_collective_has_run(place: torch.device) -> Any:
    notes = []
    with runner_of(_fails_after_a_collective, place, group=dist.group.WORLD, on_failure="eager") as runner:
        for k in range(1, 5):
            try:
                assert torch.equal(runner(_rows(3, k, place)), torch.full((3, 2), 4.0 * k, device=place))
            except segue.CaptureError as e:
                notes.append((k, place.type == "cpu" and "it isn't retried eagerly" in e.__notes__[-1]))
        return notes, dict(runner.stats.reasons)


def test_a_capture_that_failed_after_a_collective_ran_is_not_run_again(ranks: TwoRanks) -> None:
    first, second = ranks(_a_collective_has_run)
    assert first == ([], {"a failed capture": 2})
    assert second in [([(2, True)], {"a failed capture": 2}), ([], {"a failed capture": 3})]  # CUDA runs nothing as it records


def _one_reason(place: torch.device, which: str) -> Any:
    mine = dist.get_rank()
    options: dict[str, Any] = {"takes": lambda args, kwargs, ctx: mine == 0} if which == "takes" else {}

    def forward(x: Tensor, twice: bool = False) -> Tensor:
        return _sum_over_ranks(x)

    buckets = (4, 8) if which == "buckets" and mine else (4, 8, 16)
    with runner_of(forward, place, buckets, group=dist.group.WORLD, **options) as runner:
        flags = {"twice": True} if which == "flag" and mine else {}
        if which == "sleep":
            for _ in range(3):
                runner(_rows(3, 1, place))
            if mine:
                runner.sleep()
        for k, n in ((1, 3), (2, 12 if which == "buckets" else 3)):
            assert torch.equal(runner(_rows(n, k, place), **flags), torch.full((n, 2), (2.0 + 4 * n) * k, device=place))
        return dict(runner.stats.reasons)


@pytest.mark.parametrize(
    ("which", "reason"),
    [
        ("takes", "takes= says that graphs don't serve it"),
        ("flag", "the ranks' calls are of different variants"),
        ("buckets", "the ranks' calls are of different variants"),
        ("sleep", "asleep"),
    ],
)
def test_a_reason_that_only_one_rank_has_is_that_of_all(ranks: TwoRanks, which: str, reason: str) -> None:
    assert ranks(_one_reason, which) == [{reason: 2}] * 2


class _Scaled:
    def __init__(self, place: torch.device) -> None:
        self.weight = torch.full((2,), 3.0, device=place)

    def __call__(self, x: Tensor) -> Tensor:
        return _sum_over_ranks(x * self.weight)


def _wide(x: Tensor) -> Tensor:
    y = x.repeat(1, 1024).mul_(2)
    return _sum_over_ranks(y[:, :2] / 2)


def _budgets(place: torch.device, budgets: list[int | None]) -> Any:
    with runner_of(_wide, place, (4, 8, 1024), group=dist.group.WORLD, memory_budget=budgets[dist.get_rank()]) as runner:
        try:
            summary = runner.capture(_rows(3, 1, place))
        except segue.UsageError as e:
            return str(e).split(":")[0]
        for n in (3, 1000, 7):
            assert torch.equal(runner(_rows(n, 2, place)), torch.full((n, 2), 4.0 + 8 * n, device=place)), n
        return sorted(summary.buckets), runner.stats.buckets, dict(runner.stats.reasons)


@pytest.mark.parametrize("other", [None, 2**32], ids=["none", "larger"])
def test_ranks_keep_to_the_smallest_budget_of_any(ranks: TwoRanks, other: int | None) -> None:
    for budgets in ([4 << 20, other], [other, 4 << 20]):
        assert ranks(_budgets, budgets) == [([4, 8], (4, 8), {"memory_budget": 1})] * 2
    assert ranks(_budgets, [2**32, other]) == [([4, 8, 1024], (4, 8, 1024), {})] * 2
    assert ranks(_budgets, [other, 100]) == ["memory_budget=0.0 MiB is too small for one bucket"] * 2


def _one_forgets(place: torch.device) -> Any:
    budget = 16 << 20 if dist.get_rank() == 0 else None
    with runner_of(_wide, place, (256, 512, 4096), group=dist.group.WORLD, memory_budget=budget) as runner:
        runner.capture(_rows(3, 1, place))
        runner(_rows(3, 1, place))
        if dist.get_rank() == 1:
            runner.recapture()
        assert torch.equal(runner(_rows(4000, 2, place)), torch.full((4000, 2), 4.0 + 8 * 4000, device=place))
        return dict(runner.stats.reasons)


def test_a_rank_that_begins_anew_is_told_what_the_others_left_out(ranks: TwoRanks) -> None:
    assert ranks(_one_forgets) == [{"memory_budget": 1}] * 2


def _one_refuses(place: torch.device) -> Any:
    scaled, texts = _Scaled(place), []
    mine, x = dist.get_rank(), _rows(3, 1, place)
    with runner_of(scaled, place, group=dist.group.WORLD) as runner:
        for _ in range(3):
            assert torch.equal(runner(x), torch.full((3, 2), 42.0, device=place))
        before = scaled.weight
        if mine == 1:
            scaled.weight = before.clone()
        for n in (3, 8 if mine == 0 else 3):  # the second call is of a bucket that rank 1 didn't expect
            with pytest.raises(segue.StateChangedError if mine == 1 else segue.RankError) as error:
                runner(_rows(n, 1, place))
            texts.append(str(error.value))
            scaled.weight = before
            for _ in range(3):
                runner(_rows(8 if mine == 0 else 3, 1, place))
            scaled.weight = before.clone() if mine == 1 else before
        scaled.weight = before
        with pytest.raises(segue.InputError if mine == 0 else segue.RankError) as error:
            runner(x.double() if mine == 0 else x)
        texts.append(str(error.value))
        assert torch.equal(runner(x), torch.full((3, 2), 42.0, device=place))
        return texts


def test_what_one_rank_refuses_is_an_error_on_all_and_nobody_waits(ranks: TwoRanks) -> None:
    first, second = ranks(_one_refuses)
    for here, there in zip(first[:2], second[:2], strict=True):
        assert here == f"rank 1 refused its part of this call, so no rank goes on: StateChangedError: {there}"
    assert second[2] == f"rank 0 refused its part of this call, so no rank goes on: InputError: {first[2]}"


def _asleep(place: torch.device) -> Any:
    with runner_of(_sum_over_ranks, place, group=dist.group.WORLD) as runner:
        for _ in range(3):
            runner(_rows(3, 1, place))
        buffers = weakref.ref(runner.prepare().recorder)
        runner.sleep()
        gc.collect()
        freed = buffers() is None
        runner.wake()
        for k in range(3):
            assert torch.equal(runner(_rows(3, k, place)), torch.full((3, 2), 14.0 * k, device=place))
        return freed, runner.stats.replayed, runner.stats.eager


def test_ranks_sleep_and_wake_together(ranks: TwoRanks) -> None:
    assert ranks(_asleep) == [(True, 2, 0)] * 2


def _apart(place: torch.device, sockets: bool) -> Any:
    """A new group, whose ranks segue takes to be of two hosts unless they may have ``sockets``."""
    with pytest.MonkeyPatch.context() as patch:
        if not sockets:
            patch.setattr(rank_group, "connected", lambda rank, size, seconds, tell: None)
        group = dist.new_group(backend="gloo")
        rank_group.rank_group(group, 1)
    return group


def _one_is_missing(place: torch.device, sockets: bool) -> Any:
    group, seconds = _apart(place, sockets), []
    with runner_of(lambda x: x * 2, place, group=group, group_timeout=1) as runner:
        runner(_rows(3, 1, place))
        texts = []
        for _ in range(2 if dist.get_rank() == 0 else 0):
            start = time.monotonic()
            with pytest.raises(segue.RankError) as error:
                runner(_rows(3, 1, place))
            seconds.append(time.monotonic() - start)
            texts.append(str(error.value))
        return texts, seconds


@pytest.mark.parametrize("sockets", [True, False], ids=["one host", "several hosts"])
def test_a_missing_rank_is_named_in_time(ranks: TwoRanks, sockets: bool) -> None:
    (texts, seconds), _ = ranks(_one_is_missing, sockets)
    assert texts[0].startswith("rank 0 of 2 waited up to 1 s for the others to agree on a call, and rank 1 did not come")
    assert texts[1].startswith("rank 0 of 2 missed the others at an earlier call") and 0.5 < seconds[0] < 3 > seconds[1] * 10


def _one_is_late(place: torch.device, sockets: bool) -> Any:
    with runner_of(lambda x: _all_reduce(x * 2), place, group=_apart(place, sockets), group_timeout=1) as runner:
        runner(_rows(3, 1, place))
        if dist.get_rank() == 1:
            time.sleep(1.5)
        with pytest.raises(segue.RankError) as error:
            runner(_rows(3, 1, place))
        return str(error.value)


@pytest.mark.parametrize("sockets", [True, False], ids=["one host", "several hosts"])
def test_a_rank_that_comes_too_late_doesnt_go_on_alone(ranks: TwoRanks, sockets: bool) -> None:
    first, second = ranks(_one_is_late, sockets)
    assert "rank 1 did not come" in first and second.startswith("rank 1 of 2 waited up to 1 s for the others")


def _only_one_captures(place: torch.device) -> Any:
    with runner_of(lambda x: x * 2, place, group=dist.new_group(backend="gloo"), group_timeout=1) as runner:
        if dist.get_rank() == 0:
            with pytest.raises(segue.RankError, match="rank 1 did not come"):
                runner.capture(_rows(3, 1, place))


def test_a_rank_that_doesnt_capture_is_named(ranks: TwoRanks) -> None:
    ranks(_only_one_captures)


def _over_both(place: torch.device) -> Any:
    mine, found = dist.get_rank(), []
    for sockets in (True, False):
        group = rank_group.RankGroup(dist.group.WORLD, 1, sockets)
        assert (group._sockets is not None) is sockets
        found.append([group.largest([k, -k, -(2**62) * mine, 5 - 10 * mine]) for k in (mine, 7 * mine, 1 - mine)])
        assert group.largest([mine * k for k in range(100)]) == [*range(100)]
        assert group.all({"rank": "x" * mine}) == [{"rank": ""}, {"rank": "x"}]
    return found


def test_ranks_of_one_host_and_of_several_tell_each_other_the_same(ranks: TwoRanks) -> None:
    want = [[1, 0, 0, 5], [7, 0, 0, 5], [1, 0, 0, 5]]
    assert ranks(_over_both) == [[want, want]] * 2


def _at_another_call(place: torch.device, sockets: bool) -> None:
    group = rank_group.RankGroup(dist.group.WORLD, 5, sockets)
    with pytest.raises(segue.RankError, match=f"and rank {1 - dist.get_rank()} is at another call"):
        group.largest([1] * (1 + 12 * dist.get_rank()))


@pytest.mark.parametrize("sockets", [True, False], ids=["one host", "several hosts"])
def test_a_rank_at_another_call_is_named(ranks: TwoRanks, sockets: bool) -> None:
    ranks(_at_another_call, sockets)


def _only_one_makes_a_runner(place: torch.device) -> None:
    group = dist.new_group(backend="gloo")
    if dist.get_rank() == 0:
        with pytest.raises(segue.RankError, match="rank 0 of 2 waited up to 1 s for the others to make a runner, and not all"):
            runner_of(_sum_over_ranks, place, group=group, group_timeout=1)


def test_a_rank_that_makes_no_runner_is_an_error(ranks: TwoRanks) -> None:
    ranks(_only_one_makes_a_runner)


def _groups_of_one_alone(place: torch.device) -> Any:
    alone = dist.new_group([0], backend="gloo", use_local_synchronization=True)
    group = dist.new_group([0, 1], backend="gloo", use_local_synchronization=False)
    with runner_of(_sum_over_ranks, place, group=group, group_timeout=5) as runner:
        given = runner(_rows(3, 1, place))
    dist.destroy_process_group(group)
    if dist.get_rank() == 0:
        dist.destroy_process_group(alone)
    return given.tolist()


def test_ranks_may_be_in_different_numbers_of_groups(ranks: TwoRanks) -> None:
    assert ranks(_groups_of_one_alone) == [[[14.0, 14.0]] * 3] * 2


def _open_files_of_groups(place: torch.device) -> Any:
    counts = []
    for _ in range(4):
        group = dist.new_group(backend="gloo")
        rank_group.rank_group(group, 5)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        counts.append(len(os.listdir("/dev/fd")))
    return counts[-1] - counts[0]


def test_a_group_that_is_gone_leaves_no_file_open(ranks: TwoRanks) -> None:
    assert ranks(_open_files_of_groups) == [0, 0]


def _one_is_interrupted(place: torch.device) -> None:
    group = rank_group.RankGroup(dist.group.WORLD, 5)
    if dist.get_rank() == 0:

        def interrupted(values: Any) -> Any:
            raise KeyboardInterrupt

        group._values = interrupted
        with pytest.raises(KeyboardInterrupt):
            group.largest([1])
    with pytest.raises(segue.RankError, match="rank 0 is gone" if dist.get_rank() else "missed the others at an earlier call"):
        group.largest([1])


def test_nobody_waits_for_a_rank_that_was_interrupted_while_it_agreed(ranks: TwoRanks) -> None:
    start = time.monotonic()
    ranks(_one_is_interrupted)
    assert time.monotonic() - start < 3


def _decided_elsewhere(place: torch.device) -> Any:
    with runner_of(lambda x: x * 2, place, group=dist.group.WORLD) as runner:
        for k in range(4 if dist.get_rank() == 0 else 0):
            assert runner(_rows(3, k, place), decision=runner.admit(6)).tolist() == [[2.0 * k] * 2] * 3
        return runner.stats.replayed, runner.stats.buckets


def test_a_decision_of_the_callers_needs_no_agreement(ranks: TwoRanks) -> None:
    assert ranks(_decided_elsewhere) == [(2, (8,)), (0, ())]


@segue.break_point
def _add_total(y: Tensor) -> Tensor:
    total = y.sum(0, keepdim=True)
    dist.all_reduce(total)
    return y + total


def _full_steps(place: torch.device) -> Any:
    def takes(args: Any, kwargs: Any, ctx: Any) -> bool:
        return len(args[0]) <= 2

    strategies = [segue.Full(takes, [2]), segue.Breakable()]
    mine = dist.get_rank()
    with runner_of(lambda x: _add_total(x * 2), place, group=dist.group.WORLD, strategies=strategies) as runner:
        for k, both in enumerate([(2, 2), (1, 2), (2, 0), (0, 1), (2, 4), (4, 0), (0, 4), (3, 1)]):
            given = runner(_rows(both[mine], k, place))
            assert torch.equal(given, torch.full((both[mine], 2), 2.0 * k + 2 * k * sum(both), device=place)), (k, given)
        return dict(runner.stats.strategies), runner.stats.eager


def test_a_strategy_serves_a_call_only_if_all_ranks_with_work_take_it(ranks: TwoRanks) -> None:
    assert ranks(_full_steps) == [({"full": 2, "breakable": 2}, 0)] * 2


def test_a_group_must_be_one(device: Device) -> None:
    with pytest.raises(segue.UsageError, match="group='world' is no process group"):
        segue.GraphRunner(lambda x: x, INPUTS, [4], device=device, group="world")


def _registered(place: torch.device) -> None:
    device = "emulator" if place.type == "cpu" else place
    if place.type == "cuda":
        dist.all_reduce(torch.ones(1, device=place))
        pool = segue.new_pool(device, group=dist.group.WORLD)
        with runner_of(lambda x: _all_reduce(x * 2), place, pool=pool) as runner:
            for k in range(4):
                assert torch.equal(runner(_rows(3, k, place)), _rows(3, 4 * k, place))
        return
    with pytest.raises(segue.UsageError, match="only NCCL registers a pool's memory, and this one is on emulator"):
        segue.new_pool(device, group=dist.group.WORLD)
    with pytest.raises(segue.UsageError, match="group= registers no memory on cuda:0, as only NCCL"):
        _torch_ranks.registered_memory(dist.group.WORLD, torch.device("cuda", 0))
    with pytest.raises(segue.UsageError, match="group=3 is no process group"):
        _torch_ranks.registered_memory(3, torch.device("cuda", 0))


def test_a_pools_memory_is_registered_with_the_group_or_that_is_refused(ranks: TwoRanks) -> None:
    ranks(_registered)


class _Short(segue.Breakable):
    name = "short"

    def takes(self, call: Any) -> bool:
        assert call.tokens
        return bool(call.tokens <= 2)


def _full_requests(place: torch.device) -> Any:
    def forward(x: Tensor, scales: Tensor) -> Tensor:
        return _add_total(x * scales.repeat_interleave(len(x) // len(scales))[:, None] if len(scales) else x)

    inputs = {"x": segue.Input(0, 0.0), "scales": segue.Input(request_dim=0, pad=0.0)}
    strategies = [segue.Full(lambda args, kwargs, ctx: len(args[0]) <= 6, [4]), segue.Breakable()]
    mine = dist.get_rank()
    device = "emulator" if place.type == "cpu" else place
    with segue.GraphRunner(
        forward, inputs, [16], device=device, progress=False, request_buckets=[4], strategies=strategies, group=dist.group.WORLD
    ) as runner:
        for k, (both, each) in enumerate([((2, 3), 2), ((3, 1), 2), ((2, 0), 2), ((0, 3), 2), ((1, 3), 2)]):
            n = both[mine] * each
            given = runner(_rows(n, k, place), torch.full((both[mine],), 2.0, device=place))
            assert torch.equal(given, torch.full((n, 2), 2.0 * k + 2 * k * each * sum(both), device=place)), (k, given)
        uneven = runner(_rows(2, 1, place), torch.full((2 - mine,), 2.0, device=place))  # one token a request, and two
        assert torch.equal(uneven, torch.full((2, 2), 10.0, device=place))
        return dict(runner.stats.strategies), runner.stats.warmed


def test_full_graphs_of_requests_are_agreed_on_too(ranks: TwoRanks) -> None:
    assert ranks(_full_requests) == [({"full": 3}, 2)] * 2


def _idle_beside_a_strategy(place: torch.device) -> Any:
    mine = dist.get_rank()
    with runner_of(_sum_over_ranks, place, group=dist.group.WORLD, strategies=[_Short(), segue.Breakable()]) as runner:
        for both in ((2, 2), (1, 2), (2, 1), (2, 0), (0, 2), (2, 0)):
            given = runner(_rows(both[mine], 1, place))
            assert torch.equal(given, torch.full((both[mine], 2), 2.0 + 2 * sum(both), device=place)), (both, given)
        return dict(runner.stats.strategies)


def test_an_idle_rank_sends_all_to_the_strategy_that_serves_every_call(ranks: TwoRanks) -> None:
    assert ranks(_idle_beside_a_strategy) == [{"short": 1, "breakable": 1}] * 2


_ENDS = """
import atexit, sys, weakref
import torch
import torch.distributed as dist

atexit.register(lambda: print("alive at the end:", group() is not None))  # runs after what is registered later
import segue

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)

def forward(x):
    y = x * 2
    dist.all_reduce(y)
    return y

runner = segue.GraphRunner(forward, {"x": segue.Input(0, 0.0)}, [4], device="emulator", progress=False)
for _ in range(3):
    runner(torch.ones(4, 2))
dist.destroy_process_group()
print("alive in graphs:", group() is not None)
"""


def test_graphs_let_go_of_a_group_before_python_ends(tmp_path: Path) -> None:
    """Freeing a group waits for gloo's threads, which need the GIL to free the tensors of their last collective."""
    command = [sys.executable, "-c", _ENDS, str(tmp_path / "rendezvous")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.splitlines() == ["alive in graphs: True", "alive at the end: False"]
