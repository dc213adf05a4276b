"""The handle is the model to those who use it as one, and says so where it can't be."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import segue
from segue.devices import Device
from segue.integrations.transformers import accelerate

Make = Callable[..., Any]


def test_a_copy_of_an_accelerated_model_can_be_accelerated_and_keeps_nothing_of_the_original(
    make: Make, ids: Make, device: Device
) -> None:
    model, prompt = make(), ids(1, 6)
    handle = accelerate(model, max_tokens=16, device=device)
    other, again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.inference_mode():
        want = model(prompt).logits.clone()
    gone = [weakref.ref(model), weakref.ref(handle)]
    handle.restore()
    del model, handle
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    for one in (other, again):
        with accelerate(one, max_tokens=16, device=device) as graphed, torch.inference_mode():
            for _ in range(3):
                torch.testing.assert_close(one(prompt).logits, want, rtol=1e-5, atol=1e-5)
            assert graphed.stats.replayed == 1 and graphed.stats.eager == 0
        assert "forward" not in vars(one.model)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_handle_is_not_copied_and_says_what_to_copy(copied: Any, make: Make, graphed: Make) -> None:
    with pytest.raises(segue.SegueError, match=r"an accelerated LlamaForCausalLM can't be copied.*handle\.module"):
        copied(graphed(make()))


def test_dir_lists_the_models_names_and_close_restores(make: Make, graphed: Make) -> None:
    model = make()
    handle = graphed(model)
    assert {"generate", "config", "capture", "recapture", "close"} <= set(dir(handle))
    handle.close()
    assert "forward" not in vars(model.model)
    with pytest.raises(segue.SegueError, match="restored"):
        handle.recapture()


def test_another_body_runs_in_place_of_the_runner_within_a_block(make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(2, 3)
    handle = graphed(model)
    seen: list[tuple[int, ...]] = []

    def body(x: torch.Tensor, position_ids: torch.Tensor, ctx: Any) -> torch.Tensor:
        seen.append((*x.shape, *position_ids.shape, ctx.batch, ctx.length))
        return x

    with torch.inference_mode():
        with handle.with_body(body):
            hidden = model.model(prompt).last_hidden_state
        assert torch.equal(hidden, model.model.get_input_embeddings()(prompt)) and seen == [(6, 64, 6, 2, 3)]
        with handle.with_body(body), handle.with_body(None):
            model(prompt)
    assert len(seen) == 1 and handle.stats.warmed == 1


@pytest.mark.parametrize("block", ["untouched", "reference"])
def test_a_block_pauses_its_own_thread_only(block: str, make: Make, graphed: Make, ids: Make) -> None:
    model, prompt = make(), ids(1, 6)
    handle = graphed(model)

    def forward() -> None:
        with torch.inference_mode():
            model(prompt)

    for _ in range(2):
        forward()
    with getattr(handle, block)():
        forward()
        before = handle.stats.replayed
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
        assert handle.stats.replayed == before + 1


def test_capturing_ahead_captures_prime_too(make: Make, graphed: Make, ids: Make) -> None:
    model = make()
    prompts = [ids(1, n) for n in (30, 3, 16, 1)]
    want = [model.generate(p, max_new_tokens=3, do_sample=False) for p in prompts]
    handle = graphed(model, max_tokens=32)
    model.generate(prompts[1], max_new_tokens=1, do_sample=False)  # one bucket is warm already
    handle.capture()
    before = handle.stats
    handle.capture()
    assert handle.stats == before
    for p, text in zip(prompts, want, strict=True):
        assert torch.equal(model.generate(p, max_new_tokens=3, do_sample=False), text)
    after = handle.stats
    assert (after.warmed, after.captured, after.eager) == (before.warmed, before.captured, 0)
    assert after.strategies["prime"] - before.strategies.get("prime", 0) == 4
    report = handle.report()
    assert "| replayed: prime | 4 |" in report and "| buckets with a graph | 1" in report
    assert handle.scratch_bytes == 2 * 3 * 2 * 32 * 16 * 4  # of the largest bucket: keys and values, layers, heads, rows, size


@pytest.mark.parametrize("value", ["off", "OFF"])
def test_segue_off_refuses_no_call(value: str, make: Make, graphed: Make, ids: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = make(), ids(1, 5)
    handle = graphed(model)
    monkeypatch.setenv("SEGUE", value)
    model.train()(prompt, labels=prompt).loss.backward()
    assert handle.stats.reasons == {"SEGUE=off in the environment": 1}


def test_segue_off_refuses_no_model_and_counts_its_forwards(make: Make, ids: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEGUE", "Off")
    model, prompt = make().train(), ids(1, 5)
    with accelerate(model, strategy="no such", device="emulator") as handle:
        handle(prompt, labels=prompt).loss.backward()
        with handle.untouched(), handle.reference():
            handle(prompt)
        handle.capture()
        handle.recapture()
        assert handle.stats.reasons == {"SEGUE=off in the environment": 1} and handle.stats.eager == 1
        assert handle.graphs_of(5) == (None, 0, 0) and "SEGUE=off" in handle.report()
    assert not model.model._forward_pre_hooks
    assert accelerate(nn.Linear(2, 2))(torch.ones(1, 2)).shape == (1, 2)


def test_an_import_that_is_blocked_is_told_like_a_missing_package() -> None:
    code = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'transformers':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}')\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "import segue\n"
        "try:\n    segue.accelerate(object())\n"
        "except segue.SegueError as e:\n    print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'segue-graphs[transformers]'" in done.stdout


@pytest.mark.parametrize("strategy", ["auto", "breakable"])
def test_a_fresh_layer_whose_mode_makes_no_difference_is_taken_in(
    strategy: str, make: Make, graphed: Make, ids: Make
) -> None:
    model, prompt = make(), ids(1, 7)
    handle = graphed(model, strategy=strategy)
    with torch.inference_mode():
        for _ in range(3):
            model(prompt)
        model.model.layers[1].mlp.act_fn = torch.nn.GELU()
        with handle.untouched():
            want = model(prompt).logits
        handle.recapture()
        before = handle.stats.eager
        for _ in range(3):
            torch.testing.assert_close(model(prompt).logits, want)
        assert handle.stats.eager == before
        model.model.layers[1].mlp.act_fn = torch.nn.RReLU()
        with pytest.raises(segue.SegueError, match=r"layers\.1\.mlp\.act_fn is in training mode"):
            handle.recapture()
