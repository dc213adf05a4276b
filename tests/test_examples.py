"""The examples run, and give what eager gives."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(not (ROOT / "examples").exists(), reason="tests run outside a checkout")


def runs(*arguments: str, **environment: str) -> str:
    command, environment = [sys.executable, "-W", "ignore", *arguments], {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment).stdout


def test_the_examples_run_and_agree_with_eager() -> None:
    assert runs("examples/runner.py").count("equals the reference: True") >= 6
    pytest.importorskip("transformers")
    assert runs("examples/generate.py").count("identical: True") == 3


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/engine.py."""
    spec = importlib.util.spec_from_file_location("engine", ROOT / "examples" / "engine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "engine", module)
    spec.loader.exec_module(module)
    return module


def test_the_engine_serves_every_step_out_of_graphs_and_gives_the_plain_models_tokens() -> None:
    said = runs("examples/engine.py")
    assert "tokens are equal: True" in said
    assert ("the figures of speed mean nothing" in said) is not torch.cuda.is_available()
    steps = int(said.split(" steps")[0].split()[-1])
    full, breakable, eager = (int(said.split(f" {name}")[0].split()[-1]) for name in ("full,", "breakable,", "eager"))
    assert eager == 0 and full > breakable > 0 and full + breakable == 2 * steps


def test_two_ranks_share_the_engines_model() -> None:
    """By torchrun, as its users start it."""
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    said = runs(*torchrun, "examples/engine.py", CUDA_VISIBLE_DEVICES="")
    assert "tokens are equal: True" in said and "ranks: 2" in said and ", 0 eager" in said


@torch.inference_mode()
def test_a_request_gets_the_same_tokens_alone_as_among_others(engine: ModuleType) -> None:
    model, text = engine.random_model()
    model.eval()
    together, alone = engine.requests_of(text), engine.requests_of(text)
    engine.Engine(model, torch.device("cpu")).serve(together)
    for request in alone:
        engine.Engine(model, torch.device("cpu")).serve([request])
    assert [request.tokens for request in together] == [request.tokens for request in alone]
    assert len({token for request in together for token in request.tokens[-5:]}) > 20


def test_the_engine_fails_where_padding_writes_to_somebodys_page(
    engine: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three short requests, so that each decode step has a padded one, and each token counts."""
    monkeypatch.setattr(engine, "SPARE", 0)
    monkeypatch.setattr(engine, "requests_of", lambda text: [engine.Request(text[9 * i :][:3], 40) for i in range(3)])
    assert engine.main() == 1
    assert "tokens are equal: False" in capsys.readouterr().out
