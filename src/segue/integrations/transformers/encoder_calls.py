"""Reads the arguments of an encoder's forward: the tensors that go into its graph, or why graphs can't serve the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.integrations.transformers import reasons

MASK = "attention_mask"
SIDES = ("token_type_ids", "position_ids")  # [batch, tokens], beside the main input and the mask
# Arguments that change nothing when they are False.
_ABSENT_WHEN_FALSE = ("output_attentions", "use_cache")
_STATES = "output_hidden_states"
_READ = ("return_dict", _STATES)
STATES = "hidden_states"  # of an output


@dataclass(frozen=True)
class Boundary:
    """The module of a model whose whole forward is one graph, and what is known of that forward.

    Args:
        path: its name in the model; empty where it is the model.
        forward: its own, which a patch may stand in for.
        main: the argument that is [batch, tokens, ...], or, without ``mask``, [batch, ...] of a fixed shape.
        mask: the dtype of its ``attention_mask`` [batch, tokens], by which lengths can be padded; None if it takes none.
        sides: which of :data:`SIDES` it takes and treats rightly.
        pads: what fills padded tokens, by argument.
        output: the type of its output.
        fields: names of the tensors in that, with the dimension that has one row a token, if any.
        example: makes a main input of so many rows and tokens from a generator.
        host_made: the forward makes tensors on the host and copies them, which no graph can hold. They go on the device.
        hidden_states: its forward is asked for those of all layers too. They are fields of their own, numbered.
    """

    module: Any
    path: str
    forward: Callable[..., Any]
    main: str
    mask: torch.dtype | None
    sides: tuple[str, ...]
    pads: Mapping[str, float]
    output: Any
    fields: Mapping[str, int | None]
    example: Callable[[int, int, torch.Generator], Tensor] = field(repr=False)
    host_made: bool = False
    hidden_states: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The tensor arguments that it can be given, in order."""
        return (self.main, *(() if self.mask is None else (MASK,)), *self.sides)

    @property
    def return_dict(self) -> bool:
        """Whether its forward takes that argument."""
        parameters = inspect.signature(self.forward).parameters
        return "return_dict" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def ones(self, main: Tensor) -> Tensor:
        """The mask of a call that gives none."""
        return torch.ones(main.shape[:2], dtype=self.mask, device=main.device)

    def parts_of(self, out: Any) -> dict[str, Any]:
        """What an output holds, by field. Hidden states that the config alone asks for are none."""
        parts = dict(out)
        states = parts.pop(STATES, None) or ()
        return parts | {f"{STATES}.{i}": t for i, t in enumerate(states if self.hidden_states else ())}

    def output_of(self, tensors: Sequence[Tensor]) -> Any:
        """The output that holds these tensors, one for each of its fields."""
        parts: dict[str, Any] = dict(zip(self.fields, tensors, strict=True))
        if self.hidden_states:
            parts[STATES] = tuple(parts.pop(name) for name in self.fields if name.startswith(f"{STATES}."))
        return self.output(**parts)

    @property
    def where(self) -> str:
        """The class of the module, and its name in the model."""
        name = type(self.module).__name__
        return f"{name} ({self.path})" if self.path else name


@dataclass(slots=True)
class EncoderCall:
    """A call of an encoder's forward that graphs can serve. ``tensors``: by name, each [batch, length, ...] or [batch, ...].

    ``length``: tokens of each row, padding of the caller's included; 0 where rows have no length.
    """

    tensors: dict[str, Tensor]
    return_dict: bool
    batch: int
    length: int
    hidden_states: bool = False  # the caller wants those of all layers too

    def part(self, begin: int, end: int) -> EncoderCall:
        """Some of its rows."""
        tensors = {k: t[begin:end] for k, t in self.tensors.items()}
        return EncoderCall(tensors, self.return_dict, end - begin, self.length, self.hidden_states)


class EncoderCallReader:
    """Reads calls of a boundary's forward. ``config``: of the model, for what it asks of every call."""

    def __init__(self, boundary: Boundary, config: Any) -> None:
        self._config, self._boundary, self._names = vars(config), boundary, boundary.names  # going past its slow look-up
        parameters = inspect.signature(boundary.forward).parameters.values()
        self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> EncoderCall | str:
        """The call, or the reason why it runs untouched, one of :mod:`~segue.integrations.transformers.reasons`."""
        given = kwargs
        if args:
            given = {**dict(zip(self._positional, args, strict=False)), **kwargs}
            if len(given) != len(args) + len(kwargs):
                return reasons.ARGUMENTS
        return_dict = given.get("return_dict")
        if return_dict is None:
            return_dict = self._config.get("return_dict", True)
        if self._wants("output_attentions", given):
            return reasons.requested_output("output_attentions")
        states = self._wants(_STATES, given)
        if states and states is not True:
            return reasons.requested_output(_STATES)
        tensors: dict[str, Tensor] = {}
        for name, value in given.items():
            if name in self._names:
                if isinstance(value, Tensor):
                    tensors[name] = value
                elif value is not None:
                    return reasons.not_a_tensor(name)
            elif value is not None and name not in _READ and not (value is False and name in _ABSENT_WHEN_FALSE):
                return reasons.unknown_argument(name)
        main = tensors.get(self._names[0])
        if main is None:
            return reasons.without(self._names[0])
        call = self._shaped(main, tensors, bool(return_dict))
        if states and isinstance(call, EncoderCall):
            call.hidden_states = True
        return call

    def _wants(self, name: str, given: Mapping[str, Any]) -> Any:
        wanted = given.get(name)
        return self._config.get(name, False) if wanted is None else wanted

    def _shaped(self, main: Tensor, tensors: dict[str, Tensor], return_dict: bool) -> EncoderCall | str:
        shape, boundary = main.shape, self._boundary
        if len(shape) < (1 if boundary.mask is None else 2):
            return reasons.dimensions(len(shape))
        if 0 in shape:
            return reasons.NO_TOKENS
        if boundary.mask is None:
            return EncoderCall(tensors, return_dict, shape[0], 0)
        batch, length = shape[:2]
        for name in self._names[1:]:
            t = tensors.get(name)
            if t is None:
                if name == MASK:
                    tensors[name] = boundary.ones(main)
            elif t.shape != (batch, length):
                if name == MASK or t.shape != (1, length):
                    return reasons.shape(name)
                tensors[name] = t.expand(batch, length)
        return EncoderCall({n: tensors[n] for n in self._names if n in tensors}, return_dict, batch, length)


def padded(call: EncoderCall, length: int, pads: Mapping[str, float]) -> list[Tensor]:
    """The call's tensors at ``length`` tokens a row, in their order. What fits already is not copied."""
    missing = length - call.length
    if not missing:
        return list(call.tensors.values())
    return [F.pad(t, (*(0, 0) * (t.dim() - 2), 0, missing), value=pads[name]) for name, t in call.tensors.items()]
