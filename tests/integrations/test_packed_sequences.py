"""transformers' continuous batching, whose forwards are of sequences one behind the other over a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from integrations.families import FAMILIES
from integrations.twins import tokens
from segue import accelerate

transformers: Any = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.skipif(not hasattr(transformers, "ContinuousBatchingConfig"), reason="a release without continuous batching"),
    pytest.mark.filterwarnings("default"),  # what this part of transformers warns of is not ours
]
Start = Callable[..., Any]


def answers(model: Any, lengths: tuple[int, ...] = (5, 9, 17, 3), graphs: bool = False, **options: Any) -> list[list[int]]:
    """Greedy tokens after prompts of these lengths, by ``generate_batch``."""
    prompts = [tokens(torch.device("cpu"), 1, n)[0].tolist() for n in lengths]
    few: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 24, "use_cuda_graph": graphs, **options}
    given = transformers.GenerationConfig(do_sample=False, max_new_tokens=7, eos_token_id=-1, pad_token_id=0)
    config = transformers.ContinuousBatchingConfig(**few)
    found = model.generate_batch(prompts, generation_config=given, continuous_batching_config=config, progress_bar=False)
    return [found[name].generated_tokens for name in sorted(found)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen3_moe", "gpt2"])
def test_packed_sequences_get_the_untouched_models_tokens(family: str, start: Start) -> None:
    handle = start(family)
    with handle.untouched():
        want = answers(handle.module)
    for _ in range(3):
        assert answers(handle.module) == want
    assert handle.stats.eager == 0 and handle.stats.strategies["breakable"] > 5, handle.report()


def test_continuous_batching_and_generate_in_turn(start: Start, said: Callable[..., Tensor]) -> None:
    handle = start()
    ids = said(2)
    given: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with handle.untouched():
        want, packed = handle.module.generate(ids, **given), answers(handle.module)
    for _ in range(2):
        assert torch.equal(handle.module.generate(ids, **given), want)
        assert answers(handle.module) == packed
    assert handle.stats.eager == 0 and handle.stats.strategies["full"] > 2


def test_a_forward_that_runs_around_its_layers_takes_no_paged_cache(start: Start, said: Callable[..., Tensor]) -> None:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    handle = start("opt")
    call = {"input_ids": said(), handle._reader.cache_name: object.__new__(PagedAttentionCache)}
    assert "PagedAttentionCache" in handle._reader.read((), call)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_forward_in_somebody_elses_graph_is_recorded_untouched() -> None:
    place = torch.device("cuda")
    with accelerate(FAMILIES["llama"].make().to(place), max_tokens=64) as handle, torch.no_grad():
        ids = tokens(place, 1, 8)
        want = handle.module(ids, use_cache=False).logits
        for _ in range(2):
            handle.module(ids, use_cache=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = handle.module(ids, use_cache=False).logits
        logits.zero_()
        graph.replay()
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
        assert sum(count for reason, count in handle.stats.reasons.items() if "not segue's" in reason) == 1
        with handle.untouched():
            answer = answers(handle.module)
        assert answers(handle.module, graphs=True) == answer
