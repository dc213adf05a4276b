"""One family of each mechanism, through the functions that write the table of all families; and what these functions see."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.families import FAMILIES, Family
from integrations.family_checks import Kept, Mismatch, check, difference, measure
from integrations.family_flows import Seen, cache_parts
from integrations.family_table import isolated
from segue.runner.stats import Counters

# Attention alone, other names for everything, a mixture, latent attention, the gated delta rule, a state space, an encoder, an
# encoder and a decoder.
_EIGHT = ("llama", "gpt2", "qwen3_moe", "deepseek_v3", "qwen3_next", "mamba2", "bert", "whisper")
_TABLE = Path(__file__).parent.parent.parent / "docs" / "families.md"


@pytest.mark.parametrize("name", _EIGHT)
def test_every_column_of_the_table_holds_for(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, which differ from family to family
        cells = check(FAMILIES[name])
    wrong = {column: f"{cell.text}: {cell.note}" for column, cell in cells.items() if not cell.ok}
    assert not wrong


def test_the_table_in_the_docs_has_each_family_for_each_release() -> None:
    text = _TABLE.read_text()
    assert len(FAMILIES) >= 60 and all(text.count(f"\n| {name} |") == 2 for name in FAMILIES)


class _Handle:
    """Counts the calls of a flow as a handle would, and adds something to what the flow sees."""

    def __init__(self, off: float = 0.0, eager: bool = False, replays: bool = True) -> None:
        self.off, self._eager, self._replays, self._counters = off, eager, replays, Counters()

    @property
    def stats(self) -> Any:
        return self._counters.snapshot(0, 0, ())

    def __call__(self) -> Seen:
        if self._eager:
            self._counters.fell_back("a reason")
        elif self._replays:
            self._counters.replays_of("breakable", 8).calls += 1
        return {"logits": torch.ones(2) + self.off, "tokens": torch.tensor([3])}


@pytest.mark.parametrize(
    ("handle", "tolerance", "text", "ok"),
    [
        (_Handle(), 0.0, "=", True),
        (_Handle(2e-6), 0.0, "2e-6", False),
        (_Handle(2e-6), 1e-5, "2e-6", True),
        (_Handle(1e-3), 1e-5, "WRONG: 1e-3", False),
        (_Handle(float("nan")), 1e-5, "WRONG: logits has other infinite values or NaNs", False),
        (_Handle(eager=True), 0.0, "untouched: a reason", False),
        (_Handle(replays=False), 0.0, "not replayed", False),
    ],
)
def test_a_cell_says_what_was_measured(handle: _Handle, tolerance: float, text: str, ok: bool) -> None:
    cell = measure(lambda model: model(), handle, _Handle()(), Kept(torch.nn.Module()), tolerance)
    assert (cell.text, cell.ok) == (text, ok)


def test_each_run_begins_with_a_model_that_has_kept_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].deltas = None
    new = Kept(model)
    model[0].deltas = torch.zeros(2)
    new.put_back()
    assert model[0].deltas is None


def test_whole_numbers_shapes_and_names_must_be_equal() -> None:
    want = {"tokens": torch.tensor([1, 2]), "logits": torch.zeros(2)}
    assert difference(dict(want), want) == 0
    for other in ({"tokens": torch.tensor([1, 3])}, {"logits": torch.zeros(3)}, {"more": torch.zeros(1)}):
        with pytest.raises(Mismatch):
            difference(want | other, want)


def test_every_tensor_and_number_of_a_cache_is_a_part_of_it() -> None:
    from transformers import DynamicCache, LlamaConfig

    cache = DynamicCache(config=LlamaConfig(num_hidden_layers=2))
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 1)
    cache.layers[0].states = {"recurrent": [torch.zeros(1, 2)]}
    names = cache_parts(cache).keys()
    assert {"cache.layers[1].keys", "cache.layers[1].values", "cache.layers[0].states['recurrent'][0]"} <= names
    assert "cache.layers[0].is_initialized" in names


class _Dies(Family):
    known = True

    def make(self, **changes: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_family_that_crashes_or_is_unknown_is_a_row_like_any_other() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking, where threads sleep
        assert isolated(_Dies("any", "decoder"))["mechanism"].note == "the process ended with SIGKILL"
        assert isolated(Family("no such family", "decoder"))["mechanism"].text == "not in this release"
