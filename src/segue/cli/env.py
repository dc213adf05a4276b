"""``segue env``: versions, device and what works here, ready to paste into an issue."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from typing import Any

import torch

from segue.cli.output import Format, FormatOption, render

_PACKAGES = ("segue-graphs", "transformers", "triton", "accelerate", "gguf", "numpy")


def env(output: FormatOption = Format.MD) -> None:
    """Print versions, device and what works here."""
    sys.stdout.write(render([{"what": k, "value": v} for k, v in facts().items()], output))


def facts() -> dict[str, Any]:
    """Versions of what matters, the device, and which of segue's two devices captures run on."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "torch": torch.__version__,  # the package's metadata may lack the local version (+cu130)
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


def _works(captures: str) -> dict[str, str]:
    """What a user can do here, or what is missing for it."""
    needs = {
        "segue.accelerate": ("transformers",),
        "segue demo": ("transformers", "gguf", "accelerate"),
        "segue plan --plot": ("matplotlib",),
        "RunnerCollector": ("prometheus_client",),
    }
    found = {"GraphRunner, PrimeGraph": captures}
    for what, modules in needs.items():
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        found[what] = f"no: {', '.join(missing)} not installed" if missing else captures if what == "segue.accelerate" else "yes"
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
