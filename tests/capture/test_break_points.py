"""Breaks: what they see, what they may return, and that a replay equals eager whatever the memory held before."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import segue
from segue.capture import reference_frame
from segue.devices import Device

pytestmark = pytest.mark.usefixtures("inference")


@segue.break_point
def double(y: Tensor) -> Tensor:
    return y * 2


@segue.break_point(trim=("x",))
def row_mix(x: Tensor) -> Tensor:
    """Every row depends on every valid row, so a stale or padded one shows everywhere."""
    return x + x.sum(0, keepdim=True)


def test_a_break_sees_real_values_while_the_capture_is_recorded(device: Device) -> None:
    seen = []

    @segue.break_point
    def look(y: Tensor) -> Tensor:
        seen.append(y.sum().item())
        return y + 1

    x = torch.ones(4, device=device.torch_device)
    with segue.BreakableCapture(device=device):
        out = look(x * 3) * 2
    assert seen == [12.0]
    assert out.tolist() == [8.0] * 4


def test_a_replay_reads_new_input_values(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = double(x + 1) + 1
    x.fill_(10)
    capture.replay()
    assert out.tolist() == [23.0] * 4


def test_the_flat_program_alternates_graphs_and_breaks(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = double(double(x + 1) + 1) + 1
    assert (capture.graphs, capture.breaks, capture.num_segments) == (3, 2, 5)
    assert len(capture.segments) == 5
    x.fill_(2)
    for step in capture.segments:
        step()
    assert out.tolist() == [15.0] * 4


def test_a_break_with_nothing_before_it_still_stands_between_two_graphs(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = double(double(x))
    assert (capture.graphs, capture.breaks) == (3, 2)
    x.fill_(3)
    capture.replay()
    assert out.tolist() == [12.0] * 4


def test_add_eager_runs_now_and_at_every_replay(device: Device) -> None:
    calls: list[int] = []
    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        y = x + 1
        capture.add_eager(lambda: calls.append(len(calls)))
        out = y * 2
    assert calls == [0]
    x.fill_(4)
    capture.replay()
    assert calls == [0, 1]
    assert out.tolist() == [10.0] * 4


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


@dataclasses.dataclass
class Nested:
    first: Tensor
    rest: dict[str, Any]


def _returns() -> dict[str, Any]:
    return {
        "tuple": lambda y: (y + 1, y * 2),
        "list": lambda y: [y + 1, y * 2],
        "named tuple": lambda y: Pair(y + 1, None),
        "dict": lambda y: {"a": y + 1, "b": None, "flag": True, "name": "n"},
        "dataclass": lambda y: Nested(y + 1, {"x": (y * 2, 3)}),
        "view": lambda y: y[:, 1:],
        "transposed": lambda y: (y + 1).t(),
        "expanded": lambda y: y[:1].expand(4, 3),
        "the same tensor twice": lambda y: (lambda z: (z, z))(y + 1),
        "its argument": lambda y: y,
        "its argument, changed in place": lambda y: y.add_(5),
        "zero rows": lambda y: y[:0],
        "a scalar": lambda y: y.amax(),
    }


def _total(value: Any) -> Tensor:
    from segue.capture.nested import leaves

    total = torch.zeros((), device=next(v for v in leaves(value) if isinstance(v, Tensor)).device)
    for t in leaves(value):
        if isinstance(t, Tensor):
            total = total + (t * 3).sum()
    return total


@pytest.mark.parametrize("kind", list(_returns()))
def test_any_structure_a_break_returns_is_live_at_replay(device: Device, kind: str) -> None:
    fn = segue.break_point(_returns()[kind])

    def forward(x: Tensor) -> Tensor:
        return _total(fn(x * 2)) + 1

    x = torch.arange(12.0, device=device.torch_device).reshape(4, 3)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = forward(x)
    assert torch.equal(out, forward(x))
    x.copy_(torch.randn(4, 3))
    capture.pool.poison()
    capture.replay()
    assert torch.equal(out, forward(x))


def test_a_model_output_stays_a_model_output(device: Device) -> None:
    pytest.importorskip("transformers")
    from transformers.modeling_outputs import BaseModelOutput

    @segue.break_point
    def fn(y: Tensor) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=y + 1, hidden_states=(y, y * 2))

    x = torch.ones(4, 2, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        result = fn(x * 1)
        out = result.last_hidden_state + result.hidden_states[1]
    assert isinstance(result, BaseModelOutput)
    x.fill_(3)
    capture.replay()
    assert out.tolist() == [[10.0, 10.0]] * 4


def test_out_is_filled_without_a_copy_and_its_tail_is_cleared(device: Device) -> None:
    pointers = []

    @segue.break_point(out="dst", trim=("src",))
    def fill(src: Tensor, dst: Tensor) -> None:
        pointers.append(dst.data_ptr())
        dst.fill_(float("nan"))
        dst[: src.shape[0]] = src * 2

    def forward(x: Tensor) -> Tensor:
        y = x + 1
        z = fill(y, torch.empty_like(y))
        return z + z.sum()

    x = torch.ones(8, device=device.torch_device)
    capture = segue.BreakableCapture(rows=8, device=device)
    with capture:
        out = forward(x)
    for n in (8, 3, 1, 5):
        capture.replay(valid_rows=n)
        assert out.tolist() == [4.0 + 4 * n] * n + [4.0 * n] * (8 - n)
    assert len(set(pointers)) == 1
    with reference_frame(rows=8, valid_rows=3):
        assert forward(x).tolist() == [16.0] * 3 + [12.0] * 5


def test_break_here_copies_into_its_destination(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    dst = torch.full((4,), 7.0, device=device.torch_device)
    assert segue.break_here(lambda t: t * 2, dst, x) is dst
    assert dst.tolist() == [2.0] * 4
    capture = segue.BreakableCapture(device=device)
    with capture:
        y = x + 1
        got = segue.break_here(lambda t: t * 2, dst, y)
        out = dst + 1
    assert got is dst
    x.fill_(4)
    capture.replay()
    assert out.tolist() == [11.0] * 4


def test_break_here_may_fill_its_destination_itself_and_give_fewer_rows(device: Device) -> None:
    rows = [4]
    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        dst = torch.empty_like(x)
        segue.break_here(lambda t: t[: rows[0]] * 2, dst, x * 1)
        out = dst + 1
    rows[0] = 1
    capture.replay()
    assert out.tolist() == [3.0, 1.0, 1.0, 1.0]


def test_a_break_inside_a_break_is_a_plain_call(device: Device) -> None:
    @segue.break_point
    def outer(y: Tensor) -> Tensor:
        assert segue.capture_phase() == "break"
        return double(y) + 1

    x = torch.ones(2, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        assert segue.capture_phase() == "segment"
        assert segue.is_breakable_capture_active()
        assert segue.BreakableCapture.current() is capture
        out = outer(x) + 1
    assert segue.capture_phase() is None
    assert segue.BreakableCapture.current() is None
    assert capture.breaks == 1
    assert out.tolist() == [4.0, 4.0]


def test_a_break_point_is_a_plain_call_outside_a_capture() -> None:
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert row_mix(torch.ones(2, 1)).tolist() == [[3.0], [3.0]]
    assert segue.current_valid_rows() is None


@pytest.mark.parametrize("order", [(16, 8), (8, 16)])
def test_buckets_that_share_a_pool_never_read_each_others_rows(device: Device, order: tuple[int, int]) -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        return row_mix(y) + y

    captures, inputs, outs = {}, {}, {}
    for b in order:
        inputs[b] = torch.randn(b, 3, device=device.torch_device)
        captures[b] = segue.BreakableCapture(rows=b, device=device)
        with captures[b]:
            result = forward(inputs[b])
        outs[b] = segue.weak_ref_tensor(result)
        del result
    for b, n in ((16, 16), (16, 3), (8, 8), (8, 1), (16, 9), (8, 7), (16, 0)):
        inputs[b].normal_()
        captures[b].pool.poison()
        captures[b].replay(valid_rows=n)
        got = outs[b].clone()
        with reference_frame(rows=b, valid_rows=n):
            assert torch.equal(got, forward(inputs[b]))


def test_outputs_with_their_own_token_dimension_are_cleared_along_it(device: Device) -> None:
    @segue.break_point(token_dim=(0, 1, None))
    def three(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return y + 1, (y + 1).t(), torch.full((4, 4), float(y.shape[0]), device=y.device)

    x = torch.ones(4, 2, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, device=device)
    with capture:
        a, b, c = three(x * 1)
        outs = a * 1, b * 1, c * 1
    capture.replay(valid_rows=3)
    assert outs[0].tolist() == [[2.0, 2.0]] * 3 + [[0.0, 0.0]]
    assert outs[1].tolist() == [[2.0, 2.0, 2.0, 0.0]] * 2
    assert outs[2].tolist() == [[4.0] * 4] * 4


def test_without_rows_dimension_0_of_every_hand_off_is_cleared(device: Device) -> None:
    x = torch.ones(4, 2, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        out = double(x + 0) + 1
    capture.replay(valid_rows=1)
    assert out[:, 0].tolist() == [3.0, 1.0, 1.0, 1.0]
    capture.replay()
    assert out[:, 0].tolist() == [3.0] * 4


def test_a_capture_with_fewer_valid_rows_than_its_bucket_grows_trimmed_results_back(device: Device) -> None:
    x = torch.randn(8, 3, device=device.torch_device)
    capture = segue.BreakableCapture(rows=8, valid_rows=5, device=device)
    with capture:
        out = row_mix(x * 2) + 1
    for n in (5, 8, 1, 2):
        if n != 5:
            capture.replay(valid_rows=n)
        with reference_frame(rows=8, valid_rows=n):
            assert torch.equal(out, row_mix(x * 2) + 1)


def test_one_valid_row_is_not_taken_for_a_token_dimension_unless_the_break_cuts_rows(device: Device) -> None:
    @segue.break_point
    def scale(y: Tensor) -> Tensor:
        return y.abs().amax().reshape(1)

    x = torch.ones(4, 3, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, valid_rows=1, device=device)
    with capture:
        out = x / scale(x * 2)
    capture.replay(valid_rows=3)
    assert out.tolist() == [[0.5] * 3] * 4


@pytest.mark.parametrize(
    ("later", "found"),
    [
        (lambda y: y.double(), "torch.float64"),
        (lambda y: y[:, :1], "(4, 1)"),
        (lambda y: torch.cat([y, y]), "(8, 3)"),
        (lambda y: (y,), "a tuple"),
        (lambda y: None, "NoneType"),
    ],
)
def test_a_result_that_changed_is_refused_by_name(device: Device, later: Any, found: str) -> None:
    how = [lambda y: y + 1]

    @segue.break_point
    def fickle(y: Tensor) -> Any:
        return how[0](y)

    x = torch.ones(4, 3, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, device=device, name="bucket 4")
    with capture:
        out = fickle(x * 2) + 1
    how[0] = later
    with pytest.raises(segue.SegueError) as error:
        capture.replay()
    for part in ("bucket 4", "segment 0", "fickle", "test_break_points.py", found):
        assert part in str(error.value)
    how[0] = lambda y: y + 1
    capture.replay()
    assert out.tolist() == [[4.0] * 3] * 4


def test_a_plain_value_that_changed_is_refused(device: Device) -> None:
    number = [3]

    @segue.break_point
    def count(y: Tensor) -> tuple[Tensor, int]:
        return y + 1, number[0]

    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with capture:
        y, k = count(x * 2)
        out = y * k
    capture.replay()
    assert out.tolist() == [9.0] * 4
    number[0] = 4
    with pytest.raises(segue.SegueError, match=r"result\[1\] is 4 and was 3 at capture"):
        capture.replay()


def test_an_object_returned_that_is_not_plain_is_refused_at_capture(device: Device) -> None:
    class Thing:
        pass

    @segue.break_point
    def thing(y: Tensor) -> Any:
        return y, Thing()

    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(device=device)
    with pytest.raises(segue.SegueError, match=r"result\[1\] is a .*Thing"), capture:
        thing(x)


def test_names_that_the_function_lacks_are_refused_when_decorating() -> None:
    with pytest.raises(segue.SegueError, match="has no argument 'z'; it has x"):
        segue.break_point(trim=("z",))(lambda x: x)
    with pytest.raises(segue.SegueError, match="has no argument 'dst'"):
        segue.break_point(out="dst")(lambda x: x)


def test_a_token_dim_structure_that_does_not_fit_is_refused(device: Device) -> None:
    x = torch.ones(4, device=device.torch_device)
    bad = segue.break_point(token_dim=(0, 1))(lambda y: (y, y, y))
    with pytest.raises(segue.SegueError, match="2 entries for the 3 values"), segue.BreakableCapture(device=device):
        bad(x)


def test_methods_and_modules_may_be_breaks(device: Device) -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0

        @segue.break_point
        def forward(self, y: Tensor) -> Tensor:
            return y * self.scale

    class Backend:
        factor = 3.0

        @segue.break_point(trim=("y",))
        def run(self, y: Tensor) -> Tensor:
            return y * self.factor

    attention, backend = Attention(), Backend()
    x = torch.ones(4, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, device=device)
    with capture:
        out = backend.run(attention(x + 0)) + 1
    backend.factor, attention.scale = 5.0, 1.0
    capture.replay(valid_rows=2)
    assert out.tolist() == [6.0, 6.0, 1.0, 1.0]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("gives", ["cut", "whole", "whole, laid out otherwise", "cut or whole"])
def test_a_hand_off_holds_the_rows_and_nothing_after_them_at_every_length(
    device: Device, dim: int, dtype: torch.dtype, gives: str
) -> None:
    """Rows and cleared tail are copied in one go from the second time that a length is met."""
    calls = [0]

    def result(y: Tensor) -> Tensor:
        calls[0] += 1
        whole = "whole" in gives and (gives != "cut or whole" or calls[0] % 2 == 0)
        y = y if whole else y.narrow(dim, 0, segue.current_valid_rows())
        return (y.mT.contiguous().mT if "otherwise" in gives else y) + 1

    hand_on = segue.break_point(token_dim=dim)(result)
    x = torch.zeros((6, 3) if dim == 0 else (1, 6), dtype=dtype, device=device.torch_device)

    def forward() -> Tensor:
        return hand_on(x * 2) * 3

    calls[0] = 1
    with segue.BreakableCapture(rows=6, valid_rows=6, device=device) as capture:
        out = forward()
    for k, n in enumerate((4, 4, 2, 4, 6, 0, 4, 1, 1, 0, 6, 2)):
        x.copy_(torch.arange(x.numel()).view(x.shape) + k)
        capture.pool.poison()
        capture.replay(valid_rows=n)
        want = (x * 2 + 1) * 3
        want.narrow(dim, n, 6 - n).zero_()
        assert torch.equal(out, want), (k, n)


def test_a_break_that_gave_nothing_and_gives_something_now_is_refused(device: Device) -> None:
    gives: list[Tensor | None] = [None]
    x = torch.ones(4, device=device.torch_device)

    @segue.break_point
    def nothing() -> Tensor | None:
        return gives[0]

    with segue.BreakableCapture(device=device) as capture:
        y = x * 2
        nothing()
        out = y * 2
    capture.replay()
    gives[0] = x
    with pytest.raises(segue.SegueError, match=r"result is tensor.* and was None at capture"):
        capture.replay()
    gives[0] = None
    capture.replay()
    assert out.tolist() == [4.0] * 4


@pytest.mark.parametrize(
    "view", [lambda y: y.t(), lambda y: torch._neg_view(y), lambda y: y.conj()], ids=["transposed", "negated", "conjugated"]
)
def test_an_argument_returned_as_another_view_of_itself_than_at_capture_is_refused(device: Device, view: Any) -> None:
    """It begins where the argument does, so it was taken for it, or copied onto itself while it was read."""
    turned = [False]

    @segue.break_point(token_dim=None)
    def back(y: Tensor) -> Tensor:
        return view(y) if turned[0] else y

    x = torch.arange(9, device=device.torch_device).reshape(3, 3) * (1 + 2j)
    x = x.to(torch.complex64) if view(x).is_conj() else x.real.float().contiguous()
    capture = segue.BreakableCapture(device=device)
    with capture:
        y = x * 2
        out = back(y) + 0
    turned[0] = True
    with pytest.raises(segue.SegueError, match="is other memory now, or another view of it"):
        capture.replay()
    turned[0] = False
    capture.replay()
    assert torch.equal(out, x * 2) and torch.equal(y, x * 2)


def test_a_destination_returned_as_another_view_of_itself_is_filled_with_that(device: Device) -> None:
    x = torch.arange(9.0, device=device.torch_device).reshape(3, 3)
    capture = segue.BreakableCapture(device=device)

    def turn(y: Tensor, dst: Tensor) -> Tensor:
        return dst.copy_(y).t()

    with capture:
        dst = torch.empty_like(x)
        out = segue.break_here(turn, dst, x * 2, dst) + 0
    assert torch.equal(out, (x * 2).t())
    x.add_(1)
    capture.replay()
    assert torch.equal(out, (x * 2).t())


@pytest.mark.parametrize("order", [(4, 2, 0), (2, 4, 2)])
def test_a_tensor_passed_twice_and_trimmed_twice_may_be_returned_twice(device: Device, order: tuple[int, ...]) -> None:
    """All rows: one tensor at two places of the result. Fewer: two views of the same rows, which are as good."""

    @segue.break_point(trim=("y", "z"))
    def both(y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return y, z

    x = torch.ones(4, 2, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, device=device)
    with capture:
        shared = x * 2
        a, b = both(shared, shared)
        out = a + b
    for n in order:
        capture.replay(n)
        assert out.tolist() == [[4.0, 4.0]] * n + [[0.0, 0.0]] * (4 - n)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.uint16, torch.bool, torch.float8_e4m3fn])
def test_a_hand_off_of_any_dtype_is_cleared_past_its_rows(device: Device, dtype: torch.dtype) -> None:
    """CUDA has a fused copy for some dtypes only, and torch fills others not at all."""
    size = dtype.itemsize

    @segue.break_point(trim=("y",))
    def packed(y: Tensor) -> Tensor:
        return y.clone().view(dtype)

    x = torch.ones(4, 2 * size, dtype=torch.uint8, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, device=device)
    with capture:
        out = packed(x * 1).view(torch.uint8) + 1
    for n in (4, 2, 2, 3, 2):
        capture.replay(n)
        assert out.tolist() == [[2] * 2 * size] * n + [[1] * 2 * size] * (4 - n)


def test_rows_cut_from_a_tensor_that_a_break_reaches_by_itself_are_not_cleared_in_it(device: Device) -> None:
    """As of an argument: at capture all rows were real, so the result was that memory, and its tail was cleared there."""
    x = torch.ones(4, 2, device=device.torch_device)
    capture = segue.BreakableCapture(rows=4, device=device)
    with capture:
        y = x * 2
        part = capture.add_eager(lambda: y[: segue.current_valid_rows()])
        out, cut = y + 1, part + 1
    capture.replay(1)
    assert out.tolist() == [[3.0, 3.0]] * 4
    assert cut.tolist() == [[3.0, 3.0]] + [[1.0, 1.0]] * 3
