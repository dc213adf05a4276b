"""A conversation held twice: by an accelerated model, and by the untouched one on a cache of its own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from segue.integrations.transformers import decode_body, names

FIRST_ID, LAST_ID = 10, 96  # of ordinary tokens, in every tiny model


def tokens(device: torch.device, batch: int, length: int, seed: int = 0) -> Tensor:
    """Random ids [batch, length], none of them special."""
    draw = torch.Generator().manual_seed(1000 * seed + 10 * length + batch)
    return torch.randint(FIRST_ID, LAST_ID, (batch, length), generator=draw).to(device)


def full(handle: Any) -> int:
    """How many forwards were replayed as one full graph."""
    return int(handle.stats.strategies.get("full", 0))


def declined(handle: Any, words: str) -> int:
    """How many steps no full graph took, for a reason with ``words`` in it."""
    return sum(count for reason, count in handle.stats.declined.items() if words in reason)


def held(cache: Any) -> list[tuple[int, Tensor, Tensor]]:
    """The length, keys and values of each layer of a cache."""
    return [(layer.get_seq_length(), layer.keys, layer.values) for layer in cache.layers]


def memory_of(handle: Any) -> Any:
    """The resident memory of a handle's steps."""
    return handle._decode._memory


def poison(handle: Any) -> None:
    """Fill resident memory, in which no cache lies, and the free memory of the pool with NaN."""
    memory = memory_of(handle)
    assert not memory.residences
    for t in memory._owned:
        t[: memory.rows].fill_(float("nan"))
    handle.runner.prepare().recorder.pool.poison()


@functools.cache
def reset_empties() -> bool:
    """Whether reset() of a growing cache drops its rows. Older releases zero them, and can't go on with another batch."""
    cache, one = names.new_cache(None), torch.ones(1, 1, 2, 1)
    cache.update(one, one, 0)
    cache.reset()
    return not cache.layers[0].is_initialized


def cached(handle: Any, cache: Any) -> dict[str, Any]:
    """The argument that gives a model a cache."""
    return {names.cache_name(type(handle.module).forward): cache}


def cache_of(out: Any) -> Any:
    """The cache that a model has returned."""
    return out.get("cache") if out.get("past_key_values") is None else out.past_key_values


class Twins:
    """A conversation of ``batch`` sequences. ``mask`` [batch, n]: of all tokens so far; None where nothing is padding."""

    def __init__(self, handle: Any, ours: Any = None, theirs: Any = None, mask: Tensor | None = None) -> None:
        self.handle, self.ours, self.theirs, self.mask = handle, ours, theirs, mask

    def say(self, ids: Tensor, mask: Tensor | None = None, **given: Any) -> Tensor:
        """Feed ids [batch, n] to both, whose logits and caches must be equal then. ``mask``: of these tokens. Returns logits."""
        if mask is not None or self.mask is not None:
            new = torch.ones_like(ids) if mask is None else mask
            self.mask = new if self.mask is None else torch.cat([self.mask, new], 1)
        given = {"attention_mask": self.mask, **given}
        with torch.no_grad():
            with self.handle.untouched():
                want = self.handle.module(ids, use_cache=True, **cached(self.handle, self.theirs), **given)
            got = self.handle.module(ids, use_cache=True, **cached(self.handle, self.ours), **given)
        self.theirs, self.ours = cache_of(want), cache_of(got)
        real = slice(None) if mask is None else mask.bool()[:, -want.logits.shape[1] :]  # what padding says, nobody reads
        close(got.logits[real], want.logits[real])
        self.check()
        return want.logits  # type: ignore[no-any-return]

    def steps(self, count: int, seed: int = 0, **given: Any) -> Tensor:
        """Feed ``count`` tokens one by one. Returns the last logits."""
        batch, out = self.theirs.layers[0].keys.shape[0], torch.empty(0)
        for ids in tokens(self.handle.device, batch, count, seed).split(1, 1):
            out = self.say(ids, **given)
        return out

    def both(self, change: Callable[[Any], Any]) -> None:
        """Do the same to both caches."""
        change(self.ours)
        change(self.theirs)

    def copied(self, how: Callable[[Any], Any] = copy.deepcopy) -> Twins:
        """Another conversation, whose caches are copies of these."""
        return Twins(self.handle, how(self.ours), how(self.theirs), self.mask)

    def check(self) -> None:
        """Compare the caches, but for what padding has left in them."""
        assert self.ours.get_seq_length() == self.theirs.get_seq_length()
        assert type(self.ours) is type(self.theirs) and len(self.ours.layers) == len(self.theirs.layers)
        for (n, *got), (m, *want) in zip(held(self.ours), held(self.theirs), strict=True):
            assert n == m
            for a, b in zip(got, want, strict=True):
                assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
                if self.mask is None:
                    close(a, b)
                else:
                    real = self.mask.bool()[:, -b.shape[2] :]
                    real = torch.nn.functional.pad(real, (0, b.shape[2] - real.shape[1]), value=True)  # of a static cache
                    close(a.transpose(1, 2)[real], b.transpose(1, 2)[real])


def close(got: Tensor, want: Tensor) -> None:
    """Equal to rounding."""
    most = 1e-4 if want.dtype is torch.float32 else 5e-2
    torch.testing.assert_close(got, want, rtol=most, atol=most)


def take_turns(talks: list[Twins]) -> None:
    """Let conversations of several sequences and lengths decode in turns. All caches must be right after each step."""
    for at, talk in enumerate(talks):
        talk.say(tokens(talk.handle.device, 1 + at // 2, 5 + 4 * at))
    for turn in range(5):
        for at, talk in enumerate(talks):
            talk.steps(1, 10 * turn + at)
            for each in talks:
                each.check()


def fail_in_a_step(talk: Twins, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next step of a conversation fail that has made so many: behind all layers where it would be warmed up or
    captured, before the graph where it would be replayed."""

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a test")

    handle, body = talk.handle, decode_body.DecodeBody
    hidden = body.hidden
    with monkeypatch.context() as broken:
        if steps < 2:
            broken.setattr(body, "hidden", lambda *given: fail(hidden(*given)))
        else:
            broken.setattr(type(handle._decode._runner), "__call__", fail)
        with torch.no_grad(), pytest.raises(ZeroDivisionError):
            handle(tokens(handle.device, 1, 1), **cached(handle, talk.ours))
