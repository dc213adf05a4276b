"""Whether tensors have bytes in common: found on the host, from their addresses and strides."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

Steps = tuple[tuple[int, int], ...]  # bytes and size of each dimension, the element's own bytes included
_MOST = 20_000  # the most steps of one search


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` and ``b`` have a byte in common."""
    if not a.numel() or not b.numel() or a.device != b.device or not a.data_ptr():
        return False
    return _meet(b.data_ptr() - a.data_ptr(), _steps(a), _steps(b))


def first_overlap(tensors: Sequence[tuple[int, Tensor]]) -> tuple[int, int] | None:
    """The indices of two tensors that overlap and have different owners, or None. ``tensors``: owner and tensor each.

    The layers of a model lie alike in memory, so answers are cached by how the tensors lie relative to each other.
    """
    start = tensors[0][1].data_ptr()
    return _first(tuple((owner, t.data_ptr() - start, _steps(t)) for owner, t in tensors))


@functools.lru_cache(1024)
def _first(placed: tuple[tuple[int, int, Steps], ...]) -> tuple[int, int] | None:
    for j, (owner, at, steps) in enumerate(placed):
        for i in range(j):
            if placed[i][0] != owner and _meet(at - placed[i][1], placed[i][2], steps):
                return i, j
    return None


def _steps(t: Tensor) -> Steps:
    size = t.element_size()
    return (*((stride * size, n) for stride, n in zip(t.stride(), t.shape, strict=True)), (1, size))


@functools.lru_cache(4096)
def _meet(distance: int, a: Steps, b: Steps) -> bool:
    """Whether a tensor with steps ``a`` has a byte in common with one with steps ``b`` that begins ``distance`` bytes after it.

    They have one if steps forwards in ``a`` and backwards in ``b`` can add up to the distance. The search goes from the largest
    step to the smallest; where strides nest, it has one or two choices a dimension.
    """
    least: dict[int, int] = {}
    most: dict[int, int] = {}
    for step, n in a:
        most[step] = most.get(step, 0) + n - 1
    for step, n in b:
        least[step] = least.get(step, 0) - n + 1
    steps = sorted((s for s in most.keys() | least.keys() if s), reverse=True)
    low, high = [0], [0]  # the least and the most that the steps from each on can add up to
    for step in reversed(steps):
        low.append(low[-1] + step * least.get(step, 0))
        high.append(high[-1] + step * most.get(step, 0))
    low.reverse()
    high.reverse()
    left = _MOST

    def search(i: int, rest: int) -> bool:
        nonlocal left
        left -= 1
        if i == len(steps) or left < 0:
            return rest == 0 or left < 0  # too tangled to tell: refused rather than overwritten
        step = steps[i]
        first = max(least.get(step, 0), -((high[i + 1] - rest) // step))
        last = min(most.get(step, 0), (rest - low[i + 1]) // step)
        return any(search(i + 1, rest - c * step) for c in range(first, last + 1))

    return search(0, distance)
