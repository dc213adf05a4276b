"""Cuts change when a graph starts, and nothing that it computes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

import segue
from prime.prompts import prompt
from segue.capture.op_watch import OpWatch
from segue.devices import Device
from segue.errors import CaptureError
from segue.prime import cuts
from segue.prime.cuts import Pattern


@pytest.mark.parametrize("pattern", [[], [1], [2], [1, 2], [2, 1, 1]])
def test_a_cut_graph_computes_the_same(device: Device, trunk: Any, pattern: list[int]) -> None:
    with segue.PrimeGraph(trunk, 32, cuts=pattern, device=device) as prime:
        assert prime.cuts == tuple(sorted(set(pattern)))
        assert prime.graphs == len(set(pattern)) + 1
        assert prime.capture is not None and prime.capture.breaks == 0
        for n in (30, 2, 32):
            want = prime.reference(prompt(n, device))
            prime.pool.poison()
            assert torch.equal(prime.run(prompt(n, device), trunk.new_cache(32)).logits, want.logits)


def test_a_cut_that_is_no_mark_is_refused_with_the_number_of_marks(device: Device, dense_trunk: Any) -> None:
    for wrong in (0, 3, 1.0, True):
        with pytest.raises(segue.SegueError, match=r"is no mark of this trunk.*2 times.*from 1 to 2"):
            segue.PrimeGraph(dense_trunk, 32, cuts=[wrong], device=device)  # type: ignore[list-item]


def test_cuts_are_measured_where_time_means_something(device: Device, dense_trunk: Any) -> None:
    with segue.PrimeGraph(dense_trunk, 32, device=device) as prime:
        if device.traits.timing:
            assert prime.cuts == min(prime.measured, key=lambda cut: prime.measured[cut])
        else:
            assert prime.cuts == () and not prime.measured
    with segue.PrimeGraph(dense_trunk, 32, cuts=[1], device=device) as prime:
        assert prime.cuts == (1,) and not prime.measured


def test_the_patterns_to_measure_grow_and_fit_the_marks() -> None:
    assert cuts.patterns(0) == cuts.patterns(1) == [()]
    assert cuts.patterns(3) == [(), (1, 2), (2,), (1,)]
    assert cuts.patterns(28) == [(), (1, 2, 4, 8, 16), (2, 10), (1, 4, 14)]


class _Capture:
    def __init__(self, cut: Pattern) -> None:
        self.cut, self.closed = cut, False

    def close(self) -> None:
        self.closed = True


def test_the_quickest_way_is_kept_and_the_others_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[Pattern, float] = {(): 3.0, (1,): 1.0, (1, 2): 2.0}
    made: list[_Capture] = []

    def record(cut: Pattern) -> Any:
        made.append(_Capture(cut))
        return made[-1]

    monkeypatch.setattr(cuts, "_median", lambda capture, device: taken[capture.cut])
    best, kept, seconds = cuts.quickest([(), (1,), (1, 2)], record, device=None)  # type: ignore[arg-type]
    assert best == (1,) and seconds == taken
    assert [c.cut for c in made if not c.closed] == [best] and not kept.closed  # type: ignore[attr-defined]


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_each_have_graphs_of_their_own(hybrid: ModuleType) -> None:
    made = []
    for index in (0, 1):
        trunk = hybrid.build(f"cuda:{index}")
        made.append((trunk, segue.PrimeGraph(trunk, 32, cuts=[1], device=f"cuda:{index}")))
    for current in (0, 1):
        with torch.cuda.device(current):
            for trunk, prime in made:
                want = prime.reference(prompt(20, prime.device)).logits
                prime.pool.poison()
                assert torch.equal(prime.run(prompt(20, prime.device), trunk.new_cache(32)).logits, want)
                assert torch.cuda.current_device() == current
    for _, prime in made:
        prime.close()


def test_a_mark_outside_a_prime_capture_does_nothing(device: Device) -> None:
    segue.prime.cut_here()
    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device, name="bare")
    with torch.inference_mode(), capture:
        x + 1
        segue.prime.cut_here()
        x + 2
    assert capture.graphs == 1


def test_a_bare_capture_may_be_cut_inside_its_block_only(device: Device) -> None:
    capture = segue.BreakableCapture(device=device, name="bare", root=test_a_bare_capture_may_be_cut_inside_its_block_only)
    x = torch.ones(4, device=device.torch_device)
    with torch.inference_mode(), capture:
        y = x * 2
        capture.cut()
        y = y + 1
    assert (capture.graphs, capture.breaks, len(capture.segments)) == (2, 0, 2)
    x.fill_(5)
    capture.replay()
    assert y.tolist() == [11.0] * 4
    with pytest.raises(segue.SegueError, match=r"bare: cut\(\) belongs inside its `with`"):
        capture.cut()


def test_a_break_after_cuts_sees_what_all_segments_before_it_computed(device: Device) -> None:
    seen: list[list[float]] = []

    @segue.break_point
    def look(y: torch.Tensor) -> None:
        seen.append(y.tolist())

    x = torch.arange(3.0, device=device.torch_device)
    with torch.inference_mode(), segue.BreakableCapture(device=device) as capture:
        y = x * 2
        capture.cut()
        y = y + 1
        capture.cut()
        look(y)
    x.fill_(4)
    capture.replay()
    assert seen == [[1.0, 3.0, 5.0], [9.0] * 3]
    capture.close()


def test_a_capture_that_fails_after_a_cut_leaves_the_pool_as_it_was(device: Device) -> None:
    pool = device.new_pool()
    x = torch.arange(3.0, device=device.torch_device)
    counter = torch.zeros(3, device=device.torch_device)
    for _ in range(2):
        failing = segue.BreakableCapture(pool=pool)
        with torch.inference_mode(), pytest.raises(ValueError, match="no more"), failing:
            y = x.sin()
            counter.add_(1)
            failing.cut()
            counter.mul_(3)
            failing.cut()
            y = y @ y
            raise ValueError("no more")
        with torch.inference_mode(), segue.BreakableCapture(pool=pool) as capture:
            y = x * 2
            capture.cut()
            y = y + 1
        capture.replay()
        assert y.tolist() == [1.0, 3.0, 5.0]
        capture.close()
        del y
    device.synchronize()
    assert not pool.usage().reserved and not counter.any(), "what was never launched has written nothing"


def test_a_segment_that_is_refused_as_it_ends_has_written_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = torch.zeros(3, device=device.torch_device)

    def refused(self: OpWatch) -> None:
        raise CaptureError("in another capture's memory")

    monkeypatch.setattr(OpWatch, "settle", refused)
    with torch.inference_mode(), pytest.raises(CaptureError, match="another capture's"), segue.BreakableCapture(device=device):
        counter.add_(1)
    assert not counter.any()
