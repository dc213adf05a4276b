"""The graph from ids to one row of logits: what is around the decoder changes, and the answer stays the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

import segue
from segue.devices import Device
from segue.integrations.transformers import accelerate, names

from .conftest import build

Change = Callable[[Any], Any]


def _doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state * 2
        return out

    return wrapped


def _scaled(model: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    def scaled(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits * model.scale
        return out

    return scaled


class _DoublingHead(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class _DoublingEmbedding(torch.nn.Embedding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def _wrap_the_decoder(model: Any) -> None:
    model.model.forward = _doubled(model.model.forward)


def _replace_the_heads_weight(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)


def _replace_the_embeddings_weight(model: Any) -> None:
    model.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight * 2)


def _give_the_head_a_bias(model: Any) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.ones_like(model.lm_head.weight[:, 0]))


def _replace_the_head(model: Any) -> None:
    model.lm_head = torch.nn.Linear(64, 97).to(model.device)


def _parametrize_the_head(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    model.lm_head.parametrizations.weight.original0.mul_(2)


def _make_the_head_another_class(model: Any) -> None:
    model.lm_head.__class__ = _DoublingHead


def _make_the_embedding_another_class(model: Any) -> None:
    model.model.embed_tokens.__class__ = _DoublingEmbedding


def _hook_the_head(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, out: out * 2)


def _hook_the_decoder(model: Any) -> None:
    model.model.register_forward_hook(lambda module, args, out: _doubled(lambda: out)())


def _replace_the_decoder(model: Any) -> None:
    other = build("llama", model.device)
    other.model.norm.weight.mul_(3)
    model.model = other.model


def _enlarge_the_vocabulary(model: Any) -> None:
    model.resize_token_embeddings(120, mean_resizing=False)


def _write_the_heads_weight(model: Any) -> None:
    model.lm_head.weight.mul_(2)


_CHANGES = [
    _wrap_the_decoder,
    _replace_the_heads_weight,
    _replace_the_embeddings_weight,
    _give_the_head_a_bias,
    _replace_the_head,
    _parametrize_the_head,
    _make_the_head_another_class,
    _make_the_embedding_another_class,
    _hook_the_head,
    _hook_the_decoder,
    _replace_the_decoder,
    _enlarge_the_vocabulary,
    _write_the_heads_weight,
]


def _assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the rounding of a product of 8 rows where the model by itself makes one of 7."""
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def _first_token(model: Any, length: int) -> Any:
    ids = torch.arange(length, device=model.device)[None] * 7 % model.config.vocab_size
    return model(ids, use_cache=True, logits_to_keep=1)


@pytest.mark.parametrize("change", _CHANGES, ids=lambda change: change.__name__[1:])
def test_a_change_around_the_decoder_reaches_the_first_token(change: Change, device: Device) -> None:
    model, other = build("llama", device.torch_device), build("llama", device.torch_device)
    with torch.no_grad(), accelerate(model, max_tokens=16, device=device) as graphed:
        for _ in range(3):
            before = _first_token(model, 7)
        assert graphed.stats.strategies["prime"] >= 1
        for m in (model, other):
            torch.manual_seed(1)
            change(m)
        for length in (7, 5, 7):
            got, expected = _first_token(model, length), _first_token(other, length)
            _assert_close(got.logits, expected.logits)
        assert got.logits.shape != before.logits.shape or not torch.allclose(got.logits, before.logits)


@pytest.mark.parametrize("part", ["lm_head", "model.embed_tokens"])
def test_a_weight_that_was_repointed_is_named_and_taken_in_by_recapture(part: str, device: Device) -> None:
    model, other = build("llama", device.torch_device), build("llama", device.torch_device)
    with torch.no_grad(), accelerate(model, max_tokens=16, device=device) as graphed:
        for _ in range(3):
            _first_token(model, 7)
        for m in (model, other):
            weight = m.get_submodule(part).weight
            weight.data = weight.data * 2
        _assert_close(_first_token(model, 7).logits, _first_token(other, 7).logits)
        name = f"{part}.weight" if part == "lm_head" else "embed_tokens.weight"
        assert graphed.stats.reasons == {f"another tensor at {name}: recapture() takes it in": 1}
        graphed.recapture()
        replays = graphed.stats.strategies["prime"]
        for _ in range(3):
            _assert_close(_first_token(model, 7).logits, _first_token(other, 7).logits)
        assert graphed.stats.strategies["prime"] > replays


class _ScaledLlama(LlamaForCausalLM):  # type: ignore[misc]
    """A forward of its own, around that of transformers."""

    scale = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.scale
        return out


@pytest.mark.parametrize("how", ["subclass", "attribute"])
def test_a_forward_of_the_users_own_around_the_model_always_runs(how: str, device: Device) -> None:
    model = build("llama", device.torch_device)
    expected = _first_token(model, 7).logits.detach()
    if how == "subclass":
        model.__class__ = _ScaledLlama
    else:
        model.scale = 1.0
        model.forward = _scaled(model, model.forward)
    with torch.no_grad(), accelerate(model, max_tokens=16, device=device):
        for scale in (1.0, 2.0, 3.0, 4.0):
            model.scale = scale
            _assert_close(_first_token(model, 7).logits, expected * scale)


