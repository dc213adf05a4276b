"""One family of each mechanism, through the functions that write the table of all families."""

from __future__ import annotations

import warnings

import pytest

from integrations.families import FAMILIES
from integrations.family_checks import check

# One of each: attention alone, other names for everything, mixtures, latent attention, gated delta rule, state space, encoder,
# encoder and decoder.
_EIGHT = ("llama", "gpt2", "qwen3_moe", "deepseek_v3", "qwen3_next", "mamba2", "bert", "bart")


@pytest.mark.parametrize("name", _EIGHT)
def test_every_column_of_the_table_holds_for(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, which differ from family to family
        cells = check(FAMILIES[name])
    wrong = {column: f"{cell.text}: {cell.note}" for column, cell in cells.items() if not cell.ok}
    assert not wrong
