"""Random numbers advance as in eager, and a new seed counts."""

from __future__ import annotations

import dataclasses
import logging
import threading

import pytest
import torch
from torch import Tensor

import segue
from segue.capture import isolation
from segue.devices import Device
from segue.runner import GraphRunner, Input

pytestmark = pytest.mark.usefixtures("inference")


@segue.break_point
def noisy_break(y: Tensor) -> Tensor:
    return y + torch.rand_like(y)


def _forward(x: Tensor) -> Tensor:
    y = torch.nn.functional.dropout(x, 0.5, training=True) + torch.randn_like(x)
    return noisy_break(y) * torch.rand(x.shape, device=x.device)


def test_capture_and_replays_draw_what_eager_draws(device: Device) -> None:
    x = torch.ones(64, device=device.torch_device)
    torch.manual_seed(7)
    expected = [_forward(x) for _ in range(4)]
    torch.manual_seed(7)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = _forward(x)
    got = [out.clone()]
    for _ in range(3):
        capture.replay()
        got.append(out.clone())
    for want, have in zip(expected, got, strict=True):
        assert torch.equal(want, have)
    torch.manual_seed(11)
    fresh = _forward(x)
    torch.manual_seed(11)
    capture.replay()
    assert torch.equal(out, fresh)


def _own(device: Device) -> torch.Generator:
    return torch.Generator(device.torch_device).manual_seed(3)


def test_a_runners_forward_may_draw_from_a_generator_of_its_own(device: Device) -> None:
    own = _own(device)

    def forward(x: Tensor) -> Tensor:
        y = noisy_break(x * 2)
        return y + torch.rand(x.shape, generator=own, device=x.device) + torch.empty_like(x).normal_(generator=own)

    x = torch.ones(8, device=device.torch_device)
    torch.manual_seed(7)
    expected = [forward(x) for _ in range(4)]
    torch.manual_seed(7)
    own.manual_seed(3)
    runner = GraphRunner(forward, inputs={"x": Input(0, 0.0)}, buckets=[8], device=device, progress=False)
    for want in expected:
        assert torch.equal(runner(x), want)
    assert runner.stats.replayed == 2
    torch.manual_seed(7)
    own.manual_seed(3)  # a new seed counts
    assert torch.equal(runner(x), expected[0])


def test_a_generator_that_no_warm_up_has_shown_is_refused_by_name_and_known_from_then_on(device: Device) -> None:
    own, x = _own(device), torch.ones(8, device=device.torch_device)
    before = own.get_state()
    failed = segue.BreakableCapture(device=device)
    named = r"at \S*test_random\.py:\d+ in .* draws from a random generator of its own"
    with pytest.raises(segue.SegueError, match=named), failed:
        x + torch.rand(8, generator=own, device=x.device)
    assert torch.equal(own.get_state(), before)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = noisy_break(x) * torch.rand(8, generator=own, device=x.device)
    torch.manual_seed(1)
    own.manual_seed(3)
    want = noisy_break(x) * torch.rand(8, generator=own, device=x.device)
    torch.manual_seed(1)
    own.manual_seed(3)
    capture.replay()
    assert torch.equal(out, want)


def test_an_explicit_capture_and_a_check_leave_generators_as_they_were(device: Device) -> None:
    own, x = _own(device), torch.ones(8, device=device.torch_device)

    def forward(x: Tensor) -> Tensor:
        return noisy_break(x) + torch.rand(x.shape, generator=own, device=x.device)

    before = own.get_state()
    runner = GraphRunner(forward, inputs={"x": Input(0, 0.0)}, buckets=[8], device=device, progress=False)
    runner.capture(x)
    assert torch.equal(own.get_state(), before)
    assert runner.check(x).ok
    assert torch.equal(own.get_state(), before)


def test_a_default_generator_may_be_given_by_name(device: Device) -> None:
    x = torch.ones(8, device=device.torch_device)
    default = torch.cuda.default_generators[0] if device.traits.streams else torch.default_generator
    with segue.BreakableCapture(device=device) as capture:
        out = noisy_break(x) * torch.rand(8, generator=default, device=x.device)
    torch.manual_seed(1)
    want = noisy_break(x) * torch.rand(8, device=x.device)
    torch.manual_seed(1)
    capture.replay()
    assert torch.equal(out, want)


def test_a_lazy_capture_beside_other_threads_says_once_what_it_does_to_them(
    device: Device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, done = torch.ones(8, device=device.torch_device), threading.Event()
    monkeypatch.setattr(isolation, "_warned_of", set())
    for stops in (False, True):
        monkeypatch.setattr(device, "traits", dataclasses.replace(device.traits, stops_random_ops=stops), raising=False)
        other = threading.Thread(target=done.wait)
        other.start()
        try:
            with caplog.at_level(logging.WARNING, "segue"):
                for _ in range(2):
                    runner = GraphRunner(noisy_break, inputs={"y": Input(0, 0.0)}, buckets=[8], device=device, progress=False)
                    for _ in range(3):
                        runner(x)
        finally:
            done.set()
            other.join()
        done.clear()
        said = [r.getMessage() for r in caplog.records if "captured while other threads run" in r.getMessage()]
        assert len(said) == stops
    assert "ahead of traffic" in said[0]
