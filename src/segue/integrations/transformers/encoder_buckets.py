"""The buckets of an encoder: a grid of padded lengths and of rows, since every row is a sequence by itself."""

from __future__ import annotations

from collections.abc import Iterable

from segue.runner import Ladder

_MOST_ROWS = 32
_SHORTEST, _COARSE_UPTO = 16, 128


class EncoderGrid:
    """Padded lengths, and for each of them rows: powers of two, as many as fit into ``max_tokens``, and at most 32.

    A batch of more rows is run in pieces. Up to 128 tokens each length is twice the one before, as there a forward is no longer
    for it; beyond, each doubling has a step between.

    Args:
        buckets: the padded lengths, or None for these.
        max_tokens: of one piece, padding included. A single row may have as many.
        longest: the most tokens that the model takes; None if it doesn't say.
    """

    def __init__(self, buckets: Ladder | Iterable[int] | None, max_tokens: int, longest: int | None) -> None:
        if buckets is not None:
            self.lengths = buckets if isinstance(buckets, Ladder) else Ladder(buckets)
        else:
            self.lengths = _lengths(max_tokens if longest is None else min(max_tokens, longest))
        most = max(max_tokens, self.lengths.max)
        self._rows = {n: _powers_of_two(min(_MOST_ROWS, most // n)) for n in self.lengths}
        self._rows[0] = _powers_of_two(_MOST_ROWS)

    def rows(self, tokens: int) -> Ladder:
        """The rows that batches of ``tokens`` tokens each, one of the lengths, are padded to; 0: of rows without a length."""
        return self._rows[tokens]


def _powers_of_two(most: int) -> Ladder:
    return Ladder(2**i for i in range(max(1, most).bit_length()))


def _lengths(longest: int) -> Ladder:
    sizes, size = {longest}, _SHORTEST
    while size < longest:
        sizes.add(size)
        if size >= _COARSE_UPTO and size * 3 // 2 < longest:
            sizes.add(size * 3 // 2)
        size *= 2
    return Ladder(sizes)
