"""Facts of the environment: the switch ``SEGUE=off``, versions, the device, what works here, and where a result comes from."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("segue-graphs", "torch", "transformers", "triton", "accelerate", "gguf", "numpy")
_NEEDS = {
    "segue.accelerate": ("transformers",),
    "segue demo, with real weights": ("transformers", "gguf", "accelerate"),
    "segue plan --plot": ("matplotlib",),
    "RunnerCollector": ("prometheus_client",),
}


def disabled() -> bool:
    """Whether ``SEGUE=off`` is set now, so that everything runs eager. Upper and lower case are alike."""
    return os.environ.get("SEGUE", "").strip().lower() == "off"


def facts() -> dict[str, Any]:
    """Versions of the packages that matter, the device, and which of segue's two devices captures run on."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }
    if not torch.cuda.is_available():
        return {**found, "device": "emulator (no CUDA device: correctness only, no speed)", **_works("emulated")}
    device = torch.cuda.get_device_properties(0)
    return {
        **found,
        "cuda": torch.version.cuda,
        "device": f"{device.name}, {device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}",
        "devices": torch.cuda.device_count(),
        "memory pools": "yes" if hasattr(torch.cuda, "use_mem_pool") else "no",
        **_works("yes"),
    }


def provenance() -> str:
    """Markdown lines that say where a result comes from: :func:`facts`, the date, the commit and the command."""
    program = Path(sys.argv[0])
    command = " ".join(["segue" if program.stem in ("segue", "__main__") else f"python {program.name}", *sys.argv[1:]])
    lines = [f"{key}: {value}" for key, value in facts().items()]
    lines += [f"date: {datetime.date.today().isoformat()}", f"commit: {_commit()}", f"command: `{command}`"]
    return "\n".join(f"* {line}" for line in lines)


def _works(captures: str) -> dict[str, str]:
    """What a user can do here, or what is missing for it."""
    found = {"GraphRunner, PrimeGraph": captures}
    for what, modules in _NEEDS.items():
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        found[what] = f"no: {', '.join(missing)} not installed" if missing else captures if what == "segue.accelerate" else "yes"
    return found


def _version(name: str) -> str | None:
    if name == "torch":  # the metadata of some wheels lack the local version, which names the CUDA build
        return str(torch.__version__)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit of the checkout this file lies in, with a mark if files differ from it."""
    try:
        head, changed = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain", "-uno")
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not a git checkout)"
    return head + (" with local changes" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
