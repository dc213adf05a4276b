"""Steps of one token on a caller's static cache run as full graphs, and say what the untouched model says on one of its own."""

from __future__ import annotations

import copy
import functools
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer
from transformers.generation import CompileConfig

from integrations.test_steps import flow, padded
from integrations.twins import Twins, cached, close, declined, fail_in_a_step, full, held, poison, take_turns
from segue.integrations.transformers import decode_server
from segue.integrations.transformers.resident_layers import residence_of

Start = Callable[..., Any]
Said = Callable[..., Tensor]
_FAMILIES = ("qwen3", "llama", "gemma2", "qwen3_moe", "mistral")
_ROWS = 40


def twins(handle: Any, rows: int = _ROWS) -> Twins:
    """A conversation on static caches of so many rows."""
    return Twins(handle, *(StaticCache(handle.config, max_cache_len=rows) for _ in range(2)))


def begun(handle: Any, said: Said, batch: int = 1, length: int = 5, seed: int = 0, rows: int = _ROWS) -> Twins:
    """A conversation after a prompt and two steps."""
    talk = twins(handle, rows)
    talk.say(said(batch, length, seed))
    talk.steps(2, seed)
    return talk


def lies(talk: Twins) -> Any:
    """The run of resident memory in which the cache lies; None if it lies elsewhere."""
    return residence_of(talk.ours.layers[0])


@pytest.mark.parametrize("asked", ["greedy", "batch", "sampling", "beams", "beams of a batch", "several"])
@pytest.mark.parametrize("family", _FAMILIES)
def test_generate_says_the_untouched_models_tokens(family: str, asked: str, start: Start, said: Said) -> None:
    handle, given = start(family), {**flow(asked, said), "cache_implementation": "static"}
    graphs = []
    for seed in (0, 1, 2):
        torch.manual_seed(seed)
        with handle.untouched():
            want = handle.generate(**given)
        torch.manual_seed(seed)
        with torch.inference_mode(seed == 1):
            assert torch.equal(handle.generate(**given), want)
        graphs.append(handle._decode._strategy.captured)
    assert full(handle) > 25 and not handle.stats.declined
    assert graphs == [1, 1, 1]  # though each has a cache of its own


