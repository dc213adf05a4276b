"""docs/refusals.md is what the error classes and the code on it give."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import segue
from guides import refusals

PAGE = Path(__file__).parents[2] / "docs" / "refusals.md"


@pytest.mark.skipif(not PAGE.exists(), reason="tests run outside a checkout")
def test_the_page_is_what_the_errors_say_now() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written = refusals.page()
    assert written == PAGE.read_text("utf-8"), "run make refusals"


def test_every_error_is_on_the_page_and_says_what_to_do() -> None:
    errors = {e for name in segue.__all__ if isinstance(e := getattr(segue, name), type) and issubclass(e, segue.SegueError)}
    assert errors - {segue.SegueError} == set(refusals.EXAMPLES)
    assert all("What to do: " in (error.__doc__ or "") for error in errors)
    # Nothing can make these happen here: the device must be full, a rank missing, or torch another one.
    unshown = {e for e, shown in refusals.EXAMPLES.items() if not shown}
    assert unshown == {segue.GraphMemoryError, segue.RankError, segue.UnsupportedTorchError}
