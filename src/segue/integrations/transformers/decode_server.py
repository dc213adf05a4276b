"""Serves steps of one token: caches lie in resident memory while they decode, and one full graph makes the step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.thread_state import reference_frame
from segue.devices import Device
from segue.errors import CaptureError, GraphMemoryError, UsageError
from segue.integrations.transformers import names, reasons
from segue.integrations.transformers.attention import AttentionName
from segue.integrations.transformers.decode_body import DecodeBody, StepState, has_flash
from segue.integrations.transformers.decoder_calls import DecoderCall
from segue.integrations.transformers.decoder_forward import Body
from segue.integrations.transformers.decoder_parts import DecoderParts
from segue.integrations.transformers.probe import difference, exact_products, jittered
from segue.integrations.transformers.resident_caches import CacheContents, NoDecode, contents_of, windows_of
from segue.integrations.transformers.resident_layers import enter, leave_all, move_in, residence_of
from segue.integrations.transformers.resident_memory import LayerShape, Residence, ResidentMemory, left_padding, room_for
from segue.integrations.transformers.static_residence import StaticResidence, padding_of
from segue.runner import Full, GraphRunner, Input, Job
from segue.runner.memory_budget import mib
from segue.runner.reasons import Reason
from segue.runner.strategy import CapturedForward

log = logging.getLogger("segue")
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_BATCHES_AHEAD = (1, 2, 4, 8)  # captured ahead of traffic
_CUTS = (2, 10)  # layers before whose attention a graph is cut, so that the device starts while the rest is being launched
_LEAST_ROWS = 4096
_LEAST_WIDTH = 256
_PROOF_ROOM, _PROOF_ROWS = 16, 256
_SHARE = 4  # a share of the free memory that resident memory may take, where no budget was given
_PATIENCE = 16  # steps of others after which a cache has to make room


class StepGraphs(Full):
    """Full graphs of a step. ``own``: gives the tensors that nobody else uses, which a graph may write before all is checked."""

    def __init__(self, batches: Sequence[int], own: Callable[[], list[Tensor]]) -> None:
        super().__init__(lambda args, kwargs, ctx: True, batches)
        self._own = own
        self.captured = 0  # graphs

    def capture(self, job: Job) -> CapturedForward:
        """Record a step on this call's values."""
        program = self.record(job, {**job.inputs, "resident": self._own()})
        self.captured += 1
        return program


