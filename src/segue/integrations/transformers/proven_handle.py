"""How a handle proves that it runs a decoder right, and finds out what no graph can hold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from segue.capture import BreakableCapture
from segue.capture.thread_state import active_forward, reference_frame
from segue.errors import CaptureError, UsageError
from segue.integrations.transformers import names, reasons
from segue.integrations.transformers.attention import LiveContext
from segue.integrations.transformers.compiled_layers import CompiledLayers
from segue.integrations.transformers.decoder_forward import Body
from segue.integrations.transformers.decoder_parts import DecoderParts
from segue.integrations.transformers.hidden_states import NAME as HIDDEN_STATES
from segue.integrations.transformers.hidden_states import HiddenStates
from segue.integrations.transformers.layer_calls import NotSeen
from segue.integrations.transformers.module_breaks import ModuleBreaks, Recorder, TokenBreak, culprit
from segue.integrations.transformers.probe import PROMPT, difference, exact_products, jittered, prompt
from segue.integrations.transformers.serving_handle import ServingHandle
from segue.runner.reasons import Reason

_TRIAL = 3  # tokens of the trial capture
_PADDING = 3  # rows
_PROMPT = 7  # tokens that a prompt of the probe has at least, in all its sequences


class ProvenHandle(ServingHandle):
    """A handle of a decoder that has compared its body with the untouched decoder, before it serves a call."""

    _decoder: Any
    _parts: DecoderParts
    _layers: int
    _reader: Any  # of calls of the decoder
    _body: Body
    _breaks: ModuleBreaks
    _asked_device: Any
    _output: Any  # the decoder's output type, seen in the probe
    _tied: bool  # the last of all hidden states is the last hidden state itself
    _states: HiddenStates | None  # what gives the hidden states of all layers, once they were asked for
    _why_not: dict[str, str]  # strategies that this model can't have
    _compiled: CompiledLayers | None

    @abstractmethod
    def _example(self, tokens: int) -> tuple[tuple[Any, ...], LiveContext]:
        """Inputs of the body for one sequence of ``tokens``, and the live context of that forward."""

    @abstractmethod
    def _compile_by(self, layers: CompiledLayers, body: Callable[..., Any]) -> None:
        """Compile the layers as ``body`` calls them."""

    @abstractmethod
    def _graphed(self, call: Any, run: Callable[..., Tensor] | None, decision: Any, reached: list[int] | None = None) -> Any:
        """One forward of the decoder with ``run`` in the place of its body. ``reached`` collects the layers of the breaks."""

    def _probe(self, **asks: bool) -> None:
        """Run short conversations with and without segue's body, no graphs. ``asks``: further arguments of each forward.

        Raises:
            UsageError: attention missed the break, or the results differ.
        """
        expected = self._expected_reach()

        def untouched(given: dict[str, Any]) -> Any:
            out = self._forward(**given, **asks)
            self._output = type(out)
            if asks:
                self._note_states(out)
            return out

        def ours(given: dict[str, Any]) -> Any:
            reached: list[int] = []
            call = self._reader.read((), {**given, **asks})
            if isinstance(call, str):
                raise UsageError(f"its forward can't be read for a probe: {call}")
            call.hidden_states = bool(asks)  # whatever the config asks for
            out = self._graphed(call, partial(self._plain, self._body.states if asks else self._body), None, reached)
            if sorted(reached) != expected:
                raise UsageError(
                    f"attention of {self._layers} layers reached segue's break {len(reached)} times (layers "
                    f"{sorted(set(reached))}): a layer that computes attention by itself would be frozen into the graph"
                )
            return out

        with torch.no_grad(), jittered(self._decoder), exact_products():
            where = difference(self._forward, self._decoder, untouched, ours, bool(asks))
        if where is not None:
            raise UsageError(where)

    def _hidden_states(self) -> HiddenStates | Reason:
        """What gives the hidden states of all layers, proven and made when they are first asked for. A reason if nothing does."""
        if self._states is None and HIDDEN_STATES not in self._why_not:
            layers = self._compiled
            try:
                with names.unrecorded(), nullcontext() if layers is None else layers.as_they_are():
                    self._probe(output_hidden_states=True)
            except (UsageError, NotSeen) as e:
                self._why_not[HIDDEN_STATES] = str(e)
            else:
                if layers is not None:
                    self._compile_by(layers, self._body.states)
                on_failure = self._options["on_failure"]
                self._states = HiddenStates(self._body, self._runner, on_failure=on_failure, device=self._asked_device)
        return self._states or reasons.no_hidden_states(self._why_not[HIDDEN_STATES])

    def _note_states(self, out: Any) -> None:
        """Note how the untouched forward gives the hidden states of all layers."""
        states = getattr(out, "hidden_states", None)
        if type(states) is not tuple or not states or not all(isinstance(t, Tensor) for t in states):
            raise UsageError("its forward doesn't give a tuple of tensors")
        self._tied = states[-1] is out.last_hidden_state

    def _expected_reach(self) -> list[int]:
        """The layers of all breaks that a forward meets, in order."""
        return list(range(self._layers))

    def _break_what_no_graph_holds(self) -> None:
        """Let modules run live that can't be captured, one after the other, until a trial capture goes through.

        Raises:
            UsageError: it doesn't, and no module is to blame for it.
        """
        found: list[TokenBreak] = []
        while (error := self._trial_capture()) is not None:
            module = culprit(error, self._parts)
            alike = [m for m in self._decoder.modules() if module is not None and type(m) is type(module)]
            try:
                found = [] if module in self._breaks.modules else self._token_breaks(alike)
            except NotSeen as e:
                raise UsageError(f"{error} And no break can be made of it: {e}") from error
            if not found:
                raise UsageError(str(error)) from error
            self._breaks.put([*self._breaks, *found])
            self._body.look()
        if found:
            self._probe()

    def _token_breaks(self, modules: Sequence[Any]) -> list[TokenBreak]:
        recorded, (batch, length) = Recorder(modules), PROMPT
        with torch.no_grad(), recorded.listening():
            self._forward(**prompt(self._decoder))
        return [
            TokenBreak(m, recorded.arguments[m], recorded.results[m], batch, length) for m in modules if m in recorded.results
        ]

    def _trial_capture(self) -> CaptureError | None:
        """Capture the body once, of few tokens. Returns why that failed."""
        inputs, ctx = self._example(_TRIAL)
        trial = BreakableCapture(device=self._asked_device, name="a trial")
        try:
            with torch.inference_mode(), active_forward(ctx), trial:
                self._body(*inputs)
        except CaptureError as e:
            return e
        trial.close()
        return None

    @staticmethod
    def _plain(body: Callable[..., Any], *inputs: Any, ctx: LiveContext) -> Any:
        """A body's result without graphs. Behind a prompt stand rows of a bucket that are no tokens, and change nothing, where
        rounding can't hide what they change."""
        n = len(inputs[0])
        if n < _PROMPT or inputs[0].dtype not in (torch.float32, torch.float64):
            with active_forward(ctx), names.unrecorded():
                return body(*inputs)
        padded = [_padded(given) for given in inputs]
        with active_forward(ctx), names.unrecorded(), reference_frame(n + _PADDING, n):
            found = body(*padded)
        return tuple(t[:n] for t in found) if isinstance(found, tuple) else found[:n]


def _padded(rows: Any) -> Any:
    if isinstance(rows, Tensor):
        return torch.cat([rows, rows.new_zeros(_PADDING, *rows.shape[1:])])
    return [_padded(each) for each in rows]
