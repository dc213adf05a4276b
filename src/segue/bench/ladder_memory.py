"""What a ladder of buckets takes in memory against its largest bucket alone, and how long recording one takes.

The forward is :mod:`segue.bench.decoder`, a break point in every layer, captured in one pool, the largest bucket first:
what is in use after the first capture is the largest bucket alone, and after the last one all of them together.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue.bench import timing
from segue.bench.decoder import Decoder, Shape, attend, build
from segue.bench.result import SAME, BenchResult, Row
from segue.capture import BreakableCapture, reference_frame
from segue.capture.isolation import no_garbage_collection
from segue.devices import Device, Pool

BUCKETS = (8192, 4096, 2048, 1024)
_SMALL_BUCKETS = (64, 32, 16, 8)
_SMALL = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96)


@dataclass(frozen=True, kw_only=True)
class LadderMemory(BenchResult):
    """What a ladder takes. Times are None on a device without timing, and driver bytes 0 where there is no driver memory."""

    title = "Memory of a ladder, and recording it"

    memory: list[Row]  # after each bucket, in the order of capture
    recording: list[Row]  # per bucket

    @property
    def tables(self) -> dict[str, list[Row]]:
        """The rows under the titles that are printed above them."""
        return {"One pool, the largest bucket first": self.memory, "Recording a bucket": self.recording}


def measure(
    device: Device,
    shape: Shape | None = None,
    buckets: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    times: int = 5,
    progress: Callable[[str], None] = lambda line: None,
) -> LadderMemory:
    """Capture the buckets into one pool, then time recordings in another.

    ``shape``, ``buckets``: by default :data:`BUCKETS` of the usual :class:`Shape`, and small ones on a device without timing.
    ``times``: recordings of each bucket. ``progress``: gets a line for each step.
    """
    timed = device.traits.timing
    shape = shape or (Shape() if timed else _SMALL)
    order = sorted(buckets or (BUCKETS if timed else _SMALL_BUCKETS), reverse=True)
    decoder = build(shape, dtype, device.torch_device)
    kind, count = str(dtype).removeprefix("torch."), len(list(decoder.parameters()))
    size = {name: value for name, value in dataclasses.asdict(shape).items() if name != "vocabulary"}
    notes = [f"shape: {size}, {kind}, {count} parameters"]
    if not timed:
        notes.append(f"Device {device.name}: no time is meant, and there is no driver memory.")
    with torch.inference_mode():
        forwards = [_Forward(decoder, n, dtype, device) for n in order]
        progress("warming up")
        for forward in forwards:
            forward.reference(None)
            forward.reference(forward.valid)
        # Memory that the driver takes once, for the first graph of all, belongs to no bucket.
        small = _Forward(build(shape.small(), dtype, device.torch_device), min(order), dtype, device)
        small.reference(small.valid)
        first = small.capture(device.new_pool())
        memory = _memory(device, forwards, progress)
        recording = _recording(device, forwards, times, progress)
        _close([small], [first])
    notes.append(
        "*pool*: graph memory, inputs and weights not in it; *driver*: what the graphs take outside torch's allocator. "
        "*recording*: one capture, each segment launched as soon as it is recorded, without warm-up and garbage "
        f"collection; medians of {times}, in turns with an eager forward. *by torch alone*: the same graphs recorded and "
        "launched by torch's CUDAGraph, with nothing watched, held or checked."
    )
    right = all(row["replay = reference"] == SAME for row in memory)
    return LadderMemory(memory=memory, recording=recording, right=right, notes=notes)


class _Forward:
    """The decoder at one bucket, over fixed inputs, with rather fewer real rows than it has."""

    def __init__(self, decoder: Decoder, rows: int, dtype: torch.dtype, device: Device) -> None:
        self.decoder, self.rows, self.valid, self.device = decoder, rows, rows - rows // 8, device
        width = decoder.norm.weight.shape[0]
        draw = torch.Generator().manual_seed(rows)
        self.x = torch.randn(rows, width, generator=draw).to(device.torch_device, dtype)
        self.positions = torch.arange(rows, device=device.torch_device)
        self.out: Tensor | None = None

    def eager(self) -> Tensor:
        hidden: Tensor = self.decoder(self.x, self.positions)
        return hidden

    def reference(self, valid: int | None) -> Tensor:
        with reference_frame(self.rows, valid):
            return self.eager()

    def capture(self, pool: Pool) -> BreakableCapture:
        self.out = None
        with BreakableCapture(rows=self.rows, pool=pool, root=self.decoder) as capture:
            self.out = self.eager()
        return capture

    def bare(self, stream: torch.cuda.Stream, pool: Any) -> list[torch.cuda.CUDAGraph]:
        """The same graphs by torch alone, each launched before its break: nothing is watched, held, cleared or checked."""
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=pool, capture_error_mode="thread_local")

        def end() -> None:
            graphs[-1].capture_end()
            graphs[-1].replay()

        def between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            end()
            out: Tensor = attend(q, k, v)
            begin()
            return out

        stream.wait_stream(torch.cuda.current_stream())
        for layer in self.decoder.layers:
            layer.__dict__["attend"] = between
        try:
            with torch.cuda.stream(stream):
                begin()
                self.out = self.eager()
                end()
        finally:
            for layer in self.decoder.layers:
                del layer.__dict__["attend"]
        return graphs

    def verdict(self, capture: BreakableCapture) -> str:
        """Whether a replay over poisoned free memory gives the reference's rows, pads included."""
        assert self.out is not None
        for valid in (None, self.valid):
            expected = self.reference(valid)
            capture.pool.poison()
            self.out.fill_(float("nan"))
            capture.replay(valid)
            if not torch.equal(self.out, expected):
                off = (self.out.float() - expected.float()).abs().max().item()
                return f"NO: off by {off} with {valid} valid rows"
        return SAME


