"""What only the emulator can show or must see to: freed memory, strict refusals, clean modes, no Python at replay."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode

from segue import _torch
from segue.devices import Traits, generators
from segue.devices.emulator import EmulatedPool, EmulatedSegment
from segue.errors import CaptureError, ReplayError, UsageError

from .conftest import Sandbox


class Spy(TorchFunctionMode):
    """A mode of the user's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def _function_modes() -> list[object]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def _pool(lab: Sandbox) -> EmulatedPool:
    assert isinstance(lab.pool, EmulatedPool)
    return lab.pool


def test_traits_say_what_is_not_emulated(emulated: Sandbox) -> None:
    nothing = Traits(streams=False, driver_memory=False, timing=False, compiled=False, stops_random_ops=False)
    assert emulated.device.traits == nothing


def test_a_quick_answer_about_ownership_is_as_old_as_the_last_look(emulated: Sandbox) -> None:
    """A CUDA pool must ask torch's allocator, and whoever forgets to look is to fail here too."""
    pool, large = _pool(emulated), ((1 << 20,), (1,), torch.float32)
    first = pool.empty(*large)
    assert not pool.owns(first, look=False) and pool.owns(first) and pool.owns(first, look=False)
    second = pool.empty(*large)
    assert not pool.owns(second, look=False)
    recording = emulated.device.begin(pool)
    assert pool.owns(second, look=False), "the start of a recording looks"
    recording.abort()
    emulated.close()
    address = first.data_ptr()
    del first
    elsewhere = _torch.tensor_at(address, 4, torch.float32, (1,), (1,), 0, torch.device("cpu"))
    assert not pool.owns(elsewhere, look=False), "memory that was handed back is nobody's"


def test_a_freed_block_is_poisoned_at_once_when_asked(emulated: Sandbox) -> None:
    block = emulated.pool.empty((4,), (1,), torch.float32)
    shadow = _torch.tensor_at(block.data_ptr(), 16, torch.float32, (4,), (1,), 0, torch.device("cpu"))
    block.zero_()
    del block
    assert shadow.isnan().all()


def test_the_environment_turns_poisoning_on(monkeypatch: pytest.MonkeyPatch, emulated: Sandbox) -> None:
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("SEGUE_POISON", value)
        assert _pool(Sandbox(emulated.device)).poison_freed is expected


def test_blocks_are_cut_from_the_best_fit_and_joined_again(emulated: Sandbox) -> None:
    pool = emulated.pool
    blocks = [pool.empty((n,), (1,), torch.uint8) for n in (1, 513, 2048, 512)]
    start = blocks[0].data_ptr()
    assert [b.data_ptr() - start for b in blocks] == [0, 512, 1536, 3584]
    assert [size for _, size in sorted(pool.blocks())] == [512, 1024, 2048, 512]
    del blocks[1]
    assert pool.empty((600,), (1,), torch.uint8).data_ptr() == start + 512
    del blocks[1:]
    assert pool.empty((3000,), (1,), torch.uint8).data_ptr() == start + 512


def test_a_block_lives_as_long_as_storage_in_another_thread_or_container(emulated: Sandbox) -> None:
    held = {"t": emulated.pool.empty((8,), (1,), torch.float32)[2:]}
    thread = threading.Thread(target=held.clear)
    assert len(emulated.pool.blocks()) == 1
    thread.start()
    thread.join()
    assert emulated.pool.blocks() == []


def test_many_threads_allocate_and_free_without_losing_a_block(emulated: Sandbox) -> None:
    def churn() -> None:
        kept = []
        for n in range(300):
            kept.append(emulated.pool.empty((n % 7 * 300,), (1,), torch.float32))
            if n % 3 == 0:
                kept.pop(0)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert emulated.pool.usage().live == 0
    free = _pool(emulated)._arenas.free_blocks()
    assert sum(size for _, size in free) == emulated.pool.usage().reserved


