"""A random module tree whose forward reads state of every kind, and edits of that state that can be undone."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import segue

WIDTH = 4
ACTS = (nn.ReLU, nn.Tanh, nn.Softsign, nn.Sigmoid)
FUNCTIONS = (torch.sin, torch.cos, torch.tanh)
BODIES = ("sequential", "list", "dict", "block")
LEVEL: contextvars.ContextVar[float] = contextvars.ContextVar("LEVEL", default=1.0)
GAIN = 1.5
Undo = Callable[[], object]


@dataclass(frozen=True)
class Plan:
    """A block: how it holds its children, and whether it has a break. ``seed``: of its numbers."""

    body: str = "list"
    children: tuple[Plan, ...] = ()
    breaks: bool = False
    seed: int = 0


def bent(x: Tensor) -> Tensor:
    return x + 0.5


class Block(nn.Module):
    """Each part of its state moves the answer, but ``note``. ``live`` is read by its break alone."""

    rate = 1.25

    def __init__(self, plan: Plan, device: torch.device) -> None:
        super().__init__()
        made = tensors(plan.seed, device)
        self.weight, self.bias = nn.Parameter(made(WIDTH, WIDTH), requires_grad=False), None
        self.register_buffer("shift", made(WIDTH))
        self.act, self.fn, self.adapter = ACTS[plan.seed % 4](), FUNCTIONS[plan.seed % 3], None
        self.scale, self._bend = 1.0 + plan.seed, 0.5
        self.sizes, self.options, self.flags = [0.5, 1.5], {"alpha": 1.0, "deep": [2.0]}, {1}
        self.space = SimpleNamespace(gain=1.0, more=SimpleNamespace(power=2.0))
        self.tables: dict[int, Tensor] = {}  # of constants, by length
        self.live, self.note, self.breaks = SimpleNamespace(gain=1.0, steps=[1.0]), "unread", plan.breaks
        blocks = [type(self)(child, device) for child in plan.children]
        if plan.body == "dict":
            self.body: nn.Module = nn.ModuleDict({f"m{i}": block for i, block in enumerate(blocks)})
        elif plan.body == "block" and blocks:
            self.body = blocks[0]
        else:
            self.body = nn.Sequential(*blocks) if plan.body == "sequential" else nn.ModuleList(blocks)

    @property
    def bend(self) -> float:
        return self._bend

    def mixed(self, x: Tensor) -> Tensor:
        return x * self.rate

    @segue.break_point(trim=("x",))
    def attend(self, x: Tensor) -> Tensor:
        return x * self.live.gain + sum(self.live.steps)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        if n not in self.tables:
            self.tables[n] = torch.arange(n, device=x.device, dtype=x.dtype)[:, None] / 8
        y = self.fn(self.act(x @ self.weight + self.shift)) * self.scale + self.tables[n]
        for size in self.sizes:
            y = y * 0.5 + size
        for option in self.options.values():
            y = y * 0.75 + (option if isinstance(option, float) else option[0])
        if 2 in self.flags:
            y = y - 1
        if self.bias is not None:
            y = y + self.bias
        if self.adapter is not None:
            y = self.adapter(y)
        y = bent(self.mixed(y)) * GAIN + LEVEL.get() + self.bend + self.space.gain * self.space.more.power
        if self.breaks:
            y = self.attend(y)
        for child in (self.body,) if isinstance(self.body, Block | nn.Sequential) else _children(self.body):
            y = y + child(y)
        return y / (1 + y.abs().amax(-1, keepdim=True))  # bounded, so that no edit drowns


UNREAD = {"live", "note", "remark", "tables"}
OF_MODULES = vars(nn.Module()).keys() - {"training"}


def tensors(seed: int, device: torch.device) -> Callable[..., Tensor]:
    g = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(device)


def _children(body: Any) -> Any:
    return body.values() if isinstance(body, nn.ModuleDict) else body


class Hook:
    """A forward hook that has state."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, module: Any, args: Any, out: Any = None) -> Any:
        return (args[0] * self.by,) if out is None else out * self.by