def _memory(device: Device, forwards: list[_Forward], progress: Callable[[str], None]) -> list[Row]:
    pool = device.new_pool()
    device.synchronize()
    before = device.driver_bytes()
    rows: list[Row] = []
    captures = []
    sizes: list[tuple[int, int]] = []
    for forward in forwards:
        progress(f"{forward.rows} rows: memory")
        captures.append(forward.capture(pool))
        device.synchronize()
        usage, driver = pool.usage(), device.driver_bytes() - before
        sizes.append((usage.reserved, driver))
        rows.append({
            "buckets": " + ".join(str(f.rows) for f in forwards[: len(captures)]),
            "graphs": sum(c.graphs for c in captures),
            "pool MiB": f"{usage.reserved / 2**20:.2f}",
            "of these live MiB": f"{usage.live / 2**20:.2f}",
            "driver MiB": f"{driver / 2**20:.2f}",
            "pool against the largest": _against(usage.reserved, sizes[0][0]),
            "driver against the largest": _against(driver, sizes[0][1]),
        })  # fmt: skip
    for capture, forward, row in zip(captures, forwards, rows, strict=True):
        progress(f"{forward.rows} rows: replay against the reference")
        row["replay = reference"] = forward.verdict(capture)
    _close(forwards, captures)
    return rows


def _close(forwards: list[_Forward], captures: list[BreakableCapture]) -> None:
    """Let go of the outputs in the pool's memory, then of the graphs, all together."""
    for forward in forwards:
        forward.out = None
    for capture in captures:
        capture.close()


def _against(now: int, first: int) -> str:
    return f"{now / first:.3f}x" if first > 0 else ""


def _recording(device: Device, forwards: list[_Forward], times: int, progress: Callable[[str], None]) -> list[Row]:
    """Times of recording, each segment launched as soon as it is recorded, and of one eager forward, in turns."""
    pool = device.new_pool()
    rows, captures = [], []
    bare_pool = torch.cuda.graph_pool_handle() if device.traits.driver_memory else None
    kept = []  # no graph is destroyed while another is recorded
    for forward in forwards:
        progress(f"{forward.rows} rows: recording")
        eager, recording, bare = [], [], []
        for _ in range(times):
            if bare_pool is not None:
                timing.synchronize()
                start = time.perf_counter()
                with no_garbage_collection():
                    kept.append(forward.bare(device.default_stream(), bare_pool))
                timing.synchronize()
                bare.append(time.perf_counter() - start)
            eager.append(timing.wall(forward.eager))
            timing.synchronize()
            start = time.perf_counter()
            captures.append(forward.capture(pool))
            timing.synchronize()
            recording.append(time.perf_counter() - start)
        rows.append(_recorded(forward, captures[-1].graphs, eager, recording, bare, device.traits.timing))
    _close(forwards, captures)
    return rows


def _recorded(
    forward: _Forward, graphs: int, eager: list[float], recording: list[float], bare: list[float], timed: bool
) -> Row:
    row: Row = {"bucket": forward.rows, "graphs": graphs, "eager ms": None, "recording ms": None, "range ms": None}
    if not timed:
        return {**row, "recording / eager": None, "by torch alone ms": None, "torch alone / eager": None}
    one, other = statistics.median(eager), statistics.median(recording)
    return row | {
        "eager ms": one * 1e3,
        "recording ms": other * 1e3,
        "range ms": f"{min(recording) * 1e3:.1f} to {max(recording) * 1e3:.1f}",
        "recording / eager": f"{other / one:.2f}x",
        "by torch alone ms": statistics.median(bare) * 1e3 if bare else None,
        "torch alone / eager": f"{statistics.median(bare) / one:.2f}x" if bare else None,
    }
