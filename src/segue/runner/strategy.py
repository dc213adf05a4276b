"""How a bucket's forward is captured and replayed. One strategy here, *breakable*; others plug in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from segue.capture import BreakableCapture, active_forward
from segue.devices import Pool
from segue.runner.calls import Call

Forward = Callable[[], Any]  # the user's function on the bucket's static inputs
Finish = Callable[[], None]


@dataclass
class Job:
    """One bucket to capture.

    ``forward``: the function on the static inputs, which are filled. ``arrived``: to be called with what it returned
    before the capture ends; its result is called when the program has run whole, while nothing else can replay in the
    pool. ``root``: where the names of what the graphs read are looked for. ``launched``: set by the strategy; whether
    something had run when it failed, so that an eager retry would run it twice. ``inputs``: the static inputs by name,
    at the bucket's shape.
    """

    forward: Forward
    arrived: Callable[[Any], Finish]
    tokens: int
    requests: int
    valid: int
    ctx: Any
    pool: Pool
    stream: Any
    root: Any
    name: str
    launched: bool = False
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


class CapturedForward(Protocol):
    """One bucket's forward, captured."""

    @property
    def graphs(self) -> int: ...

    @property
    def breaks(self) -> int: ...

    @property
    def writes(self) -> Sequence[Tensor]:
        """Tensors outside the pool that the graphs write."""

    def replay(self, valid_rows: int | None = None) -> None:
        """Run it on the static inputs, within the pool's turn and in inference mode. The live context is that of the innermost
        ``active_forward``."""

    def close(self) -> None: ...


class Strategy(Protocol):
    """A way to run a bucket. ``takes`` says whether it serves a call; the last strategy of a runner serves all.

    A strategy whose replays don't equal the runner's function on padded inputs has a ``reference(inputs, tokens)`` too: the
    padded inputs by name and the real tokens, to what its replay must equal, eager, with the context live. One whose
    graphs have no breaks on purpose says ``whole = True``.
    """

    name: str

    def takes(self, call: Call) -> bool: ...

    def capture(self, job: Job) -> CapturedForward: ...


class Breakable:
    """Everything between break points captured, the breaks run live. Serves every batch."""

    name = "breakable"

    def takes(self, call: Call) -> bool:
        return True

    def capture(self, job: Job) -> CapturedForward:
        """Run the forward once for real while recording it.

        Raises:
            whatever the forward or the capture raises; ``job.launched`` says whether a segment or break had run.
        """
        capture = BreakableCapture(
            rows=job.tokens,
            pool=job.pool,
            stream=job.stream,
            valid_rows=job.valid,
            name=job.name,
            root=job.root,
            defer_checks=True,
        )
        with torch.inference_mode(), active_forward(job.ctx), capture:
            try:
                capture.at_end(job.arrived(job.forward()))
            finally:
                job.launched = capture.graphs > 0
        return _CapturedProgram(capture)


class _CapturedProgram:
    def __init__(self, capture: BreakableCapture) -> None:
        self.capture = capture
        self.graphs, self.breaks = capture.graphs, capture.breaks
        self.writes = [e.tensor for e in capture.externals if e.written]
        self.replay, self.close = capture.replay_in_turn, capture.close
