"""An accelerated model says what the untouched model says, whatever is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

Make = Callable[..., Any]
_GREEDY = {"max_new_tokens": 12, "do_sample": False}


def padded(ids: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The last ``lengths`` tokens of each row, padded on the left."""
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        mask[row, ids.shape[1] - n :] = 1
    return ids * mask, mask


def hidden(model: Any, ids: Tensor, **given: Any) -> Tensor:
    with torch.inference_mode():
        return model.base_model(ids, **given).last_hidden_state.clone()


def test_greedy_text_is_the_untouched_models_for_each_family(family: str, make: Make, graphed: Make, ids: Make) -> None:
    model = make(family)
    prompts = [ids(1, n) for n in (1, 21, 5, 33, 21, 21)]
    want = [model.generate(p, **_GREEDY) for p in prompts]
    handle = graphed(model)
    got = [handle.generate(p, **_GREEDY) for p in prompts]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    stats = handle.stats
    assert stats.eager == 0 and stats.reasons == {}
    assert stats.warmed + stats.captured + stats.replayed == 12 * len(prompts)
    assert stats.replayed > stats.captured > 0


def test_a_left_padded_batch_is_served_as_one_row_of_tokens(family: str, make: Make, graphed: Make, ids: Make) -> None:
    model = make(family)
    batch, mask = padded(ids(3, 17), [12, 17, 4])
    want = model.generate(batch, attention_mask=mask, **_GREEDY)
    handle = graphed(model)
    for _ in range(3):
        assert torch.equal(handle.generate(batch, attention_mask=mask, **_GREEDY), want)
    assert handle.stats.eager == 0


def test_a_prompt_fed_in_two_chunks_continues_in_the_first_ones_cache(
    family: str, make: Make, graphed: Make, ids: Make, cache_name: str
) -> None:
    model, prompt = make(family), ids(1, 30)

    def run(first: int) -> Tensor:
        with torch.no_grad():
            out = model(prompt[:, :first], use_cache=True)
        return model.generate(prompt, **{cache_name: getattr(out, cache_name)}, **_GREEDY)

    want = {first: run(first) for first in (3, 11, 29)}
    handle = graphed(model)
    for _ in range(3):
        for first, text in want.items():
            assert torch.equal(run(first), text)
    assert handle.stats.eager == 0


def test_hidden_states_and_caches_equal_the_reference_bit_for_bit(
    family: str, make: Make, graphed: Make, ids: Make, cache_name: str
) -> None:
    model = make(family)
    handle = graphed(model, max_tokens=32)

    def run(prompt: Tensor) -> list[Tensor]:
        with torch.inference_mode():
            out = model.base_model(prompt, use_cache=True)
            kept = [t for layer in getattr(out, cache_name).layers for t in (layer.keys, layer.values)]
            return [t.clone() for t in (out.last_hidden_state, *kept)]

    for n in (32, 1, 31, 2, 17, 16, 15, 5, 3, 32, 9, 1):
        for _ in range(3):
            got = run(ids(1, n))
            with handle.reference():
                want = run(ids(1, n))
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), n


def test_half_precision_replays_equal_the_reference_bit_for_bit(make: Make, graphed: Make, ids: Make) -> None:
    model = make("qwen3", dtype=torch.bfloat16)
    handle = graphed(model)
    for n in (40, 7, 1, 7, 40, 7):
        for _ in range(2):
            got = hidden(model, ids(1, n))
            with handle.reference():
                assert torch.equal(hidden(model, ids(1, n)), got)


