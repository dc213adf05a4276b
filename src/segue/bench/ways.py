"""The ways to run a prompt's forward that ``segue bench ttft`` compares: eager, segue's, and what else a user could pick.

Each way has a copy of the model of its own, which shares the weights with the others.
"""

from __future__ import annotations

import importlib
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from segue.bench import timing
from segue.bench.models import last_logits, sharing_copy
from segue.devices import Device
from segue.integrations.transformers import accelerate, names

EAGER, DYNAMO, REDUCE = "eager", "torch.compile", "reduce-overhead"
RECORDERS = {  # by the name on PyPI: the module, its graph's class, and the context that records
    "breakable-cuda-graphs": ("breakable_cuda_graphs", "BreakableCUDAGraph", "breakable_graph"),
    "piecewise-cuda-graphs": ("piecewise_cuda_graphs", "CUDAGraphSequence", "piecewise_graph"),
}
FORWARD_RIVALS = (DYNAMO, REDUCE, *RECORDERS)
CALLS_TO_START = 3  # torch.compile: the first compiles, the second records a graph, the third replays it


class RivalMissing(Exception):
    """A rival can't be measured here. The text says why."""


class Way(ABC):
    """One way to run the forward of a prompt, on a model that is its own but for the weights."""

    once = False  # its start-up serves all lengths

    def __init__(self, name: str, model: Any) -> None:
        self.name, self.model = name, model

    def start(self, ids: Tensor, caches: list[Any]) -> float:
        """Seconds until prompts like ``ids`` [1, n] run at their speed. Uses up :data:`CALLS_TO_START` of the ``caches``."""
        begin = time.perf_counter()
        for _ in range(CALLS_TO_START):
            self.forward(ids, caches.pop())
        timing.synchronize()
        return time.perf_counter() - begin

    @abstractmethod
    def forward(self, ids: Tensor, cache: Any) -> Tensor:
        """The last token's logits [1, 1, V] of a prompt ``ids`` [1, n]. Fills the empty ``cache``."""

    def close(self) -> None:
        """Free what the way holds."""
        return


class Eager(Way):
    """The model's own forward."""

    def forward(self, ids: Tensor, cache: Any) -> Tensor:
        with torch.inference_mode():
            return last_logits(self.model, ids, cache)


class Accelerator:
    """A model that segue accelerates, its whole ladder captured. ``seconds``: how long that took, compilation included."""

    def __init__(self, model: Any, max_tokens: int, device: Device, compile: bool, buckets: Sequence[int] | None) -> None:
        options: dict[str, Any] = {"compile": True} if compile else {}
        if buckets:
            options["buckets"] = list(buckets)
        begin = time.perf_counter()
        self.handle: Any = accelerate(sharing_copy(model), max_tokens=max_tokens, device=device, **options)
        try:
            self.handle.capture()
        except BaseException:
            self.handle.restore()
            raise
        timing.synchronize()
        self.seconds = time.perf_counter() - begin


class Segue(Way):
    """A captured :class:`Accelerator`: strategy "auto", or with ``prime=False`` the breakable graphs alone."""

    once = True

    def __init__(self, name: str, accelerator: Accelerator, prime: bool) -> None:
        super().__init__(name, accelerator.handle.module)
        self.handle, self.seconds, self.prime = accelerator.handle, accelerator.seconds, prime

    def start(self, ids: Tensor, caches: list[Any]) -> float:
        """Seconds that the whole ladder's start-up took, of both strategies."""
        super().start(ids, caches)
        return self.seconds

    def context(self) -> AbstractContextManager[Any]:
        """Within this block the handle's forwards run by this way's strategy."""
        breakable_only: AbstractContextManager[Any] = self.handle.breakable_only()
        return nullcontext() if self.prime else breakable_only

    def forward(self, ids: Tensor, cache: Any) -> Tensor:
        with torch.inference_mode(), self.context():
            return last_logits(self.model, ids, cache)


