"""Random edits of a random module tree between calls: a replay equals eager, or names what changed, and recapture() mends it."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import segue
from property.budget import CUDA, budget
from property.edits import BODIES, EDITS, WIDTH, Plan, Tree, readable
from property.play import pool_of
from segue import devices
from segue.devices import Device
from segue.errors import LeftBehindError, StateChangedError

_number = st.integers(0, 7)


@dataclass(frozen=True)
class Edit:
    """An edit: its kind, what picks the block, and what is set."""

    kind: str
    pick: int
    number: int


@dataclass(frozen=True)
class Call:
    """A call of so many rows, and whether a refusal is mended at once; later edits may undo what was refused."""

    rows: int
    mends: bool


@dataclass(frozen=True)
class Case:
    """A tree, whether all is captured ahead, and what happens then: calls, edits, "undo", "recapture"."""

    plan: Plan
    ahead: bool
    steps: tuple[Any, ...]


_plans = st.recursive(
    st.builds(Plan, breaks=st.booleans(), seed=_number),
    lambda inner: st.builds(Plan, st.sampled_from(BODIES), st.lists(inner, max_size=2).map(tuple), st.booleans(), _number),
    max_leaves=3,
)
_call = st.builds(Call, st.sampled_from((3, 4, 7, 8, 9)), st.booleans())
_edit = st.builds(Edit, st.sampled_from(list(EDITS)), _number, _number)
_step = st.one_of(_call, _edit, _edit, st.sampled_from(("undo", "undo", "recapture")))
cases = st.builds(Case, _plans, st.integers(0, 3).map(bool), st.lists(_step, min_size=6, max_size=24).map(tuple))


class Edited:
    """Calls of a runner of a tree, each beside the plain tree, with edits between them."""

    def __init__(self, case: Case, device: Device) -> None:
        self.case, self.tree, self.place = case, Tree(case.plan, device.torch_device), device.torch_device
        pool, inputs = pool_of(device), {"x": segue.Input(token_dim=0, pad=0.0)}
        self.runner = segue.GraphRunner(self.tree.net, inputs, [4, 8], device=device, pool=pool, progress=False)
        self.made_from: dict[int, dict[str, Any]] = {}  # what was readable when a bucket's graph was made

    def play(self) -> None:
        try:
            with torch.inference_mode():
                if self.case.ahead:
                    self.runner.capture(self.input(3))
                    self.note_captured()
                for i, step in enumerate((*self.case.steps, Call(4, True), Call(8, True))):
                    self.do(step, f"step {i}, {step}")
        finally:
            while self.tree.done:  # globals and classes are everybody's
                self.tree.undo()
        self.runner.close()

    def do(self, step: Any, what: str) -> None:
        if isinstance(step, Edit):
            with torch.inference_mode(False), torch.no_grad():
                self.tree.edit(step.kind, step.pick, step.number)
        elif isinstance(step, Call):
            if not self.answers(step.rows, what) and step.mends:
                self.recapture()
                for again in ("warm-up", "capture", "replay"):
                    assert self.answers(step.rows, f"{what}, {again}"), f"{what}: refused after recapture()"
        elif step == "undo":
            with torch.inference_mode(False), torch.no_grad():
                self.tree.undo()
        else:
            self.recapture()

    def answers(self, rows: int, what: str) -> bool:
        """Make a call. Returns whether it was answered, rightly. It was refused, rightly, if not."""
        x = self.input(rows)
        want = self.tree.net(x)
        try:
            got = self.runner(x)
        except LeftBehindError as e:  # a block that came after the warm-up has its tables to make
            assert (4 if rows <= 4 else 8) not in self.made_from and ".tables[" in str(e), f"{what}: {e}"
            return False
        except segue.ReplayError as e:
            then, now = self.made_from[4 if rows <= 4 else 8], readable(self.tree.net)
            differ = [key for key in then.keys() | now.keys() if then.get(key, self) != now.get(key, self)]
            assert differ, f"{what}: refused, and nothing is other than at capture: {e}"
            assert "recapture()" in str(e), e
            named = e.change.path if isinstance(e, StateChangedError) else str(e)
            words = {word for key in differ for word in key.split(" ")[0].split(".")[-2:]}
            assert any(word in named for word in words), f"{what}: names none of {differ}: {e}"
            return False
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: silently different\n{text}")
        self.note_captured()
        return True

    def recapture(self) -> None:
        self.runner.recapture()
        self.made_from.clear()

    def note_captured(self) -> None:
        for bucket in self.runner.stats.buckets:
            self.made_from.setdefault(bucket, readable(self.tree.net))

    def input(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)).to(self.place)


def _play(case: Case, device: Device) -> None:
    contextvars.copy_context().run(Edited(case, device).play)


@budget(60, 1500)
@given(cases)
def test_a_random_edit_is_followed_or_named(case: Case) -> None:
    _play(case, devices.resolve("emulator"))


@pytest.mark.cuda
@CUDA
@budget(40, 400)
@given(cases)
def test_a_random_edit_is_followed_or_named_on_cuda(case: Case) -> None:
    _play(case, devices.resolve("cuda"))
