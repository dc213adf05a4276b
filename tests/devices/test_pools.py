"""Pools and streams as users give them: pools of their own, torch's handles, and what is neither."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import segue
from segue.check import tiny_trunk
from segue.devices import Device

pytestmark = pytest.mark.usefixtures("inference")
_numbers = itertools.count(1 << 40)


@pytest.fixture
def handle(device: Device) -> tuple[int, int]:
    """What torch gives for a pool. Without CUDA it gives nothing, and any two numbers stand for it."""
    return (0, next(_numbers)) if device.torch_device.type == "cpu" else torch.cuda.graph_pool_handle()


def captured(pool: Any, device: Device) -> tuple[segue.BreakableCapture, torch.Tensor, torch.Tensor]:
    x = torch.ones(8, 4, device=device.torch_device)
    capture = segue.BreakableCapture(pool=pool, device=device)
    with capture:
        out = segue.break_here(lambda t: t + 1, torch.empty_like(x), x * 2) * 3
    return capture, x, out


def test_a_pool_of_ones_own_is_shared_with_nobody(device: Device) -> None:
    mine, other = segue.new_pool(device), segue.new_pool(device.name)
    assert mine.device is device and mine not in (other, device.default_pool())
    first, x, out = captured(mine, device)
    second, _, theirs = captured(other, device)
    assert first.pool is mine and mine.owns(out) and other.owns(theirs)
    assert not mine.owns(theirs) and not other.owns(out) and not device.default_pool().owns(out)
    x.fill_(2)
    first.replay()
    assert (out == 15).all()
    del out
    first.close()
    assert mine.usage().reserved == 0 and other.usage().reserved > 0
    second.close()


def test_captures_under_one_handle_of_torchs_share_one_pool(device: Device, handle: tuple[int, int]) -> None:
    first, x, out = captured(handle, device)
    second, _, _ = captured(tuple(handle), device)
    assert first.pool is second.pool is not device.default_pool() and first.pool.owns(out)
    for k in range(3):
        x.fill_(k)
        with first.pool.turn():
            first.replay()
            assert (out == (2 * k + 1) * 3).all()
    first.close()
    second.close()
    again, x, kept = captured(handle, device)
    assert again.pool is first.pool
    again.close()
    later, x, out = captured(handle, device)  # what `kept` lies in is still there
    later.replay()
    assert (out == 9).all() and kept.shape == out.shape
    later.close()


def test_runners_and_prime_graphs_take_torchs_handles(device: Device, handle: tuple[int, int]) -> None:
    trunk = tiny_trunk.build(device.torch_device.type)
    with segue.PrimeGraph(trunk, 16, pool=handle, device=device) as prime:
        x = torch.ones(3, 4, device=device.torch_device)
        with segue.GraphRunner(lambda x: x + 1, {"x": segue.Input(0, 0.0)}, [4], pool=handle, device=device) as runner:
            for _ in range(3):
                assert torch.equal(runner(x), x + 1)
            assert runner.pool is prime.pool
        tokens = torch.arange(5, device=device.torch_device)
        assert torch.equal(prime.run(tokens, trunk.new_cache(16)).logits, prime.reference(tokens).logits)


@pytest.mark.parametrize("pool", [3, "pool", (1,), (1, 2, 3), (1.0, 2.0), []], ids=repr)
def test_what_is_no_pool_is_refused_when_it_is_given(device: Device, pool: Any) -> None:
    refused = pytest.raises(segue.InputError, match=r"is no graph pool: give segue.new_pool\(\)")
    with refused:
        segue.BreakableCapture(pool=pool, device=device)
    with refused:
        segue.GraphRunner(lambda x: x, {"x": segue.Input(0, 0.0)}, [4], pool=pool)
    with refused:
        segue.PrimeGraph(tiny_trunk.build(device.torch_device.type), 16, pool=pool)


def test_what_is_no_stream_is_refused(device: Device) -> None:
    for stream in (0, "stream", object()):
        with pytest.raises(segue.InputError, match=f"is no stream of {device.name}"):
            segue.BreakableCapture(stream=stream, device=device)
        with pytest.raises(segue.InputError, match=f"is no stream of {device.name}"):
            segue.GraphRunner(lambda x: x, {"x": segue.Input(0, 0.0)}, [4], stream=stream, device=device)


def test_a_stream_of_the_users_is_captured_on(device: Device) -> None:
    stream = torch.cuda.Stream() if device.traits.streams else torch.Stream("cpu")
    x = torch.ones(3, 4, device=device.torch_device)
    with segue.GraphRunner(lambda x: x + 1, {"x": segue.Input(0, 0.0)}, [4], stream=stream, pool=device.new_pool()) as runner:
        for _ in range(3):
            assert torch.equal(runner(x), x + 1)
        assert runner.prepare().recorder.stream is stream


@pytest.mark.cuda
def test_a_pool_or_stream_of_another_device_is_refused() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with pytest.raises(segue.InputError, match="is a pool of emulator, and the graphs are on cuda:0"):
        segue.BreakableCapture(pool=segue.new_pool("emulator"), device="cuda:0")
    with pytest.raises(segue.InputError, match="is no stream of"):
        segue.BreakableCapture(stream=torch.Stream("cpu"), device="cuda")


@pytest.mark.cuda
def test_a_pool_is_shared_with_a_graph_of_torchs_own() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    graph, y = torch.cuda.CUDAGraph(), torch.ones(1 << 16, device="cuda")
    with torch.cuda.graph(graph):
        theirs = y * 5 + 1
    capture, x, out = captured(graph.pool(), segue.new_pool("cuda").device)
    assert capture.pool.owns(theirs) and capture.pool.owns(out)
    x.fill_(3)
    capture.replay()
    assert (out == 21).all()
    graph.replay()
    assert (theirs == 6).all()
    capture.close()
    graph.replay()
    assert (theirs == 6).all()
