"""``segue demo``: a real language model, every forward replayed, its text compared with the untouched model's."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from segue.cli import demo_prompts, demo_weights
from segue.cli.output import Format, FormatOption, examples, log, render
from segue.devices import resolve
from segue.integrations.transformers import accelerate

EXAMPLES = examples("segue demo", "segue demo --random --layers 4", "segue demo --weights ./my-model --tokens 64")
_FIRST = 2  # tokens of the first two runs, which warm up and capture a new bucket; in the third run all calls replay
_EMULATED = "Emulated on CPU, by a tape with the semantics of CUDA graphs: this shows correctness and gives no timing."


def demo(
    folder: Annotated[Path | None, typer.Option("--weights", help="A model folder to use instead.")] = None,
    random: Annotated[bool, typer.Option(help="A Llama-like model with random weights: needs no network.")] = False,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random model.")] = 30,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 32,
    output: FormatOption = Format.MD,
) -> None:
    """Run prompts through captured graphs and compare every token with the untouched model."""
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = resolve("emulator" if place.type == "cpu" else place)
    log.print("making a model with random weights" if random else "loading a model")
    model, tokenizer = _random_model(layers, place) if random else demo_weights.load(folder, place)
    size = model.config.vocab_size
    todo = demo_prompts.random_prompts(size, place) if tokenizer is None else demo_prompts.prompts(tokenizer, place)
    rows = []
    with accelerate(model, max_tokens=512, strategy="breakable", device=device) as graphed:
        for case in todo:
            log.print(f"{case.name}")
            row = _row(graphed, case, tokenizer, tokens)
            rows.append({**row, **(_timings(graphed, case, tokens) if device.traits.timing else {})})
        log.print(graphed.report())
    note = (
        f"{_title(random, layers)}, fp32, {tokens} greedy tokens each, on {_device_name(place)}. Each prompt runs "
        f"three times: twice for {_FIRST} tokens, in which a new bucket is warmed up and captured, then whole."
    )
    sys.stdout.write(render(rows, output, [note, *([] if device.traits.timing else [_EMULATED])]))
    if any(row["verdict"] != "identical" for row in rows):
        log.print("some texts differ from the untouched model's: see the column 'verdict'")
        raise typer.Exit(1)
    log.print("next: segue bench ttft" if device.traits.timing else "next: the same on a machine with CUDA, for times")


def _row(graphed: Any, case: demo_prompts.PromptCase, tokenizer: Any, tokens: int) -> dict[str, Any]:
    with graphed.untouched():
        want = generate(graphed.module, case, tokens)
    before = graphed.stats
    start = case.ids.shape[1]
    verdicts = []
    for some in (min(_FIRST, tokens), min(_FIRST, tokens), tokens):
        got = generate(graphed.module, case, some)
        verdicts.append(verdict(want[:, : start + some], got, start))
    after = graphed.stats
    length = start - case.chunk
    bucket, segments, breaks = graphed.graphs_of(case.ids.shape[0] * length)
    return {
        "prompt": case.name,
        "tokens": case.tokens,
        "bucket": bucket,
        "segments": segments,
        "breaks": breaks,
        "warmed": after.warmed - before.warmed,
        "captured": after.captured - before.captured,
        "replayed": after.replayed - before.replayed,
        "untouched": after.eager - before.eager,
        "text": " / ".join(_text(ids, tokenizer) for ids in got[:, start:]),
        "verdict": next((v for v in verdicts if v != "identical"), "identical"),
    }


def generate(model: Any, case: demo_prompts.PromptCase, tokens: int) -> Tensor:
    """Greedy continuation, prompt included: [B, T + at most ``tokens``]."""
    given: dict[str, Any] = {"attention_mask": case.mask, "max_new_tokens": tokens, "do_sample": False}
    if case.chunk:
        from segue.integrations.transformers import names

        name = names.cache_name(model.forward)
        with torch.no_grad():
            first = model(case.ids[:, : case.chunk], use_cache=True)
        given[name] = getattr(first, name)
    out: Tensor = model.generate(case.ids, **given)
    return out


def verdict(want: Tensor, got: Tensor, start: int) -> str:
    """``identical``, or the first sequence and new token at which ``got`` differs. ``start``: tokens of the prompt."""
    if want.shape == got.shape and torch.equal(want, got):
        return "identical"
    for row, (a, b) in enumerate(zip(want.tolist(), got.tolist(), strict=True)):
        for i in range(start, max(len(a), len(b))):
            old, new = (a[i] if i < len(a) else "nothing"), (b[i] if i < len(b) else "nothing")
            if old != new:
                return f"differs: sequence {row}, token {i - start}: {new} instead of {old}"
    return "differs in the prompt"


def _timings(graphed: Any, case: demo_prompts.PromptCase, tokens: int) -> dict[str, Any]:
    """Milliseconds to the first token and tokens a second, without segue and with it."""
    if case.chunk:
        return {}

    def first() -> None:
        with torch.inference_mode():
            graphed.module(case.ids, attention_mask=case.mask, use_cache=True, logits_to_keep=1)

    def all_of_them() -> None:
        generate(graphed.module, case, tokens)

    with graphed.untouched():
        ttft, total = _seconds(first, 5), _seconds(all_of_them, 2)
    ours, our_total = _seconds(first, 5), _seconds(all_of_them, 2)
    new = tokens * case.ids.shape[0]
    return {
        "ms to first token, untouched": ttft * 1e3,
        "with segue": ours * 1e3,
        "tokens/s, untouched": new / total,
        "tokens/s, with segue": new / our_total,
    }


def _seconds(run: Callable[[], None], times: int) -> float:
    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _text(ids: Tensor, tokenizer: Any) -> str:
    if tokenizer is None:
        return " ".join(str(i) for i in ids[:8].tolist()) + " ..."
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def _random_model(layers: int, device: torch.device) -> tuple[Any, None]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device).eval(), None


def _title(random: bool, layers: int) -> str:
    return f"Llama-like, random weights, {layers} layers" if random else demo_weights.NAME


def _device_name(place: torch.device) -> str:
    return torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
