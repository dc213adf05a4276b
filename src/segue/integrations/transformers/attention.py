"""The break: attention and the KV cache, run live between two segments by the model's own functions.

In the graphs a batch [B, T] is one row of N = B*T tokens, since everything but attention treats each token alone. The
break makes a batch of it again. :class:`AttentionName` is how the model's attention gets to the break.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from segue import _torch
from segue.capture.break_points import break_point
from segue.capture.compiled import as_input
from segue.capture.thread_state import current_forward_ctx
from segue.integrations.transformers import names

T = TypeVar("T")
PAGED = "paged|"  # how older releases begin the names of implementations for paged caches
NAME = "segue"  # the attention implementation, while a decoder's body runs

# Attributes of an initialized layer, by the dtypes and device of its keys and values and the layer's own function. None: they
# can't be shared, since some tensor among them is the layer's own, or has the shape of its keys.
_initialized: dict[tuple[torch.dtype, torch.dtype, torch.device, Any], dict[str, Any] | None] = {}
# Arguments of an attention function that belong to the running forward. A break would bind those of the first call.
LIVE = ("position_ids", "use_cache")


class AttentionName:
    """Switches ``config._attn_implementation`` of a decoder's configs: segue's while a body runs, else the model's own.

    No mask function is registered under segue's name, so that a body makes no masks. Since the configs have that name only
    while a body runs, the untouched model, its masks and whatever else reads the name never see it.
    """

    def __init__(self, configs: Iterable[Any], name: str = NAME) -> None:
        self._segue = name
        self._configs = list({id(config): config for config in configs}.values())
        self._own: list[Any] = []
        self.swapped = False  # a body is running

    @property
    def name(self) -> str | None:
        """The model's own implementation: ``"sdpa"``, ``"eager"``, ..."""
        first = self._own[0] if self.swapped else self._configs[0]._attn_implementation
        return first  # type: ignore[no-any-return]

    @contextmanager
    def segue(self) -> Iterator[None]:
        """Within this block, in which a body runs, attention goes to the break."""
        own = [config._attn_implementation for config in self._configs]
        before, self._own, self.swapped = (self._own, self.swapped), own, True
        try:
            self._set([self._segue] * len(own))
            yield
        finally:
            self._set(own)
            self._own, self.swapped = before

    @contextmanager
    def unprefixed(self) -> Iterator[None]:
        """Within this block the configs name an implementation for paged caches by its plain name, as when it was captured."""
        own = [config._attn_implementation for config in self._configs]
        self._set([name and name.removeprefix(PAGED) for name in own])
        try:
            yield
        finally:
            self._set(own)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Within this block, in a break, attention functions that read the name find the model's own, as at a replay."""
        if not self.swapped:
            yield
            return
        self.swapped = False
        self._set(self._own)
        try:
            yield
        finally:
            self._set([self._segue] * len(self._configs))
            self.swapped = True

    def _set(self, implementations: list[Any]) -> None:
        for config, name in zip(self._configs, implementations, strict=True):
            config._attn_implementation = name


@dataclass(slots=True)
class LiveContext:
    """The live context of the breaks: what one forward of the decoder knows and its graphs don't."""

    batch: int
    length: int  # tokens of each sequence, padding included
    cache: Any  # transformers' Cache, or None
    make_masks: Callable[[], Sequence[Any]]  # to be called before the cache has grown
    masked: bool  # the caller gave a mask
    attention: Callable[..., Any]  # the model's own
    implementation: AttentionName
    live: dict[str, Any]  # arguments that the model's own attention would get, as this call has them
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)  # the caller's mode
    packed: Mapping[str, Any] | None = None  # the same of a paged cache, which is among them
    prime: str | None = None  # the strategy whose graphs take it, as prompts for an empty cache
    numbers: Tensor | None = None  # what that strategy's trunk gets of each token
    given: int = 0  # sequences of the caller's, where a batch is filled up
    reached: list[int] | None = None  # layers whose attention got here, for the probe
    calls: Sequence[dict[str, Any]] | None = None  # what each layer is given, by name, where that was seen
    returned: dict[Any, Any] = field(default_factory=dict)  # by breaks, for breaks after them
    _masks: Sequence[Any] | None = None

    @property
    def masks(self) -> Sequence[Any]:
        """One mask per layer, for the model's own attention; None where it needs none.

        They are made when the first break asks for them: by then the device has the first segment to run.
        """
        if self._masks is None:
            self._masks = self.make_masks()
        return self._masks


class _Redirect(threading.local):
    """Where attention goes instead of the break, in this thread."""

    to: Callable[..., Any] | None = None


_redirect = _Redirect()


