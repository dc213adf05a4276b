"""The hidden states of all layers, by a body and graphs of their own, so that other calls return no more than before."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from segue.integrations.transformers import names
from segue.integrations.transformers.counted_captures import CountedBreakable
from segue.integrations.transformers.decoder_forward import Body
from segue.runner import GraphRunner

NAME = "hidden states"  # of the strategy, in counts and reports


class StatesBody:
    """What a body takes, to the hidden states of all layers, [N, ...] each. Last is what the body gives."""

    def __init__(self, body: Body) -> None:
        self._body, self.owner, self.places = body, body.owner, body.places
        self.__signature__ = inspect.signature(body)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return self._body.states(*args, **kwargs)


class HiddenStates:
    """The graphs of a body's hidden states, captured bucket by bucket when they are asked for.

    Args:
        body: the one whose last hidden states other graphs give.
        beside: the runner of those. Its inputs and ladder are taken, and its counts go on.
        options: further ones of :class:`GraphRunner`.
    """

    def __init__(self, body: Body, beside: GraphRunner, **options: Any) -> None:
        self.graphs = CountedBreakable({}, name=NAME)
        self.runner = GraphRunner(
            StatesBody(body),
            inputs=beside.inputs,
            buckets=beside.ladder,
            counters=beside.prepare().recorder.counters,
            strategies=[self.graphs],
            progress=False,
            **options,
        )

    def run(self, *inputs: Any, ctx: Any) -> Any:
        """The hidden states, out of graphs. A forward that records around them would record what a capture calls."""
        with names.unrecorded():
            return self.runner(*inputs, ctx=ctx)

    def reference(self, *inputs: Any, ctx: Any) -> Any:
        """What :meth:`run` must equal."""
        with names.unrecorded():
            return self.runner.reference(*inputs, ctx=ctx)
