"""A segment of the emulator: a list of ops over baked addresses, and the loop that runs them in order."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from segue import _torch, _torch_ranks
from segue.devices.emulator.pool import EmulatedPool
from segue.errors import ReplayError

Store = Callable[[Any], Any]  # writes what an op returned to where the segment keeps it


@dataclass(frozen=True)
class TapeExternal:
    """Memory outside the pool that a segment uses. The segment keeps it alive and refuses to run if it moved.

    ``address``: where the storage began when it was recorded. ``op`` and ``where``: the first op that used it, and its line.
    """

    storage: torch.UntypedStorage
    address: int
    op: str
    where: str


@dataclass(frozen=True)
class TapeStep:
    """One op of a tape.

    ``run``: the op with all its arguments bound. ``store``: is given what ``run`` returns; None if nothing has to be stored.
    ``op`` and ``where``: its name and the user's line.
    """

    run: Callable[[], Any]
    store: Store | None
    op: str
    where: str


class EmulatedSegment:
    """A recorded tape.

    The recording already ran every op, which is the effect that the first launch has on CUDA. So the first launch after
    ``commit`` does nothing, and every later one runs the tape. Whoever commits a segment must launch it before any other
    segment, or discard it; ``discard`` calls ``take_back``, which undoes what the ops wrote outside the pool.
    """

    def __init__(
        self, steps: list[TapeStep], externals: list[TapeExternal], pool: EmulatedPool, take_back: Callable[[], object]
    ) -> None:
        self._take_back: Callable[[], object] | None = take_back
        self.steps: tuple[TapeStep, ...] = tuple(steps)
        self._destroyed = False
        self._externals = externals
        self._addresses = [(e.storage.data_ptr, e.address) for e in externals]
        self._ran = bool(steps)  # by the recording, in place of the first launch
        self._pool = pool
        pool.adopt(self)
        if any(_torch_ranks.is_collective(step.op) for step in steps):
            _with_collectives.add(self)

    @property
    def empty(self) -> bool:
        """Whether the tape has no op."""
        return not self.steps

    def launch(self) -> None:
        """Run the tape.

        Raises:
            ReplayError: memory that it uses was freed, resized or moved, or the segment was destroyed.
        """
        if self._destroyed:
            raise ReplayError("a segment was launched after its capture was closed and its memory handed back")
        self._take_back = None
        if self._ran:
            self._ran = False
            return
        for address_now, address in self._addresses:
            if address_now() != address:
                raise self._moved()
        step = None
        try:
            # A graph launch ignores the caller's modes, autograd and autocast, and so does a tape.
            with (
                _torch.inference_guard(True),
                _torch.function_modes_off(),
                _torch.dispatch_modes_off(),
                _torch.autocast_off(),
            ):
                for step in self.steps:
                    if step.store is None:
                        step.run()
                    else:
                        step.store(step.run())
        except Exception as e:
            if step is not None:
                e.add_note(f"segue: while replaying {step.op}, recorded at {step.where}")
            raise

    def discard(self) -> None:
        """Undo what the ops wrote outside the pool, unless the segment was launched."""
        if self._take_back is not None:
            self._take_back()
        self._take_back = None

    def destroy(self) -> None:
        """Drop the tape and the external tensors that it keeps alive. A later launch is refused."""
        self._destroyed = True
        self.steps, self._externals, self._addresses = (), [], []
        self._pool.disown(self)

    def _moved(self) -> ReplayError:
        e = next(e for e in self._externals if e.storage.data_ptr() != e.address)
        what = "was freed (its storage was resized to nothing)" if not e.storage.nbytes() else "has moved in memory"
        return ReplayError(
            f"a tensor that {e.op} at {e.where} uses {what} since it was captured, and the graph would go on with the "
            "old address. Keep its storage as it is and change the values in place (copy_), or capture again."
        )


_with_collectives: weakref.WeakSet[EmulatedSegment] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Let go of process groups, and of the tensors of collectives, while all threads still run."""
    held = list(_with_collectives)
    for segment in held:
        segment.destroy()
    if held:
        _torch_ranks.let_go_of_tensors()
