"""A prime graph gives what the trunk gives eagerly, leaves it in the session, and leaves everything else alone."""

from __future__ import annotations

import copy
import gc
import queue
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from prime.prompts import prompt
from segue.check import tiny_trunk
from segue.check.compare import difference, poison
from segue.devices import Device
from segue.prime.reference import reference

BUCKET = 32


def _same(got: Tensor, want: Tensor) -> None:
    assert difference(got, want) is None


def _check(prime: segue.PrimeGraph, trunk: Any, tokens: Tensor, capacity: int = 48) -> None:
    """Run over poisoned memory and compare with the reference: outputs, the state, and what lies past it."""
    n = tokens.shape[0]
    session, want = trunk.new_cache(capacity), prime.reference(tokens)
    for value in (*trunk.state(session).values(), *trunk.state(prime.scratch).values()):
        poison(value.tensor)
    prime.pool.poison()
    got = prime.run(tokens, session)
    _same(got.logits, want.logits)
    _same(got.hidden, want.hidden)
    assert trunk.get_length(session) == n
    theirs = trunk.state(want.cache)
    for name, value in trunk.state(session).items():
        if isinstance(value, segue.Whole):
            _same(value.tensor, theirs[name].tensor)
            continue
        _same(value.tensor.narrow(value.dim, 0, n), theirs[name].tensor.narrow(value.dim, 0, n))
        past = value.tensor.narrow(value.dim, n, capacity - n).clone()
        poison(untouched := past.clone())
        _same(past, untouched)


def test_a_run_equals_the_eager_trunk_at_every_length_long_then_short(device: Device, trunk: Any) -> None:
    with segue.PrimeGraph(trunk, BUCKET, device=device) as prime:
        assert prime.graphs == 1 or device.traits.timing
        for n in (1, 31, 2, 32, 17, 3, 32, 1):
            _check(prime, trunk, prompt(n, device, seed=n % 3))


def test_a_session_may_be_as_short_as_the_prompt_or_longer_than_the_bucket(device: Device, trunk: Any) -> None:
    with segue.PrimeGraph(trunk, BUCKET, device=device) as prime:
        _check(prime, trunk, prompt(5, device), capacity=5)
        _check(prime, trunk, prompt(32, device), capacity=100)


@pytest.mark.parametrize("buckets", [(64, 32), (32, 64)])
def test_graphs_of_several_buckets_share_a_pool_in_any_order(device: Device, trunk: Any, buckets: tuple[int, int]) -> None:
    pool = device.new_pool()
    graphs = {b: segue.PrimeGraph(trunk, b, pool=pool) for b in buckets}
    for n, b in ((30, 32), (60, 64), (3, 32), (33, 64), (32, 32), (3, 64)):
        _check(graphs[b], trunk, prompt(n, device), capacity=80)
    graphs[buckets[0]].close()
    _check(graphs[buckets[1]], trunk, prompt(20, device), capacity=80)
    graphs[buckets[1]].close()


def test_what_a_run_returned_is_the_callers_own(device: Device, trunk: Any) -> None:
    with segue.PrimeGraph(trunk, BUCKET, device=device) as prime:
        first = prime.run(prompt(7, device), trunk.new_cache(32))
        kept = first.logits.clone(), first.hidden.clone()
        prime.run(prompt(30, device), trunk.new_cache(32))
        prime.pool.poison()
        assert torch.equal(first.logits, kept[0]) and torch.equal(first.hidden, kept[1])
        assert not first.logits.is_inference()


