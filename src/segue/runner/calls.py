"""A call's arguments, put in the order of the function's parameters and checked against the declared inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from segue import _source_lines, _torch
from segue.errors import InputError, UsageError
from segue.runner.inputs import Declared, Leaf, Spec, leaves
from segue.runner.structured_arguments import PLAIN, built, flag_key, identities, is_structure, refilled, undeclared_parts

Key = tuple[Any, ...]  # which optional inputs are there, and the plain flags: a variant, with graphs of its own
_UNLIKE = "another size"  # in the key of a call that is unlike the first, so that no graph is found for it
_MISSING: Any = inspect.Parameter.empty
_RESERVED = ("decision", "verify")
_MOST_ACCEPTED = 1024
# With ``requires_grad``, all that decides whether a tensor fits.
_metadata = attrgetter("shape", "dtype", "layout", "device", "__class__")
Metadata = tuple[Any, ...]


class Call:
    """One call, bound: values by parameter, tensors by declared input (None where absent), and its counts.

    ``key``: the variant. ``tokens``, ``requests``: real ones; ``requests`` is -1 without a request axis. ``foreign``: whether
    some tensors are on the CPU and the runner isn't. ``unlike``: where an input is of another size than in the first call, so
    that no buffer holds it, the error that says so. ``given``: the arguments as the caller gave them.
    """

    __slots__ = ("ctx", "foreign", "given", "key", "requests", "specs", "tensors", "tokens", "unlike", "updates", "values")

    def __init__(
        self,
        values: Sequence[Any],
        ctx: Any,
        tensors: list[Tensor | None],
        key: Key,
        tokens: int,
        requests: int,
        foreign: bool,
    ) -> None:
        self.values, self.ctx, self.tensors, self.key = values, ctx, tensors, key
        self.tokens, self.requests, self.foreign = tokens, requests, foreign
        self.specs: Sequence[tuple[Leaf, Spec]] = ()  # shown by this call, and kept once it has succeeded
        self.unlike: InputError | None = None
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.updates: Sequence[tuple[int, Tensor]] = ()  # places of its tensors that the forward wrote, with what they hold then

    def write_back(self) -> None:
        """Give the caller's tensors what the forward wrote to its inputs, as an eager call would."""
        if self.updates:
            with torch.inference_mode():
                for slot, new in self.updates:
                    mine = self.tensors[slot]
                    assert mine is not None
                    mine.copy_(new)
            self.updates = ()


