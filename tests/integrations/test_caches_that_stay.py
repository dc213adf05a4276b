"""Caches stay in resident memory: prompts that prime ran lie there at once, and beams are reordered there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from integrations.twins import Twins, declined, full, held, memory_of, poison
from segue import _torch
from segue.integrations.transformers import decode_server, resident_memory
from segue.integrations.transformers.resident_layers import leave_all, residence_of
from segue.integrations.transformers.resident_memory import Residence

Start = Callable[..., Any]
Said = Callable[..., Tensor]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of caches that were copied into resident memory."""
    taken: list[int] = []
    take_in = Residence.take_in

    def noted(self: Residence, kept: Any, length: int) -> None:
        taken.append(length)
        take_in(self, kept, length)

    monkeypatch.setattr(Residence, "take_in", noted)
    return taken


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resident memory begins with 64 rows, and each sequence gets room for 16 tokens more."""
    monkeypatch.setattr(resident_memory, "_LEAST_ROOM", 16)
    monkeypatch.setattr(decode_server, "_LEAST_ROWS", 64)


def lies_there(talk: Twins) -> bool:
    """Whether all layers of a conversation lie together in resident memory."""
    homes = {residence_of(layer) for layer in talk.ours.layers}
    return None not in homes and len(homes) == 1


def warmed(handle: Any, said: Said, *batches: int) -> None:
    """Capture prompts of 11 tokens in these batch sizes, and the steps after them."""
    for batch in batches:
        for seed in range(2):
            talk = Twins(handle)
            talk.say(said(batch, 11, seed))
            talk.steps(2, seed)


def padding(ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    for row in range(1, len(ids)):
        mask[row, : 2 * row] = 0
    return mask


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_prompt_is_copied_once(family: str, batch: int, start: Start, said: Said, moves: list[int]) -> None:
    handle = start(family)
    warmed(handle, said, batch)
    poison(handle)
    for length in (11, 10):
        talk = Twins(handle)
        moves.clear()
        talk.say(said(batch, length, 5))
        assert lies_there(talk) and moves == [length] and talk.ours.layers[0].keys.shape[0] == batch
        (home,) = {residence_of(layer) for layer in talk.ours.layers}
        rows = [t.data_ptr() for t in home.rooms]
        talk.steps(4)
        assert moves == [length] and [t.data_ptr() for each in held(talk.ours) for t in each[1:]] == rows
        del home
    assert not handle.stats.declined and not handle.stats.eager


def test_a_padded_batch_of_prompts_is_copied_once(start: Start, said: Said, moves: list[int]) -> None:
    handle = start("qwen3")
    for seed in range(3):
        talk = Twins(handle)
        moves.clear()
        talk.say(said(3, 11, seed), padding(said(3)))
        talk.steps(4, seed)
    assert moves == [11] and not handle.stats.declined


def test_generate_copies_a_prompt_once(start: Start, said: Said, moves: list[int]) -> None:
    handle = start()
    asked = {"do_sample": False, "max_new_tokens": 6}
    for seed in range(4):
        moves.clear()
        with handle.untouched():
            want = handle.generate(said(1, 11, seed), **asked)
        assert torch.equal(handle.generate(said(1, 11, seed), **asked), want)
    assert moves == [11] and memory_of(handle).residences == [] and not handle.stats.declined


def test_where_nothing_decodes_no_prompt_takes_resident_memory(start: Start, said: Said) -> None:
    handle = start()
    for seed in range(4):
        Twins(handle).say(said(1, 11, seed))
    assert handle.resident_bytes == 0 and handle.stats.strategies["prime"] > 0


@pytest.mark.usefixtures("small")
def test_rows_of_a_prompt_go_with_its_cache(start: Start, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = start()
    warmed(handle, said, 1)
    made: list[Tensor] = []
    own = _torch.with_own_storage
    monkeypatch.setattr(_torch, "with_own_storage", lambda t: made.append(t) or own(t))
    for seed in range(9):
        talk = Twins(handle)
        talk.say(said(1, 11, seed))
        assert lies_there(talk)
    assert len(made) <= 4  # one more run than there was, of two layers
    assert memory_of(handle).rows == 64 and len(memory_of(handle).residences) == 1


@pytest.mark.usefixtures("small")
def test_a_prompt_makes_nobody_leave(start: Start, said: Said) -> None:
    handle = start()
    warmed(handle, said, 1)
    memory, talks = memory_of(handle), []
    for seed in range(6):
        talks.append(Twins(handle))
        talks[-1].say(said(1, 11, seed))
    assert [lies_there(talk) for talk in talks] == [True] * 4 + [False] * 2 and memory_of(handle) is memory
    for talk in talks:
        talk.steps(2)
    assert memory_of(handle).rows == 128 and full(handle) >= 12 and not handle.stats.declined


@pytest.mark.usefixtures("small")
def test_prompts_that_nothing_follows_make_room_before_memory_grows(start: Start, said: Said) -> None:
    handle = start()
    warmed(handle, said, 1)
    memory, graphs = memory_of(handle), handle._decode._strategy.captured
    kept = [Twins(handle) for _ in range(3)]
    for talk in kept:
        talk.say(said(1, 11, 3))
    for seed in range(7):
        talk = Twins(handle)
        talk.say(said(1, 11, seed))
        talk.steps(3, seed)
    late = Twins(handle)
    late.say(said(1, 11, 20))
    assert not lies_there(late)  # the prompt itself makes no room
    late.steps(2)
    assert [lies_there(each) for each in (*kept, talk, late)] == [False, True, True, True, True]
    assert memory_of(handle) is memory and handle._decode._strategy.captured == graphs
    for each in (*kept, late):
        each.check()
        each.steps(2, 4)
    assert not handle.stats.declined


def test_prompts_come_between_the_steps_of_others(start: Start, said: Said, moves: list[int]) -> None:
    handle = start("qwen3")
    warmed(handle, said, 1, 2)
    talks: list[Twins] = []
    moves.clear()
    for seed in range(4):
        talks.append(Twins(handle))
        talks[-1].say(said(1 + seed % 2, 11, seed))
        for talk in talks:
            talk.steps(2, seed)
        for talk in talks:
            talk.check()
    assert moves == [11] * 4 and not handle.stats.declined


def test_a_prompt_longer_than_max_context_has_memory_of_its_own(start: Start, said: Said) -> None:
    handle = start(max_context=14)
    warmed(handle, said, 1)
    for length, there in ((13, True), (14, False)):
        talk = Twins(handle)
        talk.say(said(1, length))
        assert lies_there(talk) is there
        talk.steps(2)


def test_prompts_in_inference_mode_leave_ordinary_tensors(start: Start, said: Said) -> None:
    handle = start()
    warmed(handle, said, 1)
    talk = Twins(handle)
    with torch.inference_mode():
        talk.say(said())
    assert lies_there(talk) and not any(keys.is_inference() for _, keys, _ in held(talk.ours))
    talk.steps(2)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("padded", [False, True])
def test_beams_are_reordered_where_they_lie(
    family: str, padded: bool, start: Start, said: Said, moves: list[int]
) -> None:
    handle = start(family)
    talk = Twins(handle)
    talk.say(said(3), padding(said(3)) if padded else None)
    talk.steps(3)
    moves.clear()
    for seed, order in enumerate(([2, 0, 1], [0, 0, 2], [1, 1, 1], [0, 1, 2])):
        index = torch.tensor(order, device=handle.device)
        talk.both(lambda cache, index=index: cache.reorder_cache(index))
        if padded:
            assert talk.mask is not None
            talk.mask = talk.mask[index]
        assert lies_there(talk)
        talk.check()
        talk.steps(2, seed)
    assert moves == [] and full(handle) > 8 and not handle.stats.declined


def test_what_a_mask_says_after_a_reordering_is_believed(start: Start, said: Said) -> None:
    handle = start()
    talk = Twins(handle)
    talk.say(said(2), padding(said(2)))
    talk.steps(3)
    assert talk.mask is not None
    for mask in (talk.mask, talk.mask.flip(0), torch.ones_like(talk.mask)):
        other = talk.copied()
        other.steps(1)
        other.both(lambda cache: cache.reorder_cache(torch.tensor([1, 0], device=handle.device)))
        other.mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        other.steps(2, 1)
    assert not handle.stats.declined


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_layers_are_reordered_alone(family: str, start: Start, said: Said, moves: list[int]) -> None:
    handle = start(family)
    talk = Twins(handle)
    talk.say(said(2))
    talk.steps(3)
    moves.clear()
    for at in (0, 1):
        talk.both(lambda cache, at=at: cache.layers[at].reorder_cache(torch.tensor([1, 0], device=handle.device)))
        talk.check()
        talk.steps(2, at)
    assert moves == []


def test_a_view_does_not_change_when_beams_are_reordered(start: Start, said: Said, moves: list[int]) -> None:
    handle = start()
    talk = Twins(handle)
    talk.say(said(2))
    talk.steps(3)
    view = talk.ours.layers[1].values
    want = view.clone()
    talk.both(lambda cache: cache.reorder_cache(torch.tensor([1, 0], device=handle.device)))
    assert torch.equal(view, want) and residence_of(talk.ours.layers[1]) is None
    moves.clear()
    talk.steps(2)
    assert moves == [14] and torch.equal(view, want)


def test_a_reordering_to_another_batch_is_the_layers_own(start: Start, said: Said) -> None:
    handle = start("mistral")
    talk = Twins(handle)
    talk.say(said(2))
    talk.steps(3)
    talk.both(lambda cache: cache.reorder_cache(torch.tensor([1, 0, 1], device=handle.device)))
    talk.steps(3)
    assert not handle.stats.declined


def test_a_cache_that_has_to_leave_while_it_is_reordered(start: Start, said: Said) -> None:
    handle = start()
    talk = Twins(handle)
    talk.say(said(2))
    talk.steps(3)
    home, memory = residence_of(talk.ours.layers[0]), memory_of(handle)
    turn = memory.turn

    @contextmanager
    def others_first() -> Iterator[None]:  # another thread needed the rows
        memory.turn = turn
        leave_all(home, copied=True)
        with turn():
            yield

    memory.turn = others_first
    talk.both(lambda cache: cache.reorder_cache(torch.tensor([1, 0], device=handle.device)))
    assert not lies_there(talk)
    talk.check()
    talk.steps(2)


def test_beam_search_copies_no_cache_at_its_steps(start: Start, said: Said, moves: list[int]) -> None:
    handle = start("mistral")
    given = {"input_ids": said(2), "attention_mask": padding(said(2)), "num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    with handle.untouched():
        want = handle.generate(**given)
    for _ in range(3):
        moves.clear()
        assert torch.equal(handle.generate(**given), want)
    assert moves == [11] and not handle.stats.declined


@pytest.mark.usefixtures("small")
def test_threads_search_by_beams_in_memory_for_two(start: Start, said: Said) -> None:
    shape = [resident_memory.LayerShape(2, 16, 16)] * 2
    handle = start(memory_budget=resident_memory.ResidentMemory.bytes_of(shape, 64, torch.float32))
    greedy = {"num_beams": 2, "do_sample": False, "max_new_tokens": 8}
    given = [said(1, 5, seed) for seed in range(3)]
    with handle.untouched():
        want = [handle.generate(each, **greedy) for each in given]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            found = threads.map(lambda each: handle.generate(each, **greedy), given)
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert full(handle) > 20 and memory_of(handle).rows == 64


def test_a_budget_that_is_used_up_leaves_prompts_to_themselves(start: Start, said: Said) -> None:
    handle = start(memory_budget=1000)
    warmed(handle, said, 1)
    talk = Twins(handle)
    talk.say(said())
    talk.steps(2)
    assert not lies_there(talk) and declined(handle, "no room in resident memory") == 6