@pytest.mark.parametrize("family", [*_FAMILIES, "gpt2"])
def test_the_cache_is_the_untouched_models_after_every_step(family: str, start: Start, said: Said) -> None:
    handle = start(family)
    for batch in (1, 3):
        talk = twins(handle)
        talk.say(said(batch, 6))  # shorter than the window, and then longer
        talk.steps(9)
        for a, b in zip(talk.ours.layers, talk.theirs.layers, strict=True):
            assert torch.equal(a.cumulative_length, b.cumulative_length) and a.get_mask_sizes(1) == b.get_mask_sizes(1)
        assert repr(talk.ours) == repr(talk.theirs) and talk.ours.get_max_length() == talk.theirs.get_max_length()
    assert full(handle) > 8 and not handle.stats.declined and not handle.stats.eager


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_masks_made_beforehand(family: str, attention: str, start: Start, said: Said) -> None:
    handle = start(family)
    handle.set_attn_implementation(attention)
    handle.recapture()
    given = {**padded(said(3)), "max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    with handle.untouched():
        want = handle.generate(**given)
    assert torch.equal(handle.generate(**given), want)
    assert full(handle) > 8 and not handle.stats.declined


def test_a_mask_of_more_than_padding_goes_breakable(start: Start, said: Said) -> None:
    handle = start("qwen3")
    talk = twins(handle)
    talk.say(said(2))
    talk.steps(4)
    place, before = lies(talk), full(handle)
    mask = torch.arange(_ROWS, device=handle.device).expand(2, 1, 1, _ROWS) <= talk.ours.get_seq_length()
    for hole in (3, 15):
        changed = mask.clone()
        changed[1, :, :, hole] ^= True  # a hole, or a row without a token
        for given in (changed, {"full_attention": changed}):
            _alone(talk, said(2, 1, hole), given)
    bias = torch.zeros(mask.shape, device=handle.device).masked_fill(~mask, -5.0)
    _alone(talk, said(2, 1), bias)
    assert declined(handle, "padding at the left") == 5 and full(handle) == before
    talk.say(said(2, 1), attention_mask=mask)
    assert full(handle) == before + 1 and lies(talk) is place


def _alone(talk: Twins, ids: Tensor, mask: Any) -> None:
    """Take the step on copies of both caches: the conversation itself stays where it is."""
    talk.copied().say(ids, attention_mask=mask)


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_the_mask_changes_between_steps(family: str, start: Start, said: Said) -> None:
    handle = start(family)
    talk = twins(handle)
    talk.say(*padded(said(3)).values())
    talk.steps(4)
    adds = handle.config._attn_implementation == "eager"  # which takes no truth values
    for step, pads in enumerate(((0, 2, 4), (0, 2, 4), (1, 5, 4), (0, 0, 4))):
        _say(talk, said(3, 1, step), pads, adds=adds)
    talk.steps(2)
    assert not handle.stats.declined and full(handle) == 8
    for step, other in enumerate((adds, not adds, adds)):
        _say(talk, said(3, 1, step), (0, 0, 4), adds=other)
    assert declined(handle, "padding at the left") == adds and full(handle) == 11 - adds
    _say(talk, said(3, 1, 3), (0, 0, 4), adds=adds)
    _say(talk, said(3, 1, 4), (0, 0, 4), adds=adds, ones=True)
    assert declined(handle, "padding at the left") == 1 + adds and full(handle) == 12 - adds


def _say(talk: Twins, ids: Tensor, pads: tuple[int, ...], adds: bool, ones: bool = False) -> None:
    """A step with masks made beforehand: of truth values, or of numbers that attention adds. ``ones``: it adds ones instead."""
    n, at = int(talk.theirs.get_seq_length()), torch.arange(_ROWS, device=ids.device)
    seen = (at >= torch.tensor(pads, device=ids.device)[:, None]) & (at <= n)
    assert talk.mask is not None
    talk.mask[:] = seen[:, :n]
    mask = torch.zeros(seen.shape, device=ids.device).masked_fill(~seen, torch.finfo().min) if adds else seen
    mask = seen.float() if ones else mask
    kinds = {}
    for layer in talk.theirs.layers:
        size = layer.max_cache_len
        first = max(0, n + 1 - size)
        kinds["sliding_attention" if layer.is_sliding else "full_attention"] = mask[:, None, None, first : first + size].clone()
    talk.say(ids, attention_mask=kinds)


@pytest.mark.parametrize("family", ["gemma2", "llama", "mistral"])
def test_a_mask_that_goes_on_is_not_read_again(
    family: str, start: Start, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    padding_of = decode_server.padding_of
    monkeypatch.setattr(decode_server, "padding_of", lambda *given, **more: read.append(given) or padding_of(*given, **more))
    handle = start(family)
    for _ in range(2):
        handle.generate(**flow("batch", said), cache_implementation="static")
    assert full(handle) > 15 and len(read) == 2


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_caches_take_turns(family: str, start: Start) -> None:
    handle = start(family)
    take_turns([twins(handle, 40), twins(handle, 50), Twins(handle)])
    assert full(handle) > 8 and not handle.stats.declined


@pytest.mark.skipif(not hasattr(StaticLayer, "crop"), reason="before 5.24 static caches can't be cropped")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_cropped_cache_decodes_on_where_it_is(family: str, start: Start, said: Said) -> None:
    handle = start(family)
    talk = begun(handle, said)
    place = lies(talk)
    for seed in range(3):
        talk.steps(4, seed)
        talk.both(lambda cache: cache.crop(-3))
        talk.check()
        talk.steps(1, seed)
    assert lies(talk) is place and full(handle) > 9 and not handle.stats.declined


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_reset_cache_begins_anew(family: str, start: Start, said: Said) -> None:
    handle = start(family)
    talk = begun(handle, said, 2, 12)
    for length in (1, 7):
        talk.both(lambda cache: cache.reset())
        talk.check()
        talk.say(said(2, length))
        talk.steps(9)
    assert full(handle) > 12 and not handle.stats.declined


@pytest.mark.parametrize("family", _FAMILIES)
def test_several_tokens_and_untouched_forwards_between_steps(family: str, start: Start, said: Said) -> None:
    handle = start(family)
    with torch.no_grad(), handle.untouched():
        caches = [StaticCache(handle.config, max_cache_len=60) for _ in range(2)]
        for cache in caches:
            handle(said(2), use_cache=True, **cached(handle, cache))
    talk = Twins(handle, *caches)
    talk.steps(3)
    place = lies(talk)
    talk.say(said(2, 5))
    talk.steps(3, 1)
    with handle.untouched():
        talk.steps(2, 2)
    talk.steps(3, 3)
    with handle.breakable_only():
        talk.steps(2, 4)
    talk.steps(3, 5)
    assert (lies(talk) is place) is not any(layer.is_sliding for layer in talk.ours.layers)
    assert full(handle) > 8 and not handle.stats.declined


def test_a_full_cache_is_the_models_error(start: Start, said: Said) -> None:
    handle = start("llama")
    talk = begun(handle, said, length=5, rows=10)
    talk.steps(3)
    assert full(handle) == 3 and not handle.stats.declined
    if handle.device.type == "cpu":  # on CUDA it would be the end of the process
        with torch.no_grad():
            for run in (handle.untouched(), handle.with_body(None)):
                with run, pytest.raises((IndexError, RuntimeError)):
                    handle(said(1, 1), **cached(handle, copy.deepcopy(talk.theirs)))
            with pytest.raises((IndexError, RuntimeError)):
                handle(said(1, 1), **cached(handle, talk.copied().ours))
        assert declined(handle, "can't lie in resident memory") > 0


def test_a_window_moves_on_beyond_the_caches_size(start: Start, said: Said) -> None:
    handle = start("mistral")  # whose static cache has no more rows than the window
    talk = begun(handle, said, 2, 5, rows=64)
    talk.steps(40)
    assert full(handle) > 35 and not handle.stats.declined
    short = twins(handle, 6)
    short.say(said(1, 3))
    short.steps(6)  # it sees six tokens, and the model's window would be larger
    assert declined(handle, "can't lie in resident memory") == 3


def test_memory_outgrown_by_a_window_is_made_anew(
    start: Start, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segue.integrations.transformers.resident_memory._LEAST_ROOM", 16)
    monkeypatch.setattr(decode_server, "_LEAST_ROWS", 64)
    handle = start("mistral")
    talk = begun(handle, said, 2)
    talk.steps(60)
    assert full(handle) > 50 and not handle.stats.declined


def test_copies_and_saved_caches_have_memory_of_their_own(start: Start, said: Said) -> None:
    def through_torch(cache: Any) -> Any:
        saved = io.BytesIO()
        torch.save(cache, saved)
        saved.seek(0)
        return torch.load(saved, weights_only=False)

    for family in ("llama", "gemma2"):
        handle = start(family)
        talk = begun(handle, said)
        for how in (copy.deepcopy, through_torch):
            other = talk.copied(how)
            assert [type(a) for a in other.ours.layers] == [type(b) for b in other.theirs.layers]
            other.steps(3, 5)
            talk.check()
            talk.steps(2, 6)
            other.check()
        assert full(handle) > 8 and not handle.stats.declined


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("end", ["restore", "sleep", "recapture"])
def test_memory_is_given_back_and_conversations_go_on(end: str, family: str, start: Start, said: Said) -> None:
    handle = start(family)
    talk, other = begun(handle, said, 2), begun(handle, said, 1, 12, 1)
    kept = [t.untyped_storage()._weak_ref() for t in handle._decode._memory._owned]
    getattr(handle, end)()
    gc.collect()
    assert all(torch.UntypedStorage._expired(ref) for ref in kept)
    for each in (talk, other):
        each.check()
        for layer in each.ours.layers:
            assert "residence" not in vars(layer) and layer.keys.is_contiguous()
            assert all(hasattr(t, "_dynamo_static_input_type") for t in (layer.keys, layer.values, layer.cumulative_length))
        each.steps(3)


def test_what_the_caller_writes_is_seen(start: Start, said: Said) -> None:
    for family in ("llama", "mistral"):
        handle = start(family)
        talk = begun(handle, said, 2, 9)
        talk.both(lambda cache: cache.layers[0].values.mul_(0.5))
        talk.steps(2, 1)
        talk.both(lambda cache: setattr(cache.layers[0], "keys", 2 * cache.layers[0].keys))
        talk.steps(2, 2)
        turned = torch.tensor([1, 0], device=handle.device)
        talk.both(functools.partial(_reorder, index=turned))
        talk.steps(2, 3)
        assert full(handle) > 5 and not handle.stats.declined


def _reorder(cache: Any, index: Tensor) -> None:
    cache.reorder_cache(index)


def test_lengths_that_the_caller_changes(start: Start, said: Said) -> None:
    handle = start("llama")
    talk = begun(handle, said)
    place, counts = lies(talk), [layer.cumulative_length for layer in talk.ours.layers]
    talk.steps(2)
    assert [int(n) for n in counts] == [9] * len(counts)  # they count on, and nobody had to ask for them
    with torch.inference_mode():
        for n in counts:
            n.sub_(2)
    for layer in talk.theirs.layers:
        layer.cumulative_length.sub_(2)
    talk.steps(2, 1)
    assert lies(talk) is place and not handle.stats.declined
    talk.both(lambda cache: cache.layers[1].cumulative_length.sub_(1))  # layers that differ
    talk.steps(1, 2)
    assert declined(handle, "can't lie in resident memory") == 1
    talk.both(lambda cache: setattr(cache.layers[1], "cumulative_length", cache.layers[0].cumulative_length.clone()))
    talk.steps(2, 3)
    assert declined(handle, "can't lie in resident memory") == 1


def test_modes_change_between_steps(start: Start, said: Said) -> None:
    handle = start("llama")
    talk = begun(handle, said)
    for step in range(9):
        mask = torch.arange(_ROWS, device=handle.device)[None, None, None] <= talk.ours.get_seq_length()
        with torch.inference_mode(step % 4 == 0):
            talk.say(said(1, 1, step), attention_mask=mask)
        if step == 4:
            talk.both(lambda cache: cache.layers[0].keys.mul_(2))
    assert full(handle) > 8 and not handle.stats.declined


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_what_earlier_caches_left_is_never_read(family: str, start: Start, said: Said) -> None:
    handle = start(family)
    for batch, length in ((2, 30), (1, 11), (3, 3)):
        begun(handle, said, batch, length)
    poison(handle)
    for batch, length in ((3, 11), (1, 4), (2, 30)):
        talk = begun(handle, said, batch, length)
        talk.steps(4)
        for n, keys, values in held(talk.ours):  # zeros where no token is, as in the untouched model's
            assert not keys[:, :, int(n) :].any() and not values[:, :, int(n) :].any()
    assert not handle.stats.declined


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_step_that_fails_leaves_the_cache_as_it_was(
    steps: int, start: Start, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = start("llama")
    begun(handle, said, 2)
    talk = twins(handle)
    talk.say(said())
    if steps:
        talk.steps(steps)
    fail_in_a_step(talk, steps, monkeypatch)
    for (n, *got), (m, *want) in zip(held(talk.ours), held(talk.theirs), strict=True):
        assert n == m
        for a, b in zip(got, want, strict=True):
            close(a[:, :, : int(n)], b[:, :, : int(n)])
    talk.steps(5, 1)
    assert full(handle) >= 3 and not handle.stats.eager


def test_max_context_is_for_the_whole_static_cache(start: Start, said: Said) -> None:
    handle = start("llama", max_context=20)
    talk = begun(handle, said, rows=20)
    talk.steps(4)
    before = full(handle)
    assert before > 2 and not handle.stats.declined
    begun(handle, said, rows=21)
    assert declined(handle, "max_context") == 2 and full(handle) == before


def test_generate_does_not_compile_an_accelerated_model(
    start: Start, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile(*_: Any, **__: Any) -> None:
        raise AssertionError("it would take seconds, and end at the decoder")

    monkeypatch.setattr(torch, "compile", compile)
    unasked = CompileConfig()
    unasked._compile_all_devices = True  # as on CUDA
    handle = start("llama")
    model, given = handle.module, {**flow("greedy", said), "cache_implementation": "static", "compile_config": unasked}
    handle.generate(**given)
    assert full(handle) > 8 and copy.deepcopy(model).get_compiled_call.__func__ is type(model).get_compiled_call
    handle.restore()
    assert "get_compiled_call" not in vars(model)
    with pytest.raises(AssertionError, match="it would take seconds"):
        model.generate(**given)
