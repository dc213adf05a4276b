"""What a call of a prime graph asks for: prompts and sessions, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from segue.errors import InputError
from segue.prime.trunk import Trunk

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True)
class Batch:
    """Fresh prompts, packed one after the other.

    ``ids``: token ids of each request [n] on the device. ``lengths``: their counts; 0 for an empty request.
    ``sessions``: None where a request is empty and none was given.
    """

    ids: Sequence[Tensor]
    lengths: Sequence[int]
    sessions: Sequence[Any]

    @property
    def total(self) -> int:
        """Tokens of all requests together."""
        return sum(self.lengths)

    def offsets(self, requests: int) -> list[int]:
        """``cu_seqlens`` of a graph for ``requests`` requests: those that the call doesn't have are empty."""
        return packed_offsets(self.lengths, requests)


def packed_offsets(lengths: Sequence[int], requests: int) -> list[int]:
    """Where each of ``requests`` requests begins, and where the last one ends, if they lie one after the other.

    ``lengths``: tokens of each request; those that are missing are empty.
    """
    ends = list(accumulate(lengths, initial=0))
    return ends + ends[-1:] * (requests + 1 - len(ends))


@dataclass(frozen=True)
class Limits:
    """What one graph takes.

    ``name``: what errors call the graph. ``bucket``: the most tokens of a call. ``requests``: the most prompts of a call.
    ``min_tokens``: the fewest tokens of a prompt. ``kind``: the type of its scratch cache, and of the sessions it fills.
    ``device``: where token ids have to be.
    """

    name: str
    bucket: int
    requests: int
    min_tokens: int
    kind: type
    device: torch.device


def read(tokens: Any, session: Any, limits: Limits, trunk: Trunk) -> Batch:
    """Read a call, ``tokens`` and ``session`` or lists of both, as a batch.

    Raises:
        InputError: the graph can't take these tokens or sessions; names the request and what to do.
    """
    several = isinstance(session, list | tuple) and not (limits.requests == 1 and type(session) is limits.kind)
    sessions = list(session) if several else [session]
    ids = read_tokens(list(tokens) if several else [tokens], limits, several)
    if len(sessions) != len(ids):
        raise InputError(
            f"{limits.name}: {len(ids)} prompts and {len(sessions)} sessions were given; give one session a prompt"
        )
    batch = Batch(ids, [t.shape[0] for t in ids], sessions)
    seen: dict[int, int] = {}
    for r, (one, n) in enumerate(zip(sessions, batch.lengths, strict=True)):
        if n:
            _check_session(one, r, limits, trunk)
            if id(one) in seen:
                raise InputError(
                    f"{limits.name}: requests {seen[id(one)]} and {r} have the same session, and the second would "
                    "overwrite the first. Give each prompt a session of its own"
                )
            seen[id(one)] = r
    return batch


def read_tokens(tokens: Sequence[Any], limits: Limits, several: bool) -> list[Tensor]:
    """Token ids of each request [n], on the graph's device.

    ``several``: whether the caller gave a list, in which empty requests are allowed.

    Raises:
        InputError: they are no token ids, on another device, or more or fewer than the graph takes.
    """
    if len(tokens) > limits.requests:
        raise InputError(
            f"{limits.name}: {len(tokens)} prompts were given, and its graph takes {limits.requests}. Make a "
            f"PrimeGraph(requests={len(tokens)}), or run them one by one"
        )
    ids = [_ids(t, r, limits) for r, t in enumerate(tokens)]
    for r, t in enumerate(ids):
        n = t.shape[0]
        if n < limits.min_tokens and not (several and n == 0):
            raise InputError(
                f"{limits.name}: request {r} has {n} tokens, fewer than the trunk's min_tokens={limits.min_tokens}. "
                "Run it eagerly, or breakable"
            )
    total = sum(t.shape[0] for t in ids)
    if total > limits.bucket:
        raise InputError(
            f"{limits.name}: {total} tokens are more than its bucket of {limits.bucket} rows holds. Use a graph of a "
            "larger bucket, or prefill in chunks with a breakable runner"
        )
    if not total:
        raise InputError(f"{limits.name}: there are no tokens in this call, so there is nothing to run")
    return ids


def _ids(tokens: Any, r: int, limits: Limits) -> Tensor:
    ids = tokens if isinstance(tokens, Tensor) else _as_tensor(tokens, r, limits)
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or ids.dtype not in _INTEGERS:
        raise InputError(
            f"{limits.name}: the tokens of request {r} are {ids.dtype} {tuple(ids.shape)}, {_WANTED}. Several prompts "
            "are a list of tensors, with a list of sessions"
        )
    if ids.device != limits.device:
        if ids.device.type != "cpu":
            raise InputError(
                f"{limits.name} is on {limits.device}, and the tokens of request {r} on {ids.device}. Move them"
            )
        ids = ids.to(limits.device, non_blocking=True)
    return ids


def _as_tensor(tokens: Any, r: int, limits: Limits) -> Tensor:
    try:
        return torch.tensor(tokens, dtype=None if len(tokens) else torch.int64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as e:
        raise InputError(
            f"{limits.name}: the tokens of request {r} are a {type(tokens).__qualname__} ({e}), {_WANTED}"
        ) from None


_WANTED = "not token ids: an integer tensor [n]"


def _check_session(session: Any, r: int, limits: Limits, trunk: Trunk) -> None:
    if type(session) is not limits.kind:
        raise InputError(
            f"{limits.name}: the session of request {r} is a {type(session).__qualname__}, and this trunk's caches are "
            f"{limits.kind.__qualname__}: it is of another model. Give one that the trunk's new_cache() made"
        )
    used = trunk.get_length(session)
    if used:
        raise InputError(
            f"{limits.name}: the session of request {r} holds {used} tokens already. A prime graph starts from a fresh "
            "cache and would overwrite them; extend a used session eagerly, or breakable"
        )
