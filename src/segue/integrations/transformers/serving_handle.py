"""The handle that has taken a module's forward over: which calls graphs may serve, and what happens when the model changes."""

from __future__ import annotations

import logging
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor

from segue import _torch, devices, environment
from segue.capture.modes import CallerModes
from segue.capture.thread_state import state as thread
from segue.errors import UsageError
from segue.integrations.transformers import reasons
from segue.integrations.transformers.base_handle import Handle
from segue.integrations.transformers.decoder_forward import ForwardPatch
from segue.integrations.transformers.probe import cache_tensors
from segue.integrations.transformers.training_modes import TrainingModes
from segue.integrations.transformers.weights import Weights
from segue.runner import CaptureSummary, GraphRunner
from segue.runner.reasons import ASLEEP, DISABLED, TRACED, Reason

log = logging.getLogger("segue")
_serving: weakref.WeakSet[ServingHandle] = weakref.WeakSet()


class RunsUntouched(Exception):
    """A call that was going to be served must run untouched, for ``reason``. Nothing has been done that outlives it."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class ServingHandle(Handle):
    """A handle whose forward patches call :meth:`_serve`.

    What runs untouched is counted with its reason; what graphs may serve goes to :meth:`_serve_alone`. A subclass calls
    :meth:`_begin_with`, :meth:`_set_up` and :meth:`_take_over` when it is made. Its :meth:`_set_up` finds out everything about
    the model that may change, so that a recapture is another set-up.
    """

    # Looks at the model and makes a runner, without graphs, by the options of segue.accelerate(). It raises UsageError if the
    # model as it is can't be served.
    _set_up: Callable[..., None]
    _forward: Callable[..., Any]  # the untouched one of the module that is served
    _modes: TrainingModes
    _weights: Weights
    _runner: GraphRunner
    _patches: list[ForwardPatch]
    _restored: bool
    _one_at_a_time: AbstractContextManager[Any]
    _device: torch.device  # the model's
    _caller_modes: CallerModes  # those of all captures
    _accept_caller_modes: Callable[[], None]  # take them as they are now

    @property
    def runner(self) -> GraphRunner:
        """The runner of what is captured."""
        return self._runner

    def recapture(self) -> None:
        """Drop every graph and look at the model anew, so that each bucket is captured again. It takes in what has changed:
        weights that moved or were replaced, modules and modes.

        Raises:
            UsageError: the handle was restored, or the model as it is now can't be served; says why. The graphs stay then.
        """
        self._refuse_restored()
        try:
            self._remake(self._options)
        except UsageError as e:
            raise UsageError(f"{type(self._model).__name__} can't be served as it is now, and its graphs stay. {e}") from e

    def sleep(self) -> None:
        """Free the graphs and their memory, and let go of the weights. Until :meth:`wake`, forwards run untouched, counted.

        Raises:
            UsageError: the handle was restored.
        """
        self._refuse_restored()
        with self._one_at_a_time:
            self._asleep = True
            for owner in self._owners():
                owner.close()

    def wake(self) -> CaptureSummary | None:
        """End :meth:`sleep`: look at the model anew, as :meth:`recapture` does, and capture the ladder if :meth:`capture` had.

        Returns what was captured; None where graphs come with the calls.

        Raises:
            as :meth:`recapture` and :meth:`capture`. Where the model can't be served as it is, the handle sleeps on.
        """
        if not self._asleep:
            return None
        self.recapture()
        return self.capture() if self._captured_ahead else None

    def with_options(self, **options: Any) -> Self:
        """This handle, serving by other options of :func:`segue.accelerate`: with others than before, every graph is dropped.

        Raises:
            UsageError: an option means nothing, or the model can't be served so. It is served as before then.
        """
        changes = [f"{k}: {v!r} -> {options[k]!r}" for k, v in self._options.items() if options[k] != v]
        if changes:
            graphs = self._any_captured()
            self._remake(options)
            if graphs:
                log.warning("segue: %s is served by other options, anew: %s", type(self.module).__name__, ", ".join(changes))
        return self

    def serves(self, model: Any) -> bool:
        """Whether it serves ``model``, a transformers model without what users put around it."""
        return model is self._model and not self._restored

    def restore(self) -> None:
        """Give the model its own forward back and free the graphs. May be called again."""
        with self._one_at_a_time:  # another thread's call ends first
            if self._restored:
                return
            self._restored = True
            for patch in self._patches:
                patch.undo()
            for owner in self._owners():
                owner.close()

    @abstractmethod
    def _serve_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The answer to a call of the module whose forward is patched, while no other thread is in one."""

    @abstractmethod
    def _owners(self) -> Sequence[Any]:
        """What owns graphs and has ``close()``."""

    @abstractmethod
    def _any_captured(self) -> bool:
        """Whether anything has a graph."""

    def _begin_with(self, module: Any, model: Any, options: Mapping[str, Any]) -> None:
        self._begin(module, model)
        self._options, self._restored, self._patches = options, False, []
        self._not_taken_in: Reason | None = None
        self._asleep = self._captured_ahead = False  # the latter by capture()
        self._one_at_a_time = threading.RLock()  # a body's attention has another name while it runs, for every thread

    def _take_over(self) -> None:
        """Put the patches in the places of the model's forwards."""
        for patch in self._patches:
            patch.apply()
        _serving.add(self)

    def _remake(self, options: Mapping[str, Any]) -> None:
        with self._one_at_a_time:
            self._refuse_restored()
            before, owners = dict(vars(self)), self._owners()
            try:
                self._not_taken_in, self._asleep = None, False
                self._set_up(**options)
            except BaseException:
                vars(self).update(before)
                raise
            for patch in self._patches:
                if patch not in before["_patches"]:
                    patch.apply()
            self._options = options
            for owner in owners:
                owner.close()

    def _run_by(self, runner: GraphRunner, device: torch.device) -> None:
        """Have ``runner`` serve the model, which is on ``device``, and go on with the counts so far.

        Raises:
            UsageError: the runner captures on another device.
        """
        recorder = runner.prepare().recorder
        self._refuse_elsewhere(recorder.device.torch_device, device)
        recorder.counters.go_on_from(self._counters)
        self._runner, self._counters = runner, recorder.counters

    def _refuse_elsewhere(self, place: torch.device, device: torch.device) -> None:
        """Raise UsageError if graphs on ``place`` can't serve the model, which is on ``device``."""
        if (place.type, place.index or 0) != (device.type, device.index or 0):
            raise UsageError(
                f"{type(self._model).__name__} is on {device}, and graphs are to be captured on {place}. Move the model, or "
                "leave out device=."
            )

    def _refuse_restored(self) -> None:
        if self._restored:
            raise UsageError("this handle was restored: its graphs are gone. Call segue.accelerate(model) again.")

    def _serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        with self._one_at_a_time:
            if self._here.untouched or self._restored:
                return self._forward(*args, **kwargs)
            reason = self._unservable()
            return self._serve_alone(args, kwargs) if reason is None else self._untouched_forward(reason, args, kwargs)

    def _untouched_forward(self, reason: Reason | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._counters.fell_back(reason)
        return self._forward(*args, **kwargs)

    def _unservable(self) -> Reason | None:
        """Why no graph may serve any call now. Each call asks this first."""
        if environment.disabled():
            return DISABLED
        if _torch.is_tracing():
            return TRACED
        if self._asleep:
            return ASLEEP
        if devices.is_recorded(self._device) and thread.capture is None:
            return reasons.RECORDED
        if (who := self._modes.training()) is not None:
            return reasons.training(who)
        moved = self._weights.moved()
        return None if moved is None or self._takes_in(moved) else moved

    def _takes_in(self, change: Reason) -> bool:
        """Take a change of the model in, which is free as long as nothing has a graph."""
        if self._any_captured() or change == self._not_taken_in:
            return False
        try:
            self._remake(self._options)
        except UsageError:
            self._not_taken_in = change
            return False
        return True

    def _refuse_gradients(self, x: Tensor) -> None:
        """Raise RunsUntouched if what was made live for the graphs, such as embeddings, has gradients to record."""
        if x.requires_grad and torch.is_grad_enabled():
            raise RunsUntouched(reasons.GRADIENTS)

    def _other_mode(self) -> Reason | None:
        """Which of the caller's modes is not that of the captures; None if none is."""
        if torch.is_autocast_enabled(self._device.type):
            return reasons.AUTOCAST
        mode = self._caller_modes.other()
        if mode is None:
            return None
        if self._any_captured():
            return reasons.other_mode(mode.name, mode.now, mode.then)
        self._accept_caller_modes()
        return None

    def _needs_gradients(self, *inputs: Tensor | None, cache: Any = None) -> bool:
        """Whether a forward of ``inputs`` on what ``cache`` holds has to record gradients."""
        if not torch.is_grad_enabled():
            return False
        tensors = (*inputs, *cache_tensors(cache).values())
        return any(t is not None and t.requires_grad for t in tensors) or self._weights.require_gradients()


def handle_of(model: Any) -> ServingHandle | None:
    """The handle that serves ``model``, a transformers model without what users put around it; None if there is none."""
    return next((handle for handle in _serving if handle.serves(model)), None)
