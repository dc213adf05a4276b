"""Playing a case: every capture and replay beside its reference, on poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import segue
from property.programs import Program, outputs_as
from property.strategies import BareCase, Call, RunnerCase
from property.world import MOST_ROWS, WIDTH, Context, World, differs
from segue.capture import reference_frame
from segue.devices import Device
from segue.runner import GraphRunner, Input


@contextmanager
def written_copies_refused() -> Iterator[None]:
    """End a case whose forward writes what a break returned of memory that others hold. That is refused by name."""
    try:
        yield
    except segue.CaptureError as e:
        if "writes what a break returned" not in str(e):
            raise


def values(n: int, seed: int, device: torch.device) -> Tensor:
    """[n, 3] float32, the first rows of the same values whatever n."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(-16, 17, (MOST_ROWS, WIDTH), generator=g) / 8.0)[:n].to(device)


def pool_of(device: Device) -> Any:
    pool = device.new_pool()
    if hasattr(pool, "poison_freed"):
        pool.poison_freed = True
    return pool


def compare(what: str, got: list[Tensor], want: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert not differs(a, b), f"{what} {i} differs from the reference:\n{a}\ninstead of\n{b}"


def eager_agrees(
    program: Program, got: list[Tensor], n: int, x: Tensor, world: World, seed: int, written: Tensor | None = None
) -> None:
    """Plain eager on unpadded rows, where padding can't show by construction: the same to rounding on real rows.

    ``written``: the caller's tensor after the call, to hold what eager leaves in ``x``.
    """
    if not (program.token_wise and program.smooth):
        return
    rows = x[:n].clone()
    with segue.active_forward(world.context(seed)):
        eager = program.run(rows, world)
    if written is not None:
        close = torch.allclose(written, rows, rtol=1e-3, atol=1e-3, equal_nan=True)
        assert close, f"the caller's input after the call:\n{written}\ninstead of\n{rows}"
    for i, (a, b, (_, kind)) in enumerate(zip(got, eager, program.returned, strict=False)):
        a = a[:n] if kind in ("rows", "half", "low", "ints", "wide") else a
        close = torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-3, equal_nan=True)
        assert close, f"result {i} differs from eager on {n} unpadded rows:\n{a}\ninstead of\n{b}"


class Bare:
    """Bare captures of one program, one for each bucket."""

    def __init__(self, case: BareCase, device: Device) -> None:
        self.case, self.device, self.place = case, device, device.torch_device
        self.world = World.make(self.place, 1)
        self.pools = [pool_of(device), pool_of(device)]
        self.inputs: dict[int, Tensor] = {}
        self.programs: dict[int, Program] = {}
        self.captures: dict[int, segue.BreakableCapture] = {}
        self.outs: dict[int, list[Tensor]] = {}
        self.contexts: list[tuple[Context, list[Tensor]]] = []

    def play(self) -> None:
        with written_copies_refused():
            self._play()

    def _play(self) -> None:
        case = self.case
        with torch.inference_mode():
            for i, (bucket, valid) in enumerate(zip(case.buckets, case.at_capture, strict=True)):
                self.capture(i, bucket, valid if case.rows else bucket)
                for call in case.calls[i]:
                    self.replay(call)
            if case.closes and len(case.buckets) > 1:
                self.captures[case.buckets[0]].close()
                for call in case.calls[-1]:
                    if call.bucket != case.buckets[0]:
                        self.replay(call)
        for capture in self.captures.values():
            capture.close()
        self.outs.clear()
        usage = [pool.usage() for pool in self.pools]
        assert not any(u.live or u.reserved for u in usage), f"closed captures leave memory in their pools: {usage}"

    def capture(self, i: int, bucket: int, valid: int) -> None:
        self.inputs[bucket] = torch.empty(bucket, WIDTH, device=self.place)
        whole = bool(self.case.cut >> i & 1)
        self.programs[bucket] = self.case.program.without_breaks() if whole else self.case.program
        capture = segue.BreakableCapture(
            rows=bucket if self.case.rows else None,
            valid_rows=valid if self.case.rows else None,
            pool=self.pools[self.case.apart >> i & 1],
            device=self.device,
        )
        kept: list[Tensor] = []
        program = self.programs[bucket]

        def cut(i: int) -> None:
            if whole and i % 5 == 4:
                capture.cut()

        def run(x: Tensor) -> list[Tensor]:
            with segue.active_forward(self.world.ctx), capture:
                kept.extend(program.run(x, self.world, cut))
            return [t.clone() for t in kept]

        self.beside(
            Call(bucket, valid, 7),
            valid if self.case.rows else None,
            run,
            f"capture of {bucket}, {valid} valid: result",
        )
        self.captures[bucket] = capture
        self.outs[bucket] = [segue.weak_ref_tensor(t) if self.case.weak and capture.pool.owns(t) else t for t in kept]

    def replay(self, call: Call) -> None:
        """Replay with a row count, without one where all rows are real, or step by step."""
        # Without rows= there is no telling how far a cut result is to be padded up again.
        whole = (not self.case.rows and self.case.program.cuts) or (call.valid == call.bucket and call.seed % 2)
        valid = None if whole else call.valid
        capture = self.captures[call.bucket]

        def run(x: Tensor) -> list[Tensor]:
            with segue.active_forward(self.world.ctx):
                if valid is None and call.seed % 4 == 3:
                    for step in capture.segments:
                        step()
                else:
                    capture.replay(valid_rows=valid)
            return [t.clone() for t in self.outs[call.bucket]]

        self.beside(call, valid, run, f"{call}: result")

    def beside(self, call: Call, valid: int | None, run: Any, what: str) -> None:
        """Run the reference in a world of its own, then ``run``, and compare results, world, context and input."""
        x = self.inputs[call.bucket]
        x.copy_(values(call.bucket, call.seed, self.place))
        if self.case.tail != "random":
            x[call.valid :] = 0.0 if self.case.tail == "zero" else float("nan")
        apart, x_apart, eager, x_eager = self.world.clone(), x.clone(), self.world.clone(), x.clone()
        theirs, ours = apart.context(call.seed), self.world.context(call.seed)
        torch.manual_seed(call.seed)
        with segue.active_forward(theirs), reference_frame(call.bucket if self.case.rows else None, valid):
            want = [t.clone() for t in self.programs[call.bucket].run(x_apart, apart)]
        for pool in self.pools:
            pool.poison()
        torch.manual_seed(call.seed)
        got = run(x)
        compare(what, got, want)
        compare(f"{what} aside, world tensor", self.world.tensors(), apart.tensors())
        compare(f"{what} aside, context tensor", ours.tensors(), theirs.tensors())
        compare(f"{what} aside, input", [x], [x_apart])
        self.contexts.append((ours, [t.clone() for t in ours.tensors()]))
        for ctx, before in self.contexts:
            compare(f"{what} aside, an older context's tensor", ctx.tensors(), before)
        if self.case.rows:
            with segue.active_forward(eager.context(call.seed)):
                eager_agrees(self.programs[call.bucket], got, call.valid, x_eager, eager, call.seed)


