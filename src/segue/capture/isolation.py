"""Context managers for state of the whole process: garbage collection off, Ctrl-C held back, one capture at a time.

Each puts back what it changed, even when its body fails. ``BreakableCapture.__enter__`` says when they hold.
"""

from __future__ import annotations

import gc
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from segue.devices import Device

log = logging.getLogger("segue")


class _Collecting(threading.local):
    done = False  # in a block of collected_once()


_collecting = _Collecting()


def collect_garbage() -> None:
    """Let old graphs in reference cycles go now, not while another is being recorded. It takes up to 0.2 s."""
    if not _collecting.done:
        gc.collect()


@contextmanager
def collected_once() -> Iterator[None]:
    """Within this block, in which many captures are made, garbage is collected once, at its beginning."""
    collect_garbage()
    before, _collecting.done = _collecting.done, True
    try:
        yield
    finally:
        _collecting.done = before


one_capture = threading.Lock()  # compile stance, gc and "capturing" are process-wide, so captures take turns


_warned_of = set[str]()  # devices


def warn_of_lazy_capture(device: Device) -> None:
    """Say in the log, once, what a capture amid traffic may do to other threads, if the device can't spare them."""
    if not device.traits.stops_random_ops or threading.active_count() == 1 or device.name in _warned_of:
        return
    _warned_of.add(device.name)
    log.warning(
        "segue: a bucket is captured while other threads run. Until it is done, random ops of theirs on %s (sampling, dropout) "
        'fail with torch\'s "Offset increment outside graph capture": before 2.13 torch has one generator for all threads. '
        "Capture ahead of traffic, by capture() of the runner or of the accelerated model",
        device.name,
    )


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn the garbage collector off within this block: a collection can destroy another graph, which CUDA refuses while one is
    recorded (pytorch#161037)."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def forget_casts() -> None:
    """Clear autocast's cache, between segments. A later graph would read a weight that autocast cast in an earlier one and kept,
    when its memory has gone (pytorch#71631). Turning the cache off would help too, but compiled code guards on it and would
    compile anew.
    """
    torch.clear_autocast_cache()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block. An interrupt in it would leave a stream capture that outlives its transaction.

    Signals reach the main thread only, so in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(signal.SIGINT, came[0])


def tuned_kernel(error: BaseException) -> str | None:
    """The name of the triton kernel whose autotuner ``error`` passed through; None if it passed through none."""
    tb = error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code.co_filename.endswith("triton/runtime/autotuner.py"):
            tuner = tb.tb_frame.f_locals.get("self")
            return str(getattr(getattr(tuner, "base_fn", None), "__name__", "of an autotuner"))
        tb = tb.tb_next
    return None
