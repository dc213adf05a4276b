"""Resident memory: caches move in and out of it, it grows, it makes room, and it is given back."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from integrations.twins import Twins, cached, close, declined, fail_in_a_step, full, held, memory_of, poison
from segue.devices import Device
from segue.integrations.transformers import decode_server, resident_memory
from segue.integrations.transformers.resident_layers import residence_of

Start = Callable[..., Any]
Said = Callable[..., Tensor]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resident memory begins with 64 rows, and each sequence gets room for 16 tokens more."""
    monkeypatch.setattr(resident_memory, "_LEAST_ROOM", 16)
    monkeypatch.setattr(decode_server, "_LEAST_ROWS", 64)


def begun(handle: Any, said: Said, batch: int = 1, length: int = 5, seed: int = 0) -> Twins:
    """A conversation after a prompt and two steps."""
    talk = Twins(handle)
    talk.say(said(batch, length, seed))
    talk.steps(2, seed)
    return talk


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.usefixtures("small")
def test_a_cache_outgrows_its_room(family: str, start: Start, said: Said) -> None:
    handle = start(family)
    for batch in (1, 2):
        talk = begun(handle, said, batch)
        talk.steps(30)
    assert full(handle) > 50 and not handle.stats.declined and memory_of(handle).rows == 256


@pytest.mark.usefixtures("small")
def test_memory_outgrows_its_rows(start: Start, said: Said) -> None:
    handle, talks = start(), []
    for seed in range(6):
        talks.append(begun(handle, said, seed=seed))
        for each in talks:
            each.steps(1, seed)
    assert memory_of(handle).rows == 128 and not handle.stats.declined
    old = [t.untyped_storage()._weak_ref() for t in memory_of(handle)._owned]
    talks += [begun(handle, said, 2, seed=seed) for seed in range(7, 10)]
    for each in talks[3:]:
        each.steps(2, 11)
    assert memory_of(handle).rows == 256 and not handle.stats.declined
    assert all(torch.UntypedStorage._expired(ref) for ref in old)  # though three have not gone on
    for each in talks:
        each.check()
        each.steps(1, 12)
    assert full(handle) > 30


def test_too_small_a_budget_leaves_steps_to_breakable_graphs(start: Start, said: Said) -> None:
    handle = start(memory_budget=1000)
    begun(handle, said).steps(4)
    assert declined(handle, "no room in resident memory") == 6 and full(handle) == 0 and not handle.stats.eager
    assert handle.scratch_bytes < 1_000_000


@pytest.mark.usefixtures("small")
def test_at_the_budget_idle_caches_make_room_and_graphs_stay(start: Start, said: Said) -> None:
    shape = [resident_memory.LayerShape(2, 16, 16)] * 2
    handle = start(memory_budget=resident_memory.ResidentMemory.bytes_of(shape, 64, torch.float32))
    talks = [begun(handle, said, seed=seed) for seed in range(4)]
    memory, graphs = memory_of(handle), handle._decode._strategy.captured
    assert memory.rows == 64 and graphs and not handle.stats.declined
    late = begun(handle, said, seed=5)
    assert declined(handle, "no room") == 2
    for turn in range(8):
        for each in talks[1:]:
            each.steps(1, turn)
    late.steps(3)
    assert declined(handle, "no room") == 2
    assert residence_of(talks[0].ours.layers[0]) is None and residence_of(late.ours.layers[0]) is not None
    for each in talks:
        each.check()
    talks[0].steps(2, 9)  # nobody is idle
    assert declined(handle, "no room") == 4
    assert memory_of(handle) is memory and handle._decode._strategy.captured == graphs and not handle.stats.eager


def test_max_context_is_where_full_graphs_end(start: Start, said: Said) -> None:
    handle = start(max_context=10)
    for batch in (1, 2):
        talk = begun(handle, said, batch)
        talk.steps(6)
    assert declined(handle, "max_context") == 6 and full(handle) >= 6 and not handle.stats.eager


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.usefixtures("small")
def test_rows_are_used_again_when_nobody_looks_at_them(family: str, start: Start, said: Said) -> None:
    handle = start(family)
    for seed in range(9):
        talk = begun(handle, said, length=5 + seed % 2, seed=seed)
        ref = weakref.ref(talk.ours)
        del talk
        assert ref() is None  # and no collection of garbage is needed
    assert memory_of(handle).rows == 64 and len(memory_of(handle).residences) == 0


@pytest.mark.usefixtures("small")
def test_a_cropped_cache_that_is_kept_holds_no_rows_but_its_own(start: Start, said: Said) -> None:
    handle = start()
    prefix = begun(handle, said)
    prefix.both(lambda cache: cache.crop(-1))
    for seed in range(9):
        talk = prefix.copied()
        talk.steps(3, seed)
    prefix.check()
    assert memory_of(handle).rows == 64 and not handle.stats.declined