def test_memory_goes_back_once_the_last_block_dies_after_the_last_capture(emulated: Sandbox) -> None:
    x = torch.ones(4)
    segment, y = emulated.record(lambda: x + 1)
    emulated.close()
    assert emulated.pool.usage().reserved > 0
    del y
    assert emulated.pool.usage().reserved == 0
    with pytest.raises(ReplayError, match="after its capture was closed"):
        segment.launch()


def test_an_external_tensor_is_kept_alive_by_the_tape(emulated: Sandbox) -> None:
    x, weights = torch.ones(4), [torch.full((4,), 3.0)]
    segment, y = emulated.record(lambda: x * weights[0])
    weights.clear()
    gc.collect()
    churn = [torch.rand(4) for _ in range(64)]
    x.fill_(2)
    emulated.launch(segment)
    assert torch.equal(y, torch.full((4,), 6.0)) and churn


def test_a_freed_or_moved_external_is_refused_by_op_and_line_before_anything_runs(emulated: Sandbox) -> None:
    counter, w = torch.zeros(4), torch.ones(4)
    segment, _ = emulated.record(lambda: (counter.add_(1), counter * w))
    w.untyped_storage().resize_(0)
    with pytest.raises(ReplayError, match=r"mul.Tensor at devices.test_emulator.py:\d+ in .* uses was freed"):
        emulated.launch(segment)
    w.untyped_storage().resize_(1 << 16)
    with pytest.raises(ReplayError, match=r"has moved in memory .*copy_"):
        emulated.launch(segment)
    assert torch.equal(counter, torch.ones(4))


def test_a_replay_runs_no_python_of_the_users(emulated: Sandbox) -> None:
    calls = []

    @torch.library.custom_op("segue_test::scaled", mutates_args=())
    def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
        calls.append(1)
        return x.sin() * by

    x = torch.ones(4)
    segment, y = emulated.record(lambda: scaled(x, 2.0) + 1)
    x.fill_(0.5)
    emulated.launch(segment)
    assert len(calls) == 1
    assert torch.equal(y, x.sin() * 2 + 1)


def test_a_custom_op_that_reads_the_host_is_refused(emulated: Sandbox) -> None:
    @torch.library.custom_op("segue_test::peeks", mutates_args=())
    def peeks(x: torch.Tensor) -> torch.Tensor:
        return x * len(x.tolist())

    x = torch.ones(4)
    with pytest.raises(CaptureError, match=r"Tensor.tolist\(\) at devices.test_emulator.py:\d+ in peeks"):
        emulated.record(lambda: peeks(x))


def test_a_kernel_registered_from_python_is_opened_too(emulated: Sandbox) -> None:
    library, calls = torch.library.Library("segue_test", "FRAGMENT"), []
    library.define("halved(Tensor x) -> Tensor")
    library.impl("halved", lambda x: (calls.append(1), x / 2)[1], "CPU")
    x = torch.ones(4)
    with Spy():
        segment, y = emulated.record(lambda: torch.ops.segue_test.halved(x) + 1)
    x.fill_(4)
    emulated.launch(segment)
    assert len(calls) == 1 and torch.equal(y, x / 2 + 1)
    library._destroy()


def test_a_replay_ignores_the_callers_modes_and_autocast(emulated: Sandbox) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    segment, y = emulated.record(lambda: x @ w)
    x.normal_()
    expected = x @ w
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        segment.launch()
    assert torch.equal(y, expected)


def test_casts_by_autocast_are_recorded(emulated: Sandbox) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        segment, y = emulated.record(lambda: x @ w)
    assert y.dtype is torch.bfloat16
    x.normal_()
    segment.launch()
    assert torch.equal(y, x.bfloat16() @ w.bfloat16())


def test_no_mode_and_no_stance_is_left_after_a_segment(emulated: Sandbox) -> None:
    x = torch.ones(4)
    before = _function_modes()
    emulated.record(lambda: x + 1)
    assert _function_modes() == before
    with pytest.raises(CaptureError):
        emulated.record(lambda: x.item())
    assert _function_modes() == before
    assert x[0].item() == 1


