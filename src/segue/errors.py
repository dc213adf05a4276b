"""Every error segue raises on purpose.

The texts are for the person at 3 a.m.: what happened, where (bucket, segment, function with file:line), why it is unsafe,
and the smallest change that mends it. Torch's and the user's own exceptions pass through as they are.
"""

from __future__ import annotations

from typing import Any

import torch


class SegueError(RuntimeError):
    """Base of every error that segue raises on purpose.

    What to do: catch it where one handler for all of them is enough. Torch's errors and your own pass through as they are.
    """


class UsageError(SegueError):
    """The caller asked for something that has no meaning here: nested captures, a closed capture, contradictory options.

    What to do: change the call. Nothing has run.
    """


class CaptureError(SegueError):
    """The forward did what a graph can't hold while it was recorded: a host read, a data-dependent shape, a mutable argument.

    What to do: mostly, move the line that the text names into a break point. A capture that failed leaves everything as it was,
    and ``on_failure="eager"`` runs such a bucket eagerly and counts it.
    """


class GraphMemoryError(CaptureError, torch.OutOfMemoryError):
    """The device ran out of memory while a capture was recorded. Earlier captures keep working.

    What to do: give fewer or smaller buckets, or a ``memory_budget=``, or free memory and recapture. The text says what the graph
    pool holds.
    """


class LeftBehindError(CaptureError):
    """A segment changed the user's objects, which no replay does. The forward has run: a second run would change them twice.

    What to do: change a tensor in place instead, or change Python objects in a break.
    """


class ReplayError(SegueError):
    """A replay would not give what eager gives: a changed break result, a re-pointed tensor, a capture that failed.

    What to do: the text says what must stay as it was at the capture. If it changed for good, ``recapture()``.
    """


class StateChangedError(ReplayError):
    """What a graph holds has changed since the capture: a submodule, a hook, an attribute, a global, or where a tensor that the
    graph reads has its memory. ``change`` says which. Nothing that outlives the call has been written.

    What to do: ``recapture()`` if the change is meant, or undo it. An accelerated model runs untouched meanwhile and counts it.
    """

    def __init__(self, text: str, change: Any = None) -> None:
        super().__init__(text)
        self.change = change


class InputError(SegueError):
    """A call's arguments don't fit the declared inputs: missing, extra, wrong dtype, device, rank or shape.

    What to do: change the call or the declaration. Nothing has run.
    """


class NoBucketError(SegueError):
    """No graph serves this call, and ``strict`` forbids running it eagerly.

    What to do: add a bucket, or allow eager calls, which are counted with their reason.
    """


class RankError(SegueError):
    """The ranks of a runner's ``group=`` can't agree on a call: one didn't come in time, or refused its part.

    What to do: make each call on every rank, one without work with 0 rows. If a rank refused its part, its own error says why;
    nothing of the call has run on any. If one didn't come, make a new group and runner on all ranks.
    """


def traced(who: str) -> UsageError:
    """The error for graphs that are replayed inside ``torch.jit.trace``. ``who``: what replays them."""
    return UsageError(
        f"{who} was replayed inside torch.jit.trace, which would record the numbers of this replay. Trace the function without "
        "graphs."
    )


def no_copy(who: str, instead: str) -> UsageError:
    """The error for an attempt to copy or pickle what owns graphs. ``who``: what it is. ``instead``: what to do."""
    return UsageError(f"{who} can't be copied or pickled: its graphs belong to this process and its memory. {instead}")
