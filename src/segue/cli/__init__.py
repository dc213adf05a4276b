"""The ``segue`` command: results on stdout, progress on stderr; exit 0 ok, 1 a comparison failed, 2 wrong use, or an error."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated, NoReturn

import typer

from segue.cli import bench, check, demo, env, failures, inspect, interrupts, plan, trace
from segue.cli.output import examples
from segue.errors import SegueError

app = typer.Typer(
    name="segue",
    epilog=examples("segue demo --random", "segue check ./my-model", "segue inspect serving.py:make_runner", "segue check -h"),
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("demo", short_help="Real prompts through captured graphs, every token compared.", epilog=demo.EXAMPLES)(demo.demo)
app.command("env", short_help="Versions, the device, and what works here.", epilog=env.EXAMPLES)(env.env)
app.add_typer(bench.app, name="bench")
app.command("check", short_help="Whether replays are right; exit 1 if one isn't.", epilog=check.EXAMPLES)(check.check)
app.command("plan", short_help="Which buckets a sample of lengths calls for.", epilog=plan.EXAMPLES)(plan.plan)
app.command("inspect", short_help="Segments, breaks, memory, and what ran eager.", epilog=inspect.EXAMPLES)(inspect.inspect)
app.command("trace", short_help="Where the time of a call goes, on host and device.", epilog=trace.EXAMPLES)(trace.trace)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"segue {importlib.metadata.version('segue-graphs')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print segue's version, and leave.")
    ] = False,
) -> None:
    """Run a forward whose shape changes from call to call out of CUDA graphs captured once."""


def main() -> None:
    """Run the command. Errors become a message on stderr and exit code 2, and Ctrl-C exit code 130."""
    try:
        with interrupts.ended_by_ctrl_c():
            app()
    except SegueError as e:
        _leave("\n".join([f"segue: {e}", *getattr(e, "__notes__", ())]))
    except Exception as e:  # of a user's factory or forward: Python's exit code, 1, would say that a comparison failed
        _leave(failures.explained(e))
    except SystemExit as e:
        if e.code != interrupts.INTERRUPTED:
            raise
        interrupts.stop()
    except KeyboardInterrupt:  # before or after the command itself
        interrupts.stop()


def _leave(text: str) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(2)
