"""Captures a forward of one's own: token-shaped work is in graphs, and what looks across tokens is in a break."""

from __future__ import annotations

import torch
from torch import Tensor

import segue


@segue.break_point(trim=("x",))
def running_mean(x: Tensor) -> Tensor:
    """Mean of each row and all rows before it: real rows only, however large the bucket. [n, D] -> [n, D]."""
    count = torch.arange(1, x.shape[0] + 1, device=x.device, dtype=x.dtype)
    return x.cumsum(0) / count[:, None] * segue.current_forward_ctx()["scale"]


def main() -> None:
    """Run calls of several lengths and compare each with the reference."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.randn(64, 64, device=device)

    def forward(x: Tensor) -> Tensor:
        return running_mean(torch.relu(x @ weight)) + x

    runner = segue.GraphRunner(
        forward,
        inputs={"x": segue.Input(token_dim=0, pad=0.0)},
        buckets=[16, 32, 64],
        device="emulator" if device == "cpu" else device,
    )
    with runner, torch.inference_mode():
        for n in (5, 30, 7, 64, 6, 29, 100):
            x, ctx = torch.randn(n, 64, device=device), {"scale": 1.0 / n}
            y = runner(x, ctx=ctx)
            if runner.admit(n).bucket is not None:
                same = torch.equal(y, runner.reference(x, ctx=ctx))
                print(f"{runner.explain(n)}; equals the reference: {same}")
            else:
                print(runner.explain(n))
        print(runner.stats)


if __name__ == "__main__":
    main()
