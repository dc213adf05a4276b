"""Whole modules as breaks: they run live, on the real rows, by their own code.

A :class:`MixerBreak` gets cache, masks and whatever else its layer was given by this call's forward. A :class:`TokenBreak` is a
module that treats each token alone, and can't be captured.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from segue.capture.break_points import break_point
from segue.capture.thread_state import current_forward_ctx
from segue.integrations.transformers.attention import LiveContext, in_callers_mode
from segue.integrations.transformers.decoder_forward import own_forward
from segue.integrations.transformers.decoder_parts import DecoderParts, Mixer
from segue.integrations.transformers.layer_calls import Named, NotSeen, ReturnLayout, Signature, first_of, token_axis


class Recorder:
    """Notes the arguments, by name, and the result of each of some modules during one forward."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._signatures = {module: Signature(module) for module in modules}
        self.arguments: dict[nn.Module, Named] = {}
        self.results: dict[nn.Module, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within this block the modules are listened to."""
        handles = []
        try:
            for module in self._signatures:
                handles.append(module.register_forward_pre_hook(self._called, with_kwargs=True))
                handles.append(module.register_forward_hook(self._returned))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def first(self, module: nn.Module) -> str:
        """The name of a module's first argument."""
        return self._signatures[module].names[0]

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arguments[module] = self._signatures[module].named(args, kwargs)

    def _returned(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self.results[module] = result


@break_point(trim={"hidden": 1, "more": 1}, token_dim=1)
def mix(hidden: Tensor, more: Tensor | None, given: Any, mixer: MixerBreak) -> Tensor:
    """A mixer of the real tokens, over the cache and themselves: the break.

    ``hidden`` [1, N, D], and ``more`` [1, N, E] where the layer made another tensor for it. Returns [1, N, D].
    """
    forward: LiveContext = current_forward_ctx()
    if not forward.implementation.swapped:
        return in_callers_mode(forward, mixer.run, forward, hidden, more, given)
    with forward.implementation.own():
        return in_callers_mode(forward, mixer.run, forward, hidden, more, given)


class MixerBreak:
    """In the place of the forward of ``mixer.module`` while a body runs.

    ``recorded``: an untouched forward of ``batch`` x ``length`` tokens, which tells where each argument comes from.
    ``earlier``: the breaks of the mixers that run before it. An argument may be what one of them has returned beside its result,
    and layers and decoder have handed on.

    Raises:
        NotSeen: it can't tell.
    """

    def __init__(
        self, mixer: Mixer, layer: nn.Module, recorded: Recorder, earlier: Sequence[MixerBreak], batch: int, length: int
    ) -> None:
        module = mixer.module
        self._recorded, self._earlier = recorded.results, earlier
        self.module, self.layer, self.own = module, mixer.layer, own_forward(module)
        self._signature = Signature(module)
        self._hidden = recorded.first(module)
        self._more: str | None = None
        self._live: dict[str, str] = {}  # the layer's argument that each of the module's is
        self._handed_on: dict[str, tuple[MixerBreak, int]] = {}  # which break has returned it, and where
        self.hands_on = False
        self.layout = ReturnLayout.of(recorded.results[module])
        around = {k: v for k, v in recorded.arguments[layer].items() if k != recorded.first(layer)}
        for name, value in recorded.arguments[module].items():
            if name != self._hidden:
                self._find(name, value, around, (batch, length))
        del self._recorded, self._earlier

    def _find(self, name: str, value: Any, around: Named, sizes: tuple[int, int]) -> None:
        plain = value is None or isinstance(value, bool | int | float | str)
        for other in () if plain else self._earlier:
            result = self._recorded[other.module]
            at = next((i for i, v in enumerate(result) if i and v is value), None) if isinstance(result, tuple) else None
            if at is not None:
                self._handed_on[name], other.hands_on = (other, at), True
                return
        source = None if plain else next((k for k, v in around.items() if v is value), None)
        if source is None and plain and name in around and around[name] == value:
            source = name
        if source is not None:
            self._live[name] = source
        elif isinstance(value, Tensor):
            if self._more is not None or token_axis(value, *sizes) != 0:
                shape = list(value.shape)
                raise NotSeen(f"{type(self.module).__name__} gets {name}, a tensor of shape {shape} that its layer makes")
            self._more = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._signature.named(args, kwargs)
        hidden, more = given.pop(self._hidden), given.pop(self._more, None) if self._more else None
        rest = tuple((name, value) for name, value in given.items() if name not in self._live and name not in self._handed_on)
        return self.layout.wrap(mix(hidden, more, rest, self))

    def run(self, forward: LiveContext, hidden: Tensor, more: Tensor | None, given: Sequence[tuple[str, Any]]) -> Tensor:
        """The module's own forward on a batch again, with its live arguments."""
        assert forward.calls is not None
        if forward.reached is not None:
            forward.reached.append(self.layer)
        sizes, around = (forward.batch, forward.length), forward.calls[self.layer]
        values = {**dict(given), **{name: around.get(source) for name, source in self._live.items()}}
        if self._handed_on:
            values.update((name, forward.returned[other][at]) for name, (other, at) in self._handed_on.items())
        values[self._hidden] = hidden.view(*sizes, *hidden.shape[2:])
        if self._more is not None and more is not None:
            values[self._more] = more.view(*sizes, *more.shape[2:])
        result = self.own(**values)
        if self.hands_on:
            forward.returned[self] = result
        out: Tensor = first_of(result)
        return out.reshape(1, -1, *out.shape[2:])


class TokenBreak:
    """In the place of the forward of a module that treats each token alone, or each sequence, and can't be captured."""

    def __init__(self, module: Any, arguments: Named, result: Any, batch: int, length: int) -> None:
        self.module, self.own, self._signature = module, own_forward(module), Signature(module)
        self._tensors = [name for name, value in arguments.items() if isinstance(value, Tensor)]
        dims = [_token_dim(arguments[name], batch, length) for name in self._tensors]
        outs = tuple(_token_dim(t, batch, length) for t in _parts(result))
        if not 1 <= len(dims) <= 2 or None in dims or None in outs:
            raise NotSeen(f"{type(module).__name__} takes or returns something else than one row a token")
        self._batched = [name for name, dim in zip(self._tensors, dims, strict=True) if dim == 1]
        self._outs = outs
        self._run = self._break(dict(zip(("a", "b"), dims, strict=False)), outs if isinstance(result, tuple) else outs[0])

    def _break(self, trim: Mapping[str, Any], token_dim: Any) -> Callable[..., Any]:
        @break_point(trim=trim, token_dim=token_dim)
        def run_module(a: Tensor, b: Tensor | None, given: Any) -> Any:
            """A module that can't be captured, on the real tokens."""
            forward: LiveContext = current_forward_ctx()
            return in_callers_mode(forward, self._call, forward, a, b, given)

        return run_module

    def _call(self, forward: LiveContext, a: Tensor, b: Tensor | None, given: Sequence[tuple[str, Any]]) -> Any:
        tensors: dict[str, Any] = dict(zip(self._tensors, (a, b), strict=False))
        batch, length = forward.batch, forward.length
        if batch == 1:
            return self.own(**dict(given), **tensors)
        for name in self._batched:
            tensors[name] = tensors[name].reshape(batch, length, *tensors[name].shape[2:])
        result = self.own(**dict(given), **tensors)
        parts = zip(_parts(result), self._outs, strict=True)
        rows = tuple(t.reshape(1, -1, *t.shape[2:]) if dim == 1 else t for t, dim in parts)
        return rows if isinstance(result, tuple) else rows[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._signature.named(args, kwargs)
        tensors = [given.pop(name) for name in self._tensors]
        return self._run(*tensors, *[None] * (2 - len(tensors)), tuple(given.items()))


def culprit(error: BaseException, parts: DecoderParts) -> nn.Module | None:
    """The module in whose code a capture failed: a part of a layer, or of the decoder itself; None if it is no such part."""
    inside = {m: child for child in _parts_to_break(parts) for m in child.modules()}
    found: nn.Module | None = None
    at: BaseException | None = error
    while at is not None:
        for frame, _ in traceback.walk_tb(at.__traceback__):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in inside:
                found = inside[module]
        at = at.__cause__ or at.__context__
    return found


def _parts_to_break(parts: DecoderParts) -> list[nn.Module]:
    own = [child for child in parts.decoder.children() if child is not parts.layers]
    mixers = {mixer.module for mixer in parts.mixers}
    return own + [child for layer in parts.layers for child in _called(layer) if mixers.isdisjoint(child.modules())]


def _called(module: nn.Module) -> list[nn.Module]:
    """The children of a module that may be called, in lists too."""
    return [m for child in module.children() for m in (_called(child) if isinstance(child, nn.ModuleList) else [child])]


def _parts(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _token_dim(t: Any, batch: int, length: int) -> int | None:
    """The dimension of ``t`` that holds the tokens where a batch is one row: [B, T, ...] or [B*T, ...]."""
    if not isinstance(t, Tensor):
        return None
    if t.dim() and t.shape[0] == batch * length:
        return 0
    return 1 if token_axis(t, batch, length) == 0 else None


class ModuleBreaks:
    """The breaks of a body, which stand in their modules' places while it runs."""

    def __init__(self) -> None:
        self._breaks: list[MixerBreak | TokenBreak] = []

    def put(self, breaks: Sequence[MixerBreak | TokenBreak]) -> None:
        """These, from now on."""
        self._breaks = list(breaks)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that run live."""
        return [each.module for each in self._breaks]

    def __iter__(self) -> Iterator[MixerBreak | TokenBreak]:
        return iter(self._breaks)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this block, in which a body runs, the modules' calls are breaks."""
        tables = [vars(each.module) for each in self._breaks]
        before = [table.get("forward") for table in tables]
        for table, each in zip(tables, self._breaks, strict=True):
            table["forward"] = each
        try:
            yield
        finally:
            for table, own in zip(tables, before, strict=True):
                if own is None:
                    table.pop("forward", None)
                else:
                    table["forward"] = own