def test_layers_that_outlive_their_cache_keep_what_they_hold(start: Start, said: Said) -> None:
    handle = start("mistral")
    talk = begun(handle, said)
    layers, want = talk.ours.layers, [t.clone() for _, keys, values in held(talk.ours) for t in (keys, values)]
    theirs = talk.theirs
    del talk
    gc.collect()
    for seed in range(4):
        begun(handle, said, 2, seed=seed)
    for layer, keys, values in zip(layers, want[::2], want[1::2], strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    again = copy.copy(theirs)
    again.layers = layers
    Twins(handle, again, theirs).steps(3)


@pytest.mark.parametrize("end", ["restore", "sleep", "recapture"])
def test_memory_is_given_back_and_conversations_go_on(end: str, start: Start, said: Said) -> None:
    handle = start("mistral")
    talk, other = begun(handle, said, 2), begun(handle, said, seed=1)
    kept = [t.untyped_storage()._weak_ref() for t in memory_of(handle)._owned]
    getattr(handle, end)()
    assert all(torch.UntypedStorage._expired(ref) for ref in kept)
    assert residence_of(talk.ours.layers[0]) is None
    talk.check()
    before = full(handle)
    for each in (talk, other):
        each.steps(4, 2)
    if end == "sleep":
        handle.wake()
        talk.steps(4, 3)
        other.steps(1, 4)
    assert (full(handle) > before) is (end != "restore")


def test_a_recapture_within_a_reference_goes_on_with_it(start: Start, said: Said) -> None:
    handle = start()
    talk = begun(handle, said)
    with handle.reference():
        talk.steps(1)
        handle.recapture()
        talk.steps(2)
    assert not handle.stats.eager


def test_copies_made_in_another_mode_are_ordinary_tensors(start: Start, said: Said) -> None:
    handle = start()
    talk = begun(handle, said)
    with torch.inference_mode():
        copied = talk.copied()
        handle.recapture()
    assert not any(keys.is_inference() for _, keys, _ in held(talk.ours))
    talk.both(lambda cache: [layer.keys.mul_(2) for layer in cache.layers])
    copied.steps(2)
    talk.steps(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_a_replay_is_its_reference_bit_for_bit(family: str, dtype: torch.dtype, start: Start, said: Said) -> None:
    handle = start(family, dtype)
    for batch in (1, 3):
        talk = begun(handle, said, batch)
        talk.steps(2)
        for seed in range(3):
            one, two, ids = talk.copied(), talk.copied(), said(batch, 1, seed)
            before = full(handle)
            with torch.no_grad():
                got = handle(ids, **cached(handle, one.ours)).logits
                with handle.reference():
                    want = handle(ids, **cached(handle, two.ours)).logits
            assert full(handle) == before + 1 and torch.equal(got, want)
            for a, b in zip(held(one.ours), held(two.ours), strict=True):
                assert a[0] == b[0] and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])
            talk.steps(1, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_what_earlier_caches_left_is_never_read(
    family: str, dtype: torch.dtype, device: Device, start: Start, said: Said
) -> None:
    handle = start(family, dtype)
    for batch, length in ((2, 30), (1, 11), (3, 3)):
        begun(handle, said, batch, length)
    poison(handle)
    for batch, length in ((3, 11), (1, 4), (2, 30)):
        begun(handle, said, batch, length).steps(4)
    assert not handle.stats.declined and full(handle) > 8
    flash = device.torch_device.type == "cuda" and dtype is torch.bfloat16 and family != "gemma2"  # which caps its scores
    assert handle._decode._body.by_flash is flash


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_step_that_fails_leaves_the_cache_as_it_was(
    steps: int, start: Start, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = start("mistral")
    begun(handle, said, 2)
    talk = Twins(handle)
    talk.say(said())
    if steps:
        talk.steps(steps)
    fail_in_a_step(talk, steps, monkeypatch)
    talk.check()
    talk.steps(5, 1)
    begun(handle, said, 3).steps(3)
    assert full(handle) > 3 and not handle.stats.eager


def test_threads_have_their_own_conversations(start: Start, said: Said) -> None:
    handle = start("gemma2")
    given = [{"input_ids": said(1 + at, 9, at), "attention_mask": torch.ones_like(said(1 + at, 9))} for at in range(3)]
    greedy = {"do_sample": False, "max_new_tokens": 20}
    with handle.untouched():
        want = [handle.generate(**each, **greedy) for each in given]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            found = threads.map(lambda each: handle.generate(**each, **greedy), given)
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert full(handle) > 90 and not handle.stats.declined and not handle.stats.eager


def test_a_view_may_outlive_everything(start: Start, said: Said) -> None:
    handle = start()
    talk = begun(handle, said)
    view = talk.ours.layers[1].values
    want = view.clone()
    handle.restore()
    del talk
    gc.collect()
    close(view, want)


def test_rows_behind_a_window_are_numbers(device: Device) -> None:
    shape = resident_memory.LayerShape(2, 8, 8, window=4)
    memory = resident_memory.ResidentMemory([shape], 32, torch.float32, device.torch_device)
    for t in memory._owned:
        t.fill_(float("nan"))
    residence = memory.place(2, 16)
    assert residence is not None and memory.place(1, 1) is None
    kept = torch.randn(2, 2, 3, 8, device=device.torch_device)  # a sliding layer keeps no more of ten tokens
    residence.take_in([(kept, kept)], 10)
    for room in residence.rooms:  # flash attention multiplies those by 0, which must give 0
        assert bool(room[:, :10].isfinite().all()) and torch.equal(room[:, 7:10].transpose(1, 2), kept)
    view = memory.view(residence, 0, 1)
    assert torch.equal(view, kept)
    del residence, room
    assert memory.place(1, 1) is None  # somebody looks at it
    del view
    assert memory.place(2, 16) is not None


def test_memory_that_gets_no_storages_of_its_own_leaves_steps_to_breakable_graphs(
    start: Start, said: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(t: Tensor) -> Tensor:
        raise BufferError("no dlpack here")

    monkeypatch.setattr("segue._torch.with_own_storage", refuse)
    handle = start()
    talk = Twins(handle)
    talk.say(said(1, 5))
    for _ in range(4):
        talk.say(said(1, 1))
    assert "full" not in handle.stats.strategies and "no dlpack here" in handle.strategies["full"]
    assert not handle.stats.eager and sum(handle.stats.declined.values()) == 4
