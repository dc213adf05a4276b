"""A decoder's forward twice: the part that is captured, and the patch that stands in its place meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, Protocol

from torch import Tensor

from segue import _torch
from segue.capture.places import Places
from segue.integrations.transformers.attention import AttentionName
from segue.integrations.transformers.compiled_layers import CompiledLayers

Serve = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class Breaks(Protocol):
    """Modules that run live between two graphs."""

    @property
    def modules(self) -> Sequence[Any]:
        """All of them."""

    def active(self) -> AbstractContextManager[None]:
        """Within this block, in which a body runs, their calls are breaks."""


class Body:
    """``(x [N, D], position_ids [N]) -> hidden states [N, D]``, by the decoder's own forward. This is what is captured.

    That forward sees no mask and no cache: both are in the break, where they are live. ``layers``: run compiled. ``places``: the
    names that the decoder reaches. The decoder itself and its embedding are called live, outside the graphs. ``breaks``: modules
    that run live as well.
    """

    owner = "the handle of segue.accelerate"  # whose recapture() errors name

    def __init__(
        self,
        decoder: Any,
        forward: Callable[..., Any],
        implementation: AttentionName,
        breaks: Breaks,
        layers: CompiledLayers | None = None,
    ) -> None:
        self.decoder = decoder
        self._breaks = breaks
        self._forward = forward
        self._implementation = implementation
        self._layers = layers
        self.look()

    def look(self) -> None:
        """Take what the decoder's code decides by now for what is captured: one walk for all graphs."""
        outside = self.decoder, self.decoder.get_input_embeddings(), *self._breaks.modules
        # Whether attention is causal is handed to it as a plain value, by code that no walk from the decoder comes to.
        self.places = Places(self.decoder, outside=outside, also=("is_causal",), once=True)

    def __call__(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return self._run(x, position_ids).last_hidden_state[0]  # type: ignore[no-any-return]

    def states(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        """The hidden states of all layers, as the forward gives them, [N, D] each, and last what :meth:`__call__` gives."""
        out = self._run(x, position_ids, output_hidden_states=True)
        *others, last = out.hidden_states
        found = others if last is out.last_hidden_state else [*others, last]
        return tuple(t[0] for t in (*found, out.last_hidden_state))

    def uncompiled(self) -> AbstractContextManager[None]:
        """Within this block the layers run as their Python."""
        return nullcontext() if self._layers is None else self._layers.as_they_are()

    def _run(self, x: Tensor, position_ids: Tensor, **asks: bool) -> Any:
        compiled = nullcontext() if self._layers is None else self._layers.active()
        with self._implementation.segue(), self._breaks.active(), compiled:
            return self._forward(
                inputs_embeds=x[None],
                position_ids=position_ids[None],
                attention_mask=None,
                use_cache=False,
                return_dict=True,
                **asks,
            )


class ForwardPatch:
    """Stands in for a decoder's forward and calls ``serve(args, kwargs)``.

    Copied or pickled with its decoder, it turns into the copy's own forward.
    """

    def __init__(self, decoder: Any, serve: Serve) -> None:
        functools.update_wrapper(self, decoder.forward)
        self.__code__ = getattr(decoder.forward, "__code__", None)  # which torch.export looks at
        self._decoder, self._serve, self._before = decoder, serve, _instance_forward(decoder)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._serve(args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _own, (self._decoder, "forward", self._before)

    @property
    def module(self) -> Any:
        """The module whose forward it stands in for."""
        return self._decoder

    @contextmanager
    def away(self) -> Iterator[None]:
        """Within this block the module has its own forward."""
        own = vars(self._decoder)
        mine = own.get("forward") is self
        if mine:
            del own["forward"]
            if self._before is not None:
                own["forward"] = self._before
        try:
            yield
        finally:
            if mine:
                own["forward"] = self

    def apply(self) -> None:
        """Put the patch in the place of the decoder's forward."""
        self._decoder.forward = self

    def undo(self) -> None:
        """Leave the decoder as it was. A forward that was put around this one stays, and gets the decoder's own from it."""
        own = self._decoder.__dict__
        self._serve = _calls(_own(self._decoder, "forward", self._before))
        if own.get("forward") is not self:
            return
        if self._before is None:
            self._decoder.__dict__.pop("forward", None)
        else:
            self._decoder.forward = self._before


# A compiled model would otherwise hold the untouched forward, and no call would be served or counted.
_torch.dynamo_boundary(ForwardPatch.__call__, "an accelerated model runs out of segue's graphs: restore() it to compile it")


class UncompiledCalls:
    """Stands in for a model's ``get_compiled_call``, by which ``generate`` compiles the steps of static caches unasked.

    Dynamo would take seconds, end at the decoder's patch, and look at its guards at each step.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._before = model, vars(model).get("get_compiled_call")
        model.get_compiled_call = self

    def __call__(self, compile_config: Any = None) -> Callable[..., Any]:
        return self._model.__call__  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _own, (self._model, "get_compiled_call", self._before)

    def undo(self) -> None:
        """Leave the model as it was."""
        own = vars(self._model)
        if own.get("get_compiled_call") is self:
            del own["get_compiled_call"]
            own.update({} if self._before is None else {"get_compiled_call": self._before})


def own_forward(module: Any) -> Callable[..., Any]:
    """The forward of a module that segue is about to patch: what was set on it, or that of its class, as the class has it when it
    is called."""
    if _instance_forward(module) is not None:
        return module.forward  # type: ignore[no-any-return]

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return type(module).forward(module, *args, **kwargs)

    return forward


def _calls(forward: Callable[..., Any]) -> Serve:
    return lambda args, kwargs: forward(*args, **kwargs)


def _instance_forward(decoder: Any) -> Any:
    """The forward that was set on the decoder itself and overrides its class's; None if there is none."""
    found = decoder.__dict__.get("forward")
    plain = isinstance(found, MethodType) and found.__func__ is type(decoder).forward and found.__self__ is decoder
    return None if plain else found


def _own(module: Any, name: str, before: Any) -> Any:
    """The method that a module has without a patch: ``before``, which was set on it, or its class's."""
    return MethodType(getattr(type(module), name), module) if before is None else before
