"""Admission: in which bucket a call may replay, or why it runs eager. A pure function of the call's counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from segue.errors import InputError, UsageError
from segue.runner.ladder import Ladder
from segue.runner.reasons import NO_BUCKET, NO_REQUEST_BUCKET, PADDING, UNEVEN

EAGER = "eager"
FITS = "smallest bucket that fits"


@dataclass(frozen=True)
class Decision:
    """Where a call runs. Ranks that pass the same decision run the same graph.

    ``bucket``: padded tokens, None for eager. ``strategy``: ``"breakable"``, another registered one, or ``"eager"``.
    ``reason``: why, in words that counters use. ``requests``: padded requests, where inputs have that axis.
    """

    bucket: int | None
    strategy: str
    reason: str
    requests: int | None = None


@dataclass(frozen=True)
class Admission:
    """The rules by which one runner admits calls.

    Args:
        ladder: token buckets. ``requests``: request buckets, if some input is request-shaped.
        max_padding: a call with more padding runs eager. A whole number counts padded rows, a fraction below 1 is their share.
        strategies: names, the preferred first; a call that names none takes the last, which serves every batch.
        left_out: buckets that have no graph, with the reason.
        own: ladders of strategies that have their own, by name. Their buckets count requests, or tokens without a request axis.

    Raises:
        UsageError: ``max_padding`` is neither.
    """

    ladder: Ladder
    requests: Ladder | None = None
    max_padding: int | float | None = None
    strategies: Sequence[str] = ("breakable",)
    left_out: Mapping[int, str] = field(default_factory=dict)
    own: Mapping[str, Ladder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limit = self.max_padding
        number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if limit is not None and not (number and limit >= 0 and (isinstance(limit, int) or limit < 1)):
            raise UsageError(
                f"max_padding={limit!r} is neither a whole number of rows nor a share of the bucket below 1.0"
            )

    def decide(self, tokens: int, requests: int = -1, strategy: str | None = None) -> Decision:
        """Choose the smallest bucket that holds the call, or eager and why. It takes O(log n), and more where buckets are left
        out.

        ``requests``: -1 where the call has no request axis. ``strategy``: the name of the one that takes the call.
        """
        if strategy is not None and (own := self.own.get(strategy)) is not None:
            return self._by_requests(own, tokens, requests, strategy)
        bucket = first = self.ladder.bucket_for(tokens)
        if self.left_out:
            while bucket in self.left_out:
                bucket = self.ladder.bucket_for(bucket + 1)  # type: ignore[operator]
        if bucket is None:
            return Decision(None, EAGER, NO_BUCKET if first is None else self.left_out[first])
        row = None
        if self.requests is not None and requests >= 0:
            row = self.requests.bucket_for(requests)
            if row is None:
                return Decision(None, EAGER, NO_REQUEST_BUCKET)
        limit = self.max_padding
        if limit is not None and bucket - tokens > (limit if isinstance(limit, int) else limit * bucket):
            return Decision(None, EAGER, PADDING)
        return Decision(bucket, strategy or self.strategies[-1], FITS, row)

    @property
    def most(self) -> tuple[int, int]:
        """The most padded tokens and requests of any call."""
        tops = [ladder.max for ladder in self.own.values()]
        return max(self.ladder.max, *tops, 0), max(0 if self.requests is None else self.requests.max, *tops, 0)

    def _by_requests(self, ladder: Ladder, tokens: int, requests: int, strategy: str) -> Decision:
        count = tokens if self.requests is None else requests
        bucket = ladder.bucket_for(count)
        if bucket is None:
            return Decision(None, EAGER, NO_REQUEST_BUCKET)
        each, odd = divmod(tokens, count) if count > 0 else (1, tokens)
        if odd or bucket * each > self.most[0]:
            return Decision(None, EAGER, UNEVEN if odd else NO_BUCKET)
        return Decision(bucket * each, strategy, FITS, None if self.requests is None else bucket)

    def check(self, d: Any, tokens: int, requests: int) -> None:
        """Check that a decision made elsewhere can serve a call.

        Raises:
            UsageError: ``d`` is no decision, or not one of this runner's. InputError: its bucket is too small.
        """
        if not isinstance(d, Decision):
            raise self.no_decision(d)
        if d.bucket is None:
            return
        own = self.own.get(d.strategy)
        if own is not None and d == self._by_requests(own, d.bucket, -1 if d.requests is None else d.requests, d.strategy):
            if d.bucket >= tokens and (d.requests or 0) >= requests and d.bucket * requests == tokens * (d.requests or requests):
                return
            raise InputError(f"{d} holds other rows than the call's {tokens} tokens; admit the largest count of all ranks")
        if d.bucket not in self.ladder or d.bucket in self.left_out or d.strategy not in self.strategies:
            raise UsageError(f"{d} names a bucket or strategy this runner doesn't have; take decisions from runner.admit()")
        if d.bucket < tokens or (d.requests is not None and d.requests < requests):
            raise InputError(f"{d} holds fewer rows than the call's {tokens} tokens; admit the largest count of all ranks")
        if (d.requests is None and requests >= 0) or (d.requests is not None and self.requests is None):
            raise UsageError(f"{d} and the runner disagree on whether there is a request axis; use admit(tokens, requests)")
        if d.requests is not None and self.requests is not None and d.requests not in self.requests:
            raise UsageError(f"{d} names a request bucket this runner doesn't have; take decisions from runner.admit()")

    @staticmethod
    def no_decision(d: Any) -> UsageError:
        """The error for an object that is no decision."""
        return UsageError(f"decision={d!r} is a {type(d).__qualname__}; take decisions from runner.admit(tokens)")

    def explain(self, tokens: int, requests: int = -1) -> str:
        """Say the decision in a sentence, with its numbers."""
        d = self.decide(tokens, requests)
        if d.bucket is not None:
            padded = d.bucket - tokens
            also = "" if d.requests is None else f", {requests} requests in the request bucket {d.requests}"
            share = padded / d.bucket
            return f"{tokens} tokens: bucket {d.bucket}, {padded} padded rows ({share:.0%}), {d.strategy}{also}"
        if d.reason == NO_BUCKET or d.reason in self.left_out.values():
            why = f"the largest bucket is {self.ladder.max}"
            if self.left_out:
                why += "; left out: " + ", ".join(f"{b} ({reason})" for b, reason in self.left_out.items())
        elif d.reason == PADDING:
            bucket = self.ladder.bucket_for(tokens)
            why = f"bucket {bucket} has {bucket - tokens} padded rows, more than max_padding={self.max_padding}"  # type: ignore[operator]
        else:
            assert self.requests is not None
            why = f"{requests} requests, and the largest request bucket is {self.requests.max}"
        return f"{tokens} tokens: eager, {d.reason}: {why}"