class DecodeServer:
    """Steps of a decoder, or of a whole model.

    Args:
        body: of the decoder. ``forward``: its untouched forward; ``parts``: of it.
        model: steps end in the logits of its head; None: in the last hidden states.
        runner: of the decoder, whose device, pool and counters are shared.
        read: reads a call of the decoder.
        run_plain: runs a call of the decoder, given as keyword arguments, by the body without graphs, for the proof.
        compiled: the body's layers run compiled, which a single row doesn't.
        max_context: the most tokens of a sequence; None: as many as there is memory for.
        budget: bytes that resident memory may take; None: a quarter of what is free when more is needed.

    Raises:
        NoDecode: why the model can't have full graphs.
    """

    def __init__(
        self,
        body: Body,
        model: Any,
        parts: DecoderParts,
        forward: Callable[..., Any],
        implementation: AttentionName,
        runner: GraphRunner,
        *,
        read: Callable[..., Any],
        run_plain: Callable[[dict[str, Any]], Any],
        compiled: bool,
        max_context: int | None,
        budget: int | None,
    ) -> None:
        self._parts, self._decoder, self._forward, self._implementation = parts, parts.decoder, forward, implementation
        self._run_plain, self._read, self._main = run_plain, read, runner
        self._most_tokens, self._budget = max_context, budget
        self._windows = windows_of(self._decoder.config, len(parts.layers))
        self._name = implementation.name
        if self._name not in ("sdpa", "eager"):
            raise NoDecode(f"its attention is {self._name!r}, which a full graph can't give the used rows alone")
        recorder = runner.prepare().recorder
        self._device: Device = recorder.device
        self._pool = recorder.pool
        self._batches = [b for b in _BATCHES if b > 1 or not compiled]
        self._state = StepState(self._batches[-1], self._device.torch_device)
        attention = names.attention_function(parts.mixers[0].module, self._name)
        self._plain = body.uncompiled
        self._body = DecodeBody(body, model, self._state, None, additive=self._name == "eager")
        self._body.cuts, self._attention = _CUTS, attention
        self._memory: ResidentMemory | None = None
        self._strategy = StepGraphs(self._batches, self._tensors)
        self._runner: GraphRunner | None = None
        self._pointed = 0  # the serial number of the residence that the state is ready for
        self._clock = 0  # steps, and attempts to find room
        self._ahead: set[tuple[int, int]] = set()  # batches and widths captured ahead
        self.why_not = ""

    @property
    def captured(self) -> bool:
        """Whether any batch has a graph."""
        return self._strategy.captured > 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of keys and values."""
        return 0 if self._memory is None else self._memory.nbytes

    def step(self, call: DecoderCall, reference: bool = False) -> Tensor | Reason:
        """Logits [B, V], or hidden states [B, D], of a step of one token, which is in the cache then; or why no full graph makes
        it.

        ``reference``: run what a replay must equal instead.

        Raises:
            what the graph raises. The cache is as it was then.
        """
        cache, batch = call.cache, call.batch
        if (unable := self._unable(batch)) is not None:
            return unable
        residence = self._residence(cache)
        if residence is not None and residence.batch != batch:
            return reasons.FULL_CACHE
        known = residence is not None and residence.length < residence.room and residence.is_known(call.attention_mask)
        if not known or residence is None or residence.serial != self._pointed:
            with self._pool.turn():  # the last step may be under way on another stream, and reads what is written here
                pass
        if not known or residence is None:
            found = self._settled(call, residence)
            if isinstance(found, Reason):
                return found
            residence = found
            self._pointed = 0
        if residence.serial != self._pointed:
            self._state.point_at(residence.memory, residence)
        self._pointed = 0  # until the step is whole
        ids, positions = call.input_ids, call.position_ids
        assert ids is not None
        if ids.dtype is not torch.int64:
            ids = ids.long()
        if positions is None:
            positions = torch.full((1, 1), residence.length, device=ids.device)
        if positions.dtype is not torch.int64:
            positions = positions.long()
        width, alone = width_for(residence.length + 1), batch == 1 and self._batches[0] > 1
        given = ids.view(batch), positions.expand(batch, 1).reshape(batch), width, alone
        out = self._run(given, reference)
        if isinstance(out, Reason):
            return out
        residence.advance()
        self._clock += 1
        residence.stepped, residence.decodes, self._pointed = self._clock, True, residence.serial
        return out

    def receive(self, cache: Any, kept: Sequence[tuple[Tensor, Tensor]], length: int) -> bool:
        """Have an empty cache lie in free rows, with keys and values [B, heads, length, size] of each layer, which its prompt has
        left in a scratch cache. Returns whether it does; not before the first step of any cache, and no other makes room for it.

        The caller has the pool's turn.
        """
        batch, most = len(kept[0][0]), self._most_tokens
        if self._memory is None or self._unable(batch) is not None or (most is not None and length >= most):
            return False
        residence = self._memory.place(batch, room_for(length + 1, most))
        if residence is None:
            return False
        move_in(cache, residence, kept, length)
        residence.pad((0,) * batch, kept[0][0].new_ones(batch, length, dtype=torch.int64))
        residence.stepped = self._clock
        return True

    def _unable(self, batch: int) -> Reason | None:
        """Why no batch of so many sequences, or none at all, can make a step; None if one can."""
        if self.why_not:
            return reasons.no_full_graph(self.why_not)
        if self._implementation.name != self._name:
            return reasons.no_full_graph("another attention implementation than at the start")
        return reasons.FULL_BATCH if batch > self._state.most else None

    def _run(self, given: tuple[Any, ...], reference: bool = False) -> Tensor | Reason:
        """The body's result; or why steps have no graphs from now on, if this one can't be captured. No cache has grown yet."""
        assert self._runner is not None
        try:
            (out,) = (self._runner.reference if reference else self._runner)(*given)
        except GraphMemoryError:
            raise
        except CaptureError as e:
            self.why_not = f"a step can't be captured: {e}"
            log.warning("segue: steps of one token run by breakable graphs: %s", e)
            return reasons.no_full_graph(self.why_not)
        return out  # type: ignore[no-any-return]

    def capture(self, cache: Any, tokens: int) -> str | None:
        """Capture the graphs of small batches whose sequences have up to ``tokens`` tokens, on padded sequences alone.

        ``cache``: of one sequence, for its shapes; it stays as it is. Returns what was done, as text; None if nothing was.
        """
        contents = self._contents(cache, 1)
        if contents is None or self.why_not or (self._runner is None and self._begin(contents.shapes) is not None):
            return None
        shapes = contents.shapes
        start, before = time.perf_counter(), self._strategy.captured
        least = _BATCHES_AHEAD[0] * room_for(tokens, self._most_tokens)
        if self._memory is None and not (self._may_take(shapes, least) and self._renew(shapes, max(least, _LEAST_ROWS))):
            return None
        assert self._memory is not None and self._runner is not None
        self._pointed = 0
        self._state.point_at(self._memory, None)
        for width in sorted({width_for(n) for n in (1, *(2**i for i in range(tokens.bit_length())), tokens)}, reverse=True):
            for batch in reversed(_BATCHES_AHEAD):
                row = torch.zeros(batch, dtype=torch.long, device=self._device.torch_device)
                for _ in range(0 if (batch, width) in self._ahead else 2):
                    if isinstance(self._run((row, row, width, batch == 1 and self._batches[0] > 1)), Reason):
                        return None
                self._ahead.add((batch, width))
        if not (count := self._strategy.captured - before):
            return None
        seconds, memory = time.perf_counter() - start, mib(self._memory.nbytes)
        return f"captured {count} full graphs of a step in {seconds:.1f} s; {memory} resident memory"

    def close(self) -> None:
        """Give every cache tensors of its own, and drop graphs and memory."""
        self._pointed = 0
        if self._memory is not None:
            for residence in self._memory.residences:
                leave_all(residence, copied=True)
        if self._runner is not None:
            self._runner.close()
        self._body.memory = self._memory = self._runner = None
        self._strategy.captured = 0

    def _residence(self, cache: Any) -> Residence | None:
        """Where all layers of a cache lie, in their order; None if any lies elsewhere."""
        layers = cache.layers
        residence = residence_of(layers[0]) if layers else None
        if residence is None or not residence.whole or residence.memory is not self._memory:
            return None
        if [*map(id, layers)] != residence.ids:
            return None
        return residence if residence.is_current() else None

    def _settled(self, call: DecoderCall, residence: Residence | None) -> Residence | Reason:
        """Where the cache of a call lies, with room for more and the padding of its mask."""
        stays = residence is not None and residence.length < residence.room
        held = residence if stays else self._contents(call.cache, call.batch)
        if held is None:
            return reasons.FULL_CACHE
        pads = padding_of(call.attention_mask, call.batch, held.length, held.sizes, added=self._name == "eager")
        if pads is None:
            return reasons.FULL_MASK
        found = held if isinstance(held, Residence) else self._moved_in(call.cache, call.batch, held)
        if isinstance(found, Residence):
            found.pad(pads, call.attention_mask)
        return found

    def _moved_in(self, cache: Any, batch: int, contents: CacheContents) -> Residence | Reason:
        """Have a cache lie in resident memory, with room for more."""
        shapes, sizes = contents.shapes, contents.sizes
        if self._memory is None and (failed := self._begin(shapes)) is not None:
            return failed
        if self._memory is not None and shapes != self._memory.shapes:
            return reasons.FULL_CACHE
        if (room := contents.room(self._most_tokens)) is None:
            return reasons.FULL_CONTEXT
        residence = self._place(shapes, batch, room, None if sizes is None else partial(StaticResidence, sizes=sizes))
        if residence is None:
            return reasons.FULL_MEMORY
        move_in(cache, residence, [(layer.keys, layer.values) for layer in cache.layers], contents.length)
        return residence

    def _place(
        self, shapes: tuple[LayerShape, ...], batch: int, room: int, make: Callable[..., Residence] | None
    ) -> Residence | None:
        """Rows for a cache: free ones, those of a prompt that no step has followed for long, new ones, or those of a cache that
        has long made none."""
        if self._memory is not None and (found := self._memory.place(batch, room, make)) is not None:
            return found
        if (found := self._place_of_idle(batch, room, make, prompts=True)) is not None:
            return found
        least = max(2 * batch * room, 2 * self._memory.rows if self._memory is not None else 0)
        rows = max(_LEAST_ROWS, least)
        while not self._may_take(shapes, rows):
            if rows <= least:
                return self._place_of_idle(batch, room, make)
            rows = max(least, rows // 2)
        if not self._renew(shapes, rows):
            return self._place_of_idle(batch, room, make)
        assert self._memory is not None
        return self._memory.place(batch, room, make)

    def _place_of_idle(
        self, batch: int, room: int, make: Callable[..., Residence] | None, prompts: bool = False
    ) -> Residence | None:
        memory = self._memory
        self._clock += not prompts
        idle = [] if memory is None else [r for r in memory.residences[::-1] if not (prompts and r.decodes)]
        while idle and self._clock - idle[-1].stepped >= _PATIENCE:
            leave_all(idle.pop(), copied=True)  # whose rows are free when nobody holds it
            assert memory is not None
            if (found := memory.place(batch, room, make)) is not None:
                return found
        return None

    def _may_take(self, shapes: tuple[LayerShape, ...], rows: int) -> bool:
        needed = ResidentMemory.bytes_of(shapes, rows, self._dtype)
        free = _torch.free_bytes(self._device.torch_device)
        if self._budget is not None:
            return needed <= self._budget
        return free is None or needed <= free // _SHARE

    def _renew(self, shapes: tuple[LayerShape, ...], rows: int) -> bool:
        """Begin anew with so many rows. Caches get copies, which are moved in again when they make a step.

        Returns whether there was memory for it.
        """
        try:
            memory = ResidentMemory(shapes, rows, self._dtype, self._device.torch_device, self._pool.turn)
        except torch.OutOfMemoryError:
            return False
        if self._memory is not None:
            for residence in self._memory.residences:
                leave_all(residence, copied=True)
        self._body.memory = self._memory = memory
        self._pointed = 0
        self._ahead.clear()
        self._strategy.captured = 0
        if self._runner is not None:
            self._runner.recapture()
        return True

    @property
    def _dtype(self) -> torch.dtype:
        return self._decoder.get_input_embeddings().weight.dtype  # type: ignore[no-any-return]

    def _tensors(self) -> list[Tensor]:
        assert self._memory is not None
        return [*self._memory.keys, *self._memory.values, *self._state.tensors]

    def _contents(self, cache: Any, batch: int) -> CacheContents | None:
        return contents_of(cache, batch, self._windows, self._dtype, self._device.torch_device.type)

    def _begin(self, shapes: tuple[LayerShape, ...]) -> Reason | None:
        """Find out, by short conversations, by which attention a step equals the untouched decoder's. The first that does is
        taken."""
        trial = ResidentMemory(shapes, _PROOF_ROWS, self._dtype, self._device.torch_device)
        ways = [self._attention] if self._name != "sdpa" or not has_flash(trial) else [None, self._attention]
        for way in ways:
            self._body.attend_by(way)
            try:
                where = self._difference(trial)
            except Exception as e:  # whatever keeps a step from running so: the breakable graphs serve it
                where = f"a step fails: {type(e).__name__}: {e}"
            if where is None:
                break
        self._body.memory = None
        if where is not None:
            self.why_not = where
            return reasons.no_full_graph(where)
        recorder = self._main.prepare().recorder
        self._runner = GraphRunner(
            self._body,
            inputs={"ids": Input(token_dim=0, pad=0), "position_ids": Input(token_dim=0, pad=0)},
            buckets=self._batches,
            output_token_dim=(0,),
            max_variants=64,
            device=self._device,
            pool=recorder.pool,
            stream=recorder.stream,
            strategies=[self._strategy],
            counters=recorder.counters,
            progress=False,
        )
        return None

    def _difference(self, memory: ResidentMemory) -> str | None:
        self._body.memory = memory
        cache_name = names.cache_name(self._forward)
        output: list[Any] = []

        def untouched(given: dict[str, Any]) -> Any:
            out = self._forward(**given)
            output[:] = [type(out)]
            return out

        def ours(given: Mapping[str, Any]) -> Any:
            call = self._read((), dict(given))
            if isinstance(call, str) or call.length > 1 or call.cache is None:
                return self._run_plain(dict(given))
            residence = memory.place(call.batch, _PROOF_ROOM)
            assert residence is not None
            residence.take_in([(layer.keys, layer.values) for layer in call.cache.layers], call.cache.get_seq_length())
            pads = left_padding(call.attention_mask, call.batch, residence.length + 1)
            if pads is None:
                raise UsageError("the padding of a batch could not be told from its mask")
            residence.pad(pads, None)
            self._state.point_at(memory, residence)
            n = next(b for b in self._batches if b >= call.batch)
            ids, positions = call.input_ids.new_zeros(n), call.input_ids.new_zeros(n)
            ids[: call.batch] = call.input_ids[:, 0]
            positions[: call.batch] = call.positions(call.cache, ids.device)[:, 0]
            with reference_frame(n, call.batch):
                hidden = self._body.hidden(ids, positions, _PROOF_ROOM)[: call.batch]
            residence.advance()
            enter(call.cache.layers, residence)
            leave_all(residence, copied=True)
            return output[0](last_hidden_state=hidden[:, None], **{cache_name: call.cache})

        with torch.no_grad(), jittered(self._decoder), exact_products(), self._plain():
            return difference(self._forward, self._decoder, untouched, ours)

    def describe(self) -> str:
        """What it has, in words."""
        memory = self._memory
        if memory is None:
            return "nothing has decoded yet"
        kind = "flash attention over the used rows" if self._body.by_flash else "the model's attention over padded rows"
        return f"{memory.rows} rows of keys and values, {mib(memory.nbytes)}; {kind}"


def width_for(tokens: int) -> int:
    """The most rows of a sequence that the graph for one of ``tokens`` tokens looks at: a power of two."""
    return max(_LEAST_WIDTH, 1 << (tokens - 1).bit_length())
