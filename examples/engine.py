"""A small serving engine: paged keys and values, chunked prefill, continuous batching; every step out of graphs.

Decode steps, in which each request has one token, are full graphs: attention is inside, and reads page tables and lengths from
buffers that each call refreshes. Steps with pieces of prompts go through a breakable graph, whose attention runs eagerly between
the segments. It is one model, with one break point. A dozen requests are served by the plain model and out of graphs; the tokens
must be equal. `--smollm2` takes SmolLM2 instead of random weights; `torchrun --nproc-per-node 2` has two ranks share each layer.
"""

import os
import sys
import time
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import segue
from segue.cli import demo_weights

PAGE, PAGES, SPARE = 16, 96, 96  # tokens of a page; pages; the page behind them, for padding
CONTEXT, BUDGET, SEATS = 256, 64, 8  # most tokens of a request; of a step; requests that run at a time
Pieces = tuple[tuple[int, int], ...] | None  # each request's new tokens, and its length with them; None in decode steps


@segue.break_point(trim=("q", "k", "v", "slots"))
def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, pieces: Pieces, slots: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    """Keep ``k`` and ``v`` [N, kv heads, size] in the rows ``slots`` [N] of the cache, and have ``q`` [N, heads, size] attend.

    ``table`` [R, P]: the pages of each request. ``lengths`` [R]: its tokens, the new ones included. Gives [N, heads, size].
    """
    cache.index_copy_(1, slots, torch.stack((k, v)))
    rows = (table[:, :, None] * PAGE + torch.arange(PAGE, device=q.device)).flatten(1)  # [R, P * PAGE]
    if pieces is None:
        keys, values = cache[:, rows[: len(q)]].transpose(2, 3)  # the requests behind are padding
        seen = torch.arange(rows.shape[1], device=q.device) < lengths[: len(q), None, None, None]
        return nn.functional.scaled_dot_product_attention(q[:, :, None], keys, values, seen, enable_gqa=True)[:, :, 0]
    out = []
    for request, (n, length) in enumerate(pieces):
        part, q = q.split((n, len(q) - n))
        keys, values = cache[:, rows[request, :length]].transpose(1, 2)[:, None]
        seen = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
        out.append(nn.functional.scaled_dot_product_attention(part.transpose(0, 1)[None], keys, values, seen, enable_gqa=True)[0])
    return torch.cat(out, 1).transpose(0, 1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: ``cos`` and ``sin`` are [N, 1, size]."""
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)


def summed(x: Tensor) -> Tensor:
    """``x``, summed over the ranks in place. It is in a segment, as the ranks make the same calls in the same order."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def linears(**sizes: tuple[int, int]) -> nn.ModuleDict:
    """Layers by name, from so many numbers to so many."""
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


class Layer(nn.Module):
    """Attention over pages of its own, and MLP. Each of the ``ranks`` has its part of the heads and of the MLP."""

    def __init__(self, c: Any, ranks: int) -> None:
        super().__init__()
        width, self.size = c.hidden_size, c.hidden_size // c.num_attention_heads
        own, kept, inner = width // ranks, c.num_key_value_heads // ranks * self.size, c.intermediate_size // ranks
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        self.self_attn = linears(q_proj=(width, own), k_proj=(width, kept), v_proj=(width, kept), o_proj=(own, width))
        self.mlp = linears(gate_proj=(width, inner), up_proj=(width, inner), down_proj=(inner, width))
        self.register_buffer("cache", torch.zeros(2, (PAGES + 1) * PAGE, kept // self.size, self.size), persistent=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], *where: Any) -> Tensor:
        own, mlp, h = self.self_attn, self.mlp, self.input_layernorm(x)
        q, k, v = (project(h).unflatten(-1, (-1, self.size)) for project in (own.q_proj, own.k_proj, own.v_proj))
        attended = paged_attention(rotated(q, *rotary), rotated(k, *rotary), v, self.cache, *where)
        x = x + summed(own.o_proj(attended.flatten(1)))
        h = self.post_attention_layernorm(x)
        return x + summed(mlp.down_proj(nn.functional.silu(mlp.gate_proj(h)) * mlp.up_proj(h)))


class Model(nn.Module):
    """From the new tokens of a step to the next token of each request. ``c``: a configuration, with Hugging Face's names."""

    def __init__(self, c: Any, ranks: int = 1) -> None:
        super().__init__()
        self.c, self.size = c, c.hidden_size // c.num_attention_heads
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, ranks) for _ in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, eps=1e-5)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(
        self, ids: Tensor, positions: Tensor, last: Tensor, slots: Tensor, table: Tensor, lengths: Tensor, ctx: Pieces
    ) -> Tensor:
        """Of tokens [N], and requests [R] whose last rows are ``last``, each request's next token [R], greedily."""
        turns = torch.arange(0, self.size, 2, device=ids.device).repeat(2) / self.size
        angles = (positions[:, None] / self.c.rope_parameters["rope_theta"] ** turns)[:, None]
        rotary, x = (angles.cos(), angles.sin()), self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, rotary, ctx, slots, table, lengths)
        return self.lm_head(self.norm(x[last])).argmax(-1)


