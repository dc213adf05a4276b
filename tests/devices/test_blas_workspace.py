"""cuBLAS workspaces, whose addresses graphs bake, outlive whoever has torch free them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import linear

import segue
from segue import devices
from segue.devices.cuda.device import CudaDevice


def test_the_workspace_is_made_in_one_pool_that_nothing_else_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[object] = []
    seen: list[object] = []

    class MemPool:
        def __init__(self) -> None:
            pools.append(self)

    @contextmanager
    def use_mem_pool(pool: object) -> Iterator[None]:
        seen.append(pool)
        yield
        seen.append("left")

    monkeypatch.setattr(torch.cuda, "MemPool", MemPool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: seen.append("handle"))
    device = CudaDevice.__new__(CudaDevice)
    device._blas_memory, device.torch_device = None, torch.device("cpu")
    for _ in range(2):
        device._make_blas_workspace()
    assert len(pools) == 1 and seen == [pools[0], "handle", "left"] * 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_replay_is_right_after_torch_has_freed_all_workspaces() -> None:
    """As torch.compile's reduce-overhead does at each of its recordings."""
    device = devices.resolve("cuda")
    weight = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode(), segue.BreakableCapture(device=device) as capture:
        y = linear(x, weight)
    want = y.clone()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    churn = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    with torch.inference_mode():
        for _ in range(3):
            y.fill_(0)
            capture.replay()
            assert torch.equal(y, want)
    assert all(bool(t.isnan().all()) for t in churn), "no graph writes memory that is somebody else's"
    capture.close()