def test_a_users_mode_entered_in_a_segment_survives_its_end(emulated: Sandbox) -> None:
    spy, seen = Spy(), []

    def enter() -> None:
        spy.__enter__()

    def leave() -> None:
        seen.append(spy in _function_modes())
        spy.__exit__(None, None, None)

    before = _function_modes()
    emulated.record(enter)
    assert _function_modes() == [*before, spy]
    emulated.record(leave)
    assert seen == [True] and _function_modes() == before


def test_a_default_device_entered_in_one_segment_may_be_left_in_another(emulated: Sandbox) -> None:
    place, before = torch.device("cpu"), _function_modes()
    x = torch.ones(4)

    def leave() -> torch.Tensor:
        place.__exit__(None, None, None)  # type: ignore[attr-defined]
        return x + 1

    emulated.record(lambda: place.__enter__(), lambda: torch.zeros(3), leave)  # type: ignore[attr-defined]
    assert _function_modes() == before


def test_a_default_device_set_for_good_counts_and_may_change_in_a_segment(emulated: Sandbox) -> None:
    before = _function_modes()
    try:
        torch.set_default_device("cpu")
        emulated.record(lambda: torch.zeros(3))
        emulated.record(lambda: torch.set_default_device(None))
        assert _function_modes() == before
        emulated.record(lambda: torch.set_default_device("cpu"), lambda: torch.zeros(3))
    finally:
        torch.set_default_device(None)
    assert _function_modes() == before


def test_a_refusal_that_was_swallowed_still_spoils_the_recording(emulated: Sandbox) -> None:
    x = torch.zeros(4)

    def swallows() -> torch.Tensor:
        x.add_(1)
        try:
            return x * x.sum().item()
        except RuntimeError:
            return x

    with pytest.raises(CaptureError, match=r"Tensor.item\(\)"):
        emulated.record(swallows)
    assert torch.equal(x, torch.zeros(4))


def test_an_abort_takes_back_writes_to_live_blocks_and_explicit_generators(emulated: Sandbox) -> None:
    x, generator = torch.ones(4), torch.Generator().manual_seed(5)
    generators.note({"generator": generator})
    _, y = emulated.record(lambda: x + 1)

    def fails() -> None:
        y.mul_(torch.rand(4, generator=generator, device=torch.device("cpu")))
        y.mul_(torch.rand(4, generator=generator, device=torch.device("cpu")))
        y[1:].zero_()
        raise KeyboardInterrupt

    state = generator.get_state()
    with pytest.raises(KeyboardInterrupt):
        emulated.record(fails)
    assert torch.equal(y, torch.full((4,), 2.0))
    assert torch.equal(generator.get_state(), state)


def test_explicit_generators_draw_anew_at_each_launch(emulated: Sandbox) -> None:
    generator = torch.Generator().manual_seed(5)
    generators.note({"generator": generator})
    segment, y = emulated.record(lambda: torch.rand(4, generator=generator, device=torch.device("cpu")) * 1)
    emulated.launch(segment)
    generator.manual_seed(5)
    torch.rand(4, generator=generator)
    assert torch.equal(y, torch.rand(4, generator=generator))


def test_two_recordings_into_one_pool_are_refused(emulated: Sandbox) -> None:
    recording = emulated.device.begin(emulated.pool)
    with pytest.raises(UsageError, match="being recorded into already"):
        emulated.device.begin(emulated.pool)
    recording.abort()
    recording.abort()
    emulated.record(lambda: torch.ones_like(torch.empty(1, device=torch.device("cpu"))))


def test_resizing_and_re_pointing_are_refused(emulated: Sandbox) -> None:
    x = torch.ones(4)
    with pytest.raises(CaptureError, match=r"resize_ at .* other memory"):
        emulated.record(lambda: x.resize_(8))
    with pytest.raises(CaptureError, match=r"set_.* at .*copy_"):
        emulated.record(lambda: x.set_(torch.zeros_like(x)))


