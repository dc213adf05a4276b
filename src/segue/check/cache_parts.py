"""How a tensor in a cache of all requests corresponds to the same tensor in one session, told by their shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class CachePart:
    """Where one request's share of a cache's tensor lies, and where the same values lie in that request's session.

    The gate reads shapes and never asks the trunk's ``state``, because what the trunk leaves out there is a fault that the
    gate must find. ``dim``: the dimension along which the tensor has rows (``rows``) or requests; None if the cache's tensor
    and the session's have one shape.
    """

    dim: int | None
    rows: bool

    @staticmethod
    def of(cache: Tensor, session: Tensor, requests: int) -> CachePart | None:
        """The part of a cache for ``requests`` requests that a session's tensor corresponds to; None if shapes don't tell."""
        if cache.shape == session.shape:
            return CachePart(None, False)
        if requests > 1 and cache.shape[1:] == session.shape:
            return CachePart(0, False)
        if cache.dim() != session.dim():
            return None
        unequal = [d for d in range(cache.dim()) if cache.shape[d] != session.shape[d]]
        if len(unequal) != 1:
            return None
        dim = unequal[0]
        return CachePart(dim, not (requests > 1 and cache.shape[dim] == requests and session.shape[dim] == 1))

    def in_cache(self, cache: Tensor, request: int, start: int, n: int) -> Tensor:
        """A view of a request's share of the cache's tensor: its ``n`` rows from ``start``, or its one entry."""
        if self.dim is None:
            return cache
        return cache.narrow(self.dim, start, n) if self.rows else cache.narrow(self.dim, request, 1)

    def in_session(self, session: Tensor, n: int) -> Tensor:
        """A view of the same share in the session's tensor: its first ``n`` rows, or all of it."""
        return session.narrow(self.dim, 0, n) if self.rows and self.dim is not None else session

    def past_prompt(self, session: Tensor, n: int) -> Tensor | None:
        """A view of the session's rows past its ``n`` prompt tokens; None for a tensor without rows."""
        if not self.rows or self.dim is None:
            return None
        return session.narrow(self.dim, n, session.shape[self.dim] - n)
