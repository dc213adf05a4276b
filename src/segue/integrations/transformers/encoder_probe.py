"""Finds the module of an encoder whose whole forward can be one graph: padded inputs must give what unpadded ones do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from segue.errors import CaptureError, SegueError, UsageError
from segue.integrations.transformers.decoder_forward import ForwardPatch, own_forward
from segue.integrations.transformers.encoder_calls import MASK, SIDES, STATES, Boundary, EncoderCall, padded
from segue.integrations.transformers.encoder_forward import run_plain, run_traced
from segue.integrations.transformers.probe import exact_products
from segue.runner.write_log import generators_kept

_TOLERANCE = 3e-5  # of the largest number, in fp32
_OF_DTYPE = {torch.float32: 2e-3, torch.float64: 1e-8, torch.float16: 2e-2, torch.bfloat16: 6e-2}
_JITTER = 0.2
_SHAPES = ((1, 5, 16), (3, 11, 16), (3, 13, 24))  # rows, tokens, and tokens with padding
_SAMPLES = 800  # of raw sound, where an input of text has a token
_Refused = tuple[str, str]  # a module, and why its forward can't be a graph


def is_encoder(model: Any) -> bool:
    """Whether ``model`` is a transformers model without a decoder: one that keeps no state from one forward to the next."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or model.can_generate():
        return False
    base = model.base_model
    if _takes(base.forward, "decoder_input_ids", exactly=True):
        return False
    if _main_input(model) != "input_ids":
        return True
    forward = base.forward
    if isinstance(forward, ForwardPatch):  # which would count the call
        forward = vars(forward)["__wrapped__"]
    for asks in ({"use_cache": True}, {}):  # some encoders take the first for a mistake
        try:
            with torch.no_grad(), generators_kept(_device(base)):
                out = forward(_example(model)(1, 3, _generator()), return_dict=True, **asks)
        except Exception:
            continue
        return isinstance(out, dict) and all(isinstance(value, Tensor) for name, value in out.items() if name != STATES)
    return not hasattr(model.config, "use_cache")  # it takes more than tokens


def find(model: Any, trial: Callable[[Boundary], None]) -> Boundary:
    """The outermost module of ``model`` whose whole forward can be one graph.

    It is the model itself, its base model, or a module in that takes hidden states. ``trial``: captures it, or raises.

    Raises:
        UsageError: there is none; says what was seen, and which part of the model could be accelerated by itself.
    """
    refused: list[_Refused] = []
    device = _device(model)
    with torch.no_grad(), generators_kept(device):
        for path, module, call in _candidates(model, refused):
            try:
                return _captured(_proven(model, path, module, call), trial)
            except Exception as e:
                refused.append((path, _first_line(e)))
        parts = _parts(model, trial)
    name = f"{type(model).__name__} ({getattr(model.config, 'model_type', 'unknown family')})"
    seen = "; ".join(f"{path or 'the model itself'}: {why}" for path, why in refused)
    help = (
        f"These parts of it can be accelerated by themselves: {', '.join(f'segue.accelerate(model.{p})' for p in parts)}."
        if parts
        else "Run it untouched, or capture what of it takes padded rows with segue.GraphRunner."
    )
    raise UsageError(f"{name}: no part of its forward could be proven to be the same as one graph. {seen}. {help}")


def _captured(boundary: Boundary, trial: Callable[[Boundary], None]) -> Boundary:
    """The boundary as it can be captured: as it is, or with what its forward makes on the host made on the device."""
    try:
        trial(boundary)
    except CaptureError as e:
        boundary = replace(boundary, host_made=True)
        try:
            trial(boundary)
        except Exception:
            raise e from None
    return boundary


def with_hidden_states(boundary: Boundary, config: Any) -> Boundary:
    """The boundary whose forward gives the hidden states of all layers too, compared with its unpadded forward.

    Raises:
        UsageError: they differ, or its forward gives none. What the forward raises.
    """
    exact = _Exact(boundary.module)
    with torch.no_grad(), generators_kept(_device(boundary.module)):
        kind, fields = _fields(replace(boundary, hidden_states=True), exact)
        shown = replace(boundary, hidden_states=True, output=kind, fields=fields)
        if fields.keys() <= boundary.fields.keys():
            raise UsageError("its forward gives none")
        for rows, tokens, room in _SHAPES:
            _compare(shown, exact, rows, tokens, room, {})
        for side in boundary.sides:
            if not _serves(shown, exact, side, config):
                raise UsageError(f"with {side} and padding they differ")
    return shown


