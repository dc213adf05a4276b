"""The runner against eager: every length, long then short, lazy and explicit, over poisoned memory."""

from __future__ import annotations

import threading

import pytest
import torch

import segue
from runner.rows import Model, close, mix
from segue.errors import InputError, NoBucketError, ReplayError, SegueError, UsageError
from segue.runner import Decision, GraphRunner, Input, Ladder

LENGTHS = [16, 1, 15, 0, 8, 9, 7, 3, 4, 5, 2, 12, 16, 6, 10, 11, 13, 14, 17]


def test_the_first_call_of_a_bucket_is_warmed_the_second_captured_and_later_ones_replayed(make, model):
    runner = make(model)
    for i, n in enumerate([5, 6, 7, 8, 5]):
        x = model.x(n, i)
        assert close(runner(x), model(x))
    s = runner.stats
    assert (s.warmed, s.captured, s.replayed, s.eager) == (1, 1, 3, 0)
    assert s.buckets == (8,) and s.padding_share == (3 + 2 + 1 + 0 + 3) / 40


@pytest.mark.parametrize("order", [LENGTHS, LENGTHS[::-1], sorted(LENGTHS), sorted(LENGTHS)[::-1]])
@pytest.mark.parametrize("explicit", [True, False])
def test_every_length_equals_eager_over_poisoned_memory(make, model, order, explicit):
    runner = make(model)
    if explicit:
        runner.capture(model.x(3))
    for turn in range(3):
        for n in order:
            x = model.x(n, turn)
            runner.pool.poison()
            y = runner(x)
            assert close(y, model(x)), n
            if n <= 16:
                assert torch.equal(y, runner.reference(x)), n
    assert runner.stats.eager == 3 and dict(runner.stats.reasons) == {"no bucket fits": 3}


@pytest.mark.parametrize("buckets", [(4, 8, 16), (16, 4, 8)])
def test_capture_order_makes_no_difference(make, model, buckets):
    runner = make(model)
    for b in buckets:
        runner(model.x(b)), runner(model.x(b, 1))
    for n in LENGTHS[:-1]:
        x = model.x(n, 2)
        runner.pool.poison()
        assert torch.equal(runner(x), runner.reference(x))


def test_an_explicit_capture_leaves_only_replays(make, model):
    runner = make(model)
    summary = runner.capture(model.x(3))
    assert summary.buckets == (16, 8, 4) and summary.segments == 6 and summary.breaks == 3
    for n in LENGTHS[:-1]:
        runner(model.x(n))
    assert runner.stats.replayed == len(LENGTHS) - 1 and runner.stats.captured == 3


def test_an_explicit_capture_needs_no_example_where_shapes_and_dtypes_are_declared(make, model):
    runner = make(model, {"x": Input(0, 0.0, shape=(None, 4), dtype=torch.float32)}, [4, 8])
    runner.capture()
    assert close(runner(model.x(5)), model(model.x(5))) and runner.stats.replayed == 1


def test_an_explicit_capture_without_example_or_declared_shapes_says_what_it_lacks(make, model):
    with pytest.raises(SegueError, match=r"without an example needs shape= and dtype= of every input; 'x' lacks one"):
        make(model).capture()


def test_the_example_may_be_longer_or_shorter_than_the_bucket_and_its_rows_repeat(make, model):
    seen = []

    @segue.break_point
    def look(x):
        seen.append((x.shape[0], x.clone()))
        return x

    for n in (3, 40):
        seen.clear()
        make(lambda x: look(x * 1), {"x": Input(0, 0.0)}, [8]).capture(model.x(n))
        rows, values = seen[-1]
        assert rows == 8 and torch.equal(values, model.x(n)[torch.arange(8) % n])


def test_with_a_plain_context_only_the_examples_rows_are_real(make, model):
    seen = []

    @segue.break_point(trim=("x",))
    def look(x):
        seen.append((x.shape[0], segue.current_forward_ctx()))
        return x

    def fn(x):
        return look(x * 1)

    make(fn, {"x": Input(0, 0.0)}, [8, 2]).capture(model.x(3), ctx="plain")
    assert seen == [(3, "plain")] * 2 + [(2, "plain")] * 2
    seen.clear()
    make(fn, {"x": Input(0, 0.0)}, [8, 2], capture_ctx=lambda b: f"for {b}").capture(model.x(3))
    assert seen == [(8, "for 8")] * 2 + [(2, "for 2")] * 2


def test_breaks_see_the_context_of_their_call(make, model):
    @segue.break_point(trim=("x",))
    def scale(x):
        return x * segue.current_forward_ctx()["by"]

    def fn(x, ctx=None):
        return scale(x) + 1

    runner = make(fn, {"x": Input(0, 0.0)}, [8])
    for by in (2.0, 3.0, 5.0, 7.0):
        x = model.x(5)
        assert close(runner(x, ctx={"by": by}), x * by + 1)
        with segue.active_forward({"by": by}):
            assert close(runner(x), x * by + 1)