def test_the_models_own_attention_and_masks_are_used(make: Make, graphed: Make, ids: Make) -> None:
    model = make("mistral, sliding")
    batch, mask = padded(ids(2, 20), [20, 9])
    handle = graphed(model)
    for implementation in ("eager", "sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with handle.untouched():
            want = model.generate(batch, attention_mask=mask, **_GREEDY)
        assert torch.equal(handle.generate(batch, attention_mask=mask, **_GREEDY), want)
        assert model.config._attn_implementation == implementation


def test_capturing_ahead_leaves_only_replays(make: Make, graphed: Make, ids: Make) -> None:
    model = make("qwen2, some layers sliding")
    want = [model.generate(ids(1, n), **_GREEDY) for n in (30, 3, 12)]
    handle = graphed(model, max_tokens=32)
    handle.capture()
    before = handle.stats
    assert [torch.equal(handle.generate(ids(1, n), **_GREEDY), w) for n, w in zip((30, 3, 12), want, strict=True)]
    after = handle.stats
    assert after.captured == before.captured and after.warmed == before.warmed
    assert after.replayed - before.replayed == 36 and after.eager == 0


def test_beams_reorder_the_cache_between_replays(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make("llama"), ids(1, 9)
    want = model.generate(prompt, num_beams=3, **_GREEDY)
    handle = graphed(model)
    for _ in range(3):
        assert torch.equal(handle.generate(prompt, num_beams=3, **_GREEDY), want)


def test_embeddings_positions_and_a_tuple_are_taken_and_given_as_the_model_does(
    make: Make, graphed: Make, ids: Make
) -> None:
    model, prompt = make("llama"), ids(2, 6)
    embeds = model.get_input_embeddings()(prompt).detach()
    positions = torch.arange(4, 10, device=prompt.device)[None]
    handle = graphed(model)
    for _ in range(3):
        got = hidden(model, None, inputs_embeds=embeds, position_ids=positions)
        with handle.untouched():
            want = hidden(model, None, inputs_embeds=embeds, position_ids=positions)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        with torch.inference_mode():
            first, *_ = model.base_model(prompt, return_dict=False)
            logits = model(prompt, logits_to_keep=1).logits
        assert first.shape == (2, 6, 64) and logits.shape == (2, 1, 97)
    assert handle.stats.eager == 0


def test_masks_made_beforehand_are_used_as_they_are(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make("qwen3"), ids(1, 6)
    band = torch.ones(6, 6, dtype=torch.bool, device=prompt.device).tril().triu(-2)[None, None]
    handle = graphed(model)
    for mask in (band, {"full_attention": band}, {"full_attention": None}):
        with handle.untouched():
            want = hidden(model, prompt, attention_mask=mask)
        for _ in range(3):
            torch.testing.assert_close(hidden(model, prompt, attention_mask=mask), want, rtol=1e-5, atol=1e-5)
    assert handle.stats.eager == 0
    with torch.inference_mode(), suppress(Exception):
        model.base_model(prompt, attention_mask={"sliding_attention": band})
    assert handle.stats.eager == 1


def test_weights_changed_in_place_count_at_the_next_replay(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make("llama"), ids(1, 7)
    handle = graphed(model)
    for _ in range(3):
        hidden(model, prompt)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(-2)
    with handle.reference():
        want = hidden(model, prompt)
    assert torch.equal(hidden(model, prompt), want)


def test_what_the_cache_keeps_is_an_ordinary_tensor(make: Make, graphed: Make, ids: Make, cache_name: str) -> None:
    model = make("llama")
    graphed(model)
    for _ in range(3):
        with torch.no_grad():
            out = model(ids(1, 4), use_cache=True)
        assert not getattr(out, cache_name).layers[0].keys.is_inference()


def test_two_models_share_the_device(make: Make, graphed: Make, ids: Make) -> None:
    one, two = make("llama"), make("qwen3")
    want = [m.generate(ids(1, 10), **_GREEDY) for m in (one, two)]
    graphed(one), graphed(two)
    for _ in range(3):
        assert all(torch.equal(m.generate(ids(1, 10), **_GREEDY), w) for m, w in zip((one, two), want, strict=True))


@pytest.mark.parametrize("seed", [0, 1])
def test_sampling_draws_the_same_tokens(seed: int, make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make("llama"), ids(1, 5)

    def draw() -> Tensor:
        torch.manual_seed(seed)
        return model.generate(prompt, max_new_tokens=8, do_sample=True, temperature=5.0)

    want = draw()
    graphed(model)
    for _ in range(3):
        assert torch.equal(draw(), want)


def test_tokens_taken_back_from_the_cache_are_computed_anew(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make("qwen3"), ids(1, 9)
    given = {**_GREEDY, "prompt_lookup_num_tokens": 3}
    want = model.generate(prompt, **given)
    graphed(model)
    for _ in range(3):
        assert torch.equal(model.generate(prompt, **given), want)


def test_threads_that_share_a_model_take_turns(make: Make, graphed: Make, ids: Make) -> None:
    model = make("mistral, sliding")
    prompts = [ids(1, n) for n in (3, 30, 11, 70)]
    want = [model.generate(p, **_GREEDY) for p in prompts]
    handle = graphed(model)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            got = list(threads.map(lambda p: model.generate(p, **_GREEDY), prompts))
            assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert handle.stats.reasons == {"no bucket fits": 3}


def test_a_cache_layer_begins_as_it_does_by_itself(make: Make, graphed: Make, ids: Make, cache_name: str) -> None:
    """Its first use is not run each time, but what that leaves in the layer is put there."""
    model = make("llama")
    with torch.inference_mode():
        want = model.base_model(ids(1, 5), use_cache=True)[cache_name]
    graphed(model)
    for _ in range(3):
        with torch.inference_mode():
            cache = model.base_model(ids(1, 5), use_cache=True)[cache_name]
        for layer, own in zip(cache.layers, want.layers, strict=True):
            assert type(layer) is type(own)
            for name, value in vars(own).items():
                mine = getattr(layer, name)
                assert torch.allclose(mine, value, atol=1e-6) if isinstance(value, torch.Tensor) else mine == value


def test_layers_of_a_cache_with_an_update_of_its_own_begin_in_there(
    make: Make, graphed: Make, ids: Make, cache_name: str
) -> None:
    from transformers import DynamicCache

    class Counting(DynamicCache):  # type: ignore[misc]
        begun = 0

        def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **more: Any) -> Any:
            self.begun += not self.layers[layer].is_initialized
            return super().update(key, value, layer, *args, **more)

    model = make("llama")
    graphed(model)
    for _ in range(3):
        cache = Counting(config=model.config)
        for _ in range(2):
            hidden(model, ids(1, 5), use_cache=True, **{cache_name: cache})
        assert cache.begun == len(cache.layers) == 3


def test_a_layer_that_begins_otherwise_than_with_empty_tensors_shares_nothing(
    make: Make, graphed: Make, ids: Make, cache_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.cache_utils import DynamicLayer

    model = make("llama")
    graphed(model, strategy="breakable")
    hidden(model, ids(1, 5))
    begin = DynamicLayer.lazy_initialization

    def another(self: Any, key: Tensor, value: Tensor) -> None:
        begin(self, key, value)
        self.seen = [tuple(key.shape)]

    monkeypatch.setattr(DynamicLayer, "lazy_initialization", another)
    for n in (5, 5, 5, 7):
        with torch.inference_mode():
            cache = model.base_model(ids(1, n), use_cache=True)[cache_name]
        assert [layer.seen for layer in cache.layers] == [[(1, 2, n, 16)]] * 3
        assert len({id(layer.seen) for layer in cache.layers}) == 3
