"""examples/engine.py beside transformers' continuous batching, on the same weights: tokens per second, and whether tokens agree.

All of them serve the same requests, eight at a time, in steps of at most 64 tokens: the engine by its plain model and out of
segue's graphs; `generate_batch` of the untouched model, of the same with transformers' own graphs, and of the accelerated model,
whose forwards run out of breakable graphs. `python benchmarks/engine.py [FILE]` writes a table; on a CPU, in a small size,
it says no more than that they work.
"""

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import segue
from segue import environment
from segue.bench.timing import synchronize
from segue.cli.output import table

NEW = 48  # tokens of each request
Tokens = list[list[int]]


def example() -> Any:
    """examples/engine.py as a module."""
    path = Path(__file__).parents[1] / "examples" / "engine.py"
    spec = importlib.util.spec_from_file_location("engine", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["engine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_of(cuda: bool) -> LlamaForCausalLM:
    """A llama of SmolLM2-135M's shape with random weights in bfloat16; on a CPU a small one in float32."""
    sizes = (576, 30, 9, 3, 1536, 49152) if cuda else (64, 2, 4, 2, 96, 256)
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size"
    torch.manual_seed(0)
    config = LlamaConfig(**dict(zip(names.split(), sizes, strict=True)), rms_norm_eps=1e-5, eos_token_id=None)
    return LlamaForCausalLM(config).eval().to("cuda" if cuda else "cpu", torch.bfloat16 if cuda else torch.float32)


def by_engine(engine: Any, forward: Any, device: torch.device, prompts: Tokens) -> Tokens:
    """The new tokens of each prompt by the example's engine."""
    requests = [engine.Request([*prompt], len(prompt) + NEW) for prompt in prompts]
    engine.Engine(forward, device).serve(requests)
    return [request.tokens[-NEW:] for request in requests]


def by_transformers(engine: Any, model: Any, graphs: bool, prompts: Tokens) -> Tokens:
    """The new tokens of each prompt by ``generate_batch``."""
    limits = {"max_batch_tokens": engine.BUDGET, "max_requests_per_batch": engine.SEATS, "num_blocks": 64}
    given = GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(
        prompts,
        generation_config=given,
        continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=graphs, **limits),
        persistent_manager=True,
    )
    return [found[name].generated_tokens for name in sorted(found, key=lambda name: int(name.rpartition("_")[2]))]


@torch.inference_mode()
def main(*arguments: str) -> int:
    """Measure all ways in turns. Returns 1 if the engine's graphs give other tokens than its plain model."""
    cuda, engine, draw = torch.cuda.is_available(), example(), Random(0)
    theirs = model_of(cuda)
    device, vocabulary = theirs.device, theirs.config.vocab_size
    prompts = [[draw.randrange(vocabulary) for _ in range(draw.randint(1, 150))] for _ in range(24 if cuda else 6)]
    model = engine.Model(theirs.config)
    model.load_state_dict({name.removeprefix("model."): t for name, t in theirs.state_dict().items()})
    model.to(device, theirs.dtype).eval()
    runner = engine.graphs_of(model, device)
    copies = {name: model_of(cuda) for name in ("graphs", "segue", "compiled")}
    handles = {
        name: segue.accelerate(copies[name], max_tokens=engine.BUDGET, compile=name == "compiled")
        for name in ("segue", "compiled")
    }
    for handle in handles.values():
        handle.capture()
    ways: dict[str, Callable[[Tokens], Tokens]] = {
        "the engine, plain": partial(by_engine, engine, model, device),
        "the engine, segue's graphs": partial(by_engine, engine, runner, device),
        "generate_batch": partial(by_transformers, engine, theirs, False),
        "generate_batch, transformers' graphs": partial(by_transformers, engine, copies["graphs"], cuda),
        "generate_batch, segue": partial(by_transformers, engine, copies["segue"], False),
        "generate_batch, segue, compile=True": partial(by_transformers, engine, copies["compiled"], False),
    }
    tokens: dict[str, Tokens] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    for turn in range(5):
        for name in [name for name in ways if name not in failed]:
            start = time.perf_counter()
            try:
                tokens[name] = ways[name](prompts)
            except Exception as e:  # of a rival: the others are measured all the same
                failed[name] = f"{type(e).__name__}: {e}".splitlines()[0]
                continue
            synchronize()
            taken = time.perf_counter() - start
            print(f"{name}, turn {turn}: {NEW * len(prompts) / taken:.0f} tokens a second", file=sys.stderr, flush=True)
            if turn > 1:  # before, they warm up
                seconds[name].append(taken)
    plain = tokens["the engine, plain"]
    rows = [
        {
            "way": name,
            "tokens a second": NEW * len(prompts) / statistics.median(seconds[name]) if name not in failed else None,
            "tokens as the plain engine's": f"{sum(map(list.__eq__, tokens[name], plain))} of {len(plain)} requests"
            if name not in failed
            else failed[name],
        }
        for name in ways
    ]
    served = [f"{name}: {dict(each.stats.strategies)}" for name, each in {"engine": runner, **handles}.items()]
    text = f"# An engine\n\n{environment.provenance()}\n\n{__doc__}\n{table(rows)}\n\nSteps by strategy, {'; '.join(served)}.\n"
    print(text)
    if arguments:
        Path(arguments[0]).write_text(text)
    return int(tokens["the engine, segue's graphs"] != plain)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
