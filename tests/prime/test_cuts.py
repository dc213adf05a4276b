"""Cuts change when a graph starts, and nothing that it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import segue
from prime.prompts import prompt
from segue.devices import Device
from segue.prime import cuts


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
            assert prime.cuts == min(prime.measured, key=lambda c: prime.measured[c]) and len(prime.measured) > 1
        else:
            assert prime.cuts == () and not prime.measured


def test_the_patterns_to_measure_grow_and_fit_the_marks() -> None:
    assert cuts.patterns(0) == cuts.patterns(1) == [()]
    assert cuts.patterns(3) == [(), (1, 2), (2,), (1,)]
    assert cuts.patterns(28) == [(), (1, 2, 4, 8, 16), (2, 10), (1, 4, 14)]


def test_the_quickest_pattern_is_kept_and_the_others_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Capture:
        def __init__(self, pattern: tuple[int, ...]) -> None:
            self.pattern, self.closed = pattern, False

        def close(self) -> None:
            self.closed = True

    made: list[Capture] = []

    def record(pattern: tuple[int, ...]) -> Any:
        made.append(Capture(pattern))
        return made[-1]

    monkeypatch.setattr(cuts, "_median", lambda capture, device: {0: 3.0, 1: 1.0, 2: 2.0}[len(capture.pattern)])
    best, kept, seconds = cuts.quickest([(), (1,), (1, 2)], record, device=None)  # type: ignore[arg-type]
    assert best == (1,) and kept is made[1] and seconds == {(): 3.0, (1,): 1.0, (1, 2): 2.0}  # type: ignore[comparison-overlap]
    assert [c.closed for c in made] == [True, False, True]


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