class CompiledModel(Way):
    """The whole model under ``torch.compile``.

    ``keeps_caches``: keys and values are copied out of the memory that the next call of a CUDA graph overwrites. A caller has to
    where another prompt comes between two forwards of a conversation.
    """

    def __init__(self, name: str, model: Any, *, graphs: bool, keeps_caches: bool) -> None:
        super().__init__(name, sharing_copy(model))
        self._graphs, self._keeps_caches = graphs, graphs and keeps_caches
        options: dict[str, Any] = {"mode": "reduce-overhead", "dynamic": False} if graphs else {"dynamic": True}
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
            options["isolate_recompiles"] = True
        self._compiled: Any = torch.compile(self.model, **options)

    def forward(self, ids: Tensor, cache: Any) -> Tensor:
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            logits = last_logits(self.model, ids, cache, self._compiled)
            if self._keeps_caches:
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            return logits.clone() if self._graphs else logits


class Recorded(Way):
    """The whole model recorded once per length by a package of :data:`RECORDERS`, attention and the cache between its graphs."""

    def __init__(self, name: str, model: Any) -> None:
        from transformers import AttentionInterface

        super().__init__(name, sharing_copy(model))
        module, graph, recording = RECORDERS[name]
        try:
            package: Any = importlib.import_module(module)
        except ImportError as e:
            raise RivalMissing(f"not installed: {e} (pip install --no-deps {name})") from e
        self._graph, self._recording = getattr(package, graph), getattr(package, recording)
        self._fill = package.no_graph(self._attend_into)
        self._recorded: dict[int, tuple[Any, Tensor, Tensor]] = {}  # by length: the graphs, ids [1, n], logits [1, 1, V]
        self._cache: Any = None  # of the running call
        attention = self.model.base_model.layers[0].self_attn
        self._own = names.attention_function(attention, self.model.config._attn_implementation)
        AttentionInterface.register(name, self._attention)
        self.model.set_attn_implementation(name)

    def start(self, ids: Tensor, caches: list[Any]) -> float:
        begin = time.perf_counter()
        static = ids.clone()
        with torch.no_grad():
            for _ in range(CALLS_TO_START - 1):
                self._cache = caches.pop()
                self._model_forward(static)
            self._cache, graph = caches.pop(), self._graph()
            timing.synchronize()
            with self._recording(graph):
                logits = self._model_forward(static)
        timing.synchronize()
        self._recorded[ids.shape[1]] = graph, static, logits
        return time.perf_counter() - begin

    def forward(self, ids: Tensor, cache: Any) -> Tensor:
        graph, static, logits = self._recorded[ids.shape[1]]
        self._cache = cache
        with torch.no_grad():
            static.copy_(ids)
            graph.replay()
            return logits.clone()

    def close(self) -> None:
        for graph, _, _ in self._recorded.values():
            graph.reset()
        self._recorded.clear()

    def _model_forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=False, logits_to_keep=1).logits
        return logits

    def _attention(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        batch, heads, n, _ = q.shape
        out = q.new_empty(batch, n, heads, v.shape[-1])
        self._fill(out, q, k, v, module, options.get("scaling"), options.get("sliding_window"))
        return out, None

    def _attend_into(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, module: Any, scaling: Any, window: Any) -> None:
        k, v = self._cache.update(k, v, module.layer_idx)
        out.copy_(self._own(module, q, k, v, None, dropout=0.0, scaling=scaling, sliding_window=window)[0])


def forward_rival(name: str, model: Any, device: Device, *, keeps_caches: bool) -> Way:
    """The rival of that name, one of :data:`FORWARD_RIVALS`, on a copy of ``model``.

    Raises:
        RivalMissing: it isn't installed, or can't run on this device.
    """
    if name in RECORDERS:
        return Recorded(name, model)
    if not device.traits.timing:
        raise RivalMissing(f"not compiled on device {device.name}, where no time is meant")
    return CompiledModel(name, model, graphs=name == REDUCE, keeps_caches=keeps_caches)
