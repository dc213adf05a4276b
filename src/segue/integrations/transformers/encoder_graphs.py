"""The graphs of an encoder: a runner for single rows, with lengths as buckets, and for each length one with rows as buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from segue.capture.places import Places
from segue.devices import Device
from segue.integrations.transformers.compiled_layers import CompiledLayers
from segue.integrations.transformers.counted_captures import CountedBreakable
from segue.integrations.transformers.encoder_buckets import EncoderGrid
from segue.integrations.transformers.encoder_calls import MASK, Boundary, EncoderCall, padded
from segue.integrations.transformers.encoder_forward import EncoderBody
from segue.integrations.transformers.hidden_states import NAME
from segue.runner import Breakable, GraphRunner, Input, Stats

Run = Callable[[GraphRunner, Sequence[Tensor]], tuple[Tensor, ...]]
_MOST_SHAPES = 64


def by_runner(runner: GraphRunner, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Runs a call as the runner sees fit."""
    return runner(*tensors)  # type: ignore[no-any-return]


class TooManyShapes(Exception):
    """The call's tensors have a shape for which there is no runner, and there are as many as may be."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A runner for inputs that are alike but for the size that its buckets pad: tokens of a single row, or else rows.

    ``length``: tokens to which rows are padded before; 0 where they aren't.
    """

    runner: GraphRunner
    length: int
    single: bool
    captured: dict[int, tuple[int, int]]  # segments and breaks by bucket
    cuts: Sequence[int | None]  # the dimension of each output that has one row a token

    def tokens(self, bucket: int) -> int:
        """Tokens of a bucket, padding included; rows, where rows have no tokens."""
        return bucket * (self.length or 1)


