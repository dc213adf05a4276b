"""Whether a way to run a decoder gives what the untouched one gives: short conversations, on a decoder that hides nothing.

Parameters and buffers that are one value throughout (norms of ones, biases of zeros) hide what is wrong with the code around
them. They are others while a probe runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from segue import _torch_modes
from segue.errors import UsageError
from segue.integrations.transformers import names
from segue.integrations.transformers.layer_calls import NotSeen
from segue.integrations.transformers.resident_layers import attributes

Forward = Callable[[dict[str, Any]], Any]

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8, torch.float16: 2e-2, torch.bfloat16: 6e-2}
_SAMPLE = 256
# Conversations: batch, real tokens that are missing at the left of its first sequence, and the tokens of each forward.
_CONVERSATIONS = ((2, 2, (5, 3, 1)), (1, 0, (7, 1)), (2, 0, (4, 3, 1)))
PROMPT = 2, 5  # batch and tokens of :func:`prompt`
_ENCODED = 6  # positions of what an encoder gave


@contextmanager
def jittered(root: nn.Module) -> Iterator[None]:
    """Within this block parameters and buffers of one value are others, whose values differ. No tensor is written."""
    generator = torch.Generator().manual_seed(0)
    others: dict[Tensor, Tensor] = {}
    swapped: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for module in root.modules():
            for table in cast(list[dict[str, Any]], [module._parameters, module._buffers]):
                for name, t in table.items():
                    if t is None or not _is_constant(t):
                        continue
                    if t not in others:
                        noise = torch.randn(t.shape, generator=generator, device="cpu").mul_(0.2).to(t.device, t.dtype)
                        others[t] = t.detach() + noise
                        if isinstance(t, nn.Parameter):
                            others[t] = nn.Parameter(others[t], requires_grad=False)
                    swapped.append((table, name, t))
                    table[name] = others[t]
        yield
    finally:
        for table, name, t in swapped:
            table[name] = t


@contextmanager
def exact_products() -> Iterator[None]:
    """Within this block products and convolutions in fp32 are in fp32: TF32 would differ with the shape."""
    enabled, benchmark, deterministic, _ = _torch_modes.CUDNN.read()
    exact = _torch_modes.MATMUL_PRECISION.set_to(("ieee", "ieee"))
    with exact, _torch_modes.CUDNN.set_to((enabled, benchmark, deterministic, "ieee")):
        yield


def _is_constant(t: Tensor) -> bool:
    plain = type(t) in (Tensor, nn.Parameter) and t.dtype in _TOLERANCE and t.numel() > 1 and not t.is_meta
    if not plain:
        return False
    sample = t.detach().reshape(-1)[:_SAMPLE] if t.is_contiguous() else t.detach()
    return bool((sample == sample.flatten()[0]).all())


def difference(
    forward: Callable[..., Any], decoder: Any, untouched: Forward, ours: Forward, states: bool = False
) -> str | None:
    """Where ``ours`` gives something else than ``untouched``, and by how much; None if nowhere.

    ``forward`` is that of the untouched ``decoder``. Both get the arguments of one call of it, and return its output. What the
    padding of a sequence holds isn't looked at. What the untouched model can't do itself, such as a chunk of a padded batch, is
    left out. ``states``: hidden states of all layers are looked at too.

    Raises:
        UsageError: the untouched model can't do anything.
    """
    cache_name = names.cache_name(forward)
    size = decoder.get_input_embeddings().num_embeddings
    device = decoder.get_input_embeddings().weight.device
    generator = torch.Generator().manual_seed(0)
    failure: Exception | None = None
    done = 0
    for batch, missing, lengths in _CONVERSATIONS:
        caches: list[Any] = [None, None]
        past = 0
        encoded = encoder_states(decoder, batch, seed=2)
        for n in lengths:
            past += n
            mask = torch.ones(batch, past, dtype=torch.long, device="cpu")
            mask[0, :missing] = 0
            ids = torch.randint(size, (batch, n), generator=generator, device="cpu")
            given = {"input_ids": ids.to(device), "use_cache": True, **encoded}
            if missing:
                given["attention_mask"] = mask.to(device)
            what = f"{n} tokens after {past - n}" if past > n else f"a prompt of {n} tokens"
            what += f" in a batch of {batch}{', left-padded,' if missing else ''}"
            try:
                want = untouched({**given, cache_name: caches[0]})
            except Exception as e:
                failure = e
                break
            try:
                got = ours({**given, cache_name: caches[1]})
            except (NotSeen, UsageError):
                raise
            except Exception as e:
                return f"{what} fails: {type(e).__name__}: {e}"
            done += 1
            caches = [getattr(out, cache_name, None) for out in (want, got)]
            both = (results(out, cache, mask.bool(), n, states) for out, cache in zip((want, got), caches, strict=True))
            where = first_difference(*both)
            if where is not None:
                return f"after {what} {where}"
    if not done:
        raise UsageError(f"the untouched {type(decoder).__name__} fails: {type(failure).__name__}: {failure}") from failure
    return None


def prompt(decoder: Any, batch: int = PROMPT[0], tokens: int = PROMPT[1]) -> dict[str, Any]:
    """Arguments of a decoder's forward: a batch of prompts, with everything given that can be, and left-padded."""
    embedding = decoder.get_input_embeddings()
    ids = torch.arange(batch * tokens, device="cpu").view(batch, tokens) % embedding.num_embeddings
    mask = torch.ones(batch, tokens, dtype=torch.long, device="cpu")
    mask[0, 0] = 0
    device = embedding.weight.device
    encoded = encoder_states(decoder, batch)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "use_cache": True, **encoded}