@dataclass
class Request:
    """``tokens``: the prompt, which the engine continues until there are ``most``. ``cached``: how many have keys and values."""

    tokens: list[int]
    most: int
    cached: int = 0
    pages: list[int] = field(default_factory=list)


class Engine:
    """Serves requests by ``forward``, which is called like the model."""

    def __init__(self, forward: Any, device: torch.device) -> None:
        self.forward, self.device = forward, device
        self.free, self.running, self.steps, self.generated = list(range(PAGES)), [], 0, 0

    def serve(self, requests: list[Request]) -> None:
        """Run steps until every request has its tokens. One that waits joins the others as soon as there is room."""
        waiting = list(requests)
        while waiting or self.running:
            while waiting and len(self.running) < SEATS and (count := -(-waiting[0].most // PAGE)) <= len(self.free):
                request = waiting.pop(0)  # it gets all pages that it will need, so that it is never sent away amid its text
                request.pages, self.free = self.free[:count], self.free[count:]
                self.running.append(request)
            self.step()

    def step(self) -> None:
        """Run the model once, on one token of each request that decodes, and on as much of prompts as there is room for."""
        plan, left = [], BUDGET
        for r in sorted(self.running, key=lambda r: len(r.tokens) - r.cached):  # so no long prompt holds up those that decode
            if n := min(len(r.tokens) - r.cached, left):
                plan.append((r, n))
                left -= n
        pieces = tuple((n, r.cached + n) for r, n in plan)
        places = [(r, p) for r, n in plan for p in range(r.cached, r.cached + n)]
        inputs = (
            [r.tokens[p] for r, p in places],
            [p for _, p in places],
            [end - 1 for end in accumulate(n for n, _ in pieces)],
            [r.pages[p // PAGE] * PAGE + p % PAGE for r, p in places],
            [r.pages + [SPARE] * (CONTEXT // PAGE - len(r.pages)) for r, _ in plan],
            [length for _, length in pieces],
        )
        tensors = (torch.tensor(values, device=self.device) for values in inputs)
        following = self.forward(*tensors, ctx=None if len(places) == len(plan) else pieces)
        for (r, n), token in zip(plan, following.tolist(), strict=True):
            r.cached += n
            if r.cached == len(r.tokens):  # otherwise the rest of its prompt is to come
                r.tokens.append(token)
                self.generated += 1
                if len(r.tokens) == r.most:
                    self.running.remove(r)
                    self.free += r.pages
        self.steps += 1


def graphs_of(model: Model, device: torch.device) -> segue.GraphRunner:
    """A runner of the model that has captured full graphs for decode steps, and breakable ones for all others."""
    tokens = {name: segue.Input(token_dim=0, pad=pad) for name, pad in (("ids", 0), ("positions", 0), ("slots", SPARE * PAGE))}
    requests = {name: segue.Input(request_dim=0, pad=pad) for name, pad in (("last", 0), ("table", SPARE), ("lengths", 1))}
    runner = segue.GraphRunner(
        model, tokens | requests, buckets=[16, 32, BUDGET], request_buckets=[SEATS], output_token_dim=None, output_request_dim=0,
        strategies=[segue.Full(lambda args, kwargs, ctx: ctx is None, [1, 2, 4, SEATS]), segue.Breakable()], progress=False,
        device="emulator" if device.type == "cpu" else device,
    )  # fmt: skip
    for n in (1, 2):  # a decode step, and a piece of a prompt
        row, spare = torch.zeros(n, dtype=torch.long, device=device), torch.full((1, CONTEXT // PAGE), SPARE, device=device)
        runner.capture(row, row, row[:1] + n - 1, row + SPARE * PAGE, spare, row[:1] + n, ctx=None if n == 1 else ((n, n),))
    return runner


def random_model() -> tuple[Model, list[int]]:
    """A model with random weights, the same ones each time, and a text of random tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000, "rope_parameters": {"rope_theta": 1e4}}
    model = Model(SimpleNamespace(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, **sizes))
    for layer in model.layers:
        nn.init.constant_(layer.input_layernorm.weight, 3.0)  # or attention would look at all alike, and hardly matter
    return model, torch.randint(1000, (1000,)).tolist()


def smollm2() -> tuple[Model, list[int]]:
    """SmolLM2-135M, which is fetched once, and this file as a text."""
    theirs, tokenizer = demo_weights.load(None, torch.device("cpu"))
    model = Model(theirs.config)
    model.load_state_dict({name.removeprefix("model."): weight for name, weight in theirs.state_dict().items()})
    return model, tokenizer(open(__file__).read()).input_ids


def share_of(model: Model, rank: int, ranks: int) -> Model:
    """What one of ``ranks`` has of a model."""
    share, weights, by_input = Model(model.c, ranks), model.state_dict(), ("o_proj.weight", "down_proj.weight")
    for name in weights:
        if "_proj" in name:
            weights[name] = weights[name].chunk(ranks, int(name.endswith(by_input)))[rank]
    share.load_state_dict(weights)
    return share


def requests_of(text: list[int], count: int = 12) -> list[Request]:
    """Requests to go on with pieces of ``text`` of different lengths. They are the same ones each time."""
    draw = Random(0)
    pieces = [(draw.randrange(len(text) - 150), draw.randint(1, 150), draw.randint(8, 60)) for _ in range(count)]
    return [Request(text[start : start + n], n + more) for start, n, more in pieces]


@torch.inference_mode()
def main(*arguments: str) -> int:
    """Serve the requests both ways. Returns 1 if any token differs on this rank."""
    model, text = smollm2() if "--smollm2" in arguments else random_model()
    rank, ranks, cuda = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if ranks > 1:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    model, found = share_of(model, rank, ranks).to(device).eval(), {}
    with graphs_of(model, device) as runner:
        for forward in (model, runner) * 2:  # at first, both warm up
            requests, engine, start = requests_of(text), Engine(forward, device), time.perf_counter()
            engine.serve(requests)
            found[forward] = [r.tokens for r in requests], engine.generated / (time.perf_counter() - start)
    (wanted, plain), (tokens, graphs), stats = found[model], found[runner], runner.stats
    full, breakable = stats.strategies["full"], stats.strategies["breakable"]
    if ranks > 1:
        dist.destroy_process_group()
    if rank == 0:
        print(f"{len(tokens)} requests, {engine.generated} new tokens in {engine.steps} steps, served twice; ranks: {ranks}")
        note = "" if cuda else " (emulated on CPU: the figures of speed mean nothing)"
        print(f"tokens per second: {plain:.0f} by the plain model, {graphs:.0f} out of graphs{note}")
        print(f"steps out of graphs: {full} full, {breakable} breakable, {stats.eager} eager")
        print(f"tokens are equal: {tokens == wanted}")
    return int(tokens != wanted)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
