"""The prime graph: a whole fresh-prompt forward of one bucket, bound to a scratch cache of its own and copied out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor

from segue import _torch, devices, environment
from segue.capture import BreakableCapture
from segue.capture.module_checks import ModuleChecks
from segue.capture.named_ranges import named
from segue.capture.places import Places
from segue.capture.thread_state import state
from segue.devices import Device, Pool
from segue.errors import UsageError, no_copy, traced
from segue.prime.copyout import CopyOut
from segue.prime.cuts import Pattern
from segue.prime.fixed_inputs import Inputs
from segue.prime.reference import Reference, embed, logits_of, reference
from segue.prime.requests import Batch, Limits, read, read_tokens
from segue.prime.scratch_forward import Results, ScratchForward, places_of, without_gradients
from segue.prime.trunk import Trunk
from segue.prime.trunk_checks import check_trunk, held_weights, trunk_checks


@dataclass(frozen=True)
class PrimeResult:
    """What a run gives, the caller's own.

    With ``rows="last"`` one row for each prompt of the call, that of its last token: ``logits`` [requests, V] and ``hidden``
    [requests, H]. Those of empty prompts are zero. With ``rows="all"`` one row for each of the n tokens of the call, one prompt
    after the other: [n, V] and [n, H].
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
        pool: as for :class:`~segue.BreakableCapture`; several graphs may share one, and do by default.
        stream: as for :class:`~segue.BreakableCapture`.
        warmups: eager runs before the recording. Kernels that tune themselves may need several.

    With ``SEGUE=off`` in the environment when it is made, nothing is captured and each run is eager. :attr:`off` says so.

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
        pool: Pool | tuple[int, int] | None = None,
        stream: Any = None,
        warmups: int = 1,
    ) -> None:
        self.name = f"prime graph of {bucket} rows" + (f" and {requests} requests" if requests != 1 else "")
        check_trunk(trunk, self.name)
        _check_sizes(trunk, bucket, requests, warmups, self.name)
        self.trunk, self.bucket, self.requests = trunk, bucket, requests
        self.off, self._closed = environment.disabled(), False
        checks = self._check_state()
        scratch, copies = self._new_scratch()
        self.device: Device = devices.resolve(devices.device_of(pool) if device is None else device, copies.tensors)
        self.pool: Pool = devices.pool_of(self.device, pool)
        self._stream = devices.stream_of(self.device, stream)
        self._asked, self._warmups = cuts, warmups
        self._bound = self._bind(checks, scratch, copies, cuts)

    @property
    def owner(self) -> str:
        """What has the ``recapture()`` that errors tell the user to call."""
        return self.name

    @property
    def scratch(self) -> Any:
        """The scratch cache that the graph fills."""
        return self._bound.forward.scratch

    @property
    def copies(self) -> CopyOut:
        """The copies from the scratch cache into sessions."""
        return self._bound.forward.copies

    @property
    def graphs(self) -> int:
        """The number of segments: one more than there are cuts; 0 with ``SEGUE=off``."""
        return 0 if self.capture is None else self.capture.graphs

    @property
    def cuts(self) -> tuple[int, ...]:
        """The marks after which the graph is cut."""
        return self._bound.forward.cuts

    @property
    def seconds(self) -> float:
        """How long the latest recording took, in seconds, without warm-up and garbage collection."""
        return self._bound.forward.seconds

    @property
    def measured(self) -> Mapping[Pattern, float]:
        """Seconds of each pattern of cuts that was tried, where there was a choice and the device can measure."""
        return self._bound.forward.measured

    @property
    def capture(self) -> BreakableCapture | None:
        """The capture itself, for a close look; None with ``SEGUE=off``."""
        return self._bound.forward.captured

    def run(self, tokens: Any, session: Any, rows: Literal["last", "all"] = "last") -> PrimeResult:
        """Run a fresh prompt and leave its state in ``session``; or several, with lists of both.

        Args:
            tokens: ids [n], a tensor or a sequence of numbers, ``min_tokens <= n <= bucket``. A list of them with a
                list of sessions: prompts packed in one bucket, ``bucket`` tokens in all; one without tokens is empty
                and costs nothing.
            session: a fresh cache of the trunk's with room for the prompt. It is written only after everything else
                went well.
            rows: of which tokens hidden states and logits are returned: of each prompt's last, or of all, as a drafter needs.
                All rows equal those of the trunk's forward at the prompt's own length to rounding. The head of all rows runs
                after the graph, eagerly.

        Raises:
            InputError: what was given doesn't fit: too many or too few tokens, a used session, one of another model,
                dtype or device, one that shares memory with another. UsageError: training mode, or gradients required.
                ReplayError: something that the graph reads was re-pointed, or it was closed. Either way the sessions are as
                they were.
        """
        if rows not in ("last", "all"):
            raise UsageError(f'{self.name}: rows={rows!r} is neither "last" nor "all"')
        if state.capture is not None:
            raise UsageError(f"{self.name}: it was run inside a capture, which would record it. Run it outside")
        if _torch.is_tracing():
            raise traced(self.name)
        as_caller = torch.is_inference_mode_enabled()
        with self.pool.turn():
            bound = self._bound
            if bound.forward.captured is None:
                bound.check()
            with _torch.inference_guard(True):
                batch = read(tokens, session, bound.limits, self.trunk)
                named(f"staging, bucket {self.bucket}", self._stage)(bound.inputs, batch)
                found = bound.forward.run() if bound.forward.captured is None else bound.forward.replay()
            # From here the device is at work, and what is checked costs no time. Only the scratch cache has been written.
            bound.check()
            with without_gradients(as_caller):
                result = named("outputs", self._owned)(found, batch, rows)
            named("copy-out", bound.forward.deliver)(batch.sessions, batch.lengths, inference=as_caller)
        return result

    def reference(self, tokens: Any, rows: Literal["last", "all"] = "last") -> Reference:
        """What a run of these tokens (ids, or a list of them) must equal: the trunk, eager, on a fresh cache."""
        return reference(self.trunk, self.batch(tokens), self.bucket, self.requests, self.name, every=rows == "all")

    def batch(self, tokens: Any) -> Batch:
        """``tokens`` as :meth:`run` reads them, without sessions.

        Raises:
            InputError: they don't fit the graph.
        """
        several = isinstance(tokens, list | tuple) and any(not isinstance(t, int) for t in tokens)
        ids = read_tokens(tokens if several else [tokens], self._bound.limits, several)
        return Batch(ids, [t.shape[0] for t in ids], [None] * len(ids))

    def recapture(self) -> None:
        """Record the graph again on the trunk's present tensors and modules, with a new scratch cache, cut as was asked for.

        For weights that were re-pointed, resized or replaced. Runs of other threads wait or go on with the old graph; if
        recording fails, the old graph stays in place.

        Raises:
            CaptureError, UsageError: as when the graph was made. UsageError: it was closed.
        """
        if self._closed:
            raise UsageError(f"{self.name}: it was closed, so it can't be recaptured. Make a new PrimeGraph")
        checks = self._check_state()
        bound = self._bind(checks, *self._new_scratch(), self._asked)
        with self.pool.turn():  # no run is under way while the old graph is closed
            before, self._bound = self._bound, bound
            before.forward.close()

    def close(self) -> None:
        """Forbid further runs. The memory goes back when no live graph shares the pool. May be called twice."""
        self._closed = True
        self._bound.forward.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise no_copy(self.name, "Copy or pickle the trunk without it, and make a new PrimeGraph of the copy.")

    def __enter__(self) -> PrimeGraph:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _stage(self, inputs: Inputs, batch: Batch) -> None:
        inputs.fill(embed(self.trunk, batch, self.name, inputs.x), batch)

    def _owned(self, found: Results, batch: Batch, rows: str) -> PrimeResult:
        """A copy of the graph's results: those of each prompt's last row or of all real rows, with their logits."""
        logits, last, hidden = found
        if rows == "all":
            real = hidden[: batch.total].clone()
            return PrimeResult(logits_of(self.trunk, real, self.name), real)
        count = len(batch.lengths)
        result = PrimeResult(logits[:count].clone(), last[:count].clone())
        for r, n in enumerate(batch.lengths):
            if not n:
                result.logits[r].zero_()
                result.hidden[r].zero_()
        return result

    def _check_state(self) -> ModuleChecks:
        """Refuse to record inside another capture or in training mode. Returns the checks for later runs."""
        if state.capture is not None or state.pools:
            raise UsageError(f"{self.name}: it can't be captured inside another capture or replay. Make it beforehand")
        checks = trunk_checks(self.trunk, self.name)
        checks.check_modes()
        return checks

    def _new_scratch(self) -> tuple[Any, CopyOut]:
        with torch.inference_mode(False):
            scratch = self.trunk.new_cache(self.bucket, self.requests)
        return scratch, CopyOut(self.trunk.state(scratch), self.bucket, self.requests, self.name)

    def _bind(self, checks: ModuleChecks, scratch: Any, copies: CopyOut, cuts: Sequence[int] | None) -> _Bound:
        """Make the fixed inputs and record the forward that reads them."""
        place = copies.tensors[0].device
        if self.device.torch_device != place:
            raise UsageError(
                f"{self.name}: the trunk's cache is on {place}, and the graph on {self.device.name}. Give one device"
            )
        limits = Limits(self.name, self.bucket, self.requests, self.trunk.min_tokens, type(scratch), place)
        example = self._example(place)
        with torch.inference_mode():
            parts = embed(self.trunk, example, self.name)
            inputs = Inputs(parts[0], self.bucket, self.requests)
            inputs.fill(parts, example)
        forward = ScratchForward(
            self.trunk,
            scratch,
            copies,
            inputs.x,
            inputs.offsets,
            self.name,
            places=self._places(),
            remedy=f"call recapture() on the {self.owner}",
            with_head=True,
        )
        if not self.off:
            forward.capture(cuts, self.pool, self._stream, warmups=self._warmups)
            assert forward.captured is not None
            inputs.look_at(forward.captured)
        return _Bound(checks, held_weights(self.trunk), limits, inputs, forward)

    def _example(self, place: torch.device) -> Batch:
        """As many shortest prompts as fit, so that the capture's own forward is a plausible one."""
        n = self.trunk.min_tokens
        count = min(self.requests, self.bucket // n)
        with torch.inference_mode(False):
            ids = torch.zeros(n, dtype=torch.int64, device=place)
        return Batch([ids] * count, [n] * count, [None] * count)

    def _places(self) -> Places:
        """The names that the trunk reaches, and what it decides by now."""
        return places_of(self.trunk)


_torch.dynamo_boundary(PrimeGraph.run, "a segue prime graph replays graphs of its own")


@dataclass(frozen=True)
class _Bound:
    """Everything that one recording of a prime graph is bound to. ``held``: aliases of the trunk's weights."""

    checks: ModuleChecks
    held: list[Tensor]
    limits: Limits
    inputs: Inputs
    forward: ScratchForward

    def check(self) -> None:
        """Raise UsageError for a trunk in training mode, or for gradients that would have to be recorded."""
        self.checks.check_modes()
        self.checks.check_gradients()


def _check_sizes(trunk: Trunk, bucket: int, requests: int, warmups: int, name: str) -> None:
    for what, value in (("bucket", bucket), ("requests", requests), ("warmups", warmups)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"{name}: {what}={value!r} must be a whole number")
    if bucket < trunk.min_tokens:
        raise UsageError(
            f"{name}: the bucket is smaller than trunk.min_tokens={trunk.min_tokens}, so that no prompt fits"
        )
    if warmups < 1:
        raise UsageError(f"{name}: warmups={warmups} must be at least 1")
    if not 1 <= requests <= bucket:
        raise UsageError(f"{name}: requests={requests} must be from 1 to the bucket's {bucket} rows")
