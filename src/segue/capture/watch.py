"""The one dispatch mode of a capture, on every device: it sees each op before it is recorded.

It keeps alive what the graph reads and did not make (CUDA graphs bake addresses and own nothing), notes what is written, and
refuses what training would need. A dispatch mode works while CUDA records; one that calls itself infrastructure leaves compiled
code compiled.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue import _torch, _where
from segue.devices import Pool, Recording
from segue.errors import CaptureError

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Observer = Callable[[Run, Any, tuple[Any, ...], dict[str, Any]], Any]  # calls the first, and returns what that does


@dataclass
class External:
    """A tensor that segments read or write and that lies outside the pool. The capture keeps its memory alive.

    ``tensor``: a detached alias, which stays on the captured memory. ``seen``: the object that was used, which may be given
    other memory later. ``where``: the line that used it first. ``written``: by some op of a segment.
    """

    tensor: Tensor
    seen: Tensor
    op: str
    where: str
    written: bool = False


class _Observing(threading.local):
    observer: Observer | None = None


_observing = _Observing()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Have ``observer`` called around every op that captures begun in this block, by this thread, record."""
    before, _observing.observer = _observing.observer, observer
    try:
        yield
    finally:
        _observing.observer = before


_CAST = torch.ops.aten._to_copy.default  # to fill its cache autocast turns grad mode on; whoever uses the copy is seen by itself
_makers: weakref.WeakKeyDictionary[Pool, dict[int, tuple[int, str]]] = weakref.WeakKeyDictionary()


class Watch(_torch.WatchingMode):
    """Observes the ops of all segments of one capture and passes them to the recording under way."""

    def __init__(self, pool: Pool, name: str) -> None:
        super().__init__()
        self._name = name
        self._made: set[int] = set()  # addresses of pool blocks that this capture has written or was seen to allocate
        self._before: list[tuple[int, int]] = []  # pool blocks that were alive when it began
        self.externals: dict[int, External] = {}  # by storage
        self.recording: Recording | None = None
        self.error: BaseException | None = None  # the first refusal, even if the forward swallowed it
        self.pool = pool
        self._observer = _observing.observer

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            for a in (*args, *kwargs.values()):
                if isinstance(a, Tensor):
                    self._see(a, func)
                elif isinstance(a, list | tuple):
                    for b in a:
                        if isinstance(b, Tensor):
                            self._see(b, func)
            positions, names = _torch.written_arguments(func)
            for i in positions:
                if i < len(args):
                    self._write(args[i])
            for name in names:
                if name in kwargs:
                    self._write(kwargs[name])
            assert self.recording is not None
            if self._observer is None:
                result = self.recording.run(func, args, kwargs)
            else:
                result = self._observer(self.recording.run, func, args, kwargs)
            self._note_made(result)
            return result
        except CaptureError as e:
            self.error = self.error or e
            raise

    def _see(self, t: Tensor, func: Any) -> None:
        if t.requires_grad and torch.is_grad_enabled() and func is not _CAST:
            raise CaptureError(
                f"{func} at {_where.caller()} has an operand that requires grad while grad mode is on; a graph records no "
                "autograd. Capture and replay under torch.inference_mode()."
            )
        if t.layout is not torch.strided:
            return
        try:
            key = _torch.storage_key(t)
        except (RuntimeError, NotImplementedError):
            return  # a wrapper without storage: its inner tensors come next
        if key in self.externals or not t.numel() or _torch.storage_span(t)[0] in self._made:
            return
        if self.pool.owns(t):
            self.prove(t, func)
            return
        self.externals[key] = External(t.detach(), t, str(func), _where.caller())

    def begin(self) -> None:
        """Note what is in the pool already: another capture's outputs, which this one must not read."""
        self._before = self.pool.blocks()

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the pool for a hand-off, which a break is about to write."""
        t = self.pool.empty(size, stride, dtype)
        self._made.add(_torch.storage_span(t)[0])
        return t

    def claim(self) -> None:
        """Write this capture's name on the blocks of the pool that outlive it, for the error that another one may need."""
        makers = _makers.setdefault(self.pool, {})
        alive = {address: size for address, size in self.pool.blocks()}
        before = {address for address, _ in self._before}
        for address in [a for a in makers if a not in alive]:
            del makers[address]
        makers.update({a: (size, self._name) for a, size in alive.items() if a not in before})

    def _note_made(self, result: Any) -> None:
        for t in result if isinstance(result, list | tuple) else (result,):
            if isinstance(t, Tensor) and t.layout is torch.strided:
                try:
                    self._made.add(_torch.storage_span(t)[0])
                except (RuntimeError, NotImplementedError):
                    continue

    def prove(self, t: Tensor, user: Any) -> None:
        """See that this capture made ``t``'s memory: what another one left in the pool is overwritten without notice.

        Compiled code allocates without being seen, so a block that is alive now and wasn't at the beginning is this
        capture's too.
        """
        address = _torch.storage_span(t)[0]
        if address in self._made:
            return
        if not _inside(address, self._before) and _inside(address, self.pool.blocks()):
            self._made.add(address)
            return
        maker = next((f"{name} made it" for a, (n, name) in _makers.get(self.pool, {}).items() if a <= address < a + n), None)
        raise CaptureError(
            f"{self._name}: {user} at {_where.caller()} uses a tensor {tuple(t.shape)} in graph memory that this capture did "
            f"not write ({maker or 'whoever made it has let go of it'}). Another replay overwrites it at any time: clone it "
            "outside graphs, or give the captures pools of their own."
        )

    def _write(self, value: Any) -> None:
        for t in value if isinstance(value, list | tuple) else (value,):
            if isinstance(t, Tensor) and t.layout is torch.strided:
                external = self.externals.get(_torch.storage_key(t))
                if external is not None and not external.written:
                    external.written = True


def _inside(address: int, blocks: list[tuple[int, int]]) -> bool:
    return any(start <= address < start + size for start, size in blocks)
