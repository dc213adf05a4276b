"""``segue env``: versions, device and what works here, ready to paste into an issue."""

from __future__ import annotations

import sys

from segue import environment
from segue.cli.output import Format, FormatOption, examples, render

EXAMPLES = examples("segue env", "segue env -o json")


def env(output: FormatOption = Format.MD) -> None:
    """Print versions, device and what works here."""
    sys.stdout.write(render([{"what": k, "value": v} for k, v in environment.facts().items()], output))