class Same:
    """An object that equals itself alone."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.obj is other.obj


def readable(net: nn.Module) -> dict[str, Any]:
    """All that a graph of ``net`` may depend on beside the values of tensors, by name. It is found without segue."""
    found: dict[str, Any] = {"GAIN": GAIN, "bent": bent, "LEVEL": LEVEL.get()}

    def take(path: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[path] = value.data_ptr(), value.shape
        elif isinstance(value, dict | list):
            found[path] = list(value) if isinstance(value, dict) else len(value)
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                take(f"{path}.{key}", item)
        elif isinstance(value, SimpleNamespace | Hook):
            found[path] = Same(value)
            take(path + ".", vars(value))
        else:
            found[path] = type(value), frozenset(value) if isinstance(value, set) else value

    for name, module in net.named_modules():
        name = f"{type(net).__name__}.{name}".rstrip(".")
        found[name] = Same(module), type(module), [k for k, m in module._modules.items() if m is not None]
        take(f"{name}.hooks", [*module._forward_pre_hooks.values(), *module._forward_hooks.values()])
        held = {k: v for k, v in vars(module).items() if k not in OF_MODULES and k not in UNREAD}
        none = {k: None for k, m in module._modules.items() if m is None}
        for key, value in {**held, **none, **module._parameters, **module._buffers}.items():
            take(f"{name}.{key}", value)
        for key in ("forward", "mixed", "rate"):
            take(f"{type(module).__qualname__}.{key} of the class", getattr(type(module), key, None))
    return found


class Tree:
    """A net, and the undoing of each edit of it so far. Its blocks' class is its own."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device, self.done = device, list[Undo]()
        self.block = type("Block", (Block,), {"forward": Block.forward, "mixed": Block.mixed, "rate": 1.25})
        self.net: Block = self.block(plan, device).eval()

    def edit(self, kind: str, pick: int, number: int) -> None:
        """Make an edit of EDITS at the picked block. ``number`` says what is set. A block that lacks the thing is left."""
        blocks = [m for m in self.net.modules() if isinstance(m, Block)]
        if (undo := EDITS[kind](self, blocks[pick % len(blocks)], number)) is not None:
            self.done.append(undo)

    def undo(self) -> None:
        """Undo the last edit, so that everything is the object that it was."""
        if self.done:
            self.done.pop()()

    def child(self, number: int) -> nn.Module:
        made = ACTS[number % 4]() if number % 2 else self.block(Plan(seed=number), self.device)
        return made.eval()


def _set(obj: Any, name: str, value: Any) -> Undo:
    """Set an attribute of an object or a class."""
    if isinstance(obj, type):
        before = vars(obj)[name]
        setattr(obj, name, value)
        return lambda: setattr(obj, name, before)
    own = vars(obj)
    undos = [_change(t) for t in (own, *(own[n] for n in ("_modules", "_parameters", "_buffers") if n in own))]
    setattr(obj, name, value)
    return lambda: [undo() for undo in undos]


def _change(container: Any, change: Callable[[Any], object] = bool) -> Undo:
    """Change a dict, list or set in place. Undone, it has its old order too."""
    saved = container.copy()
    change(container)

    def undo() -> None:
        container.clear()
        (container.extend if isinstance(container, list) else container.update)(saved)

    return undo


def _rotate(d: dict[Any, Any]) -> None:
    if d:
        d[key] = d.pop(key := next(iter(d)))


def _drop_first(container: Any) -> None:
    if container:
        del container[next(iter(container)) if isinstance(container, dict) else 0]


def _hooked(block: Block, number: int) -> Undo:
    target, hook = (block.act if number > 5 else (block, block.act)[number % 2]), HOOKS[number % 3]
    undo = _change(target._forward_pre_hooks if number > 5 else target._forward_hooks)
    target.register_forward_pre_hook(hook) if number > 5 else target.register_forward_hook(hook)
    return undo


def _global(name: str, value: Any) -> Undo:
    before = globals()[name]
    globals()[name] = value
    return lambda: globals().update({name: before})


def _level(number: float) -> Undo:
    before = LEVEL.get()
    LEVEL.set(number)
    return lambda: LEVEL.set(before)


def _in_place(t: Tensor) -> Undo:
    t.mul_(2)
    return lambda: t.mul_(0.5)


