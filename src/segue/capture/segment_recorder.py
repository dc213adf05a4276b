"""The segments of one capture: recorded one after the other, and launched as soon as a break needs what they compute."""

from __future__ import annotations

from collections.abc import Callable

import torch

from segue.capture.isolation import forget_casts, tuned_kernel, uninterrupted
from segue.capture.op_watch import OpWatch
from segue.capture.program import Step
from segue.capture.thread_state import state
from segue.devices import Device, Pool, Recording, Segment
from segue.errors import CaptureError, GraphMemoryError, SegueError


class SegmentRecorder:
    """Records the segments of one capture on ``device``, in memory of ``pool``.

    Args:
        watch: sees each op before it is recorded.
        steps: of the capture. Each segment is added to it when it ends.
        name: what errors call the capture.
        after_segment: is called after each segment's end, before the segment is launched, while nothing is recorded.
    """

    def __init__(
        self,
        device: Device,
        pool: Pool,
        watch: OpWatch,
        steps: list[Step],
        name: str,
        after_segment: Callable[[], object] | None,
    ) -> None:
        self._device, self._pool, self._op_watch, self._name = device, pool, watch, name
        self._steps, self._after_segment = steps, after_segment
        self.segments: list[Segment] = []  # those that have ended
        self.recording: Recording | None = None  # of the one under way
        self.acted = False  # something has run that others can see, whatever was launched
        self._unlaunched: list[Segment] = []  # committed, and waiting for a launch

    def begin(self) -> None:
        """Begin the next segment."""
        forget_casts()
        with uninterrupted():
            recording = self.recording = self._device.begin(self._pool)
            self._op_watch.begin_segment(recording, len(self.segments))
            self._op_watch.__enter__()  # type: ignore[no-untyped-call]
            state.phase = "segment"

    def end(self, launch: bool = True) -> None:
        """Commit the segment, and launch it with those before it, because a break must see what they compute."""
        recording = self.recording
        if recording is None:
            return
        with uninterrupted():
            self._leave_watch()
            segment = recording.commit()
            self.recording, self.acted = None, self.acted or recording.acted
            self._steps.append(segment)
            self.segments.append(segment)
            self._unlaunched.append(segment)
            self._op_watch.settle()
        if self._after_segment is not None:
            self._after_segment()
        if launch:
            with uninterrupted():
                self.launch()

    def launch(self) -> None:
        """Launch the segments that wait for it."""
        for segment in self._unlaunched:
            segment.launch()
        self._unlaunched.clear()

    def abandon(self) -> None:
        """Drop the segment under way, if there is one."""
        recording = self.recording
        if recording is not None:
            with uninterrupted():
                self._leave_watch()
                recording.abort()
                self.recording, self.acted = None, self.acted or recording.acted

    def discard(self) -> None:
        """Drop the segments that wait for a launch."""
        while self._unlaunched:
            self._unlaunched.pop().discard()

    def clearer_error(self, error: BaseException) -> CaptureError | None:
        """A clearer error in the place of one whose text doesn't say what the capture has to do with it; None if it is clear."""
        if isinstance(error, SegueError):
            return None
        if isinstance(error, torch.OutOfMemoryError):
            usage = self._pool.usage()
            return GraphMemoryError(
                f"{self._name}: out of memory while recording segment {len(self.segments)}, on {self._device.name}: "
                f"{str(error).rstrip('.')}. The graph pool holds {usage.reserved / 2**20:.0f} MiB. Earlier captures keep "
                "working; use fewer or smaller buckets, or a memory budget."
            )
        kernel = tuned_kernel(error)
        if kernel is not None:
            return CaptureError(
                f"{self._name}: the triton kernel {kernel} had to be tuned while segment {len(self.segments)} was recorded, and "
                "tuning runs and times it. Run the forward once at this shape before the capture; a runner's warm-up does."
            )
        return self._device.clearer_error(error)

    def _leave_watch(self) -> None:
        if self._op_watch.recording is not None:
            self._op_watch.leave()
            state.phase = None
            self._op_watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            forget_casts()
