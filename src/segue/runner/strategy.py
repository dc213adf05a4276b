"""How a bucket's forward is captured and replayed: the protocol of strategies, and the strategy *breakable*."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from segue.capture import BreakableCapture, active_forward
from segue.capture.comparisons import Change
from segue.capture.places import Places
from segue.devices import Pool
from segue.runner.calls import Call
from segue.runner.ladder import Ladder

Takes = Callable[[tuple[Any, ...], dict[str, Any], Any], bool]  # of a call's arguments, keyword arguments and context
Forward = Callable[[], Any]  # the user's function on the bucket's static inputs
Finish = Callable[[], None]


class Declined(Exception):
    """No graph of a strategy serves a call, for the ``reason``. Nothing of the call has run, so something else may run it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Job:
    """One bucket to capture.

    ``forward``: calls the function on the static inputs, which are filled. ``arrived``: the strategy calls it with what the
    function returned, before the capture ends. It returns a function that the strategy calls when the program has run whole,
    while nothing else can replay in the pool. ``tokens``, ``requests``: the bucket; ``requests`` is -1 without a request axis.
    ``valid``: the real tokens of this call, and ``ctx`` its context. ``root``: the names that the captured function reaches.
    ``name``: what errors call the capture. ``remedy``: what they tell the user to do about something that has changed since.
    ``launched``: the strategy sets it if something had run when the capture failed, which an eager retry would run twice.
    ``inputs``: the static inputs by name, at the bucket's shape. ``stubs``: nobody waits for the answer, so breaks run their
    capture stubs. ``after_segment``: to be called after each segment's end.
    """

    forward: Forward
    arrived: Callable[[Any], Finish]
    tokens: int
    requests: int
    valid: int
    ctx: Any
    pool: Pool
    stream: Any
    root: Places
    name: str
    remedy: str = "capture again"
    launched: bool = False
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    stubs: bool = False
    after_segment: Callable[[], object] | None = None


class CapturedForward(Protocol):
    """One bucket's forward, captured. It may have a method ``check()``, which raises what ``replay`` would raise before it runs
    anything, in the same state. Ranks ask it before they agree on a replay.
    """

    @property
    def graphs(self) -> int:
        """The number of segments."""

    @property
    def breaks(self) -> int:
        """The number of breaks."""

    @property
    def writes(self) -> Sequence[Tensor]:
        """Tensors outside the pool that the graphs write, the very views."""

    @property
    def uses(self) -> Sequence[Tensor]:
        """One tensor of each storage outside the pool that the graphs read or write."""

    def replay(self, valid_rows: int | None = None) -> None:
        """Run it on the static inputs. The caller holds the pool's turn and is in inference mode; the live context is that of the
        innermost ``active_forward``. ``valid_rows``: real tokens; None means all.

        Raises:
            ReplayError: a tensor that the graphs read was re-pointed, or a break's result changed. Declined: they can't serve
            this call.
        """

    def close(self) -> None:
        """Forbid replays and let go of the graphs."""


class Strategy(Protocol):
    """A way to capture and replay a bucket. The last strategy of a runner serves every call.

    A strategy whose replays don't equal the runner's function on padded inputs has a method ``reference(inputs, tokens)`` too.
    From the padded inputs by name and the number of real tokens it computes eagerly, with the context live, what its replay must
    equal. A strategy whose graphs have no breaks on purpose has ``whole = True``, and one whose graphs hold the functions of
    break points ``breaks_inside = True``. One with a ladder of its own has it as ``ladder``: its buckets are numbers of requests,
    or of tokens where the runner has no request axis.
    """

    name: str

    def takes(self, call: Call) -> bool:
        """Whether this strategy serves the call. It is asked at every call, so it must be quick."""

    def capture(self, job: Job) -> CapturedForward:
        """Run the bucket's forward once for real, and record it."""


def ladder_of(strategy: Strategy) -> Ladder | None:
    """A strategy's own ladder; None if it captures the runner's buckets."""
    return getattr(strategy, "ladder", None)


class Breakable:
    """Captures everything between break points, and runs the breaks live. It serves every batch."""

    name = "breakable"

    def takes(self, call: Call) -> bool:
        """True: it serves every call."""
        return True

    def capture(self, job: Job) -> CapturedForward:
        """Run the forward once for real while recording it.

        Raises:
            what the forward or the capture raises. ``job.launched`` then says whether a segment or break had run.
        """
        return CapturedProgram(captured(job, stubs=job.stubs, after_segment=job.after_segment))


def captured(job: Job, **options: Any) -> BreakableCapture:
    """Run a job's forward once while recording it. ``options``: further ones of :class:`BreakableCapture`."""
    capture = BreakableCapture(
        rows=job.tokens,
        pool=job.pool,
        stream=job.stream,
        valid_rows=job.valid,
        root=job.root,
        defer_checks=True,
        remedy=job.remedy,
        **{"name": job.name, "own": dict(job.inputs), **options},
    )
    try:
        with torch.inference_mode(), active_forward(job.ctx), capture:
            try:
                capture.at_end(job.arrived(job.forward()))
            finally:
                job.launched = capture.graphs > 0
    finally:
        job.launched = job.launched or capture.acted
    return capture


class CapturedProgram:
    """A capture as the runner replays it."""

    def __init__(self, capture: BreakableCapture) -> None:
        self.capture = capture
        self.graphs, self.breaks = capture.graphs, capture.breaks
        self.uses = [e.tensor for e in capture.externals]
        self.writes = [t for e in capture.externals for t in e.parts]
        self.replay, self.close, self.check = capture.replay_in_turn, capture.close, capture.check_replay

    def changed(self) -> Change | None:
        """What Python decided by at capture and is something else now; None if nothing is."""
        return self.capture.externals_check.changed()
