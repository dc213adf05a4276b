"""The hybrid of the examples does what its papers say, so that it is worth comparing with."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from segue.devices import Device


@pytest.mark.parametrize("rows", [1, 15, 16, 37])
def test_the_chunked_delta_rule_is_the_recurrence(hybrid: ModuleType, rows: int) -> None:
    torch.manual_seed(rows)
    q, v = torch.randn(2, 2, 3, rows, 8)
    k = torch.nn.functional.normalize(torch.randn(2, 3, rows, 8), dim=-1)
    g, beta, state = -torch.rand(2, 3, rows), torch.rand(2, 3, rows), torch.randn(2, 3, 8, 8)
    out, last = hybrid._chunked(q, k, v, g, beta, state)
    for t in range(rows):
        state = g[:, :, t, None, None].exp() * state
        update = beta[:, :, t, None] * (v[:, :, t] - (k[:, :, t, None] @ state)[:, :, 0])
        state = state + k[:, :, t, :, None] * update[:, :, None]
        torch.testing.assert_close(out[:, :, t], (q[:, :, t, None] @ state)[:, :, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-5)


def test_steps_go_on_as_a_longer_prompt_would(device: Device, hybrid: ModuleType) -> None:
    trunk = hybrid.build(device.torch_device.type)
    ids = torch.arange(23, device=device.torch_device)

    def run(n: int) -> tuple[torch.Tensor, object]:
        cache = trunk.new_cache(32)
        offsets = torch.tensor([0, n], dtype=torch.int32, device=device.torch_device)
        hidden = trunk.forward(trunk.embed(ids[:n]), offsets, cache)
        trunk.set_length(cache, n)
        return trunk.head(hidden[-1:]), cache

    _, cache = run(17)
    for i in range(17, 23):
        logits = trunk.step(ids[i : i + 1], cache)
    torch.testing.assert_close(logits, run(23)[0], rtol=1e-3, atol=1e-3)


def test_the_example_runs_and_says_that_it_equals_the_eager_trunk(hybrid: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    hybrid.main()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and all("equals the eager trunk: True" in line for line in said)
