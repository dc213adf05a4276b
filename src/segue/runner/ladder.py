"""The sorted padded token counts that get a graph."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from segue.errors import UsageError


class Ladder(Sequence[int]):
    """Sorted, unique, positive bucket sizes. Immutable; equal to another ladder of the same buckets.

    Args:
        buckets: in any order, repeats allowed.

    Raises:
        UsageError: no bucket, or one that is not a positive int.
    """

    __slots__ = ("_buckets",)

    def __init__(self, buckets: Iterable[int]) -> None:
        sizes = {_positive(b, "bucket") for b in _iterated(buckets, "a ladder's buckets")}
        if not sizes:
            raise UsageError(
                "a ladder needs at least one bucket; got none. Give buckets=[16, 32, ...] or Ladder.geometric(2048)"
            )
        self._buckets = tuple(sorted(sizes))

    @classmethod
    def geometric(cls, max_tokens: int, ratio: float = 2.0, multiple_of: int = 1) -> Ladder:
        """Buckets that grow by ``ratio`` up to ``max_tokens``, which is one of them.

        1, 2, 4 and 8 are among them as far as they don't exceed ``max_tokens``, so that decode has buckets. With
        ``multiple_of`` every bucket, the largest included, is rounded up to a multiple of it.
        """
        top, step = _positive(max_tokens, "max_tokens"), _positive(multiple_of, "multiple_of")
        if not isinstance(ratio, int | float) or not ratio > 1:
            raise UsageError(f"Ladder.geometric: ratio={ratio!r} doesn't grow; it must be above 1")
        sizes = {b for b in (1, 2, 4, 8) if b <= top} | {top}
        size = 8.0
        while (size := max(size * ratio, size + 1)) < top:
            sizes.add(round(size))
        return cls(_round_up(b, step) for b in sizes)

    @classmethod
    def relative(cls, max_tokens: int, step: float = 1 / 8, floor: int = 16, cap: int = 512) -> Ladder:
        """Buckets that grow by the share ``step`` of their size, so that padding is a small share at any length.

        The first is ``floor``. Each is larger than the one before by ``step`` of it, rounded down to a multiple of ``floor``, at
        least ``floor`` and at most ``cap`` tokens. ``max_tokens`` is the last one exactly. TokenSpeed steps like this.

        Raises:
            UsageError: a size that is no positive whole number, ``step`` not above 0, or ``cap`` below ``floor``.
        """
        top, least, most = _positive(max_tokens, "max_tokens"), _positive(floor, "floor"), _positive(cap, "cap")
        if isinstance(step, bool) or not isinstance(step, int | float) or not step > 0:
            raise UsageError(f"Ladder.relative: step={step!r} must be a share above 0, as in 1/8")
        if most < least:
            raise UsageError(f"Ladder.relative: cap={cap} is below floor={floor}, and no step could be both")
        sizes, size = {top}, least
        while size < top:
            sizes.add(size)
            size += min(most, max(least, int(size * step) // least * least))
        return cls(sizes)

    @classmethod
    def fit(cls, lengths: Iterable[int], k: int, multiple_of: int = 1) -> Ladder:
        """The at most ``k`` buckets that pad ``lengths`` with the fewest rows in total, the longest length included.

        Exact, in O(k * m) for m distinct lengths: a dynamic program whose inner minimum is a lower envelope of lines.

        Raises:
            UsageError: no lengths, one that is not a positive int, or ``k`` below 1.
        """
        k, step = _positive(k, "k"), _positive(multiple_of, "multiple_of")
        counts = Counter(_round_up(_positive(n, "length"), step) for n in _iterated(lengths, "Ladder.fit's lengths"))
        if not counts:
            raise UsageError("Ladder.fit: no lengths were given, so no bucket can be chosen")
        tops = sorted(counts)
        upto = [0]
        for top in tops:
            upto.append(upto[-1] + counts[top])
        return cls(tops[j] for j in _cheapest_cuts(tops, upto, min(k, len(tops))))

    @property
    def max(self) -> int:
        """The largest bucket."""
        return self._buckets[-1]

    def bucket_for(self, n: int) -> int | None:
        """The smallest bucket that holds ``n`` tokens, or None. O(log of the number of buckets)."""
        at = bisect_left(self._buckets, n)
        return self._buckets[at] if at < len(self._buckets) else None

    def padding(self, lengths: Iterable[int]) -> int:
        """Padded rows that ``lengths`` cost in all. Lengths above the largest bucket run eager and cost none."""
        return sum((self.bucket_for(n) or n) - n for n in lengths)

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[int]:
        return iter(self._buckets)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._buckets[index]

    def __contains__(self, value: object) -> bool:
        return value in self._buckets

    def __eq__(self, other: object) -> bool:
        return self._buckets == other._buckets if isinstance(other, Ladder) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._buckets)

    def __repr__(self) -> str:
        return f"Ladder({list(self._buckets)})"


def _cheapest_cuts(tops: list[int], upto: list[int], k: int) -> list[int]:
    """Indices of the tops chosen. Group (i, j] costs ``tops[j] * (upto[j + 1] - upto[i])``; real rows are constant."""
    m = len(tops)
    cost = [tops[j] * upto[j + 1] for j in range(m)]
    cuts: list[list[int]] = []
    for _ in range(k - 1):
        lines: deque[tuple[int, int, int]] = deque(
            [(0, 0, -1)]
        )  # slope, intercept, index of the last top before the group
        new, cut = [], []
        for j in range(m):
            x = tops[j]
            while len(lines) > 1 and lines[0][0] * x + lines[0][1] >= lines[1][0] * x + lines[1][1]:
                lines.popleft()
            slope, intercept, before = lines[0]
            new.append(x * upto[j + 1] + slope * x + intercept)
            cut.append(before)
            _add_line(lines, (-upto[j + 1], cost[j], j))
        cost = new
        cuts.append(cut)
    chosen, j = [m - 1], m - 1
    for cut in reversed(cuts):
        j = cut[j]
        if j < 0:
            break
        chosen.append(j)
    return chosen


def _add_line(lines: deque[tuple[int, int, int]], line: tuple[int, int, int]) -> None:
    """Keep the lower envelope of lines with falling slopes. Integers throughout, so that the choice is exact."""
    while len(lines) > 1:
        (s0, i0, _), (s1, i1, _) = lines[-2], lines[-1]
        if (line[1] - i0) * (s0 - s1) > (i1 - i0) * (s0 - line[0]):
            break
        lines.pop()
    lines.append(line)


def _iterated(values: Iterable[int], what: str) -> Iterable[int]:
    try:
        return iter(values)
    except TypeError:
        raise UsageError(f"{what} are {values!r}; they must be a list of whole numbers of tokens") from None


def _positive(value: int, what: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise UsageError(f"{what} {value!r} is not a positive whole number of tokens")
    return number


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
