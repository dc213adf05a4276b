"""The protocol that a model's owner writes for a prime graph, in about a page: the trunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """State with one row for each token along ``dim``: keys, values, their scales.

    In a scratch cache the prompts of all requests lie one after the other, as in ``x``. Of a request with ``n`` tokens
    exactly its own ``n`` rows are copied, to the first ``n`` of its session, whose tensor may be of another length.
    ``tokens``: of one row, where a request is a batch of so many sequences side by side, each with a token in every row.
    Copies are quickest where one tensor holds all layers, or where ``dim`` is the outermost.
    """

    tensor: Tensor
    dim: int = 0
    tokens: int = 1


@dataclass(frozen=True, eq=False)
class Whole:
    """State of fixed size for each request, copied entirely: a recurrent state, a convolution's window.

    A scratch cache of several requests has one entry for each request along ``dim``; a session has one entry there, or lacks
    that dimension. For a single request both have the same shape.
    """

    tensor: Tensor
    dim: int = 0


class Trunk(Protocol):
    """A model as a prime graph sees it. Its eager run on a fresh cache is what a replay must equal, bit for bit.

    ``min_tokens``: the shortest prompt that it serves, at least 1.

    ``forward`` and ``head`` are captured, so they neither read the host nor draw data-dependent shapes. Rows from
    ``cu_seqlens[-1]`` on are padding and must reach no real row and no state: causal attention hides them, a recurrent
    mixer takes identity steps there (gate and beta 0), a convolution's window is taken where the prompt ends. Where the
    graph may be cut, between two layers, call :func:`segue.prime.cut_here`.

    Five methods are optional. ``part(cache, rows)`` gives the first rows of a larger scratch cache as a cache of their own:
    with it all buckets of a strategy share one, without it each has its own, beside the graphs' memory.
    ``reserve(session, n)`` is called before ``state(session)`` for sessions that have no memory of their own yet; it must
    leave the session as it is until ``set_length``. ``receive(session, cache, n)``, of a trunk for one request, may fill a
    session by itself, after a replay, with the first n rows of a scratch cache; it returns whether it has.
    ``step(token, session)`` is one greedy step ([1] int64 to logits [1, V]) and ``new_session(rows)`` makes a fresh session where
    ``new_cache`` doesn't; only ``segue check prime`` calls these two.
    """

    min_tokens: int

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [n] of one request to [n, D]. Runs outside the graph."""

    def new_cache(self, rows: int, requests: int = 1) -> Any:
        """A fresh cache of ``rows`` rows for ``requests`` requests together. A session's cache is of the same type."""

    def reset(self, cache: Any) -> None:
        """Make a used cache as a fresh one, on the device. Captured at the head of the graph."""

    def forward(self, x: Tensor, cu_seqlens: Tensor, cache: Any) -> Tensor:
        """[rows, D] to [rows, H], filling a fresh cache.

        ``cu_seqlens``: int32 [requests + 1] on the device. Request r owns the rows from ``cu_seqlens[r]`` up to, not
        including, ``cu_seqlens[r + 1]``; it may have none.
        """

    def head(self, last: Tensor) -> Tensor:
        """The last real row of each request [requests, H] to logits [requests, V]."""

    def state(self, cache: Any) -> Mapping[str, Rows | Whole]:
        """Everything of a cache that later steps read, by name; the same names, dtypes and shapes each time."""

    def get_length(self, session: Any) -> int:
        """Tokens in a session; 0 if it is fresh."""

    def set_length(self, session: Any, n: int) -> None:
        """Note that the session has ``n`` tokens now. Called last, when their state is in the session."""