class EncoderGraphs:
    """Runs calls out of graphs, and makes the runners that hold them. All share one pool.

    Args:
        boundary: what is captured.
        grid: lengths, and rows for each.
        places: the names that the boundary's module reaches.
        layers: run compiled.
        on_failure: as for a runner.
        device: likewise.
        before: graphs that these take the place of. Their counts go on.
    """

    def __init__(
        self,
        boundary: Boundary,
        grid: EncoderGrid,
        places: Places,
        layers: CompiledLayers | None,
        on_failure: Literal["raise", "eager"],
        device: str | torch.device | Device,
        before: EncoderGraphs | None = None,
    ) -> None:
        self._boundary, self._grid, self._places, self._layers = boundary, grid, places, layers
        self._on_failure, self._device = on_failure, device
        self.with_states: Boundary | None = None  # what is captured where the hidden states of all layers are asked for
        self._shapes: dict[tuple[Any, ...], _Shape] = {}
        self._past: list[Stats] = []  # of runners that were closed
        self._rows = self._padded = 0  # tokens of all buckets that served, and how many of them were padding
        if before is not None:
            self._past, self._rows, self._padded = before._past, before._rows, before._padded

    def run(self, call: EncoderCall, run: Run = by_runner) -> Sequence[Tensor]:
        """The output's tensors for a call that a bucket holds, cut to the call's rows and tokens.

        ``run``: called in the place of the runner that serves a piece of the call, with that.

        Raises:
            TooManyShapes: nothing was run. What the runner raises.
        """
        pieces = [self._piece(piece, run) for piece in self._pieces(call)]
        return pieces[0] if len(pieces) == 1 else [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    def holds(self, call: EncoderCall) -> bool:
        """Whether a bucket is as long as the call's rows."""
        return call.length <= self._grid.lengths.max

    def is_captured(self, call: EncoderCall) -> bool:
        """Whether all that the call needs replays."""
        for piece in self._pieces(call):
            shape = self._shapes.get(self._key(piece)[0])
            size = piece.length if piece.batch == 1 and piece.length else piece.batch
            if shape is None or shape.runner.ladder.bucket_for(size) not in shape.captured:
                return False
        return True

    def capture(self, names: Sequence[str]) -> Iterator[int]:
        """Capture, for each length, a single row and the most rows, largest bucket first. Yields each bucket's tokens before."""
        for length in sorted(self._grid.lengths, reverse=True) if self._boundary.mask is not None else (0,):
            for rows in dict.fromkeys((self._grid.rows(length).max, 1)):
                shape = self._shape(self.example(names, rows, length))
                bucket = length if shape.single else rows
                yield shape.tokens(bucket)
                for _ in range(2):
                    if bucket not in shape.captured:
                        shape.runner(*self.example(names, rows, length).tensors.values())

    def example(self, names: Sequence[str], rows: int, length: int) -> EncoderCall:
        """A call of the boundary at a padded length, of which few tokens are real: a table of positions may end before that.

        ``length``: 0 where rows have none.
        """
        main = self._boundary.example(1, min(2, length) or 1, torch.Generator().manual_seed(0))
        if not length:
            return EncoderCall({names[0]: main.expand(rows, *main.shape[1:])}, True, rows, 0)
        zeros = torch.zeros(main.shape[:2], dtype=torch.long, device=main.device)
        one = {name: main if name == names[0] else self._boundary.ones(main) if name == MASK else zeros for name in names}
        tensors = padded(EncoderCall(one, True, 1, main.shape[1]), length, self._boundary.pads)
        wide = {name: t.expand(rows, *t.shape[1:]) for name, t in zip(names, tensors, strict=True)}
        return EncoderCall(wide, True, rows, length)

    def stats(self, untouched: Counter[str]) -> Stats:
        """The counts of all runners together, with those of forwards that ran untouched."""
        shapes = list(self._shapes.values())
        now = [shape.runner.stats for shape in shapes]
        parts = [*self._past, *now]
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
            pool_bytes=max((s.pool_bytes for s in now), default=0),
            driver_bytes=sum(s.driver_bytes for s in now),
            strategies=dict(strategies),
            capture_seconds=sum(s.capture_seconds for s in parts),
            buckets=tuple(sorted({shape.tokens(bucket) for shape in shapes for bucket in shape.captured})),
        )

    def bucket_of(self, tokens: int) -> tuple[int | None, int, int]:
        """The bucket of one row of ``tokens`` tokens, its segments and its breaks; 0 and 0 before its capture."""
        bucket = self._grid.lengths.bucket_for(tokens)
        found = (shape.captured[bucket] for shape in self._shapes.values() if shape.single and bucket in shape.captured)
        return bucket, *next(found, (0, 0))

    @property
    def captured(self) -> list[tuple[int, int]]:
        """Segments and breaks of every bucket that was captured."""
        return [parts for shape in self._shapes.values() for parts in shape.captured.values()]

    def close(self) -> None:
        """Free all graphs. New ones may be captured afterwards."""
        for shape in self._shapes.values():
            self._past.append(shape.runner.stats)
            shape.runner.close()
        self._shapes.clear()

    def _pieces(self, call: EncoderCall) -> list[EncoderCall]:
        """The call, in pieces of as many rows as the largest bucket of its length has."""
        if call.batch == 1:
            return [call]
        most = self._grid.rows(self._length(call)).max
        return [call] if call.batch <= most else [call.part(i, min(i + most, call.batch)) for i in range(0, call.batch, most)]

    def _piece(self, call: EncoderCall, run: Run) -> Sequence[Tensor]:
        shape = self._shape(call)
        if not shape.length or shape.length == call.length:
            outs: Sequence[Tensor] = run(shape.runner, list(call.tensors.values()))
        else:
            own = torch.contiguous_format  # as the untouched forward's are
            whole = zip(run(shape.runner, padded(call, shape.length, self._boundary.pads)), shape.cuts, strict=True)
            outs = [t if d is None else t.narrow(d, 0, call.length).clone(memory_format=own) for t, d in whole]
        if run is by_runner:
            self._count(call, shape)
        return outs

    def _count(self, call: EncoderCall, shape: _Shape) -> None:
        size = call.length if shape.single else call.batch
        room = shape.tokens(shape.runner.ladder.bucket_for(size) or size)
        self._rows += room
        self._padded += room - call.batch * (call.length or 1)

    def _length(self, call: EncoderCall) -> int:
        return (self._grid.lengths.bucket_for(call.length) or call.length) if call.length else 0

    def _key(self, call: EncoderCall) -> tuple[tuple[Any, ...], int]:
        """What calls of one shape have in common, and the padded length of their rows; 0 for single rows."""
        length = 0 if call.batch == 1 else self._length(call)
        skip = 2 if call.length else 1
        single = call.batch == 1 and call.length > 0
        kind = length, single, call.hidden_states
        return (*kind, *[(name, t.dtype, t.shape[skip:]) for name, t in call.tensors.items()]), length

    def _shape(self, call: EncoderCall) -> _Shape:
        key, length = self._key(call)
        found = self._shapes.get(key)
        if found is None:
            if len(self._shapes) >= _MOST_SHAPES:
                raise TooManyShapes
            found = self._shapes[key] = self._new_shape(call, length)
        return found

    def _new_shape(self, call: EncoderCall, length: int) -> _Shape:
        names, single = list(call.tensors), call.batch == 1 and call.length > 0
        boundary, name = self._boundary, Breakable.name
        if call.hidden_states:
            assert self.with_states is not None
            boundary, name = self.with_states, NAME
        cuts = tuple(boundary.fields.values())
        captured: dict[int, tuple[int, int]] = {}
        # Tokens that pad a row are masked. Rows that pad a batch are read by nobody, and attend to themselves.
        pads = self._boundary.pads if single else {**self._boundary.pads, MASK: 1}
        runner = GraphRunner(
            EncoderBody(boundary, names, self._places, self._layers),
            inputs={name: Input(token_dim=int(single), pad=pads[name]) for name in names},
            buckets=self._grid.lengths if single else self._grid.rows(length),
            output_token_dim=cuts if single else (0,) * len(cuts),
            on_failure=self._on_failure,
            device=self._device,
            strategies=[CountedBreakable(captured, whole=True, name=name)],
            progress=False,
        )
        return _Shape(runner, length, single, captured, cuts)
