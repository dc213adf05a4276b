"""Bad input is refused by name, and no session is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from prime.prompts import prompt
from segue.check import tiny_trunk
from segue.devices import Device

BUCKET = 16
Make = Callable[[Device], tiny_trunk.Dense]


def _used(trunk: Any) -> Any:
    session = trunk.new_cache(16)
    session.length = 3
    return session


def _wrong(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    def make(trunk: Any) -> Any:
        session = trunk.new_cache(16)
        session.kv = change(session.kv)
        return session

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_used, r"the session of request 0 holds 3 tokens already"),
        (lambda trunk: {"kv": 1}, r"is a dict, and this trunk's caches are DenseCache: it is of another model"),
        (lambda trunk: None, r"is a NoneType"),
        (_wrong(lambda kv: kv.half()), r"keys and values as torch.float16"),
        (_wrong(lambda kv: kv.to("meta")), r"keys and values as torch.float32 on meta"),
        (
            _wrong(lambda kv: kv[:1]),
            r"keys and values of shape \(1, 2, 2, 16, 16\), and the scratch cache \(2, 2, 2, 16, 16\)",
        ),
        (lambda trunk: trunk.new_cache(4), r"room for 4 rows in keys and values, and the prompt has 5"),
    ],
)
def test_a_session_that_does_not_fit_is_refused_and_left_as_it_was(
    device: Device, dense_trunk: Any, make: Any, message: str
) -> None:
    with segue.PrimeGraph(dense_trunk, BUCKET, device=device) as prime:
        session = make(dense_trunk)
        before = vars(session).copy() if hasattr(session, "__dict__") else session
        with pytest.raises(segue.SegueError, match=f"prime graph of 16 rows: .*{message}"):
            prime.run(prompt(5, device), session)
        assert not hasattr(session, "__dict__") or vars(session) == before
        if isinstance(session, tiny_trunk.DenseCache) and session.kv.device.type != "meta":
            assert not session.kv.any()
        assert prime.run(prompt(5, device), dense_trunk.new_cache(16)).logits.shape == (1, 53)


def test_the_scratch_cache_itself_is_no_session(device: Device, dense_trunk: Any) -> None:
    five = prompt(5, device)
    prime = segue.PrimeGraph(dense_trunk, BUCKET, device=device)
    with prime, pytest.raises(segue.SegueError, match="shares the memory of keys and values with the scratch cache"):
        prime.run(five, prime.scratch)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(17, dtype=torch.int64), "17 tokens are more than its bucket of 16 rows holds"),
        (torch.zeros(2, dtype=torch.int64), "request 0 has 2 tokens, fewer than the trunk's min_tokens=3"),
        (torch.zeros(0, dtype=torch.int64), "request 0 has 0 tokens"),
        ([], "request 0 has 0 tokens"),
        (torch.zeros(5), r"the tokens of request 0 are torch.float32 \(5,\), not token ids"),
        (torch.zeros(2, 5, dtype=torch.int64), r"torch.int64 \(2, 5\), not token ids"),
        ([0.5, 1.5, 2.5], "torch.float32"),
        (7, "the tokens of request 0 are a int"),
        ("seven", "the tokens of request 0 are a str"),
        (torch.zeros(5, dtype=torch.int64, device="meta"), "the tokens of request 0 on meta"),
    ],
)
def test_tokens_that_do_not_fit_are_refused_by_name(device: Device, tokens: Any, message: str) -> None:
    trunk = tiny_trunk.build(device.torch_device.type)
    trunk.min_tokens = 3
    with segue.PrimeGraph(trunk, BUCKET, device=device) as prime:
        session = trunk.new_cache(32)
        with pytest.raises(segue.SegueError, match=message):
            prime.run(tokens, session)
        assert session.length == 0 and not session.kv.any()


def test_batches_that_do_not_fit_are_refused_by_name(device: Device, dense_trunk: Any) -> None:
    def fresh(count: int) -> list[Any]:
        return [dense_trunk.new_cache(16) for _ in range(count)]

    with segue.PrimeGraph(dense_trunk, BUCKET, requests=2, device=device) as prime:
        five = prompt(5, device)
        one = dense_trunk.new_cache(16)
        cases: list[tuple[Any, Any, str]] = [
            ([five, five, five], fresh(3), "3 prompts were given, and its graph takes 2"),
            ([five, five], fresh(1), "2 prompts and 1 sessions"),
            ([prompt(9, device), prompt(8, device)], fresh(2), "17 tokens are more than its bucket of 16"),
            ([five, five], [one, one], "requests 0 and 1 have the same session"),
            ([five, five], [one, None], "the session of request 1 is a NoneType"),
            ([five[:0], []], [None, None], "there are no tokens in this call"),
        ]
        for tokens, sessions, message in cases:
            with pytest.raises(segue.SegueError, match=message):
                prime.run(tokens, sessions)
        assert one.length == 0 and not one.kv.any()


def test_when_the_second_session_is_refused_the_first_is_untouched(device: Device, dense_trunk: Any) -> None:
    with segue.PrimeGraph(dense_trunk, BUCKET, requests=2, device=device) as prime:
        first, second = dense_trunk.new_cache(16), dense_trunk.new_cache(2)
        with pytest.raises(segue.SegueError, match="request 1 has room for 2 rows"):
            prime.run([prompt(5, device), prompt(6, device)], [first, second])
        assert first.length == 0 and not first.kv.any()


class ReadsHost(tiny_trunk.Dense):
    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        n = int(cu_seqlens[-1])
        return super().forward(x, cu_seqlens, cache) * n


class Counts(tiny_trunk.Dense):
    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        return super().forward(x, cu_seqlens, cache) + x.nonzero().shape[0]


class WritesOffsets(tiny_trunk.Dense):
    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        out = super().forward(x, cu_seqlens, cache)
        cu_seqlens.add_(1)
        return out


class Breaks(tiny_trunk.Dense):
    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        return segue.break_point(lambda y: y + 1)(super().forward(x, cu_seqlens, cache))


class OneRow(tiny_trunk.Dense):
    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        return super().forward(x, cu_seqlens, cache)[:1]


class NoRequests(tiny_trunk.Dense):
    def head(self, last: Tensor) -> Tensor:
        return super().head(last)[0]


class Pooled(tiny_trunk.Dense):
    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens).mean(0)


class Nothing(tiny_trunk.Dense):
    min_tokens = 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ReadsHost, r"test_refusals.py:\d+ in forward"),
        (Counts, r"test_refusals.py:\d+ in forward"),
        (WritesOffsets, "the trunk's forward writes cu_seqlens"),
        (Breaks, "the trunk's forward met 1 break points"),
        (OneRow, r"trunk.forward\(\) gave a tensor \(1, 32\) for 16 rows"),
        (NoRequests, r"trunk.head\(\) gave a tensor \(53,\) for 1 rows"),
        (Pooled, r"trunk.embed\(\) of 1 tokens gave torch.float32 \(32,\)"),
        (Nothing, "min_tokens=0 must be at least 1"),
    ],
)
def test_a_trunk_that_no_graph_can_hold_is_refused_by_name(device: Device, kind: Any, message: str) -> None:
    trunk = kind().to(device.torch_device).eval().requires_grad_(False)
    with pytest.raises(segue.SegueError, match=message):
        segue.PrimeGraph(trunk, BUCKET, device=device, cuts=[])
    with segue.PrimeGraph(tiny_trunk.build(device.torch_device.type), BUCKET, device=device) as prime:
        assert prime.run(prompt(5, device), prime.trunk.new_cache(16)).logits.isfinite().all()


def test_a_fresh_layer_whose_mode_makes_no_difference_may_be_put_into_a_trunk(device: Device, dense_trunk: Any) -> None:
    prime = segue.PrimeGraph(dense_trunk, bucket=16, device=device, cuts=[])
    dense_trunk.mlp[1][1] = torch.nn.ReLU()
    dense_trunk.norm = torch.nn.LayerNorm(32, device=device.torch_device).requires_grad_(False)
    prime.recapture()
    tokens = torch.arange(7, device=device.torch_device)
    result = prime.run(tokens, dense_trunk.new_cache(16))
    torch.testing.assert_close(result.logits, prime.reference(tokens).logits)
    dense_trunk.mlp[1][1] = torch.nn.Dropout()
    with pytest.raises(segue.SegueError, match=r"Dropout 'mlp.1.1' is in training mode"):
        prime.recapture()


def test_a_trunk_in_training_mode_is_refused(device: Device, dense_trunk: Any) -> None:
    dense_trunk.mlp[1].train()
    with pytest.raises(segue.SegueError, match=r"Sequential 'mlp.1' is in training mode"):
        segue.PrimeGraph(dense_trunk, BUCKET, device=device)


def test_an_embedding_that_changes_its_type_between_runs_is_refused(device: Device, dense_trunk: Any) -> None:
    with segue.PrimeGraph(dense_trunk, BUCKET, device=device) as prime:
        dense_trunk.tokens.half()
        with pytest.raises(segue.SegueError, match=r"gave torch.float16 \(5, 32\).*like torch.float32 \[n, 32\]"):
            prime.run(prompt(5, device), dense_trunk.new_cache(16))


def test_a_run_in_training_mode_is_refused_and_the_session_left_as_it_was(device: Device, dense_trunk: Any) -> None:
    with segue.PrimeGraph(dense_trunk, BUCKET, device=device) as prime:
        dense_trunk.mlp[1].train()
        session = dense_trunk.new_cache(16)
        with pytest.raises(segue.SegueError, match=r"prime graph of 16 rows: Sequential 'mlp.1' is in training mode"):
            prime.run(prompt(5, device), session)
        assert session.length == 0 and not session.kv.any()


def test_a_run_that_would_record_gradients_is_refused(device: Device, dense_trunk: Any) -> None:
    with segue.PrimeGraph(dense_trunk, BUCKET, device=device) as prime:
        dense_trunk.vocabulary.weight.requires_grad_(True)
        with pytest.raises(segue.SegueError, match=r"run with gradients required.*torch.inference_mode\(\)"):
            prime.run(prompt(5, device), dense_trunk.new_cache(16))
        with torch.no_grad():
            assert not prime.run(prompt(5, device), dense_trunk.new_cache(16)).logits.requires_grad


def test_what_is_no_trunk_is_refused_with_what_it_lacks(device: Device) -> None:
    with pytest.raises(segue.SegueError, match=r"a Linear is no trunk: it lacks embed\(\), new_cache\(\).*min_tokens"):
        segue.PrimeGraph(torch.nn.Linear(2, 2).eval(), BUCKET, device=device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bucket": "a"}, "bucket='a' must be a whole number"),
        ({"bucket": 16.0}, "bucket=16.0 must be"),
        ({"requests": 1.5}, "requests=1.5 must be a whole number"),
        ({"requests": True}, "requests=True must be"),
    ],
)
def test_sizes_that_are_no_whole_numbers_are_refused(device: Device, dense_trunk: Any, given: Any, message: str) -> None:
    with pytest.raises(segue.SegueError, match=message):
        segue.PrimeGraph(dense_trunk, **{"bucket": BUCKET, **given}, device=device)


class HeadReadsHost(tiny_trunk.Dense):
    def head(self, last: Tensor) -> Tensor:
        return super().head(last) * last.max().item()


@pytest.mark.parametrize(("kind", "method"), [(ReadsHost, "forward"), (Counts, "forward"), (HeadReadsHost, "head")])
def test_a_host_read_is_told_by_method_and_not_sent_into_a_break(device: Device, kind: Any, method: str) -> None:
    trunk = kind().to(device.torch_device).eval().requires_grad_(False)
    with pytest.raises(segue.SegueError, match=rf"trunk.{method}\(\), .*test_refusals.py:\d+ in {method}") as caught:
        segue.PrimeGraph(trunk, BUCKET, device=device, cuts=[])
    assert "prepare it in new_cache() or embed()" in str(caught.value) and "into a break" not in str(caught.value)


def test_segue_off_is_read_in_either_case(device: Device, dense_trunk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEGUE", "OFF")
    with segue.PrimeGraph(dense_trunk, BUCKET, device=device) as prime:
        assert prime.graphs == 0 and prime.run(prompt(5, device), dense_trunk.new_cache(16)).logits.shape == (1, 53)


@pytest.mark.parametrize(("bucket", "requests"), [(0, 1), (4, 5), (4, 0)])
def test_sizes_that_mean_nothing_are_refused(device: Device, dense_trunk: Any, bucket: int, requests: int) -> None:
    with pytest.raises(segue.SegueError, match=r"smaller than trunk.min_tokens=1|requests=\d must be from 1 to"):
        segue.PrimeGraph(dense_trunk, bucket, requests, device=device)


def test_a_graph_is_neither_made_nor_run_inside_a_capture(device: Device, dense_trunk: Any) -> None:
    five, session = prompt(5, device), dense_trunk.new_cache(16)
    prime = segue.PrimeGraph(dense_trunk, BUCKET, device=device)
    with prime, pytest.raises(segue.SegueError, match="run inside a capture"), segue.BreakableCapture(device=device):
        prime.run(five, session)
    with pytest.raises(segue.SegueError, match="inside another capture"), segue.BreakableCapture(device=device):
        segue.PrimeGraph(dense_trunk, BUCKET, device=device)


def test_a_cache_on_another_device_than_the_graph_is_refused(dense_trunk: Any, device: Device) -> None:
    if device.torch_device.type == "cpu":
        dense_trunk.to("meta")
    with pytest.raises(segue.SegueError, match=r"the trunk's cache is on .* and the graph on emulator"):
        segue.PrimeGraph(dense_trunk, BUCKET, device="emulator")