@contextmanager
def attention_goes_to(function: Callable[..., Any]) -> Iterator[None]:
    """Within this block, in which a trunk runs, ``function`` gets what :func:`attention_forward` gets, and no break is met.

    It is looked up here and not by another name of an implementation, because compiled layers guard on the name.
    """
    before, _redirect.to = _redirect.to, function
    try:
        yield
    finally:
        _redirect.to = before


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """What ``AttentionInterface`` calls as ``"segue"``. Compiled layers end their graphs here.

    ``query`` [1, H, N, D], ``key`` and ``value`` [1, Hkv, N, D]. Returns [1, N, H, D], and None for the weights.
    """
    if _redirect.to is not None:
        out, weights = _redirect.to(module, query, key, value, **options)
        return as_input(out), weights
    for name in LIVE:
        options.pop(name, None)
    return as_input(attend(query, key, value, module, **options)), None


_torch.dynamo_boundary(attention_forward, "a segue break point runs eagerly between two graphs")


@break_point(trim={"query": 2, "key": 2, "value": 2}, token_dim=1)
def attend(query: Tensor, key: Tensor, value: Tensor, module: Any, **options: Any) -> Tensor:
    """Attention of the real tokens over the cache and themselves: the break.

    ``query`` [1, H, N, D], ``key`` and ``value`` [1, Hkv, N, D]. Returns [1, N, H, D].
    """
    forward: LiveContext = current_forward_ctx()
    if forward.implementation.swapped:
        with forward.implementation.own():
            return in_callers_mode(forward, _attend, forward, query, key, value, module, options)
    return in_callers_mode(forward, _attend, forward, query, key, value, module, options)


def in_callers_mode(forward: LiveContext, run: Callable[..., T], *args: Any) -> T:
    """``run(*args)`` in the caller's inference mode: an untouched forward would fill the cache with tensors of that mode."""
    if torch.is_inference_mode_enabled() is forward.inference:
        return run(*args)
    guard = _torch.inference_guard(forward.inference)
    try:
        torch.set_grad_enabled(False)  # until the guard goes: leaving inference mode turns gradients on
        return run(*args)
    finally:
        del guard


def _attend(
    forward: LiveContext, query: Tensor, key: Tensor, value: Tensor, module: Any, options: dict[str, Any]
) -> Tensor:
    layer = module.layer_idx
    if forward.reached is not None:
        forward.reached.append(layer)
    if forward.batch != 1:
        query, key, value = (batched(t, forward.batch, forward.length) for t in (query, key, value))
    mask = forward.masks[layer]
    if forward.cache is not None:
        init_layer(forward.cache, layer, key, value)
        if keeps_what_it_gets(forward.cache, layer):
            key, value = key.clone(), value.clone()  # the next replay overwrites what the graph handed over
        key, value = forward.cache.update(key, value, layer)
    live = forward.live if forward.packed is None else {**forward.live, **forward.packed}
    if forward.packed is not None and names.layers_update_paged():
        key, value = live.pop("cache").update(key, value, layer, kwargs=live)
    out: Tensor = forward.attention(module, query, key, value, mask, **options, **live)[0]
    return out if forward.batch == 1 else out.reshape(1, forward.batch * forward.length, *out.shape[2:])


def batched(t: Tensor, batch: int, length: int) -> Tensor:
    """[1, H, B*T, D] as a [B, H, T, D] view, strided as an eager forward's is."""
    return t.view(t.shape[1], batch, length, t.shape[3]).transpose(0, 1)


def keeps_what_it_gets(cache: Any, at: int) -> bool:
    """Whether layer ``at`` of a cache may hold on to the very tensors that it is given."""
    layers = getattr(cache, "layers", ())
    return at < len(layers) and type(layers[at]) not in names.copying_cache_layers()


def init_layer(cache: Any, at: int, key: Tensor, value: Tensor) -> None:
    """Give layer ``at`` of a cache, if it has held nothing yet, the attributes that its ``lazy_initialization`` would give it.

    That function makes two empty tensors, which takes longer than attention needs. Layers that grow by making new tensors can
    share the empty ones, so it runs once for each kind of ``key`` and ``value``. Other layers initialize themselves, and so do
    those of a cache of a subclass, whose ``update()`` may ask whether they are initialized.
    """
    kind: Any = names.full_cache_layer()
    layer: Any = cache.layers[at] if at < len(cache.layers) else None
    if type(layer) is not kind or layer.is_initialized or type(cache) is not names.cache_type():
        return
    place = key.dtype, value.dtype, key.device, kind.lazy_initialization
    if place not in _initialized:
        _initialized[place] = _first_attributes(kind, key, value)
    vars(layer).update(_initialized[place] or {})


def _first_attributes(kind: Any, key: Tensor, value: Tensor) -> dict[str, Any] | None:
    layer = kind()
    before = dict(vars(layer))
    with torch.inference_mode(False):
        layer.lazy_initialization(key, value)
    found = {name: now for name, now in vars(layer).items() if name not in before or before[name] is not now}
    return found if all(map(_can_be_shared, found.values())) else None


def _can_be_shared(value: Any) -> bool:
    return not value.numel() if isinstance(value, Tensor) else isinstance(value, bool | torch.dtype | torch.device)
