"""``import segue`` is quick and needs nothing but torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_TIMED = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()  # of this process: a busy machine makes an import late, not slow
import segue
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - before)}))
"""


def run(code: str, env: dict[str, str] | None = None) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout


def imported(env: dict[str, str] | None = None) -> dict[str, Any]:
    return json.loads(run(_TIMED, env))  # type: ignore[no-any-return]


def test_import_adds_less_than_100_ms_to_that_of_torch(tmp_path: Path) -> None:
    # Bytecode is kept, as it is on a user's machine: without, two thirds of the time go to compiling the files again.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert min(imported(env)["seconds"] for _ in range(3)) < 0.1


def test_import_brings_in_neither_dynamo_nor_transformers_nor_the_command_line() -> None:
    new = {name.split(".")[0] if not name.startswith("torch.") else name for name in imported()["new"]}
    assert not new & {"transformers", "triton", "typer", "rich", "numpy", "torch._dynamo", "torch._inductor"}


def test_import_works_with_transformers_and_cuda_hidden() -> None:
    hidden = "import os, sys; os.environ['CUDA_VISIBLE_DEVICES'] = ''; sys.modules['transformers'] = None\n"
    assert run(hidden + "import segue; print(callable(segue.accelerate))") == "True\n"


def test_every_public_name_is_there() -> None:
    import segue

    assert all(hasattr(segue, name) for name in segue.__all__)


def test_every_error_that_is_raised_on_purpose_can_be_caught_by_its_name() -> None:
    import segue
    import segue.devices.cuda.op_checks
    import segue.integrations.transformers.handle

    errors = [segue.SegueError]
    for error in errors:
        errors += error.__subclasses__()
    own = {error for error in errors if error.__module__.startswith("segue")}
    assert {error.__name__ for error in own} <= set(segue.__all__)
    assert all(getattr(segue, error.__name__) is error for error in own)
