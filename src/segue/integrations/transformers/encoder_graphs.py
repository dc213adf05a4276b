"""The graphs of an encoder: a runner for each padded length, whose buckets are rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from segue.capture.places import Places
from segue.devices import Device
from segue.integrations.transformers.compiled_layers import CompiledLayers
from segue.integrations.transformers.encoder_buckets import EncoderGrid
from segue.integrations.transformers.encoder_calls import MASK, Boundary, EncoderCall, padded
from segue.integrations.transformers.encoder_forward import EncoderBody
from segue.runner import Breakable, CapturedForward, GraphRunner, Input, Job, Stats

Run = Callable[[GraphRunner, Sequence[Tensor]], tuple[Tensor, ...]]
_Key = tuple[Any, ...]  # padded tokens of a row, and name, dtype and further sizes of each tensor
_MOST_SHAPES = 64


class TooManyShapes(Exception):
    """The call's tensors have a shape for which there is no runner, and there are as many as may be."""


class EncoderGraphs:
    """Runs calls out of graphs, and makes the runners that hold them. All share one pool.

    A batch of more rows than the largest bucket of its length is run in pieces.
    """

    def __init__(
        self,
        boundary: Boundary,
        grid: EncoderGrid,
        places: Places,
        layers: CompiledLayers | None,
        on_failure: Literal["raise", "eager"],
        device: str | torch.device | Device,
    ) -> None:
        self._boundary, self._grid, self._places, self._layers = boundary, grid, places, layers
        self._on_failure, self._device = on_failure, device
        self._runners: dict[_Key, GraphRunner] = {}
        self._rows = self._padded = 0  # tokens of all buckets that served, and how many of them were padding
        self.captured: dict[tuple[_Key, int], tuple[int, int]] = {}  # segments and breaks by runner and rows

    def run(self, call: EncoderCall, run: Run) -> list[Tensor]:
        """The output's tensors for a call that a bucket holds, cut to the call's rows and tokens.

        Raises:
            TooManyShapes: nothing was run. What the runner raises.
        """
        length = self._grid.lengths.bucket_for(call.length) or 0 if call.length else 0
        tensors = padded(call, length, self._boundary.pads) if length else list(call.tensors.values())
        runner = self._runner(list(call.tensors), tensors, length)
        most = runner.ladder.max
        if call.batch <= most:
            outs = run(runner, tensors)
        else:
            pieces = [run(runner, [t[i : i + most] for t in tensors]) for i in range(0, call.batch, most)]
            outs = tuple(map(torch.cat, zip(*pieces, strict=True)))
        self._count(call, runner, length)
        if length == call.length:
            return list(outs)
        own = torch.contiguous_format  # as the untouched forward's are
        cuts = zip(outs, self._boundary.fields.values(), strict=True)
        return [t if d is None else t.narrow(d, 0, call.length).clone(memory_format=own) for t, d in cuts]

    def holds(self, call: EncoderCall) -> bool:
        """Whether a bucket is as long as the call's rows."""
        return not call.length or self._grid.lengths.bucket_for(call.length) is not None

    def is_captured(self, call: EncoderCall) -> bool:
        """Whether all that the call needs replays."""
        length = self._grid.lengths.bucket_for(call.length) or 0 if call.length else 0
        key = _key(list(call.tensors), list(call.tensors.values()), length)
        runner = self._runners.get(key)
        if runner is None:
            return False
        most = runner.ladder.max
        counts = {min(most, call.batch), call.batch % most} - {0}
        return all((key, runner.ladder.bucket_for(n)) in self.captured for n in counts)

    def capture(self, names: Sequence[str]) -> Iterator[int]:
        """Capture, for each length, a single row and the most rows, largest bucket first. Yields each bucket's tokens before."""
        lengths = sorted(self._grid.lengths, reverse=True) if self._boundary.mask is not None else [0]
        for length in lengths:
            call = self.example(names, 1, length)
            runner = self._runner(names, list(call.values()), length)
            for rows in dict.fromkeys((runner.ladder.max, 1)):
                yield max(1, length) * rows
                key = _key(names, list(call.values()), length), rows
                for _ in range(2):
                    if key not in self.captured:
                        runner(*self.example(names, rows, length).values())

    def example(self, names: Sequence[str], rows: int, length: int) -> dict[str, Tensor]:
        """Inputs of the boundary by name, at a padded length, of which few tokens are real: a table of positions may end before
        the length does. ``length``: 0 where rows have none.
        """
        main = self._boundary.example(1, min(2, length) or 1, torch.Generator().manual_seed(0))
        zeros = torch.zeros(main.shape[:2], dtype=torch.long, device=main.device)
        one = {name: main if name == names[0] else self._boundary.ones(main) if name == MASK else zeros for name in names}
        tensors = padded(EncoderCall(one, True, 1, main.shape[1]), length, self._boundary.pads) if length else [main]
        return {name: t.expand(rows, *t.shape[1:]) for name, t in zip(names, tensors, strict=True)}

    def stats(self, untouched: Counter[str]) -> Stats:
        """The counts of all runners together, with those of forwards that ran untouched."""
        parts = [runner.stats for runner in self._runners.values()]
        reasons, strategies = Counter(untouched), Counter[str]()
        for part in parts:
            reasons.update(part.reasons)
            strategies.update(part.strategies)
        return Stats(
            warmed=sum(s.warmed for s in parts),
            captured=sum(s.captured for s in parts),
            replayed=sum(s.replayed for s in parts),
            eager=sum(s.eager for s in parts) + untouched.total(),
            reasons=dict(reasons),
            padding_share=self._padded / self._rows if self._rows else 0.0,
            pool_bytes=max((s.pool_bytes for s in parts), default=0),
            driver_bytes=sum(s.driver_bytes for s in parts),
            strategies=dict(strategies),
            capture_seconds=sum(s.capture_seconds for s in parts),
            buckets=tuple(sorted({max(1, key[0]) * rows for key, rows in self.captured})),
        )

    def bucket_of(self, tokens: int) -> tuple[int | None, int, int]:
        """The bucket of one row of ``tokens`` tokens, its segments and its breaks; 0 and 0 before its capture."""
        bucket = self._grid.lengths.bucket_for(tokens)
        found = (parts for (key, rows), parts in self.captured.items() if rows == 1 and key[0] == bucket)
        return bucket, *next(found, (0, 0))

    def close(self) -> None:
        """Free all graphs. New ones may be captured afterwards."""
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        self.captured.clear()

    def _runner(self, names: Sequence[str], tensors: Sequence[Tensor], length: int) -> GraphRunner:
        key = _key(names, tensors, length)
        runner = self._runners.get(key)
        if runner is None:
            if len(self._runners) >= _MOST_SHAPES:
                raise TooManyShapes
            pads = {**self._boundary.pads, MASK: 1}  # rows that nobody reads attend to themselves
            runner = self._runners[key] = GraphRunner(
                EncoderBody(self._boundary, names, self._places, self._layers),
                inputs={name: Input(token_dim=0, pad=pads[name]) for name in names},
                buckets=self._grid.rows(length),
                output_token_dim=(0,) * len(self._boundary.fields),
                on_failure=self._on_failure,
                device=self._device,
                strategies=[_Whole(self.captured, key)],
                progress=False,
            )
        return runner

    def _count(self, call: EncoderCall, runner: GraphRunner, length: int) -> None:
        whole, rest = divmod(call.batch, runner.ladder.max)
        rows = whole * runner.ladder.max + (runner.ladder.bucket_for(rest) or 0 if rest else 0)
        self._rows += rows * max(1, length)
        self._padded += rows * max(1, length) - call.batch * max(1, call.length)


class _Whole(Breakable):
    """Captures forwards that have no break on purpose, and notes the segments and breaks of each."""

    whole = True

    def __init__(self, captured: dict[tuple[_Key, int], tuple[int, int]], key: _Key) -> None:
        self._captured, self._key = captured, key

    def capture(self, job: Job) -> CapturedForward:
        program = super().capture(job)
        self._captured[self._key, job.tokens] = (program.graphs, program.breaks)
        return program


def _key(names: Sequence[str], tensors: Sequence[Tensor], length: int) -> _Key:
    skip = 2 if length else 1
    return (length, *names, *[(t.dtype, t.shape[skip:]) for t in tensors])