class Served:
    """Calls of a runner, or of two on one pool; each beside its reference."""

    def __init__(self, case: RunnerCase, device: Device) -> None:
        self.case, self.place, self.pool = case, device.torch_device, pool_of(device)
        self.worlds = [World.make(self.place, 2 + i) for i in range(2 if case.twins else 1)]
        self.runners = [self.runner(world, device) for world in self.worlds]

    def runner(self, world: World, device: Device) -> GraphRunner:
        case = self.case

        def forward(x: Tensor, bias: Tensor | None = None) -> Any:
            return outputs_as(case.outputs, case.program.run(x if bias is None else x + bias, world))

        def forward_of_ctx(x: Tensor, ctx: Any, bias: Tensor | None = None) -> Any:
            return forward(x, bias)

        return GraphRunner(
            forward_of_ctx if case.takes_ctx else forward,
            {"x": Input(token_dim=0, pad=case.pad), "bias": Input(token_dim=0, pad=0.5, optional=True)},
            case.buckets,
            pool=self.pool,
            device=device,
            progress=False,
            outputs="lease" if case.lease else "copy",
            capture_ctx=(lambda bucket: world.context(bucket)) if case.capture_ctx else None,
        )

    def play(self) -> None:
        with written_copies_refused():
            self._play()

    def _play(self) -> None:
        case = self.case
        with torch.inference_mode():
            if case.explicit is not None:
                for runner, world in zip(self.runners, self.worlds, strict=True):
                    before = world.clone()
                    runner.capture(values(case.explicit, 3, self.place), ctx=world.context(3))
                    compare("capture() left a trace: world tensor", world.tensors(), before.tensors())
            for i, n in enumerate(case.lengths):
                turn = i % len(self.runners)
                if case.recaptures == i:
                    self.runners[turn].recapture()
                self.call(self.runners[turn], self.worlds[turn], n, i)
        for runner in self.runners:
            assert not runner.stats.eager, runner.stats
            runner.close()
        usage = self.pool.usage()
        assert not (usage.live or usage.reserved), f"closed runners leave memory in their pool: {usage}"

    def call(self, runner: GraphRunner, world: World, n: int, i: int) -> None:
        x = values(n, i, self.place)
        bias = {"bias": values(n, i + 50, self.place)} if self.case.biased >> i & 1 else {}
        before, theirs = world.clone(), world.context(i)
        torch.manual_seed(i)
        want = _tensors(runner.reference(x.clone(), ctx=theirs, **bias))
        after = world.clone()
        world.restore(before)
        ours = world.context(i)
        self.pool.poison()
        torch.manual_seed(i)
        mine = x.clone()
        answer = runner(mine, ctx=ours, **bias)
        got = [t.clone() for t in _tensors(answer.value if self.case.lease else answer)]
        what = f"call {i} of {n} rows: result"
        compare(what, got, want)
        compare(f"{what} aside, world tensor", world.tensors(), after.tensors())
        compare(f"{what} aside, context tensor", ours.tensors(), theirs.tensors())
        if bias:  # then the program runs on a sum
            compare(f"{what} aside, input", [mine], [x])
            eager_agrees(self.case.program, got, n, x + bias["bias"], before, i)
        else:
            eager_agrees(self.case.program, got, n, x, before, i, mine)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [value["first"], *(t for t in value["rest"] if t is not None)]
    return list(value)
