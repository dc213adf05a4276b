"""The buckets of a handle that was not told any."""

from __future__ import annotations

from collections.abc import Iterable

from segue.runner import Ladder


def buckets_or_default(buckets: Ladder | Iterable[int] | None, max_tokens: int, compile: bool) -> Ladder:
    """The buckets asked for; by default small ones for decode, and from 16 on four for each doubling, multiples of 16.

    Powers of two are among them, as matrix products of 512 rows take the device less time than those of 528. Compiled code treats
    a single row apart from all other counts, so with ``compile`` it runs in the bucket of two.
    """
    if buckets is not None:
        return buckets if isinstance(buckets, Ladder) else Ladder(buckets)
    sizes, size = {max_tokens, *((2, 4, 8) if compile else (1, 2, 4, 8))}, 16
    while size < max_tokens:
        sizes |= {size * quarters // 64 * 16 for quarters in (4, 5, 6, 7)}
        size *= 2
    return Ladder(b for b in sizes if b <= max_tokens)