def check_replay(boundary: Boundary, got: Sequence[Tensor], given: Tensor) -> None:
    """Compare what graphs gave for a main input with the boundary's own forward, as far as the dtype allows.

    Raises:
        UsageError: they differ.
    """
    want = boundary.parts_of(run_plain(boundary, {boundary.main: given}))
    for name, t in zip(boundary.fields, got, strict=True):
        scale, off = max(want[name].abs().max().item(), 1e-6), (t - want[name]).abs().max().item()
        if not off <= _OF_DTYPE.get(t.dtype, 1e-1) * scale:
            raise UsageError(f"a replay's {name} differs by up to {off:.3g} at a size of {scale:.3g}")


def _candidates(model: Any, refused: list[_Refused]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Modules with their path and the arguments of a call: the model, its base model, and modules in that given hidden states."""
    main = _main_input(model)
    try:
        example = _example(model)
        inputs = {main: example(2, 7, _generator())}
    except Exception as e:
        refused.append(("", _first_line(e)))
        return
    base = model.base_model
    path = next((name for name, m in model.named_modules() if m is base), "")
    yield "", model, inputs
    if base is not model:
        yield path, base, inputs
    inside = f"{path}." if path else ""
    for name, module, call in _calls_inside(base, inputs):
        yield inside + name, module, call


def _calls_inside(base: Any, inputs: dict[str, Any]) -> list[tuple[str, Any, dict[str, Any]]]:
    """The outermost modules in ``base`` that are given hidden states [batch, tokens, size] and take a mask, with those calls."""
    seen: list[tuple[str, Any, dict[str, Any]]] = []
    hooks = []

    def noted(name: str, module: Any) -> Callable[..., None]:
        names = list(inspect.signature(module.forward).parameters)

        def note(_: Any, args: Any, kwargs: Any) -> None:
            call = {**dict(zip(names, args, strict=False)), **kwargs}
            first = call.get(names[0])
            inner = any(name.startswith(f"{outer}.") for outer, _, _ in seen)
            if not inner and isinstance(first, Tensor) and first.dim() == 3 and first.is_floating_point():
                seen.append((name, module, {k: v for k, v in call.items() if isinstance(v, Tensor | tuple | list | dict)}))

        return note

    for name, module in base.named_modules():
        lists = any(isinstance(m, nn.ModuleList) for m in module.modules())
        if name and lists and not isinstance(module, nn.ModuleList) and _takes(module.forward, MASK, exactly=True):
            hooks.append(module.register_forward_pre_hook(noted(name, module), with_kwargs=True))
    try:
        base(**inputs)
    except Exception:
        return []
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _proven(model: Any, path: str, module: Any, call: dict[str, Any]) -> Boundary:
    """The boundary of a module, compared with its unpadded forward.

    Raises:
        UsageError: they differ, or its output isn't one that can be cut to the caller's rows.
    """
    forward = own_forward(module)
    main, given = next(iter(call.items()))
    extra = next((name for name, value in call.items() if name not in (main, MASK) and value is not None), None)
    if extra is not None:
        raise UsageError(f"it is given {extra} too, which segue doesn't know how to pad")
    outer = module is model or module is model.base_model
    masked = _takes(forward, MASK, exactly=True) and given.dim() == (2 if outer else 3)
    if outer and given.dim() == 2 and not masked:
        raise UsageError("its forward takes no attention_mask [batch, tokens], so its rows can't be padded")
    mask = (torch.long if outer else torch.bool) if masked else None
    config = model.config
    pad = getattr(config, "pad_token_id", None)
    pads = {main: 0 if pad is None or pad < 0 or given.is_floating_point() else pad, MASK: 0, **dict.fromkeys(SIDES, 0)}
    example = _example(model) if outer else _random_like(given)
    seen = Boundary(module, path, forward, main, mask, (), pads, None, {}, example)
    exact = _Exact(module)
    kind, fields = _fields(seen, exact)
    shown = Boundary(module, path, forward, main, mask, (), pads, kind, fields, example)
    for rows, tokens, room in _SHAPES:
        _compare(shown, exact, rows, tokens, room, {})
    taken = [side for side in SIDES if mask is not None and _takes(forward, side, exactly=True)]
    sides = tuple(side for side in taken if _serves(shown, exact, side, config))
    return Boundary(module, path, forward, main, mask, sides, pads, kind, fields, example)


def _fields(boundary: Boundary, exact: _Exact) -> tuple[Any, dict[str, int | None]]:
    """The type of a boundary's output, and the tensors in it with their token dimensions, from two calls.

    Raises:
        UsageError: it holds something else, or a tensor without a row for each row of the input.
    """
    outs = []
    for rows, tokens in ((2, 6), (3, 9)):
        call = _call(boundary, rows, tokens)
        outs.append((exact(boundary, call.tensors), rows, call.length))
    (first, rows, tokens), (other, more_rows, more_tokens) = outs
    if not isinstance(first, dict):
        raise UsageError(f"its forward returns a {type(first).__name__} instead of a ModelOutput")
    fields: dict[str, int | None] = {}
    others = boundary.parts_of(other)
    for name, t in boundary.parts_of(first).items():
        u = others.get(name)
        if not isinstance(t, Tensor) or not isinstance(u, Tensor) or t.dim() != u.dim():
            raise UsageError(f"its output's {name} is a {type(t).__name__}, and a graph gives tensors")
        if t.dim() == 0 or (t.shape[0], u.shape[0]) != (rows, more_rows):
            raise UsageError(f"its output's {name} has no row for each row of the input, but shape {list(t.shape)} for {rows}")
        grown = [d for d in range(1, t.dim()) if t.shape[d] != u.shape[d]]
        if len(grown) > 1 or any((t.shape[d], u.shape[d]) != (tokens, more_tokens) for d in grown):
            raise UsageError(f"its output's {name} has shape {list(t.shape)} for {tokens} tokens, so it can't be cut to them")
        fields[name] = grown[0] if grown else None
    return type(first), fields


def _serves(boundary: Boundary, exact: _Exact, side: str, config: Any) -> bool:
    """Whether the side input can be padded. What its values may be, the config tells; where it doesn't, the call fails."""
    rows, tokens, room = _SHAPES[1]
    device = _device(boundary.module)
    if side == "token_type_ids":
        values = torch.arange(rows * tokens, device=device).view(rows, tokens) % max(1, getattr(config, "type_vocab_size", 1))
    else:
        values = torch.arange(tokens, device=device).flip(0).expand(rows, tokens)
    try:
        _compare(boundary, exact, rows, tokens, room, {side: values})
    except Exception:
        return False
    return True


def _compare(boundary: Boundary, exact: _Exact, rows: int, tokens: int, room: int, sides: dict[str, Tensor]) -> None:
    """Compare a forward with the same one on padded inputs: without a mask, with padding on the right, and on the left.

    Raises:
        UsageError: they differ where there is a real token.
    """
    masks: list[Tensor | None] = [None]
    if boundary.mask is not None:
        lengths = torch.tensor([tokens, *range(2, 2 + 3 * (rows - 1), 3)]).clamp(max=tokens)
        at, device = torch.arange(tokens), _device(boundary.module)
        both = at < lengths[:, None], at >= tokens - lengths[:, None]
        masks += [m.to(device=device, dtype=boundary.mask) for m in both]
    for i, mask in enumerate(masks):
        call = _call(boundary, rows, tokens, seed=i, mask=mask, sides=sides)
        want = exact(boundary, {k: t for k, t in call.tensors.items() if k != MASK or mask is not None})
        more = {k: torch.cat([t, t[:1]]) for k, t in call.tensors.items()}
        wide = EncoderCall(more, True, rows + 1, call.length)
        got = exact(boundary, dict(zip(more, padded(wide, room if call.length else 0, boundary.pads), strict=True)), traced=True)
        want, got = boundary.parts_of(want), boundary.parts_of(got)
        for name, dim in boundary.fields.items():
            _check(name, dim, got[name], want[name], mask, tokens)


def _check(name: str, dim: int | None, got: Tensor, want: Tensor, mask: Tensor | None, tokens: int) -> None:
    got = got[: want.shape[0]]
    if dim is not None:
        got = got.narrow(dim, 0, tokens).movedim(dim, 1)
        want = want.movedim(dim, 1)
        if mask is not None:
            got, want = got[mask.bool()], want[mask.bool()]
    if got.shape != want.shape:
        raise UsageError(f"with padding {name} has shape {list(got.shape)} instead of {list(want.shape)}")
    scale = max(want.abs().max().item(), 1e-6)
    off = (got - want).abs().max().item()
    if not off <= _TOLERANCE * scale:
        raise UsageError(f"with padding {name} differs by up to {off:.3g} at a size of {scale:.3g}")


class _Exact:
    """Runs forwards with weights in fp32 whose constants are jittered, so that no norm or bias hides what padding does."""

    def __init__(self, module: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self._weights: dict[str, Tensor] = {}
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            if not t.is_floating_point() or type(t.data) is not Tensor:
                continue
            constant = isinstance(t, nn.Parameter) and t.numel() > 1 and bool((t == t.flatten()[0]).all())
            if constant:
                noise = torch.randn(t.shape, generator=generator).to(t.device) * _JITTER
                self._weights[f"module.{name}"] = t.detach().float() + noise
            elif t.dtype in (torch.float16, torch.bfloat16):
                self._weights[f"module.{name}"] = t.detach().float()

    def __call__(self, boundary: Boundary, tensors: dict[str, Tensor], traced: bool = False) -> Any:
        tensors = {k: t.float() if t.is_floating_point() else t for k, t in tensors.items()}
        with exact_products():
            return torch.func.functional_call(_Own(boundary, traced), self._weights, kwargs=tensors)


class _Own(nn.Module):
    """A boundary's own forward, without the hooks on its module."""

    def __init__(self, boundary: Boundary, traced: bool) -> None:
        super().__init__()
        self.module = boundary.module
        self._boundary, self._traced = boundary, traced
        self.training = boundary.module.training

    def forward(self, **tensors: Tensor) -> Any:
        if self._traced:
            return run_traced(self._boundary, tensors)
        return run_plain(self._boundary, tensors)


def _call(
    boundary: Boundary, rows: int, tokens: int, seed: int = 0, mask: Tensor | None = None, sides: dict[str, Tensor] | None = None
) -> EncoderCall:
    generator = _generator(seed)
    main = boundary.example(rows, tokens, generator)
    tensors = {boundary.main: main}
    if boundary.mask is None:
        return EncoderCall(tensors, True, rows, 0)
    tensors[MASK] = boundary.ones(main) if mask is None else mask
    return EncoderCall({**tensors, **(sides or {})}, True, rows, main.shape[1])


def _parts(model: Any, trial: Callable[[Boundary], None]) -> list[str]:
    """The outermost models inside ``model`` that can be accelerated by themselves."""
    from transformers import PreTrainedModel

    found: list[str] = []
    for name, module in model.named_modules():
        outer = any(name.startswith(f"{path}.") for path in found)
        if not name or outer or module is model.base_model or not isinstance(module, PreTrainedModel):
            continue
        if is_encoder(module):
            try:
                find(module, trial)
            except UsageError:
                continue
            found.append(name)
    return found


def _example(model: Any) -> Callable[[int, int, torch.Generator], Tensor]:
    """Makes main inputs of ``model``: token ids, images of the size that its config says, or samples of sound.

    Raises:
        UsageError: segue doesn't know what its main input looks like.
    """
    main, config = _main_input(model), model.config
    device = _device(model)
    if main == "input_ids":
        size, pad = model.get_input_embeddings().weight.shape[0], getattr(config, "pad_token_id", None)
        allowed = torch.tensor([i for i in range(size) if i != pad])

        def ids(rows: int, tokens: int, generator: torch.Generator) -> Tensor:
            return allowed[torch.randint(len(allowed), (rows, tokens), generator=generator)].to(device)

        return ids
    if main == "pixel_values":
        side = config.image_size
        shape = (config.num_channels, *(side if isinstance(side, list | tuple) else (side, side)))
    elif main == "input_values":
        shape = ()
    else:
        raise UsageError(f"its main input is {main}, and segue knows of input_ids, pixel_values and input_values")

    def values(rows: int, tokens: int, generator: torch.Generator) -> Tensor:
        t = torch.randn(rows, *(shape or (tokens * _SAMPLES,)), generator=generator)
        return t.to(device=device, dtype=model.dtype)

    return values


def _random_like(given: Tensor) -> Callable[[int, int, torch.Generator], Tensor]:
    """Makes hidden states [rows, tokens, size] of the size, dtype and device of those given."""
    size, dtype, device = given.shape[2:], given.dtype, given.device
    return lambda rows, tokens, generator: torch.randn(rows, tokens, *size, generator=generator).to(device=device, dtype=dtype)


def _main_input(model: Any) -> str:
    return str(getattr(model, "main_input_name", "input_ids"))


def _takes(forward: Callable[..., Any], name: str, exactly: bool = False) -> bool:
    """Whether a forward has a parameter of that name; without ``exactly``, whether it takes further keywords will do."""
    parameters = inspect.signature(forward).parameters
    return name in parameters or (not exactly and any(p.kind is p.VAR_KEYWORD for p in parameters.values()))


def _device(module: Any) -> torch.device:
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _first_line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or ["no reason given"])[0].rstrip(".")
    return text if isinstance(error, SegueError) else f"a probe call of it failed: {type(error).__name__}: {text}"
