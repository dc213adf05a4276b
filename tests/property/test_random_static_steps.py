"""Random operations on static caches between steps of one token, against the untouched model on twins of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from property.budget import CUDA, budget

pytest.importorskip("transformers")

from transformers import StaticCache

from integrations.twins import Twins, full
from property.test_random_steps import MODELS, Do, Played, handle_of, small

_ROWS = 256  # more than any play says
_MEMORY = 1024  # rows, for a few conversations
_often = ("steps", "steps", "step", "step", "new", "deepcopy", "crop", "chunk", "drop")
_seldom = ("reorder", "untouched", "replace", "write", "recapture", "masked", "reset")
_number = st.integers(0, 7)
_does = st.lists(st.builds(Do, st.sampled_from(_often + _seldom), _number, _number), min_size=8, max_size=25).map(tuple)


class PlayedStatic(Played):
    """Conversations on static caches; some also grow."""

    def begun(self, number: int) -> Twins:
        if number == 5:
            return super().begun(number)
        ours, theirs = (StaticCache(self.handle.config, max_cache_len=_ROWS) for _ in range(2))
        return Twins(self.handle, ours, theirs)

    def crop(self, talk: Twins, number: int) -> None:
        if not isinstance(talk.ours, StaticCache):
            super().crop(talk, number)
        elif all(getattr(layer, "is_croppable", False) for layer in talk.theirs.layers):
            self.cropped(talk, number)

    def reset(self, talk: Twins, number: int) -> None:
        if not isinstance(talk.ours, StaticCache):
            return super().reset(talk, number)
        talk.both(lambda cache: cache.reset())
        talk.mask = None
        talk.say(self.ids(self.batch(talk), 1 + number))
        return None


def _play(family: str, does: tuple[Do, ...], device: str) -> None:
    with small():
        PlayedStatic(handle_of(family, device, _MEMORY)).play(does)


@budget(20, 1000)
@given(st.sampled_from(MODELS), _does)
def test_random_operations_between_steps_on_static_caches(family: str, does: tuple[Do, ...]) -> None:
    _play(family, does, "emulator")


@pytest.mark.cuda
@CUDA
@budget(15, 1000)
@given(st.sampled_from(MODELS), _does)
def test_random_operations_between_steps_on_static_caches_on_cuda(family: str, does: tuple[Do, ...]) -> None:
    _play(family, does, "cuda")


def test_the_steps_between_operations_are_full_graphs() -> None:
    does = tuple(Do(what, 0, 4) for what in ("steps", "new", "steps", "deepcopy", "steps", "drop", "steps"))
    for family in MODELS:
        handle: Any = handle_of(family, "emulator", _MEMORY)
        before = full(handle)
        _play(family, does, "emulator")
        assert full(handle) > before + 6
