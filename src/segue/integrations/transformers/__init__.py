"""Hugging Face transformers: every forward of a model's decoder replayed from captured graphs.

Importing this module needs torch alone; transformers is looked for when :func:`accelerate` is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from segue import environment
from segue.errors import UsageError
from segue.integrations.transformers.base_handle import DisabledHandle, Handle
from segue.runner import Ladder
from segue.runner.options import ladder, whole_number

if TYPE_CHECKING:
    from segue.devices import Device

__all__ = ["accelerate"]

_STRATEGIES = ("auto", "breakable", "prime")


def accelerate(
    model: Any,
    max_tokens: int = 2048,
    strategy: str = "auto",
    compile: bool = False,
    buckets: Ladder | Iterable[int] | None = None,
    on_failure: Literal["raise", "eager"] = "raise",
    device: str | Device | None = None,
    max_context: int | None = None,
    memory_budget: int | None = None,
) -> Handle:
    """Run a transformers model's decoder out of captured graphs, in place: the same tokens, sooner.

    The embedding and the head stay the model's own, outside the graphs; attention and the KV cache, or the whole modules that
    mix tokens, run live, in the breaks between them, by the model's own code. What can't be served that way runs the untouched
    forward and is counted, with the reason, in the handle's ``stats``. First tokens of fresh prompts, and steps of one token for
    each sequence, are one graph from ids to logits where the model allows it: attention, cache and head are in it then.

    A model without a decoder or cache, such as BERT, runs its whole forward, masks included, as one graph for each padded length
    and number of rows. ``max_tokens`` is then that of one graph: larger batches run in pieces, and longer rows untouched.
    ``buckets`` are the padded lengths of a row. So it is for the model inside a ``SentenceTransformer`` or ``CrossEncoder``.

    Args:
        model: a ``PreTrainedModel`` with a decoder, or an encoder, in eval mode, on one device; or a module that holds one, as a
            ``PeftModel`` does. Handles, and what ``torch.compile`` returns, are looked through. What serves it is found out, and
            compared with the untouched model in short conversations.
        max_tokens: the most tokens of *one forward* (batch times padded length), not of the text generated. Longer
            forwards run untouched.
        strategy: ``"auto"``: fresh prompts, single ones and batches of up to 32, as prime graphs and steps of one token as full
            graphs, where the model allows it, everything else breakable; the handle's ``stats`` count all. ``"prime"``: the same,
            but a model without prime graphs is refused. ``"breakable"``: neither prime nor full graphs.
        compile: whether the decoder's layers and final norm are compiled, once for all lengths, before they are captured. Fused
            kernels round differently, so in bfloat16 long greedy texts may part from the untouched model's; replays equal
            ``handle.reference()``, which runs the compiled layers, bit for bit. The untouched model is never compiled.
            Where layers run inside a live forward, they run unfused. On the emulator compiled code runs as its Python.
        buckets: the padded token counts that get graphs, as a list or a :class:`~segue.Ladder`. They take the place of
            ``max_tokens``. None: 1, 2, 4 and 8, for decode, and from 16 on four for each doubling, up to ``max_tokens``;
            with ``compile`` from 2 on.
        on_failure: ``"eager"``: a bucket whose capture fails runs the untouched forward from then on, and layers that can't be
            compiled run as they are. Both are logged once.
        device: None means the model's; ``"emulator"`` says that CPU, for correctness only, is meant.
        max_context: the most tokens of a sequence that decodes by full graphs; longer ones go on by breakable ones. None: as
            many as there is memory for.
        memory_budget: bytes that resident memory may take, where caches lie while they decode. It begins small, and is made anew,
            twice as large, when caches need more. None: a quarter of the device memory that is free then.

    Returns:
        A handle that forwards calls and attributes to ``model``, and is of its class to ``isinstance``. ``restore()``, or leaving
        its ``with``, gives the model back as it was. A model that is accelerated already keeps its handle: with other options
        than before it drops its graphs and serves by these; where ``model`` is another module around the same transformers
        model, it is restored, and a new one returned. With ``SEGUE=off`` in the environment nothing is refused and nothing
        captured: the handle counts forwards, and stays off.

    Raises:
        SegueError: transformers is missing, or the model can't be served and why: its mode, its devices, tokens that meet where
            no break is, a result that differs from the untouched model's.
    """
    if environment.disabled():
        return model if isinstance(model, Handle) else DisabledHandle(model)
    _require_transformers()
    if strategy not in _STRATEGIES:
        raise UsageError(f"strategy={strategy!r} is not one that segue.accelerate() knows: use one of {_STRATEGIES}")
    from segue.integrations.transformers import checks, encoder_probe
    from segue.integrations.transformers.encoder_handle import EncoderHandle
    from segue.integrations.transformers.handle import Accelerated
    from segue.integrations.transformers.layers_handle import AcceleratedLayers
    from segue.integrations.transformers.serving_handle import handle_of
    from segue.integrations.transformers.wrapped_models import served_in, whole_of

    whole = whole_of(model)
    served = served_in(whole)
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "strategy": strategy,
        "compile": compile,
        "buckets": buckets if buckets is None else ladder("buckets", buckets),
        "on_failure": on_failure,
        "device": device,
        "max_context": None if max_context is None else whole_number("max_context", max_context, 1, " of tokens"),
        "memory_budget": None if memory_budget is None else whole_number("memory_budget", memory_budget, 1, " of bytes"),
    }
    before = handle_of(served)
    if before is not None and before.module is whole:
        return before.with_options(**options)
    if before is not None:  # the same model with something else around it
        before.restore()
    if encoder_probe.is_encoder(served):
        if strategy == "prime":
            raise UsageError(f"{checks.describe(served)} has no decoder, and prime graphs are for prompts. Leave strategy out")
        return EncoderHandle(whole, served, **options)
    parts = checks.parts_of(served)
    try:
        return Accelerated(whole, served, parts, **options)
    except UsageError as e:
        if strategy == "prime":
            raise
        seen = e
    try:
        return AcceleratedLayers(whole, served, parts, **options)
    except UsageError as e:
        if str(e) == str(seen):
            raise
        raise UsageError(
            f"{checks.describe(served)} can't be served: {seen}; and with its layers alone in graphs, {e}. Run it untouched, or "
            "capture its forward with segue.GraphRunner and mark what is not token-wise with segue.break_point."
        ) from e


def _require_transformers() -> None:
    try:
        importlib.import_module("transformers")
    except ImportError as e:
        if (e.name or "transformers").split(".")[0] != "transformers":
            raise  # transformers is installed, and something that it needs is missing
        raise UsageError(
            "segue.accelerate() takes Hugging Face models, and transformers is not installed here. "
            "Install it with: pip install 'segue-graphs[transformers]'"
        ) from e
