"""A segment of the emulator: ops over baked addresses, run in order by a loop that knows nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from segue import _torch
from segue.devices.emulator.pool import EmulatedPool
from segue.errors import ReplayError

Store = Callable[[Any], Any]


@dataclass(frozen=True)
class External:
    """Memory outside the pool that a segment uses: kept alive, and expected to stay where it is."""

    storage: torch.UntypedStorage
    address: int
    op: str
    where: str


@dataclass(frozen=True)
class Step:
    """One op: ``run`` with all its arguments bound, ``store`` for what it returns (None: nothing to store).

    ``stream``: where it runs, after as many steps of other streams as ``after`` says: ``(stream, steps)``.
    """

    run: Callable[[], Any]
    store: Store | None
    op: str
    where: str
    stream: int = 0
    after: tuple[tuple[int, int], ...] = ()


class EmulatedSegment:
    """A recorded tape.

    Recording ran every op, with the effect that the first launch has on CUDA. So the first launch after ``commit``
    finds its work done, and the ones after it run the tape. Whoever commits a segment launches it before any other launch, or
    discards it: then ``take_back`` undoes what its ops wrote outside the pool.

    Where there are several streams, launches take turns between the extremes of what their order allows: each auxiliary stream
    as early as may be, and as late. An edge that is missing shows.
    """

    def __init__(
        self, steps: list[Step], externals: list[External], pool: EmulatedPool, take_back: Callable[[], object]
    ) -> None:
        self._take_back: Callable[[], object] | None = take_back
        self.steps: tuple[Step, ...] = tuple(steps)
        streams = sorted({s.stream for s in steps})
        self._orders: list[list[Step]] = [in_order(steps, streams[::-1]), in_order(steps, streams)] if streams[1:] else [steps]
        self._externals = externals
        self._addresses = [(e.storage.data_ptr, e.address) for e in externals]
        self._ran = bool(steps)
        self._pool = pool
        pool.adopt(self)

    @property
    def empty(self) -> bool:
        return not self.steps

    def launch(self) -> None:
        """Run the tape.

        Raises:
            ReplayError: memory that it uses was freed, resized or moved, or the segment was destroyed.
        """
        if not self._orders:
            raise ReplayError("a segment was launched after its capture was closed and its memory handed back")
        self._take_back = None
        if self._ran:
            self._ran = False
            return
        for address_now, address in self._addresses:
            if address_now() != address:
                raise self._moved()
        loop = self._orders[0]
        self._orders.append(self._orders.pop(0))
        step = None
        try:
            # As a graph: no mode, no autograd and no cast of the caller's gets between the ops.
            with (
                _torch.inference_guard(True),
                _torch.function_modes_off(),
                _torch.dispatch_modes_off(),
                _torch.autocast_off(),
            ):
                for step in loop:
                    if step.store is None:
                        step.run()
                    else:
                        step.store(step.run())
        except Exception as e:
            if step is not None:
                e.add_note(f"segue: while replaying {step.op}, recorded at {step.where}")
            raise

    def discard(self) -> None:
        if self._take_back is not None:
            self._take_back()
        self._take_back = None

    def destroy(self) -> None:
        """Let go of everything. A later launch is refused."""
        self._orders = []
        self.steps, self._externals, self._addresses = (), [], []
        self._pool.disown(self)

    def _moved(self) -> ReplayError:
        e = next(e for e in self._externals if e.storage.data_ptr() != e.address)
        what = "was freed (its storage was resized to nothing)" if not e.storage.nbytes() else "has moved in memory"
        return ReplayError(
            f"a tensor that {e.op} at {e.where} uses {what} since it was captured, and the graph would go on with the "
            "old address. Keep its storage as it is and change the values in place (copy_), or capture again."
        )


def in_order(steps: list[Step], preferred: list[int]) -> list[Step]:
    """The steps in an order that their streams allow, those of the streams named first as early as possible."""
    waiting = {stream: deque(s for s in steps if s.stream == stream) for stream in preferred}
    done = dict.fromkeys(preferred, 0)
    found: list[Step] = []
    while len(found) < len(steps):
        ready = next(q for q in waiting.values() if q and all(done.get(s, 0) >= n for s, n in q[0].after))
        done[ready[0].stream] += 1
        found.append(ready.popleft())
    return found
