"""Tracing a forward ahead of its captures, for those that go on auxiliary streams too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.capture.guards import forget_casts, one_capture, still, uninterrupted
from segue.capture.watch import Watch
from segue.devices import Device, Pool
from segue.devices.trace import Trace


def trace_of(run: Callable[[], object], device: Device, pool: Pool, stream: Any, name: str) -> Trace:
    """Record ``run`` as one segment, note its ops, and give the segment up: it leaves no trace elsewhere.

    Raises:
        CaptureError: ``run`` can't be in a graph. UnseenWorkError: which memory its ops share can't be told.
    """
    found, token = Trace(), object()
    watch = Watch(pool, name, into=found)
    pool.attach(token)
    try:
        with one_capture, still(), pool.turn(), device.session(pool, stream):
            watch.begin()
            forget_casts()
            recording = device.begin(pool)
            try:
                watch.begin_segment(recording, 0)
                with watch:
                    run()
                watch.settle_traced()
            finally:
                with uninterrupted():
                    recording.abort()
                    forget_casts()
    finally:
        pool.retire(token, ())
    return found
