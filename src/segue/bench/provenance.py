"""Where, when and with what a result was measured."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

from segue.cli.env import facts


def provenance() -> str:
    """Markdown lines: hardware, versions, date, commit, command."""
    command = " ".join(["segue", *sys.argv[1:]])
    lines = [f"{key}: {value}" for key, value in facts().items()]
    lines += [f"date: {datetime.date.today().isoformat()}", f"commit: {_commit()}", f"command: `{command}`"]
    return "\n".join(f"* {line}" for line in lines)


def _commit() -> str:
    """The commit of the checkout this file lies in, with a mark if files differ from it."""
    try:
        head, changed = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain", "-uno")
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not a git checkout)"
    return head + (" with local changes" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
