"""What users put around a transformers model: adapters, compiled modules, handles. And the model that is in it."""

from __future__ import annotations

from typing import Any

from torch import nn

from segue import _torch
from segue.errors import UsageError
from segue.integrations.transformers.base_handle import Handle


def whole_of(model: Any) -> Any:
    """``model`` without handles and ``torch.compile`` around it: what a handle of it stands for."""
    while True:
        inner = model.module if isinstance(model, Handle) else _torch.uncompiled(model)
        if inner is model:
            return model
        model = inner


def served_in(whole: Any) -> Any:
    """The transformers model in ``whole``, which may be an adapter's or another module around it; ``whole`` if there is none.

    Raises:
        UsageError: there are several.
    """
    from transformers import PreTrainedModel

    def outermost(module: nn.Module) -> list[Any]:
        if isinstance(module, PreTrainedModel):
            return [whole_of(module)]
        return [model for child in module.children() for model in outermost(child)]

    found = outermost(whole) if isinstance(whole, nn.Module) else []
    models = list({id(model): model for model in found}.values())
    if len(models) > 1:
        raise UsageError(
            f"{type(whole).__name__} holds {len(models)} transformers models ({', '.join(type(m).__name__ for m in models)}), "
            "and one handle serves one. Accelerate them one by one: each stays where it is."
        )
    return models[0] if models else whole
