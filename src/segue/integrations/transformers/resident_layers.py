"""Layers of a cache whose keys and values lie in resident memory.

A layer's class is exchanged for one whose ``keys`` and ``values`` are views, made when somebody reads them. Whoever assigns
them, as every update and crop of transformers' does, gets a layer of its own class back, with what was assigned. A reordering
moves rows within resident memory, unless somebody has a view of them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from segue import _torch
from segue.integrations.transformers import names
from segue.integrations.transformers.resident_memory import Residence
from segue.integrations.transformers.static_residence import StaticResidence

_HELD = {"keys", "values", "cumulative_length", "cumulative_length_int"}  # what the residence holds for a layer
_OURS = ("residence", "at", "kind")  # attributes of a resident layer, in the order in which they go


def _lying(name: str, get: Callable[[Any], Any]) -> Any:
    """The attribute ``name`` of a resident layer, read by ``get``. Who assigns it makes a layer of its own class of it."""

    def put(layer: Any, value: Any) -> None:
        leave(layer)
        setattr(layer, name, value)

    return property(get, put)


class _Resident:
    """What overrides parts of a layer's own class. The layer's attributes ``residence`` and ``at`` say where it lies.

    ``residence`` is a function, so that who walks through a cache's objects comes to its tensors and no further.
    """

    _layer_type = None  # or transformers takes the subclass for the class of all such layers
    keys = _lying("keys", lambda layer: _view(layer, 0))
    values = _lying("values", lambda layer: _view(layer, 1))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        residence = residence_of(self)
        if residence is not None:
            with residence.memory.turn():  # no other thread has this layer leave meanwhile
                if residence_of(self) is residence and residence.reorder(vars(self)["at"], beam_idx):
                    return
        vars(self).get("kind", type(self)).reorder_cache(self, beam_idx)  # which assigns what it has selected

    def __repr__(self) -> str:
        return str(vars(self)["kind"].__name__)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """A copy, or a pickled layer, has memory of its own."""
        own = {name: _copy(value) if name in _HELD else value for name, value in attributes(self).items()}
        copied = object.__new__(vars(self)["kind"])
        copied.__dict__.update(own)
        return copied.__reduce_ex__(1)  # by later protocols only an object's own class can be pickled


class _Growing:
    def get_seq_length(self) -> int:
        return _length(self)


class _Sliding:
    get_seq_length = _Growing.get_seq_length
    cumulative_length = _lying("cumulative_length", lambda layer: _length(layer))
    record_past = _lying("record_past", lambda layer: False)  # or it couldn't lie here


class _Static:
    """Of a layer of a static cache. Who changes its tensors in place changes what lies in the residence."""

    cumulative_length = _lying("cumulative_length", lambda layer: _count(layer))


class _StaticSliding:
    cumulative_length_int = _lying("cumulative_length_int", lambda layer: _length(layer))


def _parts(kind: type) -> tuple[type, ...]:
    if issubclass(kind, names.static_cache_layer()):
        sliding = issubclass(kind, names.static_sliding_cache_layer())
        return (_Resident, _Static, _StaticSliding) if sliding else (_Resident, _Static)
    return _Resident, _Sliding if issubclass(kind, names.sliding_cache_layer()) else _Growing


@functools.cache
def _resident_class(kind: Any) -> type:
    own = {
        name: value
        for part in _parts(kind)
        for name, value in vars(part).items()
        if name not in ("__dict__", "__weakref__", "__doc__")
    }
    own["__module__"] = kind.__module__  # by which transformers' objects are told
    return type(f"Resident{kind.__name__}", (kind,), own)  # with another base beside it, no layer could change its class for this


def enter(layers: list[Any], residence: Residence) -> None:
    """Have the layers of a cache lie in ``residence``, which holds what they hold."""
    known = weakref.ref(residence)  # a residence that its layers' references hold would be a cycle

    def where() -> Residence:
        return residence

    def end(layer: Any) -> None:
        if (each := known()) is not None:
            each.whole = False

    if isinstance(residence, StaticResidence):
        residence.count([layer.cumulative_length for layer in layers])
    for at, layer in enumerate(layers):
        own: dict[str, Any] = vars(layer)
        kind: Any = type(layer)
        own.update(dict.fromkeys(own.keys() & _HELD), residence=where, at=at, kind=kind)
        layer.__class__ = _resident_class(kind)
        residence.layers.append(weakref.ref(layer, end))
        residence.ids.append(id(layer))


def move_in(cache: Any, residence: Residence, kept: Sequence[tuple[Tensor, Tensor]], length: int) -> None:
    """Have a cache lie in ``residence``, with copies of keys and values [B, heads, n, size] of each layer, the last ``n`` of
    ``length`` tokens: what it holds, or what it is to hold, if it is empty."""
    residence.take_in(kept, length)
    layers = cache.layers
    for other in {id(r): r for r in map(residence_of, layers) if r is not None}.values():
        leave_all(other)
    while len(layers) < len(kept):
        layers.append(names.full_cache_layer()())
    for layer, (keys, _) in zip(layers, kept, strict=True):
        if not layer.is_initialized:
            layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
    enter(layers, residence)


def leave(layer: Any, copied: bool = False) -> None:
    """Make a resident layer one of its own class, whose tensors are views of what lay there, or copies."""
    own, residence = vars(layer), residence_of(layer)
    if residence is None:  # it has left meanwhile
        return
    held = _held(layer)
    if copied:
        held = {name: _copy(value) for name, value in held.items()}
    for t in held.values() if copied and residence.sizes is not None else ():
        if isinstance(t, Tensor):  # as a static cache's own are, for code that the caller compiles
            _torch.mark_static_address(t)
    residence.whole = False
    own.update(held)
    layer.__class__ = own["kind"]
    for name in _OURS:  # last, since other threads may be reading the layer
        own.pop(name)


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with torch.inference_mode(False), torch.no_grad():  # whose cache it is may be in another mode than who has it copied
        return value.clone(memory_format=torch.contiguous_format)


def leave_all(residence: Residence, copied: bool = False) -> None:
    """Make every layer that lies in ``residence`` one of its own class."""
    with residence.memory.turn():
        for layer in (ref() for ref in residence.layers):
            if layer is not None and residence_of(layer) is residence:
                leave(layer, copied)


def residence_of(layer: Any) -> Residence | None:
    """Where a layer lies; None if it has memory of its own."""
    where = getattr(layer, "__dict__", {}).get("residence")
    return None if where is None else where()


def attributes(layer: Any) -> dict[str, Any]:
    """What a layer of its own class would hold in the place of this one, resident or not."""
    own = dict(vars(layer))
    if "residence" in own:
        own.update(_held(layer))
        for name in _OURS:
            del own[name]
    return own


def _held(layer: Any) -> dict[str, Any]:
    """The attributes of a layer of its own class that the residence holds for this one."""
    return {name: getattr(layer, name) for name in vars(layer).keys() & _HELD}


def _length(layer: Any) -> int:
    residence = residence_of(layer)
    return residence.length if residence is not None else layer.get_seq_length()  # it has left meanwhile


def _count(layer: Any) -> Tensor:
    at: int | None = vars(layer).get("at")
    residence = residence_of(layer)
    if at is None or not isinstance(residence, StaticResidence):  # it has left meanwhile
        return vars(layer)["cumulative_length"]  # type: ignore[no-any-return]
    return residence.counts[at]


def _view(layer: Any, which: int) -> Tensor:
    own = vars(layer)
    at, residence = own.get("at"), residence_of(layer)
    if at is None or residence is None:  # it has left meanwhile
        return own[("keys", "values")[which]]  # type: ignore[no-any-return]
    return residence.memory.view(residence, at, which)
