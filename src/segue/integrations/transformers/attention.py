"""The break: attention and the KV cache, run live between two segments by the model's own functions.

In the graphs a batch [B, T] is one row of N = B*T tokens, since everything but attention treats each token alone. Here
it becomes a batch again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.break_points import break_point
from segue.capture.thread_state import current_forward_ctx
from segue.integrations.transformers.attention_name import AttentionName
from segue.integrations.transformers.lazy_cache_init import init_layer

# Arguments of an attention function that belong to the running forward: bound at capture, they'd be the first call's.
_LIVE = ("position_ids", "use_cache")


@dataclass(slots=True)
class Forward:
    """What one forward of the decoder knows and its graphs don't: the live context of its breaks."""

    batch: int
    length: int  # tokens of each sequence, padding included
    cache: Any  # transformers' Cache, or None
    make_masks: Callable[[], Sequence[Any]]  # before the cache has grown
    masked: bool  # the caller gave a mask
    attention: Callable[..., Any]  # the model's own
    implementation: AttentionName
    live: dict[str, Any]  # arguments that the model's own attention would get, as this call has them
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)  # the caller's mode
    fresh: bool = False  # one prompt for an empty cache, as a prime graph takes it
    reached: list[int] | None = None  # layers whose attention got here, for the probe
    _masks: Sequence[Any] | None = None

    @property
    def masks(self) -> Sequence[Any]:
        """One per layer, as the model's own masks for its own attention; None where it needs none. Made when the first break
        asks: by then the device has the first segment to run."""
        if self._masks is None:
            self._masks = self.make_masks()
        return self._masks


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """What ``AttentionInterface`` calls as ``"segue"``. query [1, H, N, D], key and value [1, Hkv, N, D]."""
    for name in _LIVE:
        options.pop(name, None)
    return attend(query, key, value, module, **options), None


@break_point(trim={"query": 2, "key": 2, "value": 2}, token_dim=1)
def attend(query: Tensor, key: Tensor, value: Tensor, module: Any, **options: Any) -> Tensor:
    """Attention of the real tokens over the cache and themselves. Returns [1, N, H, D]."""
    forward: Forward = current_forward_ctx()
    if forward.implementation.swapped:
        with forward.implementation.own():
            return _in_callers_mode(forward, query, key, value, module, options)
    return _in_callers_mode(forward, query, key, value, module, options)


def _in_callers_mode(
    forward: Forward, query: Tensor, key: Tensor, value: Tensor, module: Any, options: dict[str, Any]
) -> Tensor:
    """What the cache keeps must be the kind of tensor that an untouched forward would put there."""
    if torch.is_inference_mode_enabled() is forward.inference:
        return _attend(forward, query, key, value, module, options)
    guard = _torch.inference_guard(forward.inference)
    try:
        torch.set_grad_enabled(False)  # until the guard goes: leaving inference mode turns gradients on
        return _attend(forward, query, key, value, module, options)
    finally:
        del guard


def _attend(
    forward: Forward, query: Tensor, key: Tensor, value: Tensor, module: Any, options: dict[str, Any]
) -> Tensor:
    layer = module.layer_idx
    if forward.reached is not None:
        forward.reached.append(layer)
    if forward.batch != 1:
        query, key, value = (_batched(t, forward.batch, forward.length) for t in (query, key, value))
    mask = forward.masks[layer]
    if forward.cache is not None:
        init_layer(forward.cache, layer, key, value)
        key, value = forward.cache.update(key, value, layer)
    out: Tensor = forward.attention(module, query, key, value, mask, **options, **forward.live)[0]
    return out if forward.batch == 1 else out.reshape(1, forward.batch * forward.length, *out.shape[2:])


def _batched(t: Tensor, batch: int, length: int) -> Tensor:
    """[1, H, B*T, D] as a [B, H, T, D] view, strided as an eager forward's is."""
    return t.view(t.shape[1], batch, length, t.shape[3]).transpose(0, 1)
