"""An explicit capture leaves the forward's state as it was; a lazy one makes every change exactly once."""

from __future__ import annotations

import logging

import pytest
import torch

import segue
from runner.rows import close
from segue.errors import UsageError
from segue.runner import Input
from segue.runner.write_log import WriteLog

INPUTS = {"x": Input(0, 0.0)}


class Stateful:
    """Writes a tensor in a segment, another in a break, and counts in Python."""

    def __init__(self, device):
        self.decay = torch.ones(4, device=device)
        self.cache = torch.zeros(32, 4, device=device)
        self.steps = 0
        self.store = segue.break_point(trim=("x",))(self._store)

    def _store(self, x):
        self.cache[: len(x)] = x
        self.steps += 1
        return x

    def __call__(self, x):
        self.decay.mul_(0.5)
        return self.store(x * self.decay) + 1


def test_what_warm_up_and_capture_wrote_is_put_back(make, model, caplog):
    state = Stateful(model.device)
    runner = make(state, INPUTS, [4, 8])
    with caplog.at_level(logging.WARNING, "segue"):
        summary = runner.capture(model.x(3))
    assert torch.equal(state.decay, torch.ones_like(state.decay)) and not state.cache.any()
    assert summary.changed == {"Stateful.steps": (0, 4)}
    assert "changed Python attributes, which are not put back: Stateful.steps (0 to 4)" in caplog.text
    want = Stateful(model.device)
    for n in (3, 7, 2):
        assert close(runner(model.x(n)), want(model.x(n)))
    assert torch.equal(state.decay, want.decay) and torch.equal(state.cache, want.cache)


def test_a_lazy_capture_changes_state_once_a_call(make, model):
    state, want = Stateful(model.device), Stateful(model.device)
    runner = make(state, INPUTS, [4, 8])
    for i, n in enumerate((3, 3, 7, 3, 7, 7, 2)):
        assert close(runner(model.x(n, i)), want(model.x(n, i)))
        assert torch.equal(state.decay, want.decay) and torch.equal(state.cache, want.cache)


def test_named_state_is_put_back_whatever_its_size(make, model, monkeypatch):
    monkeypatch.setattr("segue.runner.write_log.LIMIT", 100)
    monkeypatch.setattr(WriteLog.__init__, "__defaults__", ((), 100))
    state = Stateful(model.device)
    with pytest.raises(
        UsageError, match=r"writes a tensor of 512 bytes .* beyond 100 bytes in all. Name it in GraphRunner\(state="
    ):
        make(state, INPUTS, [4]).capture(model.x(3))
    assert torch.equal(state.decay, torch.ones_like(state.decay)) and not state.cache.any()
    make(state, INPUTS, [4], state=[state.cache]).capture(model.x(3))
    assert not state.cache.any()


def test_the_random_generator_is_where_it_was(make, model):
    runner = make(lambda x: x + torch.rand_like(x), INPUTS, [4, 8])
    torch.manual_seed(7)
    runner.capture(model.x(3))
    after = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(3))


def test_views_and_lists_of_external_tensors_are_put_back_and_internal_ones_are_not_copied():
    outside = torch.arange(12.0).view(3, 4)
    many = [torch.ones(2), torch.ones(3)]
    log = WriteLog(lambda t: False)
    with log:
        inner = torch.zeros(5)
        inner.add_(1)
        outside[1].zero_()
        outside.t()[0].fill_(9)
        torch._foreach_mul_(many, 3.0)
        torch.add(inner, 1, out=inner)
    assert len(log._saved) == 3
    log.put_back()
    assert torch.equal(outside, torch.arange(12.0).view(3, 4)) and all(t.eq(1).all() for t in many)


def test_put_back_works_on_parameters_and_inference_tensors():
    p = torch.nn.Parameter(torch.ones(3))
    with torch.inference_mode():
        made = torch.ones(3)
        log = WriteLog(lambda t: False)
        with log:
            p.mul_(2)
            made.mul_(2)
    log.put_back()
    assert p.eq(1).all() and made.eq(1).all()