def check_whole_forward(decoder: Any, forward: Callable[..., Any], named: Container[str]) -> None:
    """Raise UsageError if a decoder's forward isn't one that runs whole: hidden states and positions in, no mask.

    ``named``: its arguments.
    """
    for name in ("attention_mask", "inputs_embeds", "position_ids", "use_cache"):
        if name not in named:
            raise UsageError(f"its forward has no argument {name}")
    if _takes_several_positions(forward, decoder):
        raise UsageError("its tokens may have several positions each")


def _takes_several_positions(forward: Callable[..., Any], decoder: Any) -> bool:
    """Whether a decoder takes position ids [3, B, T], as models of images and text do: for time, height and width."""
    batch, tokens = PROMPT
    given = prompt(decoder)
    place = given["input_ids"].device
    positions = torch.arange(3 * tokens, device=place).view(3, 1, tokens).expand(3, batch, tokens)
    try:
        with torch.no_grad():
            out = forward(**{**given, "position_ids": positions})
    except Exception:  # whatever comes of it
        return False
    return tuple(out.last_hidden_state.shape[:2]) == (batch, tokens)


def encoder_states(decoder: Any, batch: int, seed: int = 1) -> dict[str, Tensor]:
    """What a decoder after an encoder needs of it besides: states [B, S, D] and a mask [B, S]. Empty for others."""
    if not getattr(decoder.config, "is_encoder_decoder", False):
        return {}
    weight = decoder.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(seed)
    width = getattr(decoder.config, "d_model", None) or decoder.config.hidden_size
    states = torch.randn(batch, _ENCODED, width, generator=generator, device="cpu")
    mask = torch.ones(batch, _ENCODED, dtype=torch.long, device="cpu")
    mask[0, -2:] = 0
    given = {
        "encoder_hidden_states": states.to(weight.device, weight.dtype),
        "encoder_attention_mask": mask.to(weight.device),
    }
    named = inspect.signature(type(decoder).forward).parameters
    return {name: t for name, t in given.items() if name in named}


def results(out: Any, cache: Any, mask: Tensor, n: int, states: bool = False) -> dict[str, Tensor]:
    """What a forward of ``n`` tokens left for the real tokens in ``mask`` [B, T]: the last hidden states, with ``states`` those
    of all layers, and the cache.
    """
    real = mask[:, -n:].to(out.last_hidden_state.device)
    found = {"the last hidden state": out.last_hidden_state[real]}
    for i, t in enumerate(out.hidden_states if states else ()):
        if t.shape[:2] != real.shape:
            raise UsageError(f"hidden state {i} has shape {list(t.shape)}, which isn't [batch, tokens, size]")
        found[f"hidden state {i}"] = t[real]
    for path, t in sorted(cache_tensors(cache).items()):
        kept = t.shape[-2] if t.dim() == 4 else 0
        by_token = 0 < kept <= mask.shape[1] and t.shape[0] == mask.shape[0] and "cross" not in path
        found[path] = t.transpose(1, 2)[mask[:, -kept:].to(t.device)] if by_token else t
    return found


def cache_tensors(cache: Any, path: str = "the cache") -> dict[str, Tensor]:
    """All tensors that a cache holds, by where it holds them."""
    if isinstance(cache, Tensor):
        return {path: cache}
    if isinstance(cache, dict):
        parts = cache.items()
    elif isinstance(cache, list | tuple):
        parts = dict(enumerate(cache)).items()
    elif type(cache).__module__.startswith("transformers."):
        parts = attributes(cache).items() if hasattr(cache, "__dict__") else {}.items()
    else:
        return {}
    return {k: t for name, part in parts for k, t in cache_tensors(part, f"{path}.{name}").items()}


def first_difference(want: dict[str, Tensor], got: dict[str, Tensor]) -> str | None:
    """Where two :func:`results` differ, and by how much; None if nowhere."""
    if want.keys() != got.keys():
        return f"there is {', '.join(sorted(want.keys() ^ got.keys()))} only on one side"
    for name, t in want.items():
        off = _difference(got[name], t)
        if off is not None:
            return f"{name} differs from the untouched model's ({off})"
    return None


def _difference(got: Tensor, want: Tensor) -> str | None:
    if got.shape != want.shape:
        return f"shape {list(got.shape)} instead of {list(want.shape)}"
    if not want.numel():
        return None
    off = (got.double() - want.double()).abs().max().item()
    scale = max(want.double().abs().max().item(), 1e-6)
    return None if off <= _TOLERANCE.get(want.dtype, 0) * scale else f"by up to {off:.3g} at a size of {scale:.3g}"