def test_packed_prompts_are_each_copied_into_their_own_session(device: Device, trunk: Any) -> None:
    with segue.PrimeGraph(trunk, BUCKET, requests=3, device=device) as prime:
        for lengths in ((10, 0, 21), (1, 1, 1), (32, 0, 0), (4, 28), (9,)):
            prompts = [prompt(n, device, seed=r) for r, n in enumerate(lengths)]
            sessions = [trunk.new_cache(40) if n else None for n in lengths]
            got, want = prime.run(prompts, sessions), prime.reference(prompts)
            assert got.logits.shape[0] == got.hidden.shape[0] == len(lengths)
            theirs = trunk.state(want.cache)
            for r, (session, n) in enumerate(zip(sessions, lengths, strict=True)):
                if session is None:
                    assert not got.logits[r].any() and not got.hidden[r].any()
                    continue
                _same(got.logits[r], want.logits[r])
                assert trunk.get_length(session) == n
                for name, value in trunk.state(session).items():
                    if isinstance(value, segue.Whole):
                        _same(value.tensor, theirs[name].tensor[r : r + 1])
                    else:
                        rows = theirs[name].tensor.narrow(value.dim, want.offsets[r], n)
                        _same(value.tensor.narrow(value.dim, 0, n), rows)


@pytest.mark.parametrize("lengths", [(10, 0, 21), (32,), (1, 1, 1), (7,)])
def test_all_real_rows_are_given_on_request(device: Device, trunk: Any, lengths: tuple[int, ...]) -> None:
    with segue.PrimeGraph(trunk, BUCKET, requests=3, device=device) as prime:
        prime.run([prompt(32, device)], [trunk.new_cache(40)], rows="all")
        prompts = [prompt(n, device, seed=r) for r, n in enumerate(lengths)]
        sessions = [trunk.new_cache(40) if n else None for n in lengths]
        for value in trunk.state(prime.scratch).values():
            poison(value.tensor)
        prime.pool.poison()
        got, want = prime.run(prompts, sessions, rows="all"), prime.reference(prompts, rows="all")
        assert got.hidden.shape[0] == got.logits.shape[0] == sum(lengths) and not got.hidden.is_inference()
        _same(got.hidden, want.hidden)
        _same(got.logits, want.logits)
        kept, start = got.hidden.clone(), 0
        last = prime.reference(prompts)
        for r, n in enumerate(lengths):
            if n:
                assert trunk.get_length(sessions[r]) == n
                _same(got.hidden[start + n - 1], last.hidden[r])
                torch.testing.assert_close(got.logits[start + n - 1], last.logits[r], rtol=1e-4, atol=1e-4)
                alone = reference(trunk, prime.batch(prompts[r]), n, 1, "alone", every=True)  # no padding at all
                torch.testing.assert_close(got.hidden[start : start + n], alone.hidden, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(got.logits[start : start + n], alone.logits, rtol=1e-4, atol=1e-4)
            start += n
        prime.run([prompt(30, device)], [trunk.new_cache(40)])
        assert torch.equal(got.hidden, kept)
        with pytest.raises(segue.UsageError, match='rows=3 is neither "last" nor "all"'):
            prime.run(prompts, sessions, rows=3)  # type: ignore[arg-type]


def test_a_packed_prompt_gets_what_it_gets_alone_up_to_rounding(device: Device, trunk: Any) -> None:
    with segue.PrimeGraph(trunk, BUCKET, requests=3, device=device) as prime:
        prompts = [prompt(n, device, seed=n) for n in (5, 11, 13)]
        together = prime.run(prompts, [trunk.new_cache(40) for _ in prompts])
        for r, tokens in enumerate(prompts):
            alone = prime.run([tokens], [trunk.new_cache(40)])
            torch.testing.assert_close(together.logits[r : r + 1], alone.logits, rtol=1e-4, atol=1e-4)


def test_tokens_come_as_tensors_of_any_integer_type_as_numbers_and_from_the_host(device: Device, dense_trunk: Any) -> None:
    with segue.PrimeGraph(dense_trunk, BUCKET, device=device) as prime:
        tokens = prompt(6, device)
        want = prime.reference(tokens).logits
        for given in (tokens.int(), tokens[None], tokens.cpu(), tokens.tolist(), tuple(tokens.tolist())):
            assert torch.equal(prime.run(given, dense_trunk.new_cache(8)).logits, want)


class Scaling(tiny_trunk.Dense):
    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        x.add_(1)
        return super().forward(x, cu_seqlens, cache)


def test_a_trunk_that_writes_its_input_meets_fresh_padding_at_every_run(device: Device) -> None:
    trunk = Scaling().to(device.torch_device).eval().requires_grad_(False)
    with segue.PrimeGraph(trunk, BUCKET, device=device) as prime:
        for n in (20, 4, 4, 31):
            _check(prime, trunk, prompt(n, device))
            assert bool((prime._bound.inputs.x[n:] == 1).all())


class Memo(tiny_trunk.Dense):
    """Uploads a table of positions and keeps only the latest: a known drift, as nobody else holds what is baked."""

    table: list[Tensor]

    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        if not self.table or self.table[0].shape[0] != x.shape[0]:
            self.table[:] = [torch.arange(x.shape[0], device=x.device) * 0.125]
        return super().forward(x + self.table[0][:, None], cu_seqlens, cache)


def test_a_table_that_the_trunk_let_go_of_after_the_capture_stays_alive_and_right(device: Device) -> None:
    trunk = Memo().to(device.torch_device).eval().requires_grad_(False)
    trunk.table = []
    with segue.PrimeGraph(trunk, BUCKET, device=device) as prime:
        tokens = prompt(9, device)
        want = prime.reference(tokens).logits
        table, trunk.table = trunk.table, []
        with pytest.raises(segue.SegueError, match=r"Prime\.trunk\.table"):
            prime.run(tokens, trunk.new_cache(16))
        trunk.table = table
        assert torch.equal(prime.run(tokens, trunk.new_cache(16)).logits, want)


def test_memory_that_only_the_graph_holds_is_not_reused(device: Device) -> None:
    class Hidden(tiny_trunk.Dense):
        def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
            return super().forward(x + tables.get(), cu_seqlens, cache)

    trunk = Hidden().to(device.torch_device).eval().requires_grad_(False)
    one = torch.full((BUCKET, 32), 0.5, device=device.torch_device)
    tables: queue.SimpleQueue[Tensor] = queue.SimpleQueue()  # whose items a capture can't see
    for _ in range(2):  # for the warm-up and the capture
        tables.put(one.clone())
    prime = segue.PrimeGraph(trunk, BUCKET, device=device, cuts=[])
    assert tables.empty()
    gc.collect()
    churn = [torch.full_like(one, float("nan")) for _ in range(32)]
    tables.put(one)
    want = prime.reference(tokens := prompt(9, device)).logits
    assert torch.equal(prime.run(tokens, trunk.new_cache(16)).logits, want)
    assert all(t.isnan().all() for t in churn)
    prime.close()


def test_weights_updated_in_place_count_and_re_pointed_ones_are_named(device: Device, dense_trunk: Any) -> None:
    with segue.PrimeGraph(dense_trunk, BUCKET, device=device) as prime:
        weight = dense_trunk.merge[1].weight
        weight.mul_(3)
        _check(prime, dense_trunk, prompt(9, device))
        weight.data = weight.data.clone()
        session = dense_trunk.new_cache(16)
        with pytest.raises(segue.SegueError, match=r"trunk.*merge\.1\.weight"):
            prime.run(prompt(9, device), session)
        assert not session.kv.any() and session.length == 0


def test_a_scratch_cache_that_was_re_pointed_is_named(device: Device, dense_trunk: Any) -> None:
    with segue.PrimeGraph(dense_trunk, BUCKET, device=device) as prime:
        prime.scratch.kv = prime.scratch.kv.clone()
        with pytest.raises(segue.SegueError, match=r"scratch\.kv"):
            prime.run(prompt(9, device), dense_trunk.new_cache(16))


def test_segue_off_runs_eager_with_the_same_results(device: Device, trunk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEGUE", "off")
    with segue.PrimeGraph(trunk, BUCKET, device=device) as prime:
        assert prime.graphs == 0 and prime.capture is None
        for n in (30, 4):
            _check(prime, trunk, prompt(n, device))


def test_runs_of_two_threads_take_turns(device: Device, trunk: Any) -> None:
    with segue.PrimeGraph(trunk, BUCKET, device=device) as prime:
        wanted = {n: prime.reference(prompt(n, device)).logits for n in (3, 30)}
        wrong: list[int] = []

        def work(n: int) -> None:
            for _ in range(5):
                if not torch.equal(prime.run(prompt(n, device), trunk.new_cache(32)).logits, wanted[n]):
                    wrong.append(n)

        threads = [threading.Thread(target=work, args=(n,)) for n in wanted]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong


def test_a_closed_graph_refuses_and_leaves_the_session_alone(device: Device, dense_trunk: Any) -> None:
    prime = segue.PrimeGraph(dense_trunk, BUCKET, device=device)
    prime.close()
    prime.close()
    session = dense_trunk.new_cache(16)
    with pytest.raises(segue.SegueError, match=r"prime graph of 32 rows can't be replayed: it was closed"):
        prime.run(prompt(9, device), session)
    assert session.length == 0 and not session.kv.any()


def test_recapture_takes_in_weights_modules_and_caches_that_were_re_pointed(device: Device, dense_trunk: Any) -> None:
    with segue.PrimeGraph(dense_trunk, BUCKET, device=device, cuts=[1]) as prime:
        before, scratch = prime.capture, prime.scratch
        weight = dense_trunk.merge[1].weight
        weight.data = weight.data * 2
        prime.scratch.kv = prime.scratch.kv.clone()
        with pytest.raises(segue.SegueError, match=r"other memory than at capture.*call recapture\(\) on the prime graph of 32"):
            prime.run(prompt(9, device), dense_trunk.new_cache(16))
        prime.recapture()
        assert prime.capture is not before and prime.scratch is not scratch and prime.cuts == (1,) and prime.graphs == 2
        for n in (9, 32, 1):
            _check(prime, dense_trunk, prompt(n, device))
        dense_trunk.mlp[1] = copy.deepcopy(dense_trunk.mlp[1])
        with pytest.raises(segue.SegueError, match=r"mlp\.1 was replaced since the capture.*call recapture\(\)"):
            prime.run(prompt(9, device), dense_trunk.new_cache(16))
        prime.recapture()
        _check(prime, dense_trunk, prompt(20, device))


def test_a_recapture_that_fails_leaves_the_graph_as_it_was(device: Device, dense_trunk: Any) -> None:
    with segue.PrimeGraph(dense_trunk, BUCKET, device=device) as prime:
        before = prime.capture
        dense_trunk.mlp[1].train()
        with pytest.raises(segue.SegueError, match=r"Sequential 'mlp.1' is in training mode"):
            prime.recapture()
        dense_trunk.mlp[1].eval()
        dense_trunk.head = lambda last: last * last.max().item()
        with pytest.raises(segue.SegueError, match="can't be in a graph"):
            prime.recapture()
        del dense_trunk.head
        assert prime.capture is before
        _check(prime, dense_trunk, prompt(9, device))


def test_a_closed_graph_and_one_inside_a_capture_refuse_to_recapture(device: Device, dense_trunk: Any) -> None:
    prime = segue.PrimeGraph(dense_trunk, BUCKET, device=device)
    with pytest.raises(segue.SegueError, match="inside another capture"), segue.BreakableCapture(device=device):
        prime.recapture()
    prime.close()
    with pytest.raises(segue.SegueError, match=r"it was closed, so it can't be recaptured. Make a new PrimeGraph"):
        prime.recapture()


def test_a_trunk_is_warmed_up_as_often_as_is_asked_for(device: Device, dense_trunk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    norm = type(dense_trunk.norm).forward
    monkeypatch.setattr(
        type(dense_trunk.norm), "forward", lambda self, x: (runs.append(segue.is_breakable_capture_active()), norm(self, x))[1]
    )
    with segue.PrimeGraph(dense_trunk, BUCKET, device=device, cuts=[], warmups=3) as prime:
        assert runs == [False, False, False, True]
        _check(prime, dense_trunk, prompt(9, device))
    with pytest.raises(segue.UsageError, match="warmups=0 must be at least 1"):
        segue.PrimeGraph(dense_trunk, BUCKET, device=device, warmups=0)
