"""An encoder of the shape of all-MiniLM-L6: one sequence at several lengths, and sentences of mixed length, embedded in batches.

With random weights the times are those of real ones.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from segue.bench import timing
from segue.bench.models import sharing_copy
from segue.bench.result import SAME, BenchResult, Row
from segue.devices import Device
from segue.integrations.transformers import accelerate

LENGTHS = (8, 16, 32, 64, 128)
EAGER, SEGUE, COMPILED, REDUCE, DYNAMIC = "eager", "segue", "segue compiled", "reduce-overhead", "torch.compile, dynamic"
_BATCH = 32  # what encode() takes
_CALLS_TO_START = 3
_SMALL_TOKENS = 256  # of one graph, on a device without timing
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class EncoderShape:
    """A BERT's sizes; by default those of all-MiniLM-L6-v2."""

    layers: int = 6
    hidden: int = 384
    heads: int = 12
    intermediate: int = 1536
    vocabulary: int = 30522

    def model(self, dtype: torch.dtype, device: torch.device) -> Any:
        """A ``BertModel`` with random weights, in eval mode, without gradients."""
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.intermediate,
        )
        torch.manual_seed(0)
        return BertModel(config).to(device=device, dtype=dtype).eval().requires_grad_(False)


SMALL_SHAPE = EncoderShape(layers=2, hidden=32, heads=2, intermediate=48, vocabulary=61)


@dataclass(frozen=True, kw_only=True)
class Encoder(BenchResult):
    """Milliseconds of one sequence, and seconds for many sentences. They are None on a device without timing."""

    title = "An encoder: one sequence, and sentences of mixed length"

    rows: list[Row]  # one per length
    sentences: list[Row]  # one per way
    startup: list[Row]  # one per way

    @property
    def tables(self) -> Mapping[str, Sequence[Row]]:
        """The rows under the titles that are printed above them."""
        return {"One sequence": self.rows, "Sentences of mixed length": self.sentences, "Start-up": self.startup}


def measure(
    device: Device,
    shape: EncoderShape | None = None,
    dtype: torch.dtype = torch.bfloat16,
    times: int = 50,
    progress: Callable[[str], None] = lambda line: None,
    *,
    lengths: Sequence[int] | None = None,
    sentences: int | None = None,
) -> Encoder:
    """Measure eager, segue, segue with compiled layers, and on a device that compiles torch.compile, in turns.

    Args:
        device: that of the model, and where it is captured.
        shape: by default that of all-MiniLM-L6-v2, and a small one on a device without timing.
        dtype: that of the weights.
        times: measurements of each, of which the median counts.
        progress: gets a line for each step.
        lengths: tokens of the one sequence, by default :data:`LENGTHS`.
        sentences: how many are embedded; by default 500, and 40 on a device without timing.
    """
    timed = device.traits.timing
    shape = shape or (EncoderShape() if timed else SMALL_SHAPE)
    bench = _Bench(shape, dtype, device, times if timed else 1, progress)
    try:
        with _many_compilations(device):
            rows = [bench.row(n) for n in lengths or LENGTHS]
            mixed = bench.sentences((500 if timed else 40) if sentences is None else sentences)
    finally:
        bench.close()
    right = all(row["replay = reference"] in (None, SAME) for row in (*rows, *mixed))
    notes = _notes(shape, dtype, device, times)
    return Encoder(rows=rows, sentences=mixed, startup=bench.startup, right=right, notes=notes)


