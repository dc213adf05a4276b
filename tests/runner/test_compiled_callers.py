"""What replays graphs ends the graph of whoever compiles the code around it, and is counted as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import segue
from segue.check import tiny_trunk
from segue.devices import Device

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("way", ["module.compile()", "torch.compile(module)", "torch.compile(runner)"])
def test_a_runner_in_compiled_code_replays(make: Callable[..., Any], device: Device, way: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, device=device.torch_device)
            self.runner = make(self.body, {"x": segue.Input(0, 0.0)}, [4])

        def body(self, x: Tensor) -> Tensor:
            return self.linear(x).relu()

        def forward(self, x: Tensor) -> Any:
            return self.runner(x * 2) + 1

    model = Model().eval()
    call: Any = model
    if way == "module.compile()":
        model.compile(backend="eager")
    elif way == "torch.compile(module)":
        call = torch.compile(model, backend="eager")
    else:
        compiled = torch.compile(model.runner, backend="eager")
        call = lambda x: compiled(x * 2) + 1  # noqa: E731
    for _ in range(4):
        x = torch.randn(3, 4, device=device.torch_device)
        torch.testing.assert_close(call(x), model.body(x * 2) + 1)
    assert (model.runner.stats.warmed, model.runner.stats.captured, model.runner.stats.replayed) == (1, 1, 2)


def test_code_that_is_compiled_inside_a_runner_stays_compiled(make: Callable[..., Any], device: Device) -> None:
    runs = []

    def backend(graph: Any, example: Any) -> Any:
        return lambda *args: (runs.append(1), graph.forward(*args))[1]

    inner = torch.compile(lambda x: x.sin() * 2, backend=backend)
    runner = make(lambda x: inner(x) + 1, {"x": segue.Input(0, 0.0)}, [2])
    outer = torch.compile(lambda x: runner(x) * 2, backend="eager")
    x = torch.randn(3, 4, device=device.torch_device)
    for call, count in ((runner, 1), (outer, 2)):
        call(x)
        assert len(runs) == count
    assert runner.stats.reasons == {"no bucket fits": 2}


def test_captures_and_prime_graphs_in_compiled_code_replay(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    with segue.BreakableCapture(device=device, root=nn.Identity()) as capture:
        y = x * 2
    trunk: Any = tiny_trunk.build(device.torch_device.type)
    prime = segue.PrimeGraph(trunk, bucket=8, device=device, cuts=[])
    tokens = torch.arange(3, device=device.torch_device)

    def forward(t: Tensor) -> Any:
        x.copy_(t + 1)
        capture.replay()
        return y + 1, prime.run(tokens, trunk.new_cache(8)).logits

    compiled = torch.compile(forward, backend="eager")
    for k in range(3):
        doubled, logits = compiled(torch.full((4,), float(k), device=device.torch_device))
        assert doubled.tolist() == [2.0 * k + 3] * 4
        torch.testing.assert_close(logits, prime.reference(tokens).logits)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
def test_a_traced_runner_runs_eager_and_captures_and_prime_graphs_refuse(make: Callable[..., Any], device: Device) -> None:
    runner = make(lambda x: x.sin() * 2, {"x": segue.Input(0, 0.0)}, [4])
    x = torch.randn(3, 4, device=device.torch_device)
    for _ in range(3):
        runner(x)
    traced = torch.jit.trace(lambda x: runner(x) + 1, (x,), check_trace=False)
    y = torch.randn(2, 4, device=device.torch_device)
    torch.testing.assert_close(traced(y), y.sin() * 2 + 1)
    assert runner.stats.reasons == {"inside torch.jit.trace, which would record one replay's numbers": 1}
    with segue.BreakableCapture(device=device, root=nn.Identity()) as capture:
        out = x * 2
    prime = segue.PrimeGraph(tiny_trunk.build(device.torch_device.type), bucket=8, device=device, cuts=[])
    session = prime.trunk.new_cache(8)
    for replay in (lambda t: (capture.replay(), out)[1], lambda t: prime.run(t[0].long(), session).logits):
        with pytest.raises(segue.UsageError, match=r"was replayed inside torch\.jit\.trace"):
            torch.jit.trace(replay, (x,), check_trace=False)
    runner(x)
    assert runner.stats.replayed == 2
