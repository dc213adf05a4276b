"""A torch that lacks a private name is refused in one sentence, not by an AttributeError somewhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from segue import SegueError, _torch, _torch_ops
from segue.devices.cuda import raw


def test_a_torch_without_names_that_segue_needs_is_refused_at_import_with_all_of_them() -> None:
    code = (
        "import torch\n"
        "del torch._C._InferenceMode, torch._neg_view\n"
        "try:\n    import segue\nexcept ImportError as e:\n    print(e)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"torch {torch.__version__} lacks torch._C._InferenceMode, torch._neg_view, which segue needs.")
    assert "segue supports torch >= 2.11" in said


def test_a_torch_without_what_is_optional_will_do() -> None:
    code = (
        "import torch, torch.library\n"
        "del torch.library._impls, torch._library.custom_ops.OPDEFS\n"
        "from segue import _torch_ops\n"
        "assert _torch_ops.python_kernel('aten::add') is None and _torch_ops.custom_op_body('aten::add') is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_error_is_one_of_segues_and_an_import_error() -> None:
    with pytest.raises(SegueError, match=r"lacks torch\._C\.nothing, torch\.nowhere\.at_all, which") as caught:
        _torch.require("torch._C.nothing", "torch.Tensor", "torch.nowhere.at_all")
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("module", [_torch, _torch_ops, raw])
def test_every_private_name_that_is_used_is_looked_up_first_or_optional(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    used = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    private = {name for name in used if name.startswith("torch.") and "._" in name} - {"torch.__version__"}
    unprobed = {n for n in private if not any((probed + ".").startswith(n + ".") for probed in module._NEEDED)}
    assert unprobed <= {"torch._C._CUDAGraph"}, "this one has a default"


def test_a_snapshot_that_lacks_what_segue_reads_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    block = {"size": 512, "state": "inactive"}
    segment = {"device": 0, "address": 1 << 20, "total_size": 512, "blocks": [block], "segment_pool_id": (0, 7)}
    snapshot = [segment, {**segment, "segment_pool_id": (0, 8)}]
    monkeypatch.setattr(raw, "_snapshot_parameters", lambda: frozenset({"mempool_id"}))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda mempool_id: snapshot)
    assert raw.memory_segments((0, 7)) == [segment]
    del block["state"]
    with pytest.raises(SegueError, match=r"memory_snapshot\(\)\[\.\.\.\]\['state'\]"):
        raw.memory_segments((0, 7))
    del segment["address"]
    with pytest.raises(SegueError, match=r"\['address'\]"):
        raw.memory_segments((0, 7))
    monkeypatch.setattr(raw, "_snapshot_parameters", lambda: frozenset({"include_traces"}))
    with pytest.raises(SegueError, match=r"lacks torch\.cuda\.memory_snapshot\(mempool_id"):
        raw.memory_segments((0, 7))


def test_an_allocator_without_a_statistic_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    stats: dict[str, Any] = {"num_device_alloc": 3, "reserved_bytes": {"all": {"current": 4}}}
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda device: stats, raising=False)
    assert raw.allocator_mark(0) == (3, 4)
    del stats["num_device_alloc"]
    with pytest.raises(SegueError, match=r"_cuda_memoryStats\(\)\[\.\.\.\]\['num_device_alloc'\]"):
        raw.allocator_mark(0)


@pytest.mark.parametrize("found", [(0, ["a", "b"], 2), (0, ["a", "b"], ["edges"], 2), (0, None, 0)])
def test_nodes_are_counted_in_every_version_of_cuda_bindings(found: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    graph: Any = SimpleNamespace(raw_cuda_graph=lambda: 1)
    monkeypatch.setattr(raw, "_cuda_runtime", lambda: SimpleNamespace(cudaGraphGetNodes=lambda graph: found))
    assert raw._node_count(graph) == found[-1]


def test_a_count_of_nodes_that_is_missing_is_an_error_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    graph: Any = SimpleNamespace(raw_cuda_graph=lambda: 1)
    monkeypatch.setattr(raw, "_cuda_runtime", lambda: SimpleNamespace(cudaGraphGetNodes=lambda graph: (0, ["a"])))
    with pytest.raises(SegueError, match=r"cudaGraphGetNodes of cuda-bindings .* returns no count"):
        raw._node_count(graph)
    monkeypatch.setattr(raw, "_cuda_runtime", lambda: SimpleNamespace(cudaGraphGetNodes=lambda graph: (1, None)))
    assert raw._node_count(graph) is None


def test_cuda_bindings_that_lack_a_name_are_left_alone_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw.importlib, "import_module", lambda name: SimpleNamespace(cudaGraphLaunch=1))
    with pytest.warns(UserWarning, match=r"goes without cuda-bindings .*, which lacks cudaGraphExec_t, "):
        assert raw._cuda_runtime.__wrapped__() is None