class _Bench:
    """One run: the model, and the handles of copies of it that share its weights."""

    def __init__(
        self, shape: EncoderShape, dtype: torch.dtype, device: Device, times: int, progress: Callable[[str], None]
    ) -> None:
        self.shape, self.device, self.times, self.progress = shape, device, times, progress
        self.model = shape.model(dtype, device.torch_device)
        self.startup: list[Row] = []
        self._handles: dict[str, Any] = {}
        for name, compile in ((SEGUE, False), (COMPILED, True)):
            progress(f"{name}: capturing")
            begin = time.perf_counter()
            most = 2048 if device.traits.timing else _SMALL_TOKENS
            handle = accelerate(sharing_copy(self.model), max_tokens=most, compile=compile, device=device)
            self._handles[name] = handle
            handle.capture()
            self._started(name, "all lengths", begin)

    def close(self) -> None:
        """Free all graphs."""
        for handle in self._handles.values():
            handle.restore()

    def row(self, n: int) -> Row:
        """All ways at one sequence of ``n`` tokens."""
        given = _inputs(self.shape.vocabulary, [n], self.device.torch_device, seed=n)
        ways: dict[str, Callable[[Inputs], Any]] = {EAGER: self.model, **self._handles}
        if self.device.traits.compiled:
            self.progress(f"{n} tokens: compiling for reduce-overhead")
            ways[REDUCE] = _graphed_by_torch(sharing_copy(self.model))
        runs = {name: partial(_run, way, given) for name, way in ways.items()}
        for name, run in runs.items():
            begin = time.perf_counter()
            for _ in range(_CALLS_TO_START):
                run()
            if name == REDUCE:
                self._started(name, f"{n} tokens", begin)
        expected = runs[EAGER]().last_hidden_state
        taken = self._taken(runs)
        self.progress(f"{n} tokens: " + ", ".join(f"{name} {_ms(s):.2f} ms" for name, s in taken.items()))
        row: Row = {"tokens": n, **{f"{name} ms": _ms(taken.get(name)) for name in runs}}
        if REDUCE in taken:
            row |= {f"{name} / {REDUCE}": taken[name] / taken[REDUCE] for name in self._handles}
        for name in self._handles if taken else ():
            row |= {f"{name} kernel sum ms": _ms(timing.kernels(runs[name])), f"{name} host ms": _ms(timing.host(runs[name]))}
        off = {name: _difference(runs[name]().last_hidden_state, expected) for name in self._handles}
        verdicts = [_verdict(handle, [given]) for handle in self._handles.values()]
        return {**row, **_differences(off), "replay = reference": next((v for v in verdicts if v != SAME), SAME)}

    def sentences(self, count: int) -> list[Row]:
        """All ways at embedding ``count`` sentences in batches, the longest first, as encode() of sentence-transformers does."""
        draw = torch.Generator().manual_seed(0)
        lengths = torch.empty(count).log_normal_(mean=3.1, std=0.7, generator=draw).clamp(4, 256).int().sort(descending=True)
        parts = [part.tolist() for part in lengths.values.split(_BATCH)]
        batches = [_inputs(self.shape.vocabulary, part, torch.device("cpu"), seed=i) for i, part in enumerate(parts)]
        ways: dict[str, Callable[[Inputs], Any]] = {EAGER: self.model, **self._handles}
        if self.device.traits.compiled:
            ways[DYNAMIC] = _plain_outputs(torch.compile(sharing_copy(self.model), dynamic=True))
        runs = {name: partial(_embed, way, batches, self.device.torch_device) for name, way in ways.items()}
        for name, run in runs.items():
            self.progress(f"{count} sentences: {name} starts")
            begin = time.perf_counter()
            for _ in range(_CALLS_TO_START):
                run()
            self._started(name, f"{count} sentences", begin)
        expected, taken = runs[EAGER](), self._taken(runs)
        rows = []
        for name, run in runs.items():
            seconds, handle = taken.get(name), self._handles.get(name)
            before = None if handle is None else handle.stats.eager
            off = _difference(run(), expected)
            rows.append({
                "way": name,
                "sentences": count,
                "seconds": seconds,
                "sentences a second": None if seconds is None else count / seconds,
                "eager / this": None if seconds is None else taken[EAGER] / seconds,
                "largest difference to eager": off,
                "graphs": None if handle is None else handle.stats.captured,
                "untouched": None if handle is None else handle.stats.eager - before,
                "replay = reference": None if handle is None else _verdict(handle, _moved(batches, self.device.torch_device)),
            })  # fmt: skip
        return rows

    def _taken(self, runs: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        return timing.wall_in_turns(runs, self.times) if self.device.traits.timing else {}

    def _started(self, way: str, what: str, begin: float) -> None:
        timing.synchronize()
        seconds = time.perf_counter() - begin if self.device.traits.timing else None
        self.startup.append({"way": way, "ready for": what, "seconds": seconds})


def _run(way: Callable[..., Any], given: Inputs) -> Any:
    with torch.inference_mode():
        return way(**given)


def _graphed_by_torch(model: Any) -> Callable[..., Any]:
    """The model compiled with mode "reduce-overhead" for one length, its outputs copied out of its graph's memory."""
    compiled = _plain_outputs(torch.compile(model, mode="reduce-overhead", dynamic=False))

    def run(**given: Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(**given)
        return type(out)(**{name: t.clone() for name, t in out.items()})

    return run


def _plain_outputs(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled code under ``no_grad``, since inference tensors would have it compiled once more."""

    def run(**given: Tensor) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return compiled(**given)

    return run


def _embed(way: Callable[..., Any], batches: Sequence[Inputs], device: torch.device) -> Tensor:
    """Embeddings [sentences, hidden] on the host: means over the tokens, normalized."""
    found = []
    with torch.inference_mode():
        for given in _moved(batches, device):
            hidden, mask = way(**given).last_hidden_state, given["attention_mask"].unsqueeze(-1)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            found.append(torch.nn.functional.normalize(mean, dim=1))
        return torch.cat(found).float().cpu()


def _moved(batches: Sequence[Inputs], device: torch.device) -> Iterator[Inputs]:
    """Each batch on the device, copied when it is its turn."""
    for batch in batches:
        with torch.inference_mode(False):
            moved = {name: t.to(device) for name, t in batch.items()}
        yield moved


def _inputs(vocabulary: int, lengths: Sequence[int], device: torch.device, seed: int) -> Inputs:
    """What a tokenizer gives for sequences of these lengths: padded on the right to the longest."""
    draw, longest = torch.Generator().manual_seed(seed), max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, vocabulary, mask.shape, generator=draw) * mask
    given = {"input_ids": ids, "attention_mask": mask.long(), "token_type_ids": torch.zeros_like(ids)}
    return {name: t.to(device) for name, t in given.items()}


def _verdict(handle: Any, given: Any) -> str:
    """Whether calls replay, and give the reference's bits."""
    replayed, calls = handle.stats.replayed, 0
    for one in given:
        out = _run(handle, one)
        with handle.reference():
            want = _run(handle, one)
        calls += 1
        if any(not torch.equal(out[name], want[name]) for name in want):
            return "NO"
    return SAME if handle.stats.replayed - replayed >= calls else "NO: not replayed"


def _difference(one: Tensor, other: Tensor) -> float:
    return (one.float() - other.float()).abs().max().item()


def _differences(off: dict[str, float]) -> Row:
    return {f"{name}, largest difference to eager": value for name, value in off.items()}


def _ms(seconds: float | None) -> Any:
    return None if seconds is None else seconds * 1e3


@contextmanager
def _many_compilations(device: Device) -> Iterator[None]:
    """Let dynamo compile the same code for each length. By default it gives up after eight times and runs it eagerly."""
    if not device.traits.compiled:
        yield
        return
    import torch._dynamo.config as config

    before, config.recompile_limit = config.recompile_limit, 64
    try:
        yield
    finally:
        config.recompile_limit = before


def _notes(shape: EncoderShape, dtype: torch.dtype, device: Device, times: int) -> list[str]:
    notes = [f"shape: {dataclasses.asdict(shape)}, {str(dtype).removeprefix('torch.')}"]
    if not device.traits.timing:
        notes.append(f"Device {device.name}: no time is meant, only the verdicts.")
    return [
        *notes,
        f"Medians of {times}, all ways in turns, from an idle device to an idle one. *One sequence*: ids, mask and token types "
        f"on the device, to hidden states and pooled output that the caller owns. *{REDUCE}* is compiled for each length, segue "
        "once for all. *kernel sum*: device time of the kernels of one call. *host*: how long the call keeps the host.",
        f"*Sentences*: lengths drawn from a log-normal distribution of median 22, sorted, in batches of {_BATCH} as encode() of "
        "sentence-transformers makes them; copies to the device, forward, mean and normalization, and one copy back.",
        "*replay = reference*: all tensors of the output, bit for bit, of replayed calls.",
    ]
