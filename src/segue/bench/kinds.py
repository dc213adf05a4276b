"""Decoders of several kinds, by their tokens' mixing: a prompt and a decoding step, eager and by segue, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from segue.bench import timing
from segue.bench.decode import PROMPT, by_generate
from segue.bench.models import FreshPrompt, last_logits, sharing_copy
from segue.bench.result import SAME, BenchResult, Row
from segue.devices import Device
from segue.errors import SegueError
from segue.integrations.transformers import accelerate

LENGTHS = (128, 512)
EAGER, SEGUE, COMPILED = "eager", "segue", "segue compiled"
_STEPS = 3  # generations of which the median step counts
_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
_DELTA = {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
_LATENT = {"kv_lora_rank": 256, "q_lora_rank": 384, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
_ROUTED = {"n_routed_experts": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 4}
# Each kind by transformers' name of a family of it, and what its config adds to the common sizes.
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense": ("qwen3", _HEADS),
    "mixture": ("qwen3_moe", {**_HEADS, **_EXPERTS}),
    "hybrid, gated delta rule": ("qwen3_next", {**_HEADS, **_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 512}),
    "latent attention": (
        "deepseek_v3",
        {**_LATENT, **_ROUTED, "moe_intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 16},
    ),
}


@dataclass(frozen=True)
class KindSizes:
    """The sizes that all kinds have in common."""

    layers: int = 12
    hidden: int = 1024
    vocabulary: int = 32000

    def model(self, kind: str, dtype: torch.dtype, device: torch.device) -> Any:
        """A causal language model of ``kind``, one of :data:`KINDS`, with random weights, in eval mode, without gradients."""
        from transformers import AutoConfig, AutoModelForCausalLM

        family, own = KINDS[kind]
        sizes = {"hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, "num_hidden_layers": self.layers}
        ids = {"vocab_size": self.vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
        config: Any = AutoConfig.for_model(family, **sizes, **ids, **own)
        torch.manual_seed(0)
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model.to(device).eval().requires_grad_(False)


@dataclass(frozen=True, kw_only=True)
class Kinds(BenchResult):
    """Rows of prompts and of decoding steps."""

    title: ClassVar[str] = "Decoders of several kinds"

    rows: Sequence[Row]
    steps: Sequence[Row]

    @property
    def tables(self) -> Mapping[str, Sequence[Row]]:
        return {"One prompt, cache filled": self.rows, "One step of generate(), batch 1": self.steps}


def measure(
    device: Device,
    sizes: KindSizes | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    times: int = 20,
    lengths: Sequence[int] = (),
    progress: Callable[[str], None] = print,
    compile: bool = False,
    kinds: Sequence[str] = tuple(KINDS),
) -> Kinds:
    """Measure some kinds of :data:`KINDS`, all ways in turns. A decoding step is measured where there is time to measure.

    Args:
        sizes: of the models; ``dtype``: of their weights.
        times: measurements of each, of which the median counts. ``lengths``: tokens of a prompt.
        progress: gets a line for each step.
        compile: measure segue with compiled layers too.
        kinds: which, by default all.
    """
    rows: list[Row] = []
    steps: list[Row] = []
    for kind in kinds:
        model = (sizes or KindSizes()).model(kind, dtype, device.torch_device)
        handles: dict[str, Any] = {}
        try:
            for name, fused in ((SEGUE, False), (COMPILED, True))[: 2 if compile else 1]:
                try:
                    most = max(*(lengths or LENGTHS), PROMPT)
                    handles[name] = accelerate(sharing_copy(model), max_tokens=most, compile=fused, device=device)
                except SegueError as e:
                    rows.append({"kind": kind, "way": name, "refused": str(e)})
            progress(f"{kind}: accelerated")
            for n in lengths or LENGTHS:
                rows += _prompt(kind, model, handles, n, times)
                progress(f"{kind}: {n} tokens")
            if device.traits.timing:
                steps += _step(kind, model, handles)
                progress(f"{kind}: decoded")
        finally:
            for handle in handles.values():
                handle.restore()
    right = all(row.get("replay = reference") in (None, SAME) for row in (*rows, *steps))
    notes = (
        f"{(sizes or KindSizes()).layers} layers, random weights, {str(dtype).removeprefix('torch.')}. Medians of {times}, all "
        "ways in turns. *boundaries*: what runs live between the graphs. *replay = reference*: logits of segue's replays against "
        "the same function without graphs. *largest difference to eager*: of the logits.",
    )
    return Kinds(rows=rows, steps=steps, right=right, notes=notes)


def _prompt(kind: str, model: Any, handles: Mapping[str, Any], n: int, times: int) -> list[Row]:
    calls = (len(handles) + 1) * (times + 12)
    prompt = FreshPrompt(model, n, calls)
    models = {EAGER: model, **{name: handle.module for name, handle in handles.items()}}

    def forward(name: str) -> Tensor:
        with torch.inference_mode():
            return last_logits(models[name], prompt.ids, prompt.caches.pop())

    for name in handles:
        for _ in range(2):
            forward(name)
    before = {name: handle.stats.replayed for name, handle in handles.items()}
    taken = timing.wall_in_turns({name: partial(forward, name) for name in models}, times)
    want = forward(EAGER)
    rows: list[Row] = []
    for name, seconds in taken.items():
        row: Row = {"kind": kind, "tokens": n, "way": name, "ms": seconds * 1e3, "eager / this": taken[EAGER] / seconds}
        if name in handles:
            handle, got = handles[name], forward(name).clone()
            with handle.reference():
                reference = forward(name)
            row |= {
                "replayed": handle.stats.replayed - before[name],
                "replay = reference": SAME if torch.equal(got, reference) else "NO",
                "largest difference to eager": (got - want).abs().max().item(),
                "boundaries": ", ".join(handle.boundaries),
            }
        rows.append(row)
    return rows


def _step(kind: str, model: Any, handles: Mapping[str, Any]) -> list[Row]:
    ids = FreshPrompt(model, PROMPT, calls=0).ids
    ways = {EAGER: by_generate(model), **{name: by_generate(handle.module) for name, handle in handles.items()}}
    tokens = {name: [generate(ids) for _ in range(2)][1][1].clone() for name, generate in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_STEPS):
        for name, generate in ways.items():
            taken[name].append(generate(ids)[0])
    medians = {name: sorted(seconds)[_STEPS // 2] for name, seconds in taken.items()}
    return [
        {
            "kind": kind,
            "way": name,
            "step ms": seconds * 1e3,
            "eager / this": medians[EAGER] / seconds,
            "tokens as eager's": f"{int((tokens[name] == tokens[EAGER]).sum())} of {tokens[EAGER].numel()}",
            "eager calls": handles[name].stats.eager if name in handles else None,
        }
        for name, seconds in medians.items()
    ]
