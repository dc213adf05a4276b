"""``segue bench ranks`` in a size for tests."""

from __future__ import annotations

from segue.bench import rank_agreement


def test_ranks_agree_in_every_way() -> None:
    result = rank_agreement.measure(times=5, progress=lambda line: None)
    assert result.right and len(result.rows) == 5
    assert all(float(row["least us"]) <= float(row["median us"]) for row in result.rows)
