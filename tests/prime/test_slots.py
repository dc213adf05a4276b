"""Sessions that are slices of one tensor are none the worse for being slices; those that share bytes are refused."""

from __future__ import annotations

import pytest
import torch

import segue
from prime.prompts import prompt
from segue.check import tiny_trunk
from segue.devices import Device


@pytest.mark.parametrize("slots", ["kv[i]", "kv[:, i]"])
def test_sessions_that_are_slots_of_one_tensor_are_served(device: Device, dense_trunk: tiny_trunk.Dense, slots: str) -> None:
    one = dense_trunk.new_cache(16).kv
    whole = torch.stack([one, one], 0 if slots == "kv[i]" else 1)
    sessions = [tiny_trunk.DenseCache(whole[i] if slots == "kv[i]" else whole[:, i]) for i in range(2)]
    with segue.PrimeGraph(dense_trunk, 16, requests=2, device=device) as prime:
        prime.run([prompt(4, device), prompt(5, device)], sessions)
        apart = [dense_trunk.new_cache(16) for _ in sessions]
        prime.run([prompt(4, device), prompt(5, device)], apart)
    for n, session, own in zip((4, 5), sessions, apart, strict=True):
        assert torch.equal(session.kv[..., :n, :], own.kv[..., :n, :]) and own.kv[..., :n, :].any()


def test_sessions_that_share_memory_are_refused_and_left_as_they_were(device: Device, dense_trunk: tiny_trunk.Dense) -> None:
    with segue.PrimeGraph(dense_trunk, 16, requests=2, device=device) as prime:
        long = dense_trunk.new_cache(20).kv
        sessions = [tiny_trunk.DenseCache(long[..., :16, :]), tiny_trunk.DenseCache(long[..., 4:, :])]
        with pytest.raises(segue.SegueError, match="sessions of requests 0 and 1 share the memory of keys and values"):
            prime.run([prompt(4, device), prompt(5, device)], sessions)
        part = tiny_trunk.DenseCache(prime.scratch.kv[..., 1:, :])
        with pytest.raises(segue.SegueError, match="request 0 shares the memory of keys and values with the scratch cache"):
            prime.run(prompt(4, device), part)
        expanded = tiny_trunk.DenseCache(long[..., :1, :].expand(*long.shape))
        with pytest.raises(segue.SegueError, match=r"request 0 has keys and values as an expanded tensor.*one and the same"):
            prime.run(prompt(4, device), expanded)
        assert not long.any() and all(s.length == 0 for s in (*sessions, part, expanded))