def test_optional_inputs_and_flags_are_variants_and_each_equals_eager(make, model):
    def fn(x, bias=None, double=False):
        y = model(x, bias)
        return y * 2 if double else y

    runner = make(fn)
    bias = torch.ones(4, device=model.device)
    for n in (5, 6, 7):
        for b in (None, bias):
            for double in (False, True):
                x = model.x(n)
                assert close(runner(x, bias=b, double=double), fn(x, b, double))
    assert (runner.stats.warmed, runner.stats.captured, runner.stats.replayed) == (4, 4, 4)
    assert close(runner(model.x(5), double=1), fn(model.x(5), None, 1))
    assert dict(runner.stats.reasons) == {"too many variants": 1}, (
        "1 is not True: a graph may have branched on the type"
    )


def test_a_fixed_input_is_refreshed_at_every_replay(make, model):
    runner = make(model)
    runner.capture(model.x(3), bias=torch.zeros(4, device=model.device))
    for i in range(3):
        bias = torch.full((4,), float(i), device=model.device)
        assert close(runner(model.x(3), bias), model(model.x(3), bias))


def test_too_many_tokens_run_eager_and_are_counted_and_strict_raises(make, model):
    runner = make(model)
    assert close(runner(model.x(17)), model(model.x(17)))
    assert dict(runner.stats.reasons) == {"no bucket fits": 1}
    strict = make(model, strict=True)
    with pytest.raises(NoBucketError, match=r"strict=True.*no bucket fits.*17 tokens.*largest bucket is 16"):
        strict(model.x(17))
    assert close(strict(model.x(5)), model(model.x(5)))


@pytest.mark.parametrize("limit, eager", [(3, [0, 4, 9, 12]), (0.5, [0, 1]), (0, [0, 1, 2, 3, 5])])
def test_calls_with_too_much_padding_run_eager(make, model, limit, eager):
    runner = make(model, max_padding=limit)
    for n in eager:
        if n == 4 or (limit == 0.5 and n == 1):
            continue
        assert close(runner(model.x(n)), model(model.x(n)))
        assert runner.admit(n) == Decision(None, "eager", "max_padding"), n
    assert set(runner.stats.reasons) == {"max_padding"}


def test_a_decision_from_another_rank_is_obeyed(make, model):
    runner = make(model)
    runner.capture(model.x(3))
    d = runner.admit(13)
    assert d.bucket == 16 and d.strategy == "breakable"
    assert close(runner(model.x(3), decision=d), model(model.x(3)))
    assert runner.stats.padding_share == 13 / 16
    with pytest.raises(InputError, match=r"holds fewer rows than the call's 5 tokens"):
        runner(model.x(5), decision=runner.admit(2))
    with pytest.raises(UsageError, match=r"names a bucket or strategy this runner doesn't have"):
        runner(model.x(5), decision=Decision(64, "breakable", ""))


def test_outputs_are_owned_normal_tensors_and_survive_later_replays(make, model):
    runner = make(model)
    kept = []
    for i in range(4):
        y = runner(model.x(5, i))
        assert not y.is_inference() and y.is_contiguous()
        kept.append(y)
    for _ in range(2):
        runner(model.x(8)), runner.pool.poison()
    for i, y in enumerate(kept):
        assert close(y, model(model.x(5, i)))
        y.add_(1)


def test_an_eager_answer_is_a_normal_tensor_too_and_inference_mode_is_kept(make, model):
    runner = make(model)
    assert not runner(model.x(17)).is_inference()
    with torch.inference_mode():
        for _ in range(3):
            assert close(runner(model.x(5)), model(model.x(5)))
    x = model.x(5)
    assert close(runner(x), model(x))


def test_a_lease_is_zero_copy_and_ends_when_the_pool_replays_again(make, model):
    runner = make(model, outputs="lease")
    first, second = runner(model.x(5)), runner(model.x(6))
    third = runner(model.x(7))
    assert close(third.value, model(model.x(7)))
    assert close(first.value, model(model.x(5))) and close(second.value, model(model.x(6))), "not from a replay: owned"
    runner(model.x(5))
    with pytest.raises(ReplayError, match=r"lease has ended.*Read lease.value"):
        _ = third.value


def test_everything_is_eager_with_segue_off(make, model, monkeypatch):
    monkeypatch.setenv("SEGUE", "off")
    runner = make(model, strict=True)
    runner.capture(model.x(3))
    for _ in range(3):
        assert close(runner(model.x(5)), model(model.x(5)))
    assert dict(runner.stats.reasons) == {"SEGUE=off in the environment": 3} and runner.stats.captured == 0
    assert "SEGUE=off" in runner.explain(5)


def test_a_closed_runner_refuses_calls_and_closing_twice_is_harmless(make, model):
    with make(model) as runner:
        runner.capture(model.x(3))
    runner.close()
    with pytest.raises(UsageError, match=r"runner was closed"):
        runner(model.x(3))


def test_closing_one_runner_leaves_another_on_the_same_pool_working(make, model, device):
    pool = device.new_pool()
    one, two = make(model, pool=pool), make(model, pool=pool)
    one.capture(model.x(3)), two.capture(model.x(3))
    one.close()
    pool.poison()
    for n in LENGTHS[:-1]:
        assert torch.equal(two(model.x(n)), two.reference(model.x(n)))


