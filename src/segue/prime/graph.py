"""The prime graph: a whole fresh-prompt forward of one bucket, bound to a scratch cache of its own and copied out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from segue import _torch, devices, environment
from segue.capture import BreakableCapture
from segue.capture.thread_state import state
from segue.devices import Device, Pool
from segue.errors import UsageError
from segue.prime.body import Inputs, Reference, body, embed, reference
from segue.prime.copyout import CopyOut
from segue.prime.cuts import Pattern
from segue.prime.delivery import deliver, without_gradients
from segue.prime.recorder import Prime, Recorder
from segue.prime.requests import Batch, Limits, read, read_tokens
from segue.prime.trunk import Trunk
from segue.prime.trunk_guard import Modules, check_trunk


@dataclass(frozen=True)
class PrimeResult:
    """What a run gives, the caller's own, one row for each prompt of the call; those of empty prompts are zero.

    ``logits``: [requests, V]. ``hidden``: the last real row's state [requests, H].
    """

    logits: Tensor
    hidden: Tensor


class PrimeGraph:
    """A fresh prompt's forward, attention and cache writes too, as one graph of ``bucket`` rows. Captured at once.

    A graph can't write into a session's cache, whose address differs each time. So it fills a scratch cache, and each
    run copies from there exactly the prompt's own rows and states into the session.

    Args:
        trunk: the model, in eval mode.
        bucket: rows of the graph; a run takes up to so many tokens, all its prompts together.
        requests: the most prompts in a run.
        cuts: after which of the trunk's marks the graph is cut, counted from 1; ``[]`` for one whole graph. By default
            a few patterns are recorded and measured, and the quickest is kept, where the device can measure; one whole
            graph elsewhere. :attr:`cuts` says which, to be pinned for other buckets: each pattern that lost holds its
            graph's driver memory until the pool is retired.
        device: as for :class:`~segue.BreakableCapture`; by default that of the trunk's cache.
        pool: likewise; several graphs may share one, and do by default.
        stream: likewise.

    With ``SEGUE=off`` in the environment when it is made, nothing is captured and each run is eager.

    Raises:
        CaptureError: the forward reads the host, has a data-dependent shape, or finds no memory.
        UsageError: the trunk doesn't keep to the protocol, is in training mode, or meets a break point.
    """

    def __init__(
        self,
        trunk: Trunk,
        bucket: int,
        requests: int = 1,
        *,
        cuts: Sequence[int] | None = None,
        device: str | torch.device | Device | None = None,
        pool: Pool | None = None,
        stream: Any = None,
    ) -> None:
        self.name = f"prime graph of {bucket} rows" + (f" and {requests} requests" if requests != 1 else "")
        check_trunk(trunk, self.name)
        _check_sizes(trunk, bucket, requests, self.name)
        if state.capture is not None or state.pools:
            raise UsageError(f"{self.name}: it can't be captured inside another capture or replay. Make it beforehand")
        self.trunk, self.bucket, self.requests = trunk, bucket, requests
        self._modules = Modules(trunk, self.name)
        with torch.no_grad():
            self._modules.check()
        with torch.inference_mode(False):
            self.scratch = trunk.new_cache(bucket, requests)
        self.copies = CopyOut(trunk.state(self.scratch), bucket, requests, self.name)
        place = self.copies.tensors[0].device
        self.device: Device = devices.resolve(
            pool.device if pool is not None and device is None else device, self.copies.tensors
        )
        if self.device.torch_device != place:
            raise UsageError(
                f"{self.name}: the trunk's cache is on {place}, and the graph on {self.device.name}. Give one device"
            )
        self.pool: Pool = pool if pool is not None else self.device.default_pool()
        self._stream = stream if stream is not None else self.device.default_stream()
        self._limits = Limits(self.name, bucket, requests, trunk.min_tokens, type(self.scratch), place)
        example = self._example()
        with torch.inference_mode():
            parts = embed(trunk, example, self.name)
            self._inputs = Inputs(parts[0], bucket, requests)
            self._inputs.fill(parts, example)
        self.off = environment.disabled()
        self._cuts: Pattern = ()
        self._capture: BreakableCapture | None = None
        self._recorder = Recorder(
            self._body, Prime(trunk, self.scratch, self._inputs), self.device, self.pool, self._stream, self.name
        )
        if not self.off:
            marked = self._recorder.warm()
            self._inputs.offsets.check(self.name)
            self._cuts, self._capture = self._recorder.best(cuts, marked)
            self._inputs.look_at(self._capture)

    @property
    def graphs(self) -> int:
        """Segments: one more than there are cuts."""
        return 0 if self._capture is None else self._capture.graphs

    @property
    def cuts(self) -> tuple[int, ...]:
        """After which marks it is cut."""
        return self._cuts

    @property
    def seconds(self) -> float:
        """That the latest recording took, without warm-up and collecting garbage."""
        return self._recorder.seconds

    @property
    def measured(self) -> Mapping[Pattern, float]:
        """Seconds of each pattern of cuts that was tried, where there was a choice and the device can measure."""
        return self._recorder.measured

    @property
    def capture(self) -> BreakableCapture | None:
        """What was recorded, for those who look closely; None with ``SEGUE=off``."""
        return self._capture

    def run(self, tokens: Any, session: Any) -> PrimeResult:
        """Run a fresh prompt and leave its state in ``session``; or several, with lists of both.

        Args:
            tokens: ids [n], a tensor or a sequence of numbers, ``min_tokens <= n <= bucket``. A list of them with a
                list of sessions: prompts packed in one bucket, ``bucket`` tokens in all; one without tokens is empty
                and costs nothing.
            session: a fresh cache of the trunk's with room for the prompt. It is written only after everything else
                went well.

        Raises:
            InputError: what was given doesn't fit: too many or too few tokens, a used session, one of another model,
                dtype or device, one that shares memory with another. UsageError: training mode, or gradients required.
                ReplayError: something that the graph reads was re-pointed, or it was closed. Either way the sessions are as
                they were.
        """
        if state.capture is not None:
            raise UsageError(f"{self.name}: it was run inside a capture, which would record it. Run it outside")
        if self._capture is None:
            self._modules.check()
        as_caller = torch.is_inference_mode_enabled()
        with self.pool.turn():
            with _torch.inference_guard(True):
                batch = read(tokens, session, self._limits, self.trunk)
                offsets = self._inputs.fill(embed(self.trunk, batch, self.name, self._inputs.x), batch)
                logits, hidden = self._forward()
            # From here the device is at work, and what is checked costs no time. Only the scratch cache has been written.
            self._modules.check()
            with without_gradients(as_caller):
                result = _owned(logits, hidden, batch)
            deliver(self.trunk, self.copies, batch.sessions, batch.lengths, offsets, inference=as_caller)
        return result

    def reference(self, tokens: Any) -> Reference:
        """What a run of these tokens (ids, or a list of them) must equal: the trunk, eager, on a fresh cache."""
        return reference(self.trunk, self.batch(tokens), self.bucket, self.requests, self.name)

    def batch(self, tokens: Any) -> Batch:
        """``tokens`` as :meth:`run` reads them, without sessions."""
        several = isinstance(tokens, list | tuple) and any(not isinstance(t, int) for t in tokens)
        ids = read_tokens(tokens if several else [tokens], self._limits, several)
        return Batch(ids, [t.shape[0] for t in ids], [None] * len(ids))

    def close(self) -> None:
        """Forbid further runs. The memory goes back when no live graph shares the pool. May be called twice."""
        if self._capture is not None:
            self._capture.close()
        self._recorder.results.clear()

    def __enter__(self) -> PrimeGraph:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _body(self) -> tuple[Tensor, Tensor]:
        self.trunk.reset(self.scratch)
        return body(self.trunk, self._inputs.x, self._inputs.offsets.cu_seqlens, self.scratch, self.name)

    def _forward(self) -> tuple[Tensor, Tensor]:
        if self._capture is None:
            return self._body()
        self._capture.replay()
        logits, hidden = self._recorder.results[self._capture]
        return logits, hidden

    def _example(self) -> Batch:
        """As many shortest prompts as fit, so that the capture's own forward is a plausible one."""
        n = self.trunk.min_tokens
        count = min(self.requests, self.bucket // n)
        with torch.inference_mode(False):
            ids = torch.zeros(n, dtype=torch.int64, device=self._limits.device)
        return Batch([ids] * count, [n] * count, [None] * count)


def _owned(logits: Tensor, hidden: Tensor, batch: Batch) -> PrimeResult:
    count = len(batch.lengths)
    result = PrimeResult(logits[:count].clone(), hidden[:count].clone())
    for r, n in enumerate(batch.lengths):
        if not n:
            result.logits[r].zero_()
            result.hidden[r].zero_()
    return result


def _check_sizes(trunk: Trunk, bucket: int, requests: int, name: str) -> None:
    for what, value in (("bucket", bucket), ("requests", requests)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"{name}: {what}={value!r} must be a whole number")
    if bucket < trunk.min_tokens:
        raise UsageError(
            f"{name}: the bucket is smaller than trunk.min_tokens={trunk.min_tokens}, so that no prompt fits"
        )
    if not 1 <= requests <= bucket:
        raise UsageError(f"{name}: requests={requests} must be from 1 to the bucket's {bucket} rows")
