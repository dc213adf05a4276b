"""Ctrl-C ends a command within a second, also while it is in a call that Python can't interrupt, such as a large product."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from segue.cli import output

INTERRUPTED = 130  # what shells say of a command that Ctrl-C ended
_GRACE = 0.7  # seconds that a command has to end by itself


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Within this block, a command that hasn't ended some time after Ctrl-C is ended, by :func:`stop`."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # written to when the signal comes, whatever Python is doing
    threading.Thread(target=_watch, args=(read,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)


def stop() -> NoReturn:
    """Say what the command was doing, and leave. Files that it was writing are gone, and those that it had written are whole."""
    print(f"\nsegue: stopped by Ctrl-C; the last step was: {output.log.last or 'none'}", file=sys.stderr, flush=True)
    for folder in list(output.unfinished):
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(INTERRUPTED)  # all is in order, and Python's own end takes seconds with all that torch has loaded


def _watch(read: int) -> None:
    with os.fdopen(read, "rb", buffering=0) as came:
        while number := came.read(1):
            if number[0] == signal.SIGINT:
                time.sleep(_GRACE)
                stop()
