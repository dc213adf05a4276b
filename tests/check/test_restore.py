"""Plain values and contexts are put back as they were."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from segue.check.restore import ContextContents, PlainValues

total = 0


def test_numbers_are_put_back_wherever_a_forward_holds_them():
    count, kept = 0, {"n": [1, 2], "name": "a"}

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Module()
            self.inner.step = None

        def forward(self):
            nonlocal count
            global total
            count += 1
            total += 1
            self.inner.step = 5
            kept["n"][1] = 7
            kept["name"] = "b"

    model = Model()

    def forward():
        model()
        return count

    values = PlainValues(model.forward)
    assert forward() == 1
    values.restore()
    assert (count, total, kept, model.inner.step) == (0, 0, {"n": [1, 2], "name": "a"}, None)


def test_what_a_forward_builds_and_keeps_stays():
    holder = SimpleNamespace(memo={}, table=None, step=0)

    def forward():
        holder.memo[8] = torch.ones(2)
        holder.table = torch.ones(3)
        holder.step = 1

    values = PlainValues(forward)
    forward()
    values.restore()
    assert holder.step == 0 and 8 in holder.memo and holder.table is not None


@dataclass(slots=True)
class Slotted:
    n: int
    cache: list[int]


def test_a_context_with_slots_too():
    ctx = Slotted(3, [1])
    contents, values, cache = ContextContents(ctx), PlainValues(ctx), ctx.cache
    ctx.n, ctx.cache = 4, [2]
    cache.append(5)
    values.restore()
    assert (ctx.n, ctx.cache) == (3, [2])
    contents.restore()
    assert ctx.cache is cache and cache == [1]


def test_a_context_gets_back_everything_it_held():
    first = torch.ones(1)
    ctx = SimpleNamespace(steps=[1], cache={"k": [first]}, n=3)
    contents = ContextContents(ctx)
    ctx.steps.append(2)
    ctx.cache["k"][0] = torch.zeros(1)
    ctx.cache["v"] = 1
    ctx.n = 4
    ctx.new = 5
    contents.restore()
    assert ctx.steps == [1] and list(ctx.cache) == ["k"] and ctx.cache["k"][0] is first
    assert vars(ctx).keys() == {"steps", "cache", "n"} and ctx.n == 3
