"""Finds what was done to a decoder's modules since they were captured: replays would not run it."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from torch import nn
from torch.nn.modules import module as nn_module

from segue import _source_lines
from segue.integrations.transformers import reasons

_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks)
_WITH_MODES = (nn.modules.batchnorm._NormBase, nn.RNNBase)
_training = itemgetter("training")


def hooks_on(module: nn.Module) -> list[Any]:
    """Forward hooks and pre-hooks on ``module``, without transformers' own recorders, which act on untouched calls only."""
    found = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return [hook for hook in found if getattr(hook, "__name__", "") != "output_capturing_hook"]


class ModuleSnapshot:
    """The modules of a decoder as they were captured. A call is compared with it, which takes about 10 us for 28 layers.

    It finds hooks, patched forwards and replaced modules. The decoder itself and its embedding are left out: they run
    live, outside the graphs. The graphs notice by its parameters that a module with parameters was replaced, so only the
    slots of modules without any are compared here.
    """

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.accept()

    def accept(self) -> None:
        """Take the modules as they are now for what is captured."""
        live = (self._decoder, self._decoder.get_input_embeddings())
        self._modules = {name: m for name, m in self._decoder.named_modules() if m not in live}
        # Most modules with weights of their own, linear layers and norms, do the same in training mode.
        every = (self._decoder, *self._modules.values())
        mode_dependent = (m for m in every if not m._parameters or isinstance(m, _WITH_MODES))
        self._modes = [vars(m) for m in mode_dependent if "training" in vars(m)]
        self._forwards = {name: vars(m)["forward"] for name, m in self._modules.items() if "forward" in vars(m)}
        slots = [
            (parent._modules, slot, child)
            for parent in every
            for slot, child in parent._modules.items()
            if child is not None and child not in live and not child._parameters
        ]
        self._config = vars(self._decoder.config)  # whose own lookup takes a microsecond
        self._causal = self._config.get("is_causal")  # handed to attention as a plain value
        self._parents, self._slots, self._children = ([s[i] for s in slots] for i in range(3))
        self._look()

    def training(self) -> str | None:
        """The name of a module that is in training mode and computes something else in it; None if there is none."""
        if not any(map(_training, self._modes)):
            return None
        if self._decoder.training:
            return type(self._decoder).__name__
        name = next(name for name, m in self._modules.items() if m.training)
        return f"{type(self._decoder).__name__}'s {name}"

    def reason(self) -> str | None:
        """Why replays would not do what the modules do now; None while they would."""
        if (
            any(self._no_hooks)
            or any(_GLOBAL_HOOKS)
            or list(map(len, self._tables)) != self._sizes
            or list(map(dict.get, self._parents, self._slots)) != self._children
            or self._config.get("is_causal") != self._causal
        ):
            return self._found()
        return None

    def _look(self) -> None:
        hooks = [d for m in self._modules.values() for d in (m._forward_hooks, m._forward_pre_hooks)]
        self._no_hooks = [d for d in hooks if not d]
        # A forward of a module's own is one more entry in its __dict__, and hooks beside a recorder are more of those.
        self._tables = [*map(vars, self._modules.values()), *(d for d in hooks if d)]
        self._sizes = list(map(len, self._tables))

    def _found(self) -> str | None:
        if any(_GLOBAL_HOOKS):
            return reasons.GLOBAL_HOOK
        for name, module in self._modules.items():
            for hook in hooks_on(module):
                return reasons.hook(name, _source_lines.of(hook))
            if vars(module).get("forward") is not self._forwards.get(name):
                return reasons.other_forward(name)
        if (causal := self._config.get("is_causal")) != self._causal:
            return reasons.other_causality(causal, self._causal)
        names = {id(module._modules): name for name, module in self._modules.items()}
        for parent, slot, child in zip(self._parents, self._slots, self._children, strict=True):
            if parent.get(slot) is not child:
                where = names.get(id(parent))
                return reasons.other_module(slot if where is None else f"{where}.{slot}")
        self._look()
        return None
