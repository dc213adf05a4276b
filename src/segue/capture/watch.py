"""The one dispatch mode of a capture, on every device: it sees each op before it is recorded.

It keeps alive what the graph reads and did not make (CUDA graphs bake addresses and own nothing), notes what is written, and
refuses what training would need. The idea of watching dispatched ops during CUDA capture: FIELD.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from segue import _torch, _where
from segue.devices import Pool, Recording
from segue.errors import CaptureError

OnWrite = Callable[[Tensor], None]


@dataclass
class External:
    """A tensor that segments read or write and that lies outside the pool. The capture keeps its memory alive.

    ``tensor``: a detached alias. ``where``: the line that used it first. ``written``: by some op of a segment.
    """

    tensor: Tensor
    op: str
    where: str
    written: bool = False


class Watch(TorchDispatchMode):
    """Observes the ops of all segments of one capture and passes them to the recording under way."""

    def __init__(self, pool: Pool, on_write: OnWrite | None) -> None:
        super().__init__()
        self.externals: dict[int, External] = {}  # by storage
        self.recording: Recording | None = None
        self.error: BaseException | None = None  # the first refusal, even if the forward swallowed it
        self._pool, self._on_write = pool, on_write
        self._writes: dict[Any, tuple[tuple[int, ...], tuple[str, ...]]] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

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
            positions, names = self._written_arguments(func)
            for i in positions:
                if i < len(args):
                    self._write(args[i])
            for name in names:
                if name in kwargs:
                    self._write(kwargs[name])
            assert self.recording is not None
            return self.recording.run(func, args, kwargs)
        except CaptureError as e:
            self.error = self.error or e
            raise

    def _see(self, t: Tensor, func: Any) -> None:
        if t.requires_grad and torch.is_grad_enabled():
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
        if key in self.externals or not t.numel() or self._pool.owns(t):
            return
        self.externals[key] = External(t.detach(), str(func), _where.caller())

    def _write(self, value: Any) -> None:
        for t in value if isinstance(value, list | tuple) else (value,):
            if isinstance(t, Tensor) and t.layout is torch.strided:
                external = self.externals.get(_torch.storage_key(t))
                if external is not None and not external.written:
                    external.written = True
                    if self._on_write is not None:
                        self._on_write(external.tensor)

    def _written_arguments(self, func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
        known = self._writes.get(func)
        if known is None:
            arguments = getattr(getattr(func, "_schema", None), "arguments", ())
            written = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
            known = tuple(i for i, _ in written), tuple(name for _, name in written)
            self._writes[func] = known
        return known