def _times(fn: Callable[[Tensor], Tensor], by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: fn(x) * by


def _method(fn: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda self, x: fn(self, x) * 1.5


def _reclass(act: nn.Module, number: int) -> Undo | None:
    before = type(act)
    if before not in ACTS[1:]:
        return None
    act.__class__ = ACTS[1 + number % 3]
    return lambda: setattr(act, "__class__", before)


HOOKS = (Hook(1.5), Hook(1.75), Hook(1.5))
EDITS: dict[str, Callable[[Tree, Block, int], Undo | None]] = {
    "act": lambda t, b, n: _set(b, "act", ACTS[n % 4]().eval()),
    "class of the act": lambda t, b, n: _reclass(b.act, n),
    "body": lambda t, b, n: _set(b, "body", t.child(2 * n)),
    "child": lambda t, b, n: _set(b.body, next(iter(b.body._modules), "0"), t.child(n)),
    "child more": lambda t, b, n: None if isinstance(b.body, Block) else _set(b.body, f"{9 + n}", t.child(n)),
    "child less": lambda t, b, n: None if isinstance(b.body, Block) else _change(b.body._modules, _drop_first),
    "order of children": lambda t, b, n: _change(b.body._modules, _rotate),
    "adapter": lambda t, b, n: _set(b, "adapter", t.child(n) if b.adapter is None else None),
    "fn": lambda t, b, n: _set(b, "fn", FUNCTIONS[n % 3]),
    "scale": lambda t, b, n: _set(b, "scale", 1 + n / 2),
    "type of the scale": lambda t, b, n: _set(b, "scale", int(b.scale)),
    "property": lambda t, b, n: _set(b, "_bend", n / 4),
    "item": lambda t, b, n: _change(b.sizes, lambda s: s.__setitem__(slice(1), [n / 4])),
    "item more": lambda t, b, n: _change(b.sizes, lambda s: s.append(n / 4)),
    "item less": lambda t, b, n: _change(b.sizes, _drop_first),
    "list": lambda t, b, n: _set(b, "sizes", [n / 4]),
    "option": lambda t, b, n: _change(b.options, lambda o: o.update(alpha=n / 4)),
    "option in a list": lambda t, b, n: _change(b.options.get("deep", []), lambda d: d.__setitem__(slice(1), [n / 4])),
    "option more": lambda t, b, n: _change(b.options, lambda o: o.update({f"k{n}": n / 4})),
    "option less": lambda t, b, n: _change(b.options, _drop_first),
    "order of options": lambda t, b, n: _change(b.options, _rotate),
    "flag": lambda t, b, n: _change(b.flags, lambda f: f.symmetric_difference_update({2})),
    "namespace": lambda t, b, n: _set(b.space, "gain", n / 4),
    "namespace in it": lambda t, b, n: _set(b.space.more, "power", n / 4),
    "bias": lambda t, b, n: _set(b, "bias", nn.Parameter(b.shift + n, False) if b.bias is None else None),
    "weight": lambda t, b, n: _set(b, "weight", nn.Parameter(b.weight * 2, False)),
    "weight in place": lambda t, b, n: _in_place(b.weight),
    "weight's data": lambda t, b, n: _set_data(b.weight),
    "buffer": lambda t, b, n: _set(b, "shift", b.shift + 1),
    "forward of a block": lambda t, b, n: _set(b, "forward", _times(b.forward, 1.5)),
    "forward of an act": lambda t, b, n: _set(b.act, "forward", _times(b.act.forward, 1.5)),
    "forward of blocks": lambda t, b, n: _set(t.block, "forward", _method(t.block.forward)),
    "forward of acts": lambda t, b, n: _set(type(b.act), "forward", _method(type(b.act).forward)),
    "method of blocks": lambda t, b, n: _set(t.block, "mixed", _method(t.block.mixed)),
    "method of a block": lambda t, b, n: _set(b, "mixed", MethodType(lambda block, x: x * n, b)),
    "number of blocks": lambda t, b, n: _set(t.block, "rate", n / 4),
    "number of a block": lambda t, b, n: _set(b, "rate", n / 4),
    "hook": lambda t, b, n: _hooked(b, n),
    "hook less": lambda t, b, n: _change((b, b.act)[n % 2]._forward_hooks, _drop_first),
    "order of hooks": lambda t, b, n: _change((b, b.act)[n % 2]._forward_hooks, _rotate),
    "state of a hook": lambda t, b, n: _set(HOOKS[n % 3], "by", 1 + n / 4),
    "global": lambda t, b, n: _global("GAIN", 1 + n / 4),
    "helper": lambda t, b, n: _global("bent", _times(bent, 1.5)),
    "context variable": lambda t, b, n: _level(1 + n / 4),
    # These decide nothing.
    "number of a break": lambda t, b, n: _set(b.live, "gain", n / 4),
    "list of a break": lambda t, b, n: _change(b.live.steps, lambda s: s.append(n / 4)),
    "unread": lambda t, b, n: _set(b, "note", n),
    "unread more": lambda t, b, n: _set(b, "remark", n),
    "same number": lambda t, b, n: _set(b, "scale", type(b.scale)(str(b.scale))),
    "same list": lambda t, b, n: _set(b, "sizes", b.sizes.copy()),
    "same dict": lambda t, b, n: _set(b, "options", b.options.copy()),
    "same set": lambda t, b, n: _set(b, "flags", b.flags.copy()),
}


def _set_data(p: nn.Parameter) -> Undo:
    before = p.data
    p.data = before * 2
    return lambda: setattr(p, "data", before)
