"""Buffers: what a call leaves in them is the call's own rows and padding, whatever was there before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue import _torch
from segue.runner.inputs import Input, Leaf, Spec
from segue.runner.staging import Buffer, Stage

CPU = torch.device("cpu")


def buffer(declared: Input, like: torch.Tensor, capacity: int = 16) -> Buffer:
    leaf = Leaf("x", 0, (), declared)
    return Buffer(leaf, leaf.learn(like, CPU), capacity, CPU)


calls = st.lists(st.sampled_from([4, 8, 16]).flatmap(lambda b: st.tuples(st.just(b), st.integers(0, b))), max_size=12)


@settings(max_examples=300, deadline=None)
@given(calls, st.sampled_from([0.0, -7.0]))
def test_after_any_history_a_bucket_holds_the_call_and_padding(history, pad):
    b = buffer(Input(0, pad), torch.zeros(1, 2))
    stages = {rows: Stage([b], rows, -1) for rows in (4, 8, 16)}
    for i, (rows, n) in enumerate(history):
        x = torch.full((n, 2), 100.0 + i)
        stages[rows].fill([x], n, -1)
        want = torch.full((rows, 2), pad)
        want[:n] = x
        assert torch.equal(stages[rows].static[0], want)


@pytest.mark.parametrize("rows", [300, 600])
def test_tails_of_any_length_are_padded(rows):
    x, ids = buffer(Input(0, 7), torch.zeros(1, 2), 600), buffer(Input(0, -1), torch.zeros(1, dtype=torch.int64), 600)
    stage = Stage([x, ids], rows, -1)
    stage.fill([torch.ones(rows, 2), torch.ones(rows, dtype=torch.int64)], rows, -1)
    for n in (rows - 1, rows - 256, rows - 257, 3, 0, 5, 2):
        stage.fill([torch.ones(n, 2), torch.ones(n, dtype=torch.int64)], n, -1)
        assert stage.static[0][:n].eq(1).all() and stage.static[0][n:].eq(7).all()
        assert stage.static[1][:n].eq(1).all() and stage.static[1][n:].eq(-1).all()


def test_a_tail_is_padded_again_only_where_an_older_call_wrote():
    b = buffer(Input(0, 0), torch.zeros(1, 2))
    b.claim(8, 8)
    assert b.claim(3, 8) == (3, 8)
    begin, end = b.claim(3, 8)
    assert begin >= end
    b.claim(12, 16)
    assert b.claim(5, 8) == (5, 8)
    begin, end = b.claim(5, 8)
    assert begin >= end, "rows 8 to 12 are still dirty, but lie outside the bucket"
    assert b.claim(5, 16) == (8, 12)


def test_a_break_that_writes_into_a_buffer_makes_its_tail_dirty():
    b = buffer(Input(0, 0), torch.zeros(1, 2))
    stage = Stage([b], 8, -1)
    stage.fill([torch.ones(3, 2)], 3, -1)
    stage.static[0].add_(5)
    stage.fill([torch.ones(3, 2)], 3, -1)
    assert stage.static[0][3:].eq(0).all()


def test_a_segment_that_writes_into_a_buffer_costs_it_the_whole_tail_every_time():
    b = buffer(Input(0, 0), torch.zeros(1, 2))
    b.written_by_graph()
    assert b.claim(3, 8) == (3, 8) and b.claim(3, 8) == (3, 8)


@pytest.mark.parametrize("dim, shape", [(1, (1, 3, 4)), (1, (2, 3, 4)), (-1, (2, 3)), (2, (1, 1, 3))])
def test_tokens_may_lie_along_any_dimension(dim, shape):
    declared = Input(dim, 9)
    for rows in ((8, 5), (8, 2), (4, 3), (8, 1)):
        b = buffer(declared, torch.zeros(shape))
        stage, small = Stage([b], 8, -1), Stage([b], 4, -1)
        for bucket, n in (rows, (4, 4), (8, 2)):
            size = list(shape)
            size[dim] = n
            x = torch.randn(size)
            used = stage if bucket == 8 else small
            used.fill([x], n, -1)
            assert used.static[0].is_contiguous()
            assert torch.equal(used.static[0].narrow(dim, 0, n), x)
            assert used.static[0].narrow(dim, n, bucket - n).eq(9).all()


def test_edge_padding_repeats_the_last_real_row():
    leaf = Leaf("cu", 0, (), Input(request_dim=0, extra=1, pad="edge"))
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    b = Buffer(leaf, leaf.learn(cu, CPU), 9, CPU)
    stage = Stage([b], 16, 8)
    stage.fill([torch.arange(9, dtype=torch.int32)], 16, 8)
    stage.fill([cu], 5, 2)
    assert stage.static[0].tolist() == [0, 3, 5, 5, 5, 5, 5, 5, 5]
    assert stage.padded([cu], 5, 2)[0].tolist() == stage.static[0].tolist()


def test_absent_inputs_have_no_buffer_and_fixed_ones_are_copied_whole():
    bias = Buffer(Leaf("bias", 1, (), Input()), Spec(torch.float32, CPU, (2, 2), None), 1, CPU)
    stage = Stage([buffer(Input(0, 0), torch.zeros(1, 2)), None, bias], 4, -1)
    stage.fill([torch.ones(2, 2), None, torch.eye(2)], 2, -1)
    assert stage.static[1] is None and torch.equal(stage.static[2], torch.eye(2))


def test_a_failed_copy_leaves_nothing_believed_clean():
    b = buffer(Input(0, 0), torch.zeros(1, 2))
    stage = Stage([b], 8, -1)
    stage.fill([torch.ones(8, 2)], 8, -1)
    with pytest.raises(RuntimeError):
        stage.fill([torch.ones(5, 3)], 2, -1)
    stage.fill([torch.ones(2, 2)], 2, -1)
    assert stage.static[0][2:].eq(0).all()


def test_buffers_can_be_filled_in_and_outside_inference_mode():
    stage = Stage([buffer(Input(0, 0), torch.zeros(1, 2))], 4, -1)
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            stage.fill([torch.ones(3, 2)], 3, -1)
    assert not stage.static[0].is_inference()


lengths = st.sampled_from([0, 2, 2, 5, 8])  # few, so that many calls are like the one before
fills = st.tuples(st.sampled_from(["fill", "fill", "fill", "fail"]), st.sampled_from(["x", "all", "wide"]), lengths)
writes = st.tuples(st.just("write"), st.sampled_from(["x", "y", "ids", "edge"]), st.just(0))


@settings(max_examples=400, deadline=None)
@given(st.lists(fills | writes, max_size=12), st.booleans())
def test_calls_like_the_last_one_leave_the_same_whoever_was_there_between(history, inference):
    pads = {"x": -7.0, "y": 3.0, "ids": -1}
    made = {
        "x": buffer(Input(0, pads["x"]), torch.zeros(1, 2)),
        "y": buffer(Input(0, pads["y"]), torch.zeros(1, 2)),
        "ids": buffer(Input(0, pads["ids"]), torch.zeros(1, dtype=torch.int64)),
    }
    x, y, ids = made.values()
    made["edge"] = edge = buffer(Input(0, "edge"), torch.zeros(1, dtype=torch.int32))
    stages = {
        "x": Stage([x, None, None, None], 8, -1),
        "all": Stage([x, y, ids, None], 8, -1),
        "wide": Stage([x, y, ids, edge], 16, -1),
    }
    with torch.inference_mode(inference):
        for i, (what, who, n) in enumerate(history, 1):
            if what == "write":
                made[who].flat.fill_(50)  # by a break
                continue
            stage = stages[who]
            rows = [torch.full((n, 2), 100.0 + i), torch.full((n, 2), -100.0 - i), torch.full((n,), i), torch.arange(n).int() + i]
            given = [t if view is not None else None for t, view in zip(rows, stage.static, strict=True)]
            if what == "fail":  # in the middle: x or y has been written by then
                bad = 0 if who == "x" else 1
                given[bad] = torch.ones(n + 1, 3)
                with pytest.raises(RuntimeError):
                    stage.fill(given, n, -1)
                continue
            stage.fill(given, n, -1)
            for t, view, pad in zip(given, stage.static, (*pads.values(), None), strict=True):
                if view is not None:
                    tail = pad if pad is not None else int(t[-1]) if n else 0
                    assert torch.equal(view[:n], t) and view[n:].eq(tail).all()


def test_a_segment_that_writes_into_a_buffer_leaves_no_call_like_the_last_one():
    b = buffer(Input(0, 0), torch.zeros(1, 2))
    stage = Stage([b], 8, -1)
    stage.fill([torch.ones(3, 2)], 3, -1)
    stage.wrote([b.flat])
    for _ in range(2):
        b.flat.data[:] = 5  # as a graph does, without a trace in the version
        stage.fill([torch.ones(3, 2)], 3, -1)
        assert stage.static[0][3:].eq(0).all()


def test_a_fill_that_failed_half_way_is_known_to_all_stages_of_its_buffers():
    b, other = buffer(Input(0, 0), torch.zeros(1, 2)), buffer(Input(0, 0), torch.zeros(1, 2))
    short, long = Stage([b, other], 8, -1), Stage([b, other], 16, -1)
    short.fill([torch.ones(3, 2)] * 2, 3, -1)
    written = b.flat.data  # the half that was done shows in no version, as in a kernel that the device gave up

    def copy(destinations, sources):
        written[: len(written) // 2] = 9
        raise RuntimeError("out of memory")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(_torch, "foreach_copy", copy)
        long.fill([torch.ones(8, 2)] * 2, 8, -1)
    short.fill([torch.ones(3, 2)] * 2, 3, -1)
    assert short.static[0][:3].eq(1).all() and short.static[0][3:].eq(0).all()


@pytest.mark.cuda
def test_cpu_inputs_may_be_overwritten_as_soon_as_the_call_returns():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from segue.runner import GraphRunner

    heavy = torch.randn(2048, 2048, device="cuda")

    def fn(x):
        y = x
        for _ in range(20):
            y = y @ heavy * 1e-3
        return x * 2 + 0 * y

    runner = GraphRunner(fn, {"x": Input(0, 0.0)}, [64], device="cuda", progress=False)
    for pin in (False, True):
        x = torch.empty(50, 2048, pin_memory=pin)
        answers = []
        for i in range(6):
            x.fill_(i)
            answers.append(runner(x))
            x.fill_(-1)
        assert [a[0, 0].item() for a in answers] == [0, 2, 4, 6, 8, 10]