class Binder:
    """Binds calls to a function's signature, and checks them against the declared inputs.

    What can be worked out before a call is worked out when it is made.

    Raises:
        UsageError: the declarations don't fit the signature.
    """

    def __init__(self, fn: Callable[..., Any], inputs: Declared) -> None:
        self.label = _source_lines.of(_code_of(fn))
        if not isinstance(inputs, Mapping):
            raise UsageError(f"inputs={inputs!r} must be a mapping from names of arguments to segue.Input")
        self._fn = fn
        parameters = _parameters(fn, self.label)
        self._open = any(p.kind is p.VAR_KEYWORD for p in parameters)  # then the last value is a dict of further flags
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.names = [p.name for p in named] + ([n for n in inputs if n not in {p.name for p in named}] if self._open else [])
        for name in _RESERVED:
            if name in self.names:
                raise UsageError(f"{self.label} has a parameter {name!r}, which is the runner's own; rename it")
        if "ctx" in inputs:
            raise UsageError("inputs declares 'ctx': the live context is read by breaks, and has no buffer")
        self.ctx_slot = self.names.index("ctx") if "ctx" in self.names else -1
        self._positional = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in named)
        self._unnamed = sum(p.kind is p.POSITIONAL_ONLY for p in named)
        defaults = {p.name: p.default for p in named}
        if self.ctx_slot >= 0:
            defaults["ctx"] = None
        self._defaults = [defaults.get(name, _MISSING) for name in self.names]
        self.leaves = leaves(inputs, self.names, self.label)
        for leaf in self.leaves:
            if leaf.optional and self._defaults[leaf.slot] is _MISSING:
                self._defaults[leaf.slot] = None
        self._rest = list(zip(self.names, self._defaults, strict=True))
        self._all = len(self.names) if self._positional == len(self.names) and not self._open else -1
        self._flags = [i for i, name in enumerate(self.names) if name not in inputs and i != self.ctx_slot]
        self._nested = {i: inputs[name] for i, name in enumerate(self.names) if is_structure(inputs.get(name))}
        self._optional = [i for i, leaf in enumerate(self.leaves) if leaf.optional]
        self._plain_key = not (self._flags or self._nested or self._optional or self.ctx_slot >= 0 or self._open)
        self._pick: Callable[[Any], Sequence[Any]] = self._reach
        if not self._nested and len(self.leaves) > 1:
            self._pick = itemgetter(*[leaf.slot for leaf in self.leaves])
        self._metadata = _metadata_or_none if self._optional else _metadata
        self._accepted: dict[Metadata, tuple[int, int, bool]] = {}  # of earlier calls' tensors, with the counts of those calls
        self.device: torch.device | None = None

    def place(self, device: torch.device) -> None:
        """Fix the device of all buffers."""
        self.device = device
        for leaf in self.leaves:
            leaf.settle(device)

    def arrange(self, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: Any) -> tuple[Sequence[Any], Any]:
        """Put the arguments in the order of the parameters. Returns the values, and the context.

        Raises:
            InputError: too many, unknown, repeated or missing arguments.
        """
        given = len(args)
        if given == self._all and not kwargs:
            return args, args[self.ctx_slot] if self.ctx_slot >= 0 and ctx is None else ctx
        if given > self._positional:
            raise InputError(f"{self.label} takes {self._positional} positional arguments; the call gives {given}")
        values = list(args)
        missing = ""
        for name, default in self._rest[given:]:
            value = kwargs.pop(name, default)
            if value is _MISSING:
                missing = missing or name
            values.append(value)
        if 0 <= self.ctx_slot < given and ctx is None:
            ctx = values[self.ctx_slot]
        twice = next((name for name in kwargs if name in self.names[:given]), None)
        if kwargs and (twice or not self._open):
            name = twice or next(iter(kwargs))
            raise InputError(
                f"{self.label} got argument {name!r} twice"
                if twice
                else f"{self.label} has no argument {name!r}; it has {', '.join(self.names)}"
            )
        if missing:
            raise InputError(f"argument {missing!r} of {self.label} is missing")
        if self._open:
            values.append(kwargs)
        return values, ctx

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: Any) -> Call:
        """Bind and check one call that is to fit the buffers.

        Raises:
            InputError: as :meth:`read_any`; or an input is of another size than in the first call.
        """
        call = self.read_any(args, kwargs, ctx)
        if call.unlike is not None:
            raise call.unlike
        return call

    def read_any(self, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: Any) -> Call:
        """Bind and check one call, which may be ``unlike`` the first.

        Raises:
            InputError: an argument is missing, extra, or not what its input is declared as.
        """
        values: Sequence[Any] = args
        if kwargs or len(args) != self._all or self.ctx_slot >= 0:
            values, ctx = self.arrange(args, kwargs, ctx)
        tensors = list(self._pick(values))
        counts = metadata = None
        if not torch.is_grad_enabled() or not any([getattr(t, "requires_grad", False) for t in tensors]):
            try:
                metadata = tuple(map(self._metadata, tensors))
                counts = self._accepted.get(metadata)
            except (AttributeError, TypeError):  # something else than a tensor: refused below
                metadata = None
        specs: Sequence[tuple[Leaf, Spec]] = ()
        unlike = None
        if counts is None:
            counts, specs, unlike = self._check(tensors)
            if metadata is not None and not specs and not unlike:  # a spec that this call shows is forgotten if the call fails
                if len(self._accepted) >= _MOST_ACCEPTED:
                    self._accepted.clear()
                self._accepted[metadata] = counts
        key = () if self._plain_key else self._key(values, tensors, ctx)
        call = Call(values, ctx, tensors, key, *counts)
        if unlike is not None:
            call.unlike, call.key = unlike, (*key, _UNLIKE)
        elif specs:
            call.specs = specs
        return call

    def _check(self, tensors: Sequence[Any]) -> tuple[tuple[int, int, bool], Sequence[tuple[Leaf, Spec]], InputError | None]:
        """Check the values of all declared inputs. Returns the token count, the request count and whether some are on the CPU
        while the runner isn't; the specs of inputs that no call has shown before; and the error of an input of another size.
        """
        device, grad = self.device, torch.is_grad_enabled()
        shown: list[tuple[Leaf, Spec]] = []
        unlike: InputError | None = None
        tokens = requests = -1
        foreign = False
        for leaf, t in zip(self.leaves, tensors, strict=True):
            if t is None:
                if not leaf.optional:
                    raise InputError(f"input {leaf.name!r} is None; only an input declared optional=True may be")
                continue
            spec = leaf.spec
            if spec is None:
                spec = self._learn(leaf, t)
                shown.append((leaf, spec))
            try:
                shape, dim = t.shape, spec.dim
                if dim is None:
                    fits = shape == spec.head
                else:
                    fits = len(shape) == spec.rank and shape[dim + 1 :] == spec.tail and (dim == 0 or shape[:dim] == spec.head)
                fits = fits and t.dtype is spec.dtype and t.layout is torch.strided and not (grad and t.requires_grad)
                fits = fits and not _is_refused_wrapper(t)
                home = t.device == device
            except AttributeError:
                fits = home = False
            if not fits or not (home or t.device.type == "cpu"):
                error = leaf.refuse(t, spec, self.device)  # type: ignore[arg-type]
                if not leaf.is_of_another_size(t, spec) or not (home or t.device.type == "cpu"):
                    raise error
                unlike = unlike or error
            foreign = foreign or not home
            if leaf.token:
                count = shape[dim] - leaf.extra
                if count != tokens:
                    tokens = count if tokens < 0 <= count else self._disagree(leaf, tensors, "token", count, tokens)
            elif leaf.request:
                count = shape[dim] - leaf.extra
                if count != requests:
                    requests = count if requests < 0 <= count else self._disagree(leaf, tensors, "request", count, requests)
        if tokens < 0:
            raise InputError(f"{self.label}: no token-shaped input was given, so the call has no token count")
        return (tokens, requests, foreign), shown, unlike

    def defaults(self) -> Sequence[Any]:
        """Values for all parameters without an example: their defaults, None for inputs.

        Raises:
            InputError: a plain parameter has none.
        """
        declared = {leaf.slot for leaf in self.leaves}
        values = [None if i in declared else default for i, default in enumerate(self._defaults)]
        for name, value in zip(self.names, values, strict=True):
            if value is _MISSING:
                raise InputError(f"argument {name!r} of {self.label} is missing: it has no default, so give an example call")
        return values

    def placed(self, named: dict[str, Any], tensors: Sequence[Tensor | None]) -> dict[str, Any]:
        """``named``, arguments by name, with ``tensors`` in the places of the declared inputs: keywords for :meth:`read`."""
        for slot, name in enumerate(self.names):
            parts = iter([t for leaf, t in zip(self.leaves, tensors, strict=True) if leaf.slot == slot])
            if slot in self._nested:
                named[name] = built(self._nested[slot], parts)
            elif name in named and any(leaf.slot == slot for leaf in self.leaves):
                named[name] = next(parts)
        named.pop("ctx", None)
        return named

    def with_tensors(self, call: Call, tensors: list[Tensor | None]) -> Call:
        """A call like ``call`` with other tensors, one for each declared input (None: absent), under the key of its variant."""
        key = () if self._plain_key else self._key(call.values, tensors, call.ctx)
        return Call(call.values, call.ctx, tensors, key, call.tokens, call.requests, call.foreign)

    def keep(self, call: Call) -> None:
        """Keep the specs that this call, which succeeded, has shown of its inputs. Later calls must fit them."""
        for leaf, spec in call.specs:
            leaf.spec = leaf.spec or spec
        call.specs = ()

    def invoke(self, call: Call, tensors: Sequence[Tensor | None], ctx: Any) -> Any:
        """Call the function with ``tensors`` in the places of the declared inputs.

        Raises:
            UsageError: it changed what a structured argument holds, which is a copy of the caller's.
        """
        values = list(call.values)
        if self.ctx_slot >= 0:
            values[self.ctx_slot] = ctx
        by_slot: dict[int, list[Tensor | None]] = {}
        copies: dict[int, Any] = {}
        for leaf, t in zip(self.leaves, tensors, strict=True):
            by_slot.setdefault(leaf.slot, []).append(t)
        for slot, parts in by_slot.items():
            declared = self._nested.get(slot)
            if declared is None:
                values[slot] = parts[0]
            elif tensors is not call.tensors:
                values[slot] = copies[slot] = refilled(values[slot], declared, iter(parts))
        held = {slot: identities(copy, self._nested[slot]) for slot, copy in copies.items()}
        further = values.pop() if self._open else {}
        named = {n: v for n, v in zip(self.names[self._unnamed :], values[self._unnamed :], strict=True)}
        named.update(further)
        result = self._fn(*values[: self._unnamed], **named)
        for slot, copy in copies.items():
            if identities(copy, self._nested[slot]) != held[slot]:
                raise UsageError(
                    f"{self.label}: the forward changed what the argument {self.names[slot]!r} holds. It has a copy of the "
                    "container, with the runner's own tensors, so the caller's would stay as it was, and a replay changes "
                    "none. Return what it put there, or write it into a tensor that is declared (copy_)"
                )
        return result

    def _reach(self, values: Sequence[Any]) -> list[Any]:
        """The values of the declared inputs, wherever they are in a structure."""
        return [values[leaf.slot] if leaf.get is None else leaf.get(values[leaf.slot]) for leaf in self.leaves]

    def _learn(self, leaf: Leaf, t: Any) -> Spec:
        assert self.device is not None
        if not isinstance(t, Tensor) or t.layout is not torch.strided or _is_refused_wrapper(t):
            raise leaf.refuse(t, None, self.device)
        return leaf.learn(t, self.device)

    def _disagree(self, leaf: Leaf, tensors: Sequence[Any], what: str, count: int, before: int) -> int:
        if count < 0:
            raise InputError(f"input {leaf.name!r} has {count + leaf.extra} rows, fewer than its {leaf.extra} extra ones")
        first = next(
            i for i, t in zip(self.leaves, tensors, strict=True) if (i.token if what == "token" else i.request) and t is not None
        )
        raise InputError(f"input {first.name!r} has {before} {what}s and input {leaf.name!r} has {count}; they must agree")

    def _key(self, values: Sequence[Any], tensors: list[Tensor | None], ctx: Any) -> Key:
        key: list[Any] = [tensors[i] is not None for i in self._optional]
        if self.ctx_slot >= 0:
            key.append(ctx is None)  # the function may decide by it
        for i in self._flags:
            key.append(self._flag(values[i], self.names[i], self._defaults[i]))
        for i, declared in self._nested.items():
            key.append(undeclared_parts(values[i], declared, self.names[i]))
        if self._open:
            key.append(tuple((name, self._flag(value, name, _MISSING)) for name, value in sorted(values[-1].items())))
        return tuple(key)

    def _flag(self, value: Any, name: str, default: Any) -> Any:
        cls = value.__class__
        if value is None or cls is bool or cls is int or cls is str:
            return cls, value
        if value is default and not isinstance(value, PLAIN):
            return "default"
        return flag_key(value, name)


def _is_refused_wrapper(t: Tensor) -> bool:
    return _torch.is_wrapper(t) and not _torch.is_under_way(t)


def _metadata_or_none(t: Any) -> Metadata | None:
    return None if t is None else _metadata(t)


def _code_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn.forward if isinstance(fn, torch.nn.Module) else fn


def _parameters(fn: Callable[..., Any], label: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(_code_of(fn)).parameters.values())
    except (TypeError, ValueError) as e:
        raise UsageError(f"{label} has no signature to bind calls by ({e}); wrap it in a function") from None