def test_where_its_capture_fails_the_decoders_graphs_serve_first_tokens(device: Device) -> None:
    model = build("llama", device.torch_device)
    expected = _first_token(model, 7).logits.detach()

    class Refusing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.shape[1] < 8 or float(x.abs().max()) >= 0 else -x  # few tokens are captured

    first = model.model.layers[0]
    first.input_layernorm = torch.nn.Sequential(first.input_layernorm, Refusing()).eval()
    with torch.no_grad(), accelerate(model, max_tokens=16, on_failure="eager", device=device) as graphed:
        graphed.capture()
        for _ in range(4):
            _assert_close(_first_token(model, 7).logits, expected)
        assert graphed.stats.reasons["a failed capture"] == 4  # by capture(), in the decoder's graphs too
    with torch.no_grad(), accelerate(model, max_tokens=16, device=device):
        _first_token(model, 7)
        with pytest.raises(segue.CaptureError):
            _first_token(model, 7)


def test_running_out_of_memory_is_raised_once_even_where_failures_go_eager(device: Device) -> None:
    model = build("llama", device.torch_device)
    expected = _first_token(model, 7).logits.detach()

    class Hungry(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if segue.is_breakable_capture_active() and x.shape[1] >= 8:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return x

    first = model.model.layers[0]
    first.input_layernorm = torch.nn.Sequential(first.input_layernorm, Hungry()).eval()
    with torch.no_grad(), accelerate(model, buckets=[4, 8], on_failure="eager", device=device):
        raised = 0
        for _ in range(6):
            try:
                _assert_close(_first_token(model, 7).logits, expected)
            except segue.GraphMemoryError:
                raised += 1
        assert 1 <= raised <= 2  # by the graph from ids to logits, and by the decoder's own


def test_recapture_after_a_change_of_dtype_makes_a_cache_of_the_new_one(device: Device) -> None:
    model = build("llama", device.torch_device)
    with torch.no_grad(), accelerate(model, max_tokens=16, device=device) as graphed:
        for _ in range(3):
            _first_token(model, 7)
        model.to(torch.bfloat16)
        graphed.recapture()
        with graphed.untouched():
            expected = _first_token(model, 7).logits
        before = graphed.stats.strategies["prime"]
        for _ in range(3):
            got = _first_token(model, 7)
            torch.testing.assert_close(got.logits, expected, atol=2e-2, rtol=2e-2)
        assert graphed.stats.strategies["prime"] > before
        assert graphed.stats.buckets == (8,)
        assert graphed.scratch_bytes > 0
    assert graphed.scratch_bytes == 0


def test_calls_that_the_graph_does_not_hold_run_as_they_would(device: Device) -> None:
    model = build("llama", device.torch_device)
    model.resize_token_embeddings(120, mean_resizing=False)  # the new head was never put in evaluation mode
    ids = torch.arange(7, device=model.device)[None]
    with accelerate(model, max_tokens=16, device=device) as graphed:
        with torch.no_grad():
            for _ in range(3):
                model(ids, use_cache=True, logits_to_keep=1)
            assert graphed.stats.strategies["prime"] == 1
            with graphed.untouched():
                expected = model(ids, use_cache=True, logits_to_keep=1).logits
            _assert_close(model(ids.int(), use_cache=True, logits_to_keep=1).logits, expected)
            cache = DynamicCache()
            cache.layers.extend(DynamicLayer() for _ in range(5))
            got = model(ids, **{names.cache_name(model.forward): cache}, use_cache=True, logits_to_keep=1)
            _assert_close(got.logits, expected)
            with pytest.raises(TypeError, match="input_ids"):
                model(ids, input_ids=ids, use_cache=True, logits_to_keep=1)
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        assert model(ids, use_cache=True, logits_to_keep=1).logits.requires_grad


def test_an_argument_that_only_the_outer_model_reads_is_heard(device: Device) -> None:
    class Louder(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, louder: Any = None, **given: Any) -> Any:
            out = super().forward(input_ids, **given)
            out.logits = out.logits if louder is None else out.logits * louder
            return out

    Louder.__module__ = LlamaForCausalLM.__module__  # whose heads alone are taken over
    model = build("llama", device.torch_device)
    model.__class__ = Louder
    ids = torch.arange(7, device=model.device)[None]
    with torch.no_grad(), accelerate(model, max_tokens=16, device=device) as graphed:
        for _ in range(3):
            plain = model(ids, use_cache=True, logits_to_keep=1).logits
        assert graphed.stats.strategies["prime"] == 1
        _assert_close(model(ids, louder=2.0, use_cache=True, logits_to_keep=1).logits, plain * 2)


@pytest.mark.parametrize("part", ["", "model"])
def test_a_forward_put_around_segues_stays_after_restore(part: str, device: Device) -> None:
    model = build("llama", device.torch_device)
    expected = _first_token(model, 7).logits.detach()
    graphed = accelerate(model, max_tokens=16, device=device)
    inner, calls = model.get_submodule(part).forward, []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    model.get_submodule(part).forward = wrapped
    with torch.no_grad():
        for _ in range(3):
            _assert_close(_first_token(model, 7).logits, expected)
        graphed.restore()
        _assert_close(_first_token(model, 7).logits, expected)
    assert len(calls) == 4
    assert model.get_submodule(part).forward is wrapped
