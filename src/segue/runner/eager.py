"""A call that no bucket serves: the plain function, unpadded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from segue.capture import active_forward, current_forward_ctx
from segue.runner.calls import Binder, Call
from segue.runner.outputs import owned


def run_eager(binder: Binder, call: Call) -> Any:
    """The function's answer on the call's own tensors, which go to the runner's device and, where it writes them, back."""
    device, tensors = binder.device, call.tensors
    if call.foreign:
        with torch.inference_mode(False), torch.no_grad():
            tensors = [None if t is None else t.to(device) for t in tensors]
    versions = [_version(t) for t in tensors] if call.foreign else []
    with torch.inference_mode(), active_forward(call.ctx if call.ctx is not None else current_forward_ctx()):
        raw = binder.invoke(call, tensors, call.ctx)
        for mine, moved, version in zip(call.tensors, tensors, versions, strict=False):
            if mine is not None and moved is not None and moved is not mine and _version(moved) != version:
                mine.copy_(moved)
    binder.keep(call)
    return owned(raw)


def _version(t: Tensor | None) -> int:
    return -1 if t is None or t.is_inference() else t._version
