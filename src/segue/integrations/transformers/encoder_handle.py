"""The handle of an accelerated encoder, whose whole forward is one graph for each padded length and number of rows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from segue import _source_lines, _torch, _torch_modes, environment
from segue.capture.code_names import is_library
from segue.capture.decisions import acting_hooks
from segue.capture.isolation import collected_once
from segue.capture.modes import CallerModes, modes_now
from segue.errors import StateChangedError, UsageError
from segue.integrations.transformers import checks, encoder_probe, names, reasons
from segue.integrations.transformers.compiled_layers import CompiledLayers
from segue.integrations.transformers.decoder_forward import ForwardPatch
from segue.integrations.transformers.encoder_buckets import EncoderGrid
from segue.integrations.transformers.encoder_calls import SIDES, Boundary, EncoderCall, EncoderCallReader
from segue.integrations.transformers.encoder_forward import EncoderBody, places_of
from segue.integrations.transformers.encoder_graphs import EncoderGraphs, Run, TooManyShapes, by_runner
from segue.integrations.transformers.hidden_states import NAME as HIDDEN_STATES
from segue.integrations.transformers.serving_handle import ServingHandle
from segue.integrations.transformers.training_modes import TrainingModes
from segue.integrations.transformers.weights import Weights
from segue.runner import CaptureSummary, GraphRunner, Ladder
from segue.runner.memory_budget import Cost, mib
from segue.runner.progress import Progress
from segue.runner.reasons import DISABLED, NO_BUCKET, Reason, remedy_of
from segue.runner.write_log import generators_kept

if TYPE_CHECKING:
    from segue.devices import Device
    from segue.runner import Stats

_MODES = {_torch_modes.DEFAULT_DTYPE.name, _torch_modes.ATTENTION.name, _torch_modes.CUDNN.name}  # read by what is captured


class EncoderHandle(ServingHandle):
    """The handle of a model without a decoder. :func:`segue.accelerate` says what its arguments are.

    ``max_tokens`` is that of one graph: larger batches run in pieces, since every row is a sequence by itself. ``buckets`` are
    padded lengths of a row. A bucket in ``stats`` is rows times padded tokens.
    """

    def __init__(self, module: Any, model: Any, **options: Any) -> None:
        self._begin_with(module, model, options)
        self._set_up(**options)
        self._take_over()

    def _set_up(
        self,
        *,
        max_tokens: int,
        strategy: str,
        compile: bool,
        buckets: Ladder | Iterable[int] | None,
        on_failure: Literal["raise", "eager"],
        device: str | Device | None,
        max_context: int | None,
        memory_budget: int | None,
    ) -> None:
        checks.check_mode(self._model, self._model)
        self._device = checks.device_of(self._model)
        self._asked_device: Any = self._device if device is None else device
        self._on_failure: Literal["raise", "eager"] = on_failure
        self._grid = EncoderGrid(buckets, max_tokens, _longest(self._model))
        with ExitStack() as stack:
            for patch in self._patches:
                stack.enter_context(patch.away())
            boundary = encoder_probe.find(self._model, self._try)
        _refuse_hooks(boundary)
        inside = boundary.module
        if not self._patches or self._patches[0].module is not inside:
            for patch in self._patches:
                patch.undo()
            self._patches = [ForwardPatch(inside, self._serve)]
        self._boundary, self._forward = boundary, boundary.forward
        self._weights, self._modes = Weights(inside, self._device), TrainingModes(inside)
        self._places = places_of(boundary)
        self._compiled = CompiledLayers(inside, _parts(inside), on_failure) if compile else None
        self._reader = EncoderCallReader(boundary, self._model.config)
        before = vars(self).get("_graphs")
        self._no_states: Reason | None = None  # why no graphs give the hidden states of all layers
        self._graphs = EncoderGraphs(boundary, self._grid, self._places, self._compiled, on_failure, self._asked_device, before)
        self._accept_caller_modes()

    @property
    def stats(self) -> Stats:
        """The runners' counts, with the forwards that ran untouched under ``eager`` and ``reasons``.

        ``buckets``: rows times padded tokens. A batch that runs in pieces counts once for each.
        """
        return self._graphs.stats(Counter(self._counters.reasons))

    @property
    def strategies(self) -> Mapping[str, str]:
        """The whole forward in one graph; with the hidden states of all layers, once they were asked for."""
        asked = {} if self._graphs.with_states is None else {HIDDEN_STATES: ""}
        return {"whole forward": "", **asked, **({} if self._no_states is None else {HIDDEN_STATES: self._no_states})}

    @property
    def boundaries(self) -> tuple[str, ...]:
        """What runs live around the graphs, in words."""
        return () if self._boundary.module is self._model else (f"all of the model around {self._boundary.where}",)

    def capture(self) -> CaptureSummary:
        """Capture, for each padded length, a single row and the most rows, instead of each bucket at its second call.

        They take the inputs that tokenizers give. Other numbers of rows, and other inputs, are captured when they come.

        Raises:
            UsageError: the handle was restored, or the model can't be served as it is now.
        """
        self._refuse_restored()
        with self._one_at_a_time, torch.inference_mode(), collected_once(), generators_kept(self._device):
            reason = self._unservable() or self._other_mode() or self._changed()
            if reason is not None and reason is not DISABLED and not self._takes_in(reason):
                raise UsageError(f"nothing is captured, as no graph would run: {reason}. {remedy_of(reason)}.")
            start, compiling, before = time.perf_counter(), self._compile_seconds, len(self._graphs.captured)
            if environment.disabled():
                return CaptureSummary((), 0, 0, 0.0, Cost(0, 0))
            self._compile()
            usual = [name for name in self._boundary.names if name not in SIDES or self._is_usual(name)]
            progress = Progress(0, True)
            with progress.showing():
                for bucket in self._graphs.capture(usual):
                    progress.bucket(bucket, _torch.free_bytes(self._device))
            stats = self._graphs.stats(Counter())
            summary = CaptureSummary(
                buckets=stats.buckets,
                segments=len(self._graphs.captured) - before,
                breaks=0,
                seconds=time.perf_counter() - start,
                cost=Cost(stats.pool_bytes, stats.driver_bytes),
                compile_seconds=self._compile_seconds - compiling,
            )
            memory, count = f"{mib(stats.pool_bytes)} pool", summary.segments
            progress.close(f"captured {count} whole forwards in {summary.seconds:.1f} s; {memory}{self._compiling(summary)}")
            return summary

    def graphs_of(self, tokens: int) -> tuple[int | None, int, int]:
        """The bucket of one row of ``tokens`` tokens, its segments and its breaks; 0 and 0 before its capture."""
        return self._graphs.bucket_of(tokens)

    def _owners(self) -> Sequence[Any]:
        return [self._graphs]

    def _any_captured(self) -> bool:
        return bool(self._graphs.captured)

    def _reference(self) -> Run:
        return _by_reference

    def _try(self, boundary: Boundary) -> None:
        """Warm up, capture and replay a small bucket of a boundary, and compare with its own forward.

        Raises:
            SegueError: it can't be captured. UsageError: the replay differs.
        """
        graphs = EncoderGraphs(boundary, self._grid, places_of(boundary), None, "raise", self._asked_device)
        reader = EncoderCallReader(boundary, self._model.config)
        # What is made on the device instead may be rounded otherwise, which shows at some distance between tokens.
        tokens = self._grid.lengths.max // 2 if boundary.host_made else self._grid.lengths[0] - 1 or 1
        try:
            for seed in range(3):
                given = boundary.example(1, tokens, torch.Generator().manual_seed(seed))
                call = reader.read((), {boundary.main: given})
                if isinstance(call, str):
                    raise UsageError(call)
                call.hidden_states = False  # it is the boundary that is asked for them, whatever the config does
                with torch.inference_mode():
                    got = graphs.run(call)
                    encoder_probe.check_replay(boundary, got, given)
        finally:
            graphs.close()

    def _serve_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._reader.read(args, kwargs)
        if isinstance(call, str):
            return self._untouched_forward(call, args, kwargs)
        reason = self._reason(call)
        if reason is not None:
            return self._untouched_forward(reason, args, kwargs)
        run: Run = self._here.run or by_runner
        if run is not by_runner or not self._graphs.is_captured(call):
            if (changed := self._changed()) is not None:
                if self._takes_in(changed):
                    return self._serve_alone(args, kwargs)
                return self._untouched_forward(changed, args, kwargs)
            self._compile()
            if call.hidden_states and (why_not := self._find_states()) is not None:
                return self._untouched_forward(why_not, args, kwargs)
        try:
            outs = self._graphs.run(call, run)
        except TooManyShapes:
            return self._untouched_forward(reasons.SHAPES, args, kwargs)
        except StateChangedError as e:  # found while the graph ran, which has left nothing
            return self._untouched_forward(self._changed() or reasons.changed(e.change, self._boundary.module), args, kwargs)
        boundary = self._graphs.with_states if call.hidden_states else self._boundary
        assert boundary is not None
        out = boundary.output_of(outs)
        return out if call.return_dict else out.to_tuple()

    def _find_states(self) -> Reason | None:
        """Prove that graphs give the hidden states of all layers too, when they are first asked for. Returns why they don't."""
        if self._graphs.with_states is None and self._no_states is None:
            try:
                with names.unrecorded(), nullcontext() if self._compiled is None else self._compiled.as_they_are():
                    boundary = encoder_probe.with_hidden_states(self._boundary, self._model.config)
                    self._try(boundary)
            except Exception as e:  # whatever it is that this forward doesn't do
                self._no_states = reasons.no_hidden_states(str(e))
            else:
                if self._compiled is not None:
                    self._compile_by(self._compiled, boundary)
                self._graphs.with_states = boundary
        return self._no_states

    def _reason(self, call: EncoderCall) -> Reason | None:
        """Why no graph may serve a call; None if one may."""
        tensors = list(call.tensors.values())
        if self._needs_gradients(*tensors):
            return reasons.GRADIENTS
        if any([t.device != self._device for t in tensors]):
            return reasons.DEVICES
        return self._other_mode() or (None if self._graphs.holds(call) else NO_BUCKET)

    def _changed(self) -> Reason | None:
        """Why graphs would not do what the modules do now; None while they would."""
        change = self._places.decisions.changed()
        return self._weights.replaced() if change is None else reasons.changed(change, self._boundary.module)

    def _accept_caller_modes(self) -> None:
        """Take the caller's modes as they are now for those of all captures. Calls under others run untouched."""
        kind = self._device.type
        self._caller_modes = CallerModes(kind, modes_now(kind), _MODES)

    def _compile(self) -> None:
        """Compile the layers, if that is due, by forwards of their own: for one row, and for any other number of them."""
        layers = self._compiled
        if layers is None or layers.enabled:
            return
        layers.enabled = True
        self._compile_by(layers, self._boundary)

    def _compile_by(self, layers: CompiledLayers, boundary: Boundary) -> None:
        """Compile the layers as the forward of ``boundary`` calls them."""
        size = layers.tokens_to_compile_at
        tokens = 0 if self._boundary.mask is None else min(size, self._grid.lengths.max)  # images have as many as they have
        usual = [name for name in self._boundary.names if name not in SIDES or self._is_usual(name)]
        body = EncoderBody(boundary, usual, self._places, layers)
        with torch.inference_mode():
            for rows in (1, size + 4):
                body(**self._graphs.example(usual, rows, tokens).tensors)

    def _compiling(self, summary: CaptureSummary) -> str:
        return "" if self._compiled is None else f"; {summary.compile_seconds:.1f} s of it compiling"

    @property
    def _compile_seconds(self) -> float:
        return 0.0 if self._compiled is None else self._compiled.seconds

    def _is_usual(self, side: str) -> bool:
        """Whether tokenizers give this side input: types where there are several."""
        return side == "token_type_ids" and getattr(self._model.config, "type_vocab_size", 1) > 1


def _by_reference(runner: GraphRunner, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return runner.reference(*tensors)  # type: ignore[no-any-return]


def _refuse_hooks(boundary: Boundary) -> None:
    """Raise UsageError if a forward hook is registered inside the boundary: replays run no Python."""
    for name, module in boundary.module.named_modules():
        for hook in acting_hooks(module) if name else ():
            raise UsageError(
                f"{boundary.where}: a forward hook, {_source_lines.of(hook)}, is registered on {name}. Replays run no Python, so "
                "it would be called while capturing and never again. Remove it, or register it on the model itself."
            )


def _longest(model: Any) -> int | None:
    """The most tokens of a row, if the model has a table of positions or says so."""
    found = getattr(model.config, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _parts(module: Any) -> list[nn.Module]:
    """What is compiled of an encoder: the modules of its largest list, each by itself, and what else has code of its own."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m)]
    largest = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)
    if largest is None:
        return [module]
    found: list[nn.Module] = []

    def visit(child: nn.Module) -> None:
        if child is largest:
            found.extend(child.children())
        elif any(m is largest for m in child.modules()):
            for inner in child.children():
                visit(inner)
        elif not is_library(type(child).__module__):
            found.append(child)

    visit(module)
    return found
