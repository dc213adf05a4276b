"""The ``segue`` command: results on stdout, progress on stderr; exit 0 ok, 1 a comparison failed, 2 wrong use, or an error."""

from __future__ import annotations

import sys
import traceback

import typer

from segue.cli import bench, check, demo, env, inspect, plan
from segue.errors import SegueError

app = typer.Typer(
    name="segue",
    help="Run a forward whose shape changes from call to call out of CUDA graphs captured once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("env")(env.env)
app.add_typer(bench.app, name="bench")
app.command("check")(check.check)
app.command("plan")(plan.plan)
app.command("inspect")(inspect.inspect)


def main() -> None:
    """Run the command, and turn errors into exit code 2 with a message on stderr."""
    try:
        app()
    except SegueError as e:
        print(f"segue: {e}", file=sys.stderr)
        sys.exit(2)
    except Exception as e:  # of a user's factory or forward: Python's exit code, 1, would say that a comparison failed
        traceback.print_exc()
        print(f"segue: {type(e).__name__}: {e}", file=sys.stderr)
        sys.exit(2)
