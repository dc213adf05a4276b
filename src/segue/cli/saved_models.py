"""Loads a saved transformers model from its folder, or by its name from transformers' cache."""

from __future__ import annotations

import enum
import importlib.util
from pathlib import Path
from typing import Any

import torch

from segue.errors import UsageError


class Precision(enum.StrEnum):
    """The dtypes that a saved model may be loaded in. ``AUTO``: the one that it was saved in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def load(name: str, precision: Precision | None, trust_remote_code: bool) -> Any:
    """The model in the folder ``name``, or of that name in transformers' cache, in eval mode and without gradients.

    It is of the class that the folder says it was saved from, and lies on the CUDA device if there is one.
    ``precision``: None means as saved on CUDA, and float32 on the CPU, where only correctness matters.

    Raises:
        UsageError: there is no such model, or transformers can't load it or isn't installed.
    """
    where = "the folder" if Path(name).is_dir() else "transformers' cache"
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(f"{name}: saved models need transformers: pip install 'segue-graphs[transformers]'")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise UsageError(f"{name} is a folder without a config.json: give one that save_pretrained() wrote")
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(name, **given)
        chosen = precision or (Precision.AUTO if place.type == "cuda" else Precision.FLOAT32)
        dtype = chosen.value if chosen is Precision.AUTO else getattr(torch, chosen.value)
        model = _class_of(config).from_pretrained(name, config=config, dtype=dtype, **given)
    except (OSError, ValueError, ImportError, KeyError) as e:
        if where == "the folder" or "trust_remote_code" in str(e):
            raise UsageError(f"{name}: transformers can't load the model: {_one_line(e)}") from e
        raise UsageError(
            f"{name} is no folder here, no file.py:NAME and no package.module:NAME, and transformers has no model of that name "
            f"in its cache. Fetch it first: hf download {name}"
        ) from e
    return model.to(place).eval().requires_grad_(False)


def _class_of(config: Any) -> Any:
    """The class that the config's model was saved from; a language model or a bare model where the config doesn't say."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    of_text = type(config) in transformers.AutoModelForCausalLM._model_mapping
    custom = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    return transformers.AutoModelForCausalLM if of_text or custom else transformers.AutoModel


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