def test_a_replaced_tensor_is_noticed_before_anything_runs_and_recapture_mends_it(make, model):
    ran = []

    @segue.break_point(trim=("x",))
    def note(x):
        ran.append(1)
        return x

    runner = make(lambda x: note(x @ model.weight) + 0, {"x": Input(0, 0.0)}, [8])
    runner.capture(model.x(3))
    ran.clear()
    model.weight.mul_(2)
    assert close(runner(model.x(5)), model.x(5) @ model.weight), "an in-place update simply works"
    ran.clear()
    model.weight = model.weight + 1
    with pytest.raises(ReplayError, match=r"weight"):
        runner(model.x(5))
    assert not ran
    runner.recapture(model.x(3))
    assert close(runner(model.x(5)), model.x(5) @ model.weight)
    runner.recapture()
    assert runner.stats.buckets == ()
    assert close(runner(model.x(5)), model.x(5) @ model.weight)


def wrong_in_threads(runner, model, lengths):
    """The lengths at which three threads, which call the runner at once, get something else than eager."""
    wrong = []

    def work(seed):
        for n in lengths:
            x = model.x(n, seed)
            if not close(runner(x), model(x)):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return wrong


def test_threads_take_turns(make, model):
    runner = make(model)
    runner.capture(model.x(3))
    assert not wrong_in_threads(runner, model, LENGTHS[:-1] * 3)


def test_threads_may_warm_and_capture_at_once(make, model):
    runner = make(model)
    assert not wrong_in_threads(runner, model, LENGTHS[:-1])
    assert runner.stats.captured == 3


def test_a_runner_inside_a_break_of_another_never_captures_there(make, model, device):
    inner = make(model, pool=device.new_pool())
    through = segue.break_point(lambda x: inner(x))
    outer = make(lambda x: through(x * 2) + 1, {"x": Input(0, 0.0)}, [8])
    for i in range(4):
        x = model.x(8, i)
        assert close(outer(x), model(x * 2) + 1)
    assert outer.stats.captured == 1 and inner.stats.captured == 0
    inner(model.x(8))
    x = model.x(8, 9)
    assert close(outer(x), model(x * 2) + 1) and inner.stats.replayed == 1


def test_buffers_are_shared_between_buckets_and_stale_rows_never_show(make, model):
    runner = make(lambda x: x.sum(0, keepdim=True) + 0 * x, {"x": Input(0, 0.0)})
    runner.capture(model.x(16))
    for n in (16, 2, 9, 1, 4, 16, 3, 15, 5):
        x = model.x(n, n)
        assert close(runner(x), x.sum(0, keepdim=True) + 0 * x), n


def test_a_forward_that_writes_into_its_input_finds_a_clean_tail_every_time(make, model):
    def fn(x):
        x.add_(1)
        return x.sum(0, keepdim=True) + 0 * x

    runner = make(fn, {"x": Input(0, 0.0)}, [8])
    for i in range(6):
        x = model.x(3 + i % 3, i)
        padded = torch.cat([x, torch.zeros(8 - len(x), 4, device=model.device)])
        assert close(runner(x), fn(padded)[: len(x)])
        assert torch.equal(x, padded[: len(x)]), "the caller's own tensor is written, as eager does"


def test_any_output_structure_comes_back_as_eager_gives_it(make, model):
    def fn(x):
        y = model(x)
        return {"a": y, "b": (None, [y + 1, x.new_ones(3)]), "n": 7}

    runner = make(fn, {"x": Input(0, 0.0)}, [8])
    for i in range(4):
        x = model.x(5, i)
        got, want = runner(x), fn(x)
        assert got.keys() == want.keys() and got["n"] == 7 and got["b"][0] is None
        assert close(got["a"], want["a"]) and close(got["b"][1][0], want["b"][1][0]) and got["b"][1][1].shape == (3,)


def test_ladders_may_be_given_as_ladders(make, model):
    runner = make(model, buckets=Ladder.geometric(16))
    assert list(runner.ladder) == [1, 2, 4, 8, 16]
    assert runner.explain(5) == "5 tokens: bucket 8, 3 padded rows (38%), breakable; not captured yet"
    runner(model.x(5)), runner(model.x(5))
    assert runner.explain(5).endswith("breakable; captured") and runner.explain(3).endswith("not captured yet")
    assert runner.explain(17) == "17 tokens: eager, no bucket fits: the largest bucket is 16"


def test_the_device_is_that_of_the_module_or_of_the_first_call(device):
    module = torch.nn.Linear(4, 4).to(device.torch_device).eval().requires_grad_(False)
    runner = GraphRunner(module, {"input": Input(0, 0.0)}, [4], progress=False, device=device)
    x = torch.randn(3, 4, device=device.torch_device)
    for _ in range(3):
        assert close(runner(x), module(x))


def test_mix_is_a_plain_call_outside_a_capture(model):
    assert isinstance(model, Model) and close(mix(model.x(3)), model.x(3) + model.x(3).mean(0))
