"""Steps of one token run as one full graph, and say what the untouched model says, whatever is done to the cache between them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from integrations import families
from integrations.twins import Twins, cache_of, cached, close, declined, full, held, reset_empties, take_turns
from property.budget import NIGHTLY
from segue.devices import Device
from segue.integrations.transformers import accelerate

Start = Callable[..., Any]
_FAMILIES = ("qwen3", "llama", "gemma2", "qwen3_moe", "mistral", "gpt2")
_PROMPTS = 50 if NIGHTLY else 2  # of each flow
_GREEDY = {"do_sample": False, "max_new_tokens": 12}


def padded(ids: Tensor) -> dict[str, Tensor]:
    """Prompts of other lengths each, padded on the left."""
    mask = torch.ones_like(ids)
    for row in range(len(ids)):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def flow(name: str, said: Callable[..., Tensor], seed: int = 0) -> dict[str, Any]:
    """What ``generate`` is asked for, with prompts whose length goes by ``seed``."""
    length = 8 + (3 + 5 * seed) % 17
    prompt = {"input_ids": said(1, length, seed), "attention_mask": torch.ones_like(said(1, length))}
    return {
        "greedy": {**prompt, **_GREEDY},
        "batch": {**padded(said(3, length, seed)), **_GREEDY},
        "sampling": {**prompt, **_GREEDY, "do_sample": True, "top_k": 20},
        "beams": {**prompt, **_GREEDY, "num_beams": 3},
        "beams of a batch": {**padded(said(2, length, seed)), **_GREEDY, "num_beams": 2},
        "several": {**prompt, **_GREEDY, "do_sample": True, "num_return_sequences": 3},
        "lookup": {**prompt, **_GREEDY, "prompt_lookup_num_tokens": 3},
    }[name]


@pytest.mark.parametrize("asked", ["greedy", "batch", "sampling", "beams", "beams of a batch", "several", "lookup"])
@pytest.mark.parametrize("family", _FAMILIES)
def test_generate_says_the_untouched_models_tokens(family: str, asked: str, start: Start, said: Callable[..., Tensor]) -> None:
    handle = start(family, max_tokens=96)
    for seed in range(_PROMPTS):
        given = flow(asked, said, seed)
        torch.manual_seed(seed)
        with handle.untouched():
            want = handle.generate(**given)
        torch.manual_seed(seed)
        assert torch.equal(handle.generate(**given), want)
    assert handle.stats.eager == 0
    if asked != "lookup":  # whose forwards are of several tokens, unless nothing is found
        assert full(handle) > 8 and not handle.stats.declined


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_model_and_its_assistant_are_both_served(family: str, start: Start, said: Callable[..., Tensor]) -> None:
    handle, helper = start(family), start(family)
    given = {"input_ids": said(), "attention_mask": torch.ones_like(said()), "assistant_model": helper.module, **_GREEDY}
    with handle.untouched(), helper.untouched():
        want = handle.generate(**given)
    for _ in range(2):
        assert torch.equal(handle.generate(**given), want)
    assert handle.stats.eager == helper.stats.eager == 0


@pytest.mark.parametrize("family", _FAMILIES)
def test_the_cache_is_the_untouched_models_after_every_step(family: str, start: Start, said: Callable[..., Tensor]) -> None:
    handle = start(family)
    for batch in (1, 3):
        talk = Twins(handle)
        talk.say(said(batch, 6))  # shorter than the window, and then longer
        talk.steps(9)
    assert full(handle) > 8 and not handle.stats.declined and not handle.stats.eager


def test_a_cropped_cache_decodes_on(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start()
    talk = Twins(handle)
    talk.say(said())
    for seed in range(3):
        talk.steps(5, seed)
        talk.both(lambda cache: cache.crop(-3))
        talk.check()
    assert full(handle) > 9 and not handle.stats.declined


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_cache_decodes_beside_it(how: Any, start: Start, said: Callable[..., Tensor]) -> None:
    handle = start("mistral")
    talk = Twins(handle)
    talk.say(said())
    talk.steps(4)
    other = talk.copied(how)
    if how is copy.copy:  # it shares its layers, as the untouched model's does
        other.both(lambda cache: setattr(cache, "layers", [copy.copy(layer) for layer in cache.layers]))
    for seed in range(1, 4):
        talk.steps(1, seed)
        other.steps(1, seed + 10)
        talk.check()
    assert full(handle) > 6 and not handle.stats.declined


def test_a_saved_cache_has_memory_of_its_own(start: Start, said: Callable[..., Tensor]) -> None:
    def through_torch(cache: Any) -> Any:
        saved = io.BytesIO()
        torch.save(cache, saved)
        assert saved.tell() < 100_000  # and nothing of others
        saved.seek(0)
        return torch.load(saved, weights_only=False)

    handle = start("mistral")
    talk = Twins(handle)
    talk.say(said())
    talk.steps(4)
    for how in (through_torch, lambda cache: pickle.loads(pickle.dumps(cache))):
        saved = talk.copied(how)
        assert [type(a) for a in saved.ours.layers] == [type(b) for b in saved.theirs.layers]
        saved.steps(3, 5)
        talk.steps(2, 6)
    assert full(handle) > 8 and not handle.stats.declined


def test_a_prefix_is_used_for_several_continuations(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start("qwen3")
    prefix = Twins(handle)
    prefix.say(said())
    prefix.steps(3)
    for seed in range(3):
        talk = prefix.copied()
        talk.say(said(1, 4, seed))
        talk.steps(4, seed)
        prefix.check()
    assert full(handle) > 10 and not handle.stats.declined


def test_a_cache_that_the_untouched_model_filled_is_taken_in(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start("mistral")
    with torch.no_grad(), handle.untouched():
        ours, theirs = (cache_of(handle(said(2), use_cache=True)) for _ in range(2))
    talk = Twins(handle, ours, theirs)
    talk.steps(6)
    with handle.untouched():  # and it may take it back
        talk.steps(2, 1)
    talk.steps(3, 2)
    assert full(handle) > 5 and not handle.stats.declined


def test_conversations_take_turns(start: Start) -> None:
    handle = start("gemma2")
    take_turns([Twins(handle) for _ in range(3)])
    assert full(handle) > 8 and not handle.stats.declined


def test_a_view_that_somebody_holds_never_changes(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start()
    kept = []
    for seed in range(4):
        talk = Twins(handle)
        talk.say(said(1, 11, seed))
        talk.steps(4, seed)
        kept += [(t, t.clone()) for _, keys, values in held(talk.ours) for t in (keys, values)]
        talk.steps(2, seed)
        del talk  # its rows are free, but for who looks at them
    for now, then in kept:
        assert torch.equal(now, then)
    assert full(handle) > 15 and not handle.stats.declined


def test_masks_that_change_between_steps(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start("mistral")
    talk = Twins(handle)
    talk.say(**_named(padded(said(3))))
    talk.steps(4)
    assert talk.mask is not None
    talk.mask[1, :5] = 0  # more padding
    talk.steps(3, 1)
    assert not handle.stats.declined
    talk.mask[0, 8] = 0  # a hole
    talk.steps(2, 2)
    assert declined(handle, "padding at the left") == 2
    talk.mask[0, 8] = 1
    before = full(handle)
    talk.steps(3, 3)
    assert full(handle) == before + 3


def _named(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"ids": given["input_ids"], "mask": given["attention_mask"]}


@pytest.mark.parametrize("kind", ["four dimensions", "dict"])
def test_a_mask_made_beforehand_goes_breakable(kind: str, start: Start, said: Callable[..., Tensor]) -> None:
    handle = start("qwen3")
    talk = Twins(handle)
    talk.say(**_named(padded(said(2))))
    talk.steps(4)
    assert talk.mask is not None
    mask = torch.cat([talk.mask, torch.ones_like(talk.mask[:, :1])], 1).bool()[:, None, None]
    talk.steps(1, 5, attention_mask=mask if kind == "four dimensions" else {"full_attention": mask})
    talk.steps(2, 6)
    assert declined(handle, "padding at the left") == 1 and not handle.stats.eager


def test_no_mask_after_a_padded_one_shows_the_padding(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start("llama")
    talk = Twins(handle)
    talk.say(**_named(padded(said(2))))
    talk.steps(3)
    talk.ours, talk.theirs, talk.mask = talk.ours, copy.deepcopy(talk.ours), None
    talk.steps(3, 1)
    assert full(handle) >= 4 and not handle.stats.declined


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_positions_are_those_that_are_given(family: str, start: Start, said: Callable[..., Tensor]) -> None:
    handle = start(family)
    talk = Twins(handle)
    talk.say(said(2))
    device = handle.device
    talk.steps(2)
    for step in range(4):
        talk.steps(1, step, position_ids=torch.tensor([[20 + step], [3]], device=device))
        talk.steps(1, step, position_ids=torch.tensor([[30 + step]], device=device))
        talk.steps(1, step, position_ids=torch.tensor([[5 + step]], dtype=torch.int32, device=device))
    assert full(handle) > 10 and not handle.stats.declined and not handle.stats.eager


def test_positions_between_whole_numbers_run_untouched(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start()
    talk = Twins(handle)
    for _ in range(2):
        talk.say(said(2, 3), position_ids=torch.tensor([[0.5, 1.0, 1.5]], device=handle.device))
    talk.steps(1, position_ids=torch.tensor([[2.5]], device=handle.device))
    assert handle.stats.reasons == {"position_ids that are no whole numbers": 3}


def test_a_batch_of_another_size_than_the_caches_is_the_models_error(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start()
    talk = Twins(handle)
    talk.say(said(2))
    talk.steps(4)
    for wrong in (1, 3):
        with torch.no_grad(), pytest.raises(RuntimeError):
            handle(said(wrong, 1), **cached(handle, copy.deepcopy(talk.theirs)))
        with torch.no_grad(), pytest.raises(RuntimeError):
            handle(said(wrong, 1), **cached(handle, copy.deepcopy(talk.ours)))
        kept = talk.copied()
        kept.steps(1)
        with torch.no_grad(), pytest.raises(RuntimeError):
            handle(said(wrong, 1), **cached(handle, kept.ours))
    talk.steps(2, 1)


def test_a_batch_larger_than_any_graph_goes_breakable(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start(max_tokens=256)
    for batch in (65, 64):
        talk = Twins(handle)
        talk.say(said(batch, 2))
        talk.steps(3)
        assert declined(handle, "larger batch") == 3
    assert full(handle) == 1 and not handle.stats.eager


@pytest.mark.parametrize("given", [{}, {"logits_to_keep": 0}, {"logits_to_keep": 1}, {"return_dict": True}])
def test_what_a_step_may_be_asked_for(given: dict[str, Any], start: Start, said: Callable[..., Tensor]) -> None:
    handle = start("qwen3")
    talk = Twins(handle)
    talk.say(said(2))
    assert talk.steps(5, **given).shape[:2] == (2, 1)
    assert full(handle) == 3 and not handle.stats.declined


def test_what_a_step_can_not_be_asked_for_is_served_otherwise(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start("qwen3")
    talk = Twins(handle)
    talk.say(said())
    talk.steps(4)
    before = full(handle)
    for seed in range(2):
        talk.say(said(1, 1, seed).int())
    assert full(handle) == before + 2
    with torch.no_grad():
        for _ in range(3):
            logits, cache, *_ = handle(said(1, 1, 7), **cached(handle, talk.ours), return_dict=False)
            with handle.untouched():
                want = handle(said(1, 1, 7), **cached(handle, talk.theirs))
            close(logits, want.logits)
            assert cache is talk.ours
            talk.check()
            got, want = talk.ours, talk.theirs
            seen = handle(said(1, 1, 8), **cached(handle, got), output_hidden_states=True).hidden_states
            with handle.untouched():
                known = handle(said(1, 1, 8), **cached(handle, want), output_hidden_states=True).hidden_states
            assert len(seen) == len(known)
            for a, b in zip(seen, known, strict=True):
                close(a, b)
            talk.check()
            embeds = handle.get_input_embeddings()(said(1, 1, 9))
            a = handle(inputs_embeds=embeds, **cached(handle, got)).logits
            with handle.untouched():
                close(a, handle(inputs_embeds=embeds, **cached(handle, want)).logits)
            talk.check()
            talk.steps(2, 3)
    assert full(handle) > 6 and not handle.stats.eager
    assert handle.stats.declined == {"a step that asks for something else than one row of logits": 3}


@pytest.mark.parametrize("served", ["head", "base"])
@pytest.mark.parametrize("change", ["function", "backend"])
def test_attention_that_changes_between_steps(
    served: str, change: str, device: Device, said: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.FAMILIES["qwen3"].make().to(device.torch_device)
    model, own = model if served == "head" else model.model, F.scaled_dot_product_attention
    with accelerate(model, max_tokens=64, device=device) as handle, torch.no_grad():
        cache = model(said(), use_cache=True).past_key_values
        for ids in said(1, 4).split(1, 1):
            model(ids, **cached(handle, cache))
        for turn in range(2):
            theirs, before = copy.deepcopy(cache), full(handle)
            with monkeypatch.context() as m, sdpa_kernel([SDPBackend.MATH]) if change == "backend" else nullcontext():
                if change == "function":
                    m.setattr(F, "scaled_dot_product_attention", lambda *a, **given: 2 * own(*a, **given))
                with handle.untouched():
                    want = model(said(1, 1, turn), **cached(handle, theirs))[0]
                close(model(said(1, 1, turn), **cached(handle, cache))[0], want)
            counted = declined(handle, "another attention function") + handle.stats.eager
            assert counted == turn + 1 and full(handle) == before
            model(said(1, 1), **cached(handle, cache))
            assert full(handle) == before + 1


def test_a_hook_between_model_and_decoder_is_heard_and_counted(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start()
    talk = Twins(handle)
    talk.say(said())
    talk.steps(3)
    before, heard = full(handle), []
    hook = handle.get_output_embeddings().register_forward_hook(lambda *given: heard.append(1))
    talk.steps(2)
    assert declined(handle, "runs around the decoder") == 2 and full(handle) == before and len(heard) == 4
    hook.remove()
    talk.steps(2)
    assert full(handle) == before + 2


def test_gradients_are_recorded_where_they_are_wanted(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start()
    talk = Twins(handle)
    talk.say(said())
    talk.steps(4)
    before = full(handle)
    out = handle(said(1, 1), **cached(handle, talk.copied().ours))
    out.logits.sum().backward()
    assert handle.get_output_embeddings().weight.grad is not None and full(handle) == before
    handle.requires_grad_(False)
    with torch.no_grad():
        keys = talk.copied()
    for layer in keys.ours.layers:
        layer.keys = layer.keys.detach().requires_grad_()
    for ours in (1, 4):
        assert handle(said(1, ours), **cached(handle, copy.copy(keys.ours))).logits.requires_grad
    talk.steps(2, 4)


def test_layers_that_the_user_replaces(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start("mistral")
    talk, other = Twins(handle), Twins(handle)
    talk.say(said())
    other.say(said(1, 11, 1))
    talk.steps(3)
    other.steps(3)

    def exchange(mine: Any, yours: Any) -> None:
        mine.layers[0], yours.layers[0] = yours.layers[0], mine.layers[0]

    exchange(talk.ours, other.ours)
    exchange(talk.theirs, other.theirs)
    for each in (talk, other, talk):
        each.steps(2, 1)
        talk.check()
        other.check()
    talk.both(lambda cache: cache.layers.__setitem__(1, copy.deepcopy(cache.layers[1])))
    talk.steps(2, 2)
    talk.both(lambda cache: setattr(cache.layers[0], "keys", 2 * cache.layers[0].keys))
    talk.steps(2, 3)
    talk.both(lambda cache: cache.layers[1].values.mul_(0.5))
    talk.steps(2, 4)
    assert full(handle) > 10 and not handle.stats.declined


def test_layers_that_the_user_puts_in_another_order(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start()
    talk, short = Twins(handle), Twins(handle)
    for each in (talk, short):
        each.say(said())
        each.steps(4)
    talk.both(lambda cache: cache.layers.reverse())
    before = full(handle)
    talk.steps(2)
    assert full(handle) == before + 2
    talk.both(lambda cache: cache.layers.__setitem__(1, cache.layers[0]))
    talk.steps(2)
    assert declined(handle, "resident memory") == 2 and full(handle) == before + 2
    short.both(lambda cache: cache.layers.pop())
    for cache, block in ((short.theirs, handle.untouched()), (short.ours, nullcontext())):
        with pytest.raises(IndexError), torch.no_grad(), block:
            handle(said(1, 1), **cached(handle, cache))


def test_a_mask_for_another_number_of_sequences_runs_untouched(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start("gpt2")  # which makes [2, 6] of it
    talk = Twins(handle)
    talk.say(said(2, 5))
    talk.steps(4)
    mask, ids = torch.ones(1, 12, dtype=torch.long, device=handle.device), said(2, 1, 1)
    talk.steps(2)
    with torch.no_grad(), handle.untouched():
        want = handle.module(ids, attention_mask=mask, **cached(handle, copy.deepcopy(talk.theirs))).logits
    with torch.no_grad():
        close(handle.module(ids, attention_mask=mask, **cached(handle, talk.ours)).logits, want)
    assert any("attention_mask that is neither" in reason for reason in handle.stats.reasons)


def test_batches_are_selected_repeated_and_reordered(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start("mistral")
    device = handle.device
    talk = Twins(handle)
    talk.say(said(2))
    talk.steps(3)
    changes: list[Callable[[Any], Any]] = [
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.reorder_cache(torch.tensor([3, 0, 0, 1], device=device)),
        lambda cache: cache.batch_select_indices(torch.tensor([0, 3, 2], device=device)),
    ]
    for seed, change in enumerate(changes):
        talk.both(change)
        talk.check()
        talk.steps(3, seed)
    if reset_empties():
        talk.both(lambda cache: cache.reset())
        talk.say(said(1, 5))
        talk.steps(3)
    assert full(handle) > 6 and not handle.stats.declined


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_resident_cache_looks_like_any_other(family: str, start: Start, said: Callable[..., Tensor]) -> None:
    talk = Twins(start(family))
    talk.say(said())
    talk.steps(4)
    ours, theirs = talk.ours, talk.theirs
    assert repr(ours) == repr(theirs) and len(ours) == len(theirs) and ours.is_initialized
    assert ours.get_mask_sizes(3, 0) == theirs.get_mask_sizes(3, 0)
    assert ours.is_sliding == theirs.is_sliding
    for (keys, values, *_), (k, v, *_) in zip(ours, theirs, strict=True):
        close(keys, k)
        close(values, v)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert isinstance(a, type(b)) and a.dtype == b.dtype if hasattr(b, "dtype") else True
        assert getattr(a, "cumulative_length", 0) == getattr(b, "cumulative_length", 0)


def test_a_sliding_layer_that_records_the_past_can_be_cropped(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start("mistral")
    talk = Twins(handle)
    talk.say(said())
    talk.steps(4)

    def record(cache: Any) -> None:
        for layer in cache.layers:
            layer.activate_past_recording()

    talk.both(record)
    try:
        with handle.untouched():
            talk.copied().steps(2, 1)
    except RuntimeError:
        pytest.skip("this release of transformers makes masks that don't fit such a layer")
    talk.steps(2, 1)
    talk.both(lambda cache: cache.crop(-1))
    talk.steps(2, 2)
    assert declined(handle, "can't lie in resident memory") == 4


def test_a_cache_of_another_dtype(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start()
    talk = Twins(handle)
    talk.say(said())
    talk.steps(4)

    def cast(cache: Any) -> None:
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.double(), layer.values.double()

    kept = talk.copied()
    kept.both(cast)
    for model in (handle.untouched(), handle.with_body(None)):
        with model, torch.no_grad(), pytest.raises(RuntimeError):
            handle(said(1, 1), **cached(handle, copy.deepcopy(kept.ours)))
    talk.steps(3, 1)