def test_sparse_and_quantized_tensors_are_refused_by_name(emulated: Sandbox) -> None:
    with pytest.raises(CaptureError, match="dense tensors only"):
        emulated.record(lambda: torch.zeros_like(torch.eye(3, device=torch.device("cpu"))).to_sparse())


def test_uninitialised_memory_is_allocated_and_not_recorded(emulated: Sandbox) -> None:
    x = torch.ones(4)
    segment, y = emulated.record(lambda: torch.empty_like(x))
    assert segment.empty and emulated.pool.owns(y)


def test_what_shares_memory_is_not_copied_and_results_that_share_stay_together(emulated: Sandbox) -> None:
    x = torch.arange(6.0)
    segment, (view, made, part) = emulated.record(lambda: (x[2:], *(lambda h: (h, h[1:]))(x + 1)))
    assert view.data_ptr() == x[2:].data_ptr()
    assert part.data_ptr() == made.data_ptr() + 4
    assert isinstance(segment, EmulatedSegment) and [s.op for s in segment.steps] == ["add.Tensor"]


def test_an_expanded_result_of_a_custom_op_keeps_its_strides(emulated: Sandbox) -> None:
    library = torch.library.Library("segue_test", "FRAGMENT")
    library.define("row(Tensor x) -> Tensor")
    library.impl("row", lambda x: (x + 1)[:1].clone().expand(3, 2), "CPU")
    x = torch.zeros(4, 2)
    segment, y = emulated.record(lambda: torch.ops.segue_test.row(x))
    assert y.shape == (3, 2) and y.stride()[0] == 0
    x.fill_(5)
    emulated.launch(segment)
    assert torch.equal(y, torch.full((3, 2), 6.0))
    library._destroy()


def test_zero_sized_tensors_pass_through(emulated: Sandbox) -> None:
    x = torch.zeros(0, 4)
    segment, y = emulated.record(lambda: torch.cat([x * 2, torch.ones(1, 4, device=x.device)]).sum(0))
    emulated.launch(segment)
    assert torch.equal(y, torch.ones(4))


def test_an_error_at_replay_names_op_and_line(emulated: Sandbox) -> None:
    index, x = torch.tensor([0]), torch.ones(4)
    segment, _ = emulated.record(lambda: x.index_select(0, index))
    index.fill_(9)
    with pytest.raises(IndexError) as caught:
        emulated.launch(segment)
    assert any("index_select, recorded at devices/test_emulator.py" in n for n in caught.value.__notes__)


def test_compiled_functions_run_as_python_in_a_segment(emulated: Sandbox) -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    x = torch.ones(4)
    segment, y = emulated.record(lambda: compiled(x) * 2)
    x.fill_(0.25)
    emulated.launch(segment)
    assert torch.equal(y, (x.sin() + 1) * 2)


def test_recording_does_not_import_dynamo() -> None:
    code = (
        "import sys, torch\n"
        "from segue.devices.emulator import Emulator\n"
        "device = Emulator(); r = device.begin(device.default_pool()); s = r.commit(); s.launch()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_transformer_replays_bit_for_bit_inside_one_segment(emulated: Sandbox) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    body = transformers.LlamaForCausalLM(config).eval().model
    x, positions = torch.randn(1, 12, 64), torch.arange(12)[None]
    mask = torch.full((12, 12), float("-inf")).triu(1)[None, None]
    for attention in ("eager", "sdpa"):
        body.set_attn_implementation(attention)

        def forward() -> torch.Tensor:
            made: torch.Tensor = body(
                inputs_embeds=x, attention_mask=mask, position_ids=positions, use_cache=False
            ).last_hidden_state
            return made

        segment, y = emulated.record(forward)
        assert torch.equal(y, forward())
        x.normal_()
        positions.add_(3)
        emulated.pool.poison()
        emulated.launch(segment)
        assert torch.equal(y, forward())
