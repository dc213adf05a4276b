"""A forward run once more at another number of rows, to see which sizes follow them. Its breaks don't run a second time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.nested import leaves, take_apart
from segue.capture.wrappers import with_collectives_done


class Rehearsal:
    """What the breaks of a forward of ``rows`` rows gave: shapes alone, from which stand-ins for a run of other rows are made.

    Breaks fill caches and count, so a second run must not call them. Zeros of the right shape go on in their place: they are in
    range wherever they are indices.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._results: list[tuple[Any, Any]] = []
        self._next, self._other = 0, 0

    @property
    def under_way(self) -> bool:
        """Whether the second run is what breaks are called from."""
        return self._other > 0

    def note(self, result: Any, token_dims: Any) -> None:
        """Note what the forward went on with after a break of the first run."""
        tree = take_apart(result)
        shapes = [torch.empty_like(v, device="meta") if isinstance(v, Tensor) else v for _, v, _ in tree.leaves]
        self._results.append((tree.build(iter(shapes)), token_dims))

    def begin(self, rows: int) -> None:
        """From now on breaks are called from a run of so many rows."""
        self._next, self._other = 0, rows

    def stand_in(self, arguments: Sequence[Any], destination: Any) -> Any:
        """What the forward goes on with after the next break."""
        for t in leaves([*arguments, destination]):
            t = with_collectives_done(t, lambda _: True)  # nobody else waits for it
            if isinstance(t, Tensor) and not t.is_floating_point():
                t.zero_()  # the break may have been going to fill it with indices
        result, dims = self._results[self._next]
        self._next += 1
        if destination is not None:
            return destination
        tree = take_apart(result, dims)
        return tree.build(self._like(v, dim) if isinstance(v, Tensor) else v for _, v, dim in tree.leaves)

    def _like(self, t: Tensor, dim: int | None) -> Tensor:
        shape = list(t.shape)
        if dim is not None and -t.dim() <= dim < t.dim() and shape[dim] == self._rows:
            shape[dim] = self._other
        return torch.zeros(shape, dtype=t.dtype, device=self._device)


class IndexChecks(_torch.WatchingMode):
    """Raises IndexError for an index that is out of range at another number of rows, before its op runs. On a GPU the op itself
    would end all work of the process.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, size in _indices({**dict(zip(_argument_names(func), args, strict=False)), **kwargs}):
            if index.numel() and index.dtype not in (torch.bool, torch.uint8):
                low, high = (int(v) for v in index.aminmax())
                if low < -size or high >= size:
                    raise IndexError(f"{func}: an index from {low} to {high} into {size} rows")
        return func(*args, **kwargs)


def _argument_names(func: Any) -> list[str]:
    schema = getattr(func, "_schema", None)
    return [] if schema is None else [a.name for a in schema.arguments]


def _indices(given: dict[str, Any]) -> Iterator[tuple[Tensor, int]]:
    """The tensors of indices among an op's arguments, each with the size that it points into."""
    into, dim = given.get("self", given.get("weight")), given.get("dim")
    if not isinstance(into, Tensor):
        return
    for index in (given.get("index"), given.get("indices"), given.get("target")):
        if isinstance(index, Tensor):
            if isinstance(dim, int) and into.dim():
                yield index, into.shape[dim]
            elif "weight" in given and "self" not in given:  # an embedding
                yield index, into.shape[0]
            elif "target" in given:  # a loss by classes
                yield index, into.shape[min(1, into.dim() - 1)]
            else:  # take and put
                yield index, into.numel()
        elif isinstance(index, list | tuple):
            at = 0
            for one in index:
                if isinstance(one, Tensor):
                    yield one, into.shape[at] if at < into.dim() else 0
                    at += one.dim() if one.dtype in (torch.bool, torch.uint8) else 1
                else:
                    at += 1
