"""``segue trace``: a few calls under torch's profiler, as a Chrome trace, a table and a timeline."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.profiler import ProfilerActivity, profile

from segue.bench.plots import require_matplotlib
from segue.capture.named_ranges import range_of
from segue.cli import chrome_trace, handles, target, trace_plot, trace_table
from segue.cli.chrome_trace import CALL
from segue.cli.locate import said_on_stderr
from segue.cli.model_cases import everyday_case
from segue.cli.output import Format, examples, log, render, whole_file
from segue.cli.target import Compile, DType, MaxTokens, ModelOptions, Strategy, Target, TrustRemoteCode
from segue.errors import UsageError
from segue.prime import PrimeGraph
from segue.runner import GraphRunner

EXAMPLES = examples(
    "segue trace ./my-model -o trace.json",
    "segue trace ./my-model --tokens 512 --plot timeline.svg",
    "segue trace serving.py:make_runner --steps",
)
_WARM = 3  # calls before the profiler starts: warm-up, capture, and a replay


def trace(
    name: Annotated[str, typer.Argument(metavar="TARGET", help=target.TARGETS)],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the Chrome trace here, for chrome://tracing or ui.perfetto.dev.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline of one call into this file, .svg or .png.")] = None,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=1, help="Tokens of a model's prompt.")] = 128,
    calls: Annotated[int, typer.Option(min=1, help="How often each call is traced; the table has the medians.")] = 5,
    steps: Annotated[bool, typer.Option("--steps", help="A row for each segment and break, not for all of a kind.")] = False,
    max_tokens: MaxTokens = None,
    strategy: Strategy = None,
    compile: Compile = False,
    dtype: DType = None,
    trust_remote_code: TrustRemoteCode = False,
    output: Annotated[Format, typer.Option("--output", help="How the table is written to stdout.")] = Format.MD,
) -> None:
    """Show where the time of a call goes: staging, each segment, each break, and what the device waited for.

    Of a model a prompt and a step after it are traced, of a runner its example call, of a prime graph a prompt that fills it. Any
    profile that you take yourself with torch.profiler has the same named ranges.
    """
    if plot is not None:
        require_matplotlib()  # before minutes of capturing
    found = target.find(name, ModelOptions(max_tokens, strategy, compile, dtype, trust_remote_code), max_tokens=max(256, tokens))
    with said_on_stderr(), torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        call = _caller(found, tokens)
        log.print(f"calling {name} {_WARM} times, and then {calls} times under torch's profiler")
        for _ in range(_WARM):
            call()
        file = Path(folder) / "trace.json"
        _profiled(call, calls, file)
        traced = chrome_trace.read(file)
        if out is not None:
            with whole_file(out) as unfinished:
                unfinished.write_bytes(file.read_bytes())
            log.print(f"written to {out}: open it in https://ui.perfetto.dev or chrome://tracing")
    if not any(call.steps[:-1] for call in traced):
        log.print("no call replayed anything: see segue inspect for the reasons")
    if plot is not None:
        with whole_file(plot) as unfinished:
            trace_plot.draw(unfinished, trace_table.middle_call(traced))
        log.print(f"drawn into {plot}")
    rows = trace_table.by_step(traced) if steps else trace_table.by_kind(traced)
    sys.stdout.write(render(rows, output, trace_table.notes(traced, calls)))


def _profiled(call: Callable[[], None], times: int, file: Path) -> None:
    """Make the calls under the profiler, and export its Chrome trace."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(times):
            call()
        _wait_for_device()
    profiler.export_chrome_trace(str(file))


def _caller(found: Target, tokens: int) -> Callable[[], None]:
    """Makes the calls to trace, each in a named range."""
    value = found.value
    if handles.is_handle(value):
        case, names = everyday_case(value, found.call, tokens)
        model = handles.model_of(value)
        return lambda: _drop(case.run(_Watched(model, names)))
    if isinstance(value, GraphRunner):
        return _in_range(_call_of(found), "the example call")
    prime = value if isinstance(value, PrimeGraph) else handles.prime_graph(value, tokens)
    make = getattr(prime.trunk, "new_session", prime.trunk.new_cache)
    return _in_range(lambda: prime.run([0] * prime.bucket, make(prime.bucket)), f"prompt of {prime.bucket} tokens")


def _call_of(found: Target) -> Callable[[], Any]:
    """The example call of a runner."""
    runner, given = found.value, found.call
    if given is None:
        raise UsageError(f"{found.name} gives a runner alone: let it return (runner, args, kwargs) with an example call")
    kwargs = given.kwargs or {}
    ctx = runner.capture_ctx if given.ctx is None else given.ctx
    if callable(ctx) and not isinstance(ctx, torch.nn.Module):
        ctx = ctx(runner.prepare(*given.args, **kwargs).recorder.binder.read_any(given.args, kwargs, None).tokens)
    return lambda: runner(*given.args, ctx=ctx, **kwargs)


def _in_range(run: Callable[[], Any], name: str) -> Callable[[], None]:
    """``run`` as a call of this name, which begins when the device has nothing to do."""

    def call() -> None:
        _wait_for_device()
        with range_of(CALL + name):
            run()

    return call


class _Watched:
    """A model whose calls are in named ranges: forwards, or whatever method a case calls instead, in turn by ``names``."""

    def __init__(self, model: Any, names: list[str]) -> None:
        self._model, self._names = model, iter(names)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._named(self._model)(*args, **kwargs)

    def __getattr__(self, method: str) -> Any:
        return self._named(getattr(self._model, method))

    def _named(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            _wait_for_device()
            with range_of(CALL + next(self._names)):
                return call(*args, **kwargs)

        return run


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _drop(result: Any) -> None:
    """Let go of what a call gave."""
