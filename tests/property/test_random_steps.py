"""Random operations on caches between steps of one token: logits and caches are those of the untouched model on twins of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from property.budget import CUDA, budget
from segue import devices

pytest.importorskip("transformers")

from integrations.families import FAMILIES
from integrations.twins import Twins, full, held, reset_empties, tokens
from segue.integrations.transformers import accelerate, decode_server, resident_memory
from segue.integrations.transformers.resident_layers import residence_of

MODELS = ("llama", "mistral", "gemma2")
_number = st.integers(0, 7)


@dataclass(frozen=True)
class Do:
    """What is done, to which of the conversations that live, and how."""

    what: str
    which: int
    number: int


_often = ("steps", "steps", "step", "step", "new", "deepcopy", "crop", "chunk", "look", "drop")
_seldom = ("copy", "select", "repeat", "reorder", "untouched", "replace", "write", "recapture", "masked", "reset")
_does = st.lists(st.builds(Do, st.sampled_from(_often + _seldom), _number, _number), min_size=8, max_size=30).map(tuple)


class Played:
    """Conversations with one handle, played by turns. ``budgeted``: memory is for a few of them alone."""

    def __init__(self, handle: Any) -> None:
        self.handle, self.talks, self.seed = handle, list[Twins](), 0
        self.looked_at: list[tuple[Tensor, Tensor]] = []  # views, and what they showed

    def play(self, does: tuple[Do, ...]) -> None:
        self.new(1)
        for at, do in enumerate((*does, Do("steps", 0, 3))):
            try:
                self.do(do)
                for talk in self.talks:
                    talk.check()
                for now, then in self.looked_at:
                    assert torch.equal(now, then), "a view has changed"
            except BaseException as e:
                e.add_note(f"at operation {at}, {do}")
                raise

    def do(self, do: Do) -> None:
        if do.what == "new" or not self.talks:
            return self.new(do.number)
        talk = self.talks[do.which % len(self.talks)]
        self.seed += 1
        getattr(self, do.what)(talk, do.number)
        return None

    def new(self, number: int) -> None:
        talk, batch = self.begun(number), 1 + number % 3
        ids, mask = self.ids(batch, 2 + 2 * number), None
        if batch > 1 and number > 2:
            mask = torch.ones_like(ids)
            mask[1, : 1 + number] = 0
        self.seed += 1
        talk.say(ids, mask)
        self.talks = [*self.talks[-3:], talk]

    def begun(self, number: int) -> Twins:
        return Twins(self.handle)

    def ids(self, batch: int, length: int) -> Tensor:
        return tokens(self.handle.device, batch, length, self.seed)

    def batch(self, talk: Twins) -> int:
        return int(talk.theirs.layers[0].keys.shape[0])

    def step(self, talk: Twins, _: int) -> None:
        talk.steps(1, self.seed)

    def steps(self, talk: Twins, number: int) -> None:
        talk.steps(2 + number // 2, self.seed)

    def chunk(self, talk: Twins, number: int) -> None:
        talk.say(self.ids(self.batch(talk), 2 + number))

    def untouched(self, talk: Twins, _: int) -> None:
        with self.handle.untouched():
            talk.steps(1, self.seed)

    def deepcopy(self, talk: Twins, _: int) -> None:
        self.talks = [*self.talks[-3:], talk.copied()]

    def copy(self, talk: Twins, number: int) -> None:
        other = talk.copied(copy.copy)
        other.ours.layers = [copy.copy(layer) for layer in other.ours.layers]
        other.theirs = copy.deepcopy(other.theirs)  # a copied layer of resident memory has memory of its own
        self.talks = [*self.talks[-3:], other]

    def drop(self, talk: Twins, number: int) -> None:
        self.talks.remove(talk)
        if number == 0:
            self.looked_at.clear()

    def look(self, talk: Twins, number: int) -> None:
        _, *seen = held(talk.ours)[number % len(talk.ours.layers)]
        self.looked_at = [*self.looked_at[-3:], *((t, t.clone()) for t in seen)]

    def crop(self, talk: Twins, number: int) -> None:
        slides = [layer for layer in talk.theirs.layers if layer.is_sliding]
        if not any(layer.get_seq_length() >= layer.sliding_window for layer in slides):
            self.cropped(talk, number)

    def cropped(self, talk: Twins, number: int) -> None:
        count = min(1 + number, int(talk.theirs.get_seq_length()) - 1)
        if talk.mask is not None:
            count = min(count, int(talk.mask.sum(1).min()) - 1)
        if count > 0:
            talk.both(lambda cache: cache.crop(-count))
            talk.mask = None if talk.mask is None else talk.mask[:, :-count]

    def select(self, talk: Twins, number: int) -> None:
        self.indexed(talk, "batch_select_indices", [number % self.batch(talk)])

    def reorder(self, talk: Twins, number: int) -> None:
        batch = self.batch(talk)
        self.indexed(talk, "reorder_cache", [(number + i * i) % batch for i in range(batch)])

    def indexed(self, talk: Twins, name: str, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self.handle.device)
        talk.both(lambda cache: getattr(cache, name)(index))
        talk.mask = None if talk.mask is None else talk.mask[index]

    def repeat(self, talk: Twins, _: int) -> None:
        if self.batch(talk) < 5:
            talk.both(lambda cache: cache.batch_repeat_interleave(2))
            talk.mask = None if talk.mask is None else talk.mask.repeat_interleave(2, 0)

    def replace(self, talk: Twins, number: int) -> None:
        at = number % len(talk.ours.layers)
        talk.both(lambda cache: cache.layers.__setitem__(at, copy.deepcopy(cache.layers[at])))

    def write(self, talk: Twins, number: int) -> None:
        if residence_of(talk.ours.layers[number % 2]) is not None:  # or a shallow copy would be written too
            self.looked_at.clear()  # of which this may be one
            talk.both(lambda cache: cache.layers[number % 2].values[..., -1:, :].mul_(0.5))

    def masked(self, talk: Twins, number: int) -> None:
        if talk.mask is not None:
            talk.mask[:, number] = 0  # more padding, or a hole
            if not bool(talk.mask.any(1).all()):
                talk.mask[:, -1] = 1
            talk.steps(1, self.seed)

    def reset(self, talk: Twins, number: int) -> None:
        if reset_empties():
            talk.both(lambda cache: cache.reset())
        else:
            talk.ours = talk.theirs = None
        talk.mask = None
        talk.say(self.ids(1, 3 + number))

    def recapture(self, talk: Twins, number: int) -> None:
        if number < 2:
            self.handle.recapture()


@functools.cache
def handle_of(family: str, device: str, rows: int = 256) -> Any:
    model = FAMILIES[family].make().to(devices.resolve(device).torch_device)
    kept = resident_memory.ResidentMemory.bytes_of([resident_memory.LayerShape(2, 16, 16)] * 2, rows, torch.float32)
    return accelerate(model, device=device, max_tokens=64, memory_budget=kept)


@contextmanager
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident_memory, "_LEAST_ROOM", 8)
        patch.setattr(decode_server, "_LEAST_ROWS", 64)
        yield


def _play(family: str, does: tuple[Do, ...], device: str) -> None:
    handle = handle_of(family, device)
    with small():
        Played(handle).play(does)


@budget(25, 1000)
@given(st.sampled_from(MODELS), _does)
def test_random_operations_between_steps(family: str, does: tuple[Do, ...]) -> None:
    _play(family, does, "emulator")


@pytest.mark.cuda
@CUDA
@budget(15, 1000)
@given(st.sampled_from(MODELS), _does)
def test_random_operations_between_steps_on_cuda(family: str, does: tuple[Do, ...]) -> None:
    _play(family, does, "cuda")


def test_the_steps_between_operations_are_full_graphs() -> None:
    does = tuple(Do(what, 0, 4) for what in ("steps", "new", "steps", "deepcopy", "steps", "drop", "steps"))
    before = {family: full(handle_of(family, "emulator")) for family in MODELS}
    for family in MODELS:
        _play(family, does, "emulator")
        assert full(handle_of(family, "emulator")) > before[family] + 6
