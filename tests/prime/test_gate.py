"""The gate passes what is right, and fails, by name, what isn't."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from segue.check import tiny_trunk
from segue.check.prime_gate import check_prime
from segue.devices import Device
from segue.prime.copyout import CopyOut

BUCKET = 48
LENGTHS = (1, 20, 47)


def _ready(trunk: Any, device: Device) -> Any:
    torch.manual_seed(0)
    return trunk().to(device.torch_device).eval().requires_grad_(False)


def _findings(trunk: Any, device: Device, **options: Any) -> list[str]:
    with segue.PrimeGraph(trunk, BUCKET, device=device, cuts=[1]) as prime:
        return check_prime(prime, LENGTHS, steps=4, **options).findings


@pytest.mark.parametrize("requests", [1, 3])
def test_a_right_trunk_passes_up_and_down_with_packed_prompts_too(device: Device, trunk: Any, requests: int) -> None:
    with segue.PrimeGraph(trunk, BUCKET, requests, device=device) as prime:
        said: list[str] = []
        report = check_prime(prime, progress=said.append)
    assert report.ok and not report.findings
    prompts = [row["prompt"] for row in report.rows]
    assert prompts[:4] == ["1 tokens", "47 tokens", "48 tokens", "48 tokens, another prompt"]
    assert len(prompts) == len(said) == 2 * len(set(prompts)) and prompts == prompts[::-1]
    assert requests == 1 or "15+0+32 tokens" in prompts
    assert {row["greedy"] for row in report.rows} == {"16 steps same"}
    assert report.rows[1]["pads"] == report.rows[1]["control"] == report.rows[1]["all rows"] == "same" and not report.perplexity


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantised_caches_pass(device: Device, hybrid: ModuleType, kept: torch.dtype, dtype: torch.dtype) -> None:
    trunk = hybrid.Hybrid(kinds="da", kept=kept).to(device.torch_device, dtype).eval().requires_grad_(False)
    assert _findings(trunk, device) == []


def _without_reset(hybrid: ModuleType) -> Any:
    class Trunk(hybrid.Hybrid):  # type: ignore[name-defined, misc]
        def reset(self, cache: Any) -> None:
            pass

    return Trunk


def _with_delta(hybrid: ModuleType, **changed: Any) -> Any:
    return type("Trunk", (hybrid.Hybrid,), {"delta": type("Delta", (hybrid.Delta,), changed)})


def _without_mask(hybrid: ModuleType) -> Any:
    return _with_delta(hybrid, mask_pads=lambda self, gate, beta, valid: (gate, beta))


def _decaying_pads(hybrid: ModuleType) -> Any:
    def mask_pads(self: Any, gate: Tensor, beta: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(valid[:, None], gate, -0.5), beta * valid[:, None]

    return _with_delta(hybrid, mask_pads=mask_pads)


def _window_at_the_end(hybrid: ModuleType) -> Any:
    return _with_delta(hybrid, window=lambda self, inner, n: inner[:, -3:])


def _without_v(hybrid: ModuleType) -> Any:
    class Trunk(hybrid.Hybrid):  # type: ignore[name-defined, misc]
        def state(self, cache: Any) -> dict[str, Any]:
            return {k: v for k, v in super().state(cache).items() if not k.endswith(".v")}

    return Trunk


def _without_length(hybrid: ModuleType) -> Any:
    class Trunk(hybrid.Hybrid):  # type: ignore[name-defined, misc]
        def set_length(self, session: Any, n: int) -> None:
            pass

    return Trunk


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_without_reset, ["logits:", "layers[0].state:", "layers[0].conv:"]),
        (_without_mask, ["layers[0].state, with other values in the padded rows,:", "layers[0].state, padded against"]),
        (_decaying_pads, ["layers[0].state, padded against unpadded,: is off by"]),
        (
            _window_at_the_end,
            ["layers[0].conv, with other values in the padded rows,:", "layers[0].conv, padded against"],
        ),
        (_without_v, ["layers[1].v:", "greedy step"]),
        (_without_length, ["length: 0 instead of 20"]),
    ],
)
def test_a_faulty_trunk_fails_and_what_differs_is_named(
    device: Device, hybrid: ModuleType, change: Any, expected: list[str]
) -> None:
    found = _findings(_ready(change(hybrid), device), device)
    for part in expected:
        assert any(part in line for line in found), (part, found)
    assert all(line.startswith(tuple(f"{n} tokens, " for n in LENGTHS)) for line in found)
    if expected[0].startswith("layers[0]"):  # nothing but the state that the padding reached, and what comes of it
        assert not any(": logits:" in line or ": hidden:" in line for line in found)


def test_copying_a_row_too_many_fails(device: Device, hybrid: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CopyOut.pairs
    monkeypatch.setattr(CopyOut, "pairs", lambda self, state, r, start, n: right(self, state, r, start, min(n + 1, BUCKET)))
    found = _findings(hybrid.build(device.torch_device.type), device)
    for name in ("k", "v", "k_scale", "v_scale"):
        assert any(f"20 tokens, up: layers[1].{name} past its 20 rows: was written" in line for line in found), found


class Memo(tiny_trunk.Dense):
    table: Tensor | None = None

    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        if self.table is None:
            self.table = torch.ones(x.shape[1], device=x.device)
        return super().forward(x * self.table, cu_seqlens, cache)


@pytest.mark.parametrize("freed", [False, True])
def test_a_baked_input_that_was_re_pointed_or_freed_fails_by_name(device: Device, freed: bool) -> None:
    trunk = _ready(Memo, device)
    taken: list[Tensor] = []  # or the next table may lie where the old one was
    with segue.PrimeGraph(trunk, BUCKET, device=device) as prime:
        assert check_prime(prime, [20], steps=2).ok
        if freed:
            like = torch.ones_like(trunk.table)
            trunk.table.untyped_storage().resize_(0)
            taken.extend(like.clone() for _ in range(8))
        trunk.table = None
        report = check_prime(prime, [20], steps=2)
    assert [row["logits"] for row in report.rows] == ["refused", "refused"]
    assert all("refused: Prime.trunk.table, used by aten.mul" in line for line in report.findings)


class Random(tiny_trunk.Dense):
    def head(self, last: Tensor) -> Tensor:
        return super().head(last + torch.rand_like(last))


def test_a_trunk_that_does_not_repeat_itself_fails_its_control(device: Device) -> None:
    found = _findings(_ready(Random, device), device)
    assert any("logits of the reference, run again,:" in line for line in found)
    assert not any("keys" in line or "kv" in line for line in found)


class RandomStep(tiny_trunk.Dense):
    results = 2

    def step(self, token: Tensor, session: Any) -> Tensor:
        logits = super().step(token, session)
        return logits + torch.randint(self.results, (1,)).item() * 1e-3


def test_a_step_that_does_not_repeat_itself_is_no_fault_of_the_cache(device: Device) -> None:
    with segue.PrimeGraph(_ready(RandomStep, device), BUCKET, device=device) as prime:
        report = check_prime(prime, LENGTHS, steps=4)
    assert report.ok, report.findings
    assert any("steps same, then step() doesn't repeat itself" in row["greedy"] for row in report.rows)


class NeverTheSame(RandomStep):
    results = 1_000_000


def test_a_step_that_no_copy_of_the_references_cache_repeats_is_found(device: Device) -> None:
    found = _findings(_ready(NeverTheSame, device), device)
    assert found and all("greedy step 1" in line for line in found), found
    assert all("32 copies of the reference's own cache give 32 results, and not this one" in line for line in found)


class NoStep(tiny_trunk.Dense):
    step = None  # type: ignore[assignment]


def test_a_trunk_without_a_step_passes_and_the_report_says_what_was_left_out(device: Device) -> None:
    with segue.PrimeGraph(_ready(NoStep, device), BUCKET, device=device) as prime:
        report = check_prime(prime, LENGTHS)
    assert report.ok and {row["greedy"] for row in report.rows} == {"no step()"}


class Chunks(tiny_trunk.Dense):
    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        return super().forward(x.view(-1, 16, x.shape[1]).flatten(0, 1), cu_seqlens, cache)


def test_a_trunk_that_takes_only_whole_chunks_passes_and_the_report_says_so(device: Device) -> None:
    with segue.PrimeGraph(_ready(Chunks, device), BUCKET, device=device) as prime:
        report = check_prime(prime, [20], steps=2)
    assert report.ok and report.rows[0]["pads"] == "same; doesn't run unpadded (RuntimeError)"


class LastRowOnly(tiny_trunk.Dense):
    """Right in the last real row of each prompt, by which it is judged without ``rows="all"``."""

    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        hidden = super().forward(x, cu_seqlens, cache)
        mean = hidden.mean(0)  # of padded rows too
        last = torch.arange(x.shape[0], device=x.device) + 1 == cu_seqlens[1:, None]
        return torch.where(last.any(0)[:, None], hidden, hidden + 9 * mean)


def test_rows_that_depend_on_the_padding_are_found_by_the_forward_at_the_true_length(device: Device) -> None:
    found = _findings(_ready(LastRowOnly, device), device)
    assert any("20 tokens, up: hidden of all rows, against its own length,: is off by" in line for line in found), found
    assert all("of all rows" in line for line in found)


def test_the_perplexity_of_a_text_is_that_of_the_eager_forward(device: Device, trunk: Any) -> None:
    text = torch.randint(0, 50, (2 * BUCKET + 17,), generator=torch.Generator().manual_seed(0))
    with segue.PrimeGraph(trunk, BUCKET, device=device) as prime:
        report = check_prime(prime, [20], steps=0, text=text.tolist())
        assert report.ok and report.perplexity.endswith(f"over {2 * BUCKET + 14} tokens")
        graph, eager = (float(part.split()[0]) for part in report.perplexity.split(", ")[:2])
        assert graph == pytest.approx(eager, rel=1e-4) and 10 < graph < 200
        assert "refused: " in check_prime(prime, [20], steps=0, text=[3]).findings[-1]
    with segue.PrimeGraph(_ready(LastRowOnly, device), BUCKET, device=device) as prime:
        assert any(line.startswith("perplexity: ") for line in check_prime(prime, [20], steps=0, text=text[:20]).findings)
    with segue.PrimeGraph(_ready(Chunks, device), BUCKET, device=device) as prime:
        assert "doesn't run unpadded" in check_prime(prime, [20], steps=0, text=text[:20]).perplexity
