"""A small serving engine: paged keys and values, chunked prefill, continuous batching; every step out of graphs.

Steps in which each request has one token, the decode steps, are full graphs: attention is inside, and reads page tables and
lengths from buffers that each call refreshes. Steps with longer pieces of prompts among them go through the breakable graph,
whose attention runs eagerly between the segments. It is the same model, with one break point.

`python examples/engine.py` serves a dozen requests by the plain model and out of graphs, compares the tokens, and ends with 1
if they differ. `--smollm2` takes the model of `segue demo` instead of random weights. `torchrun --nproc-per-node 2
examples/engine.py` has two ranks share each layer: each has half of the heads and of the MLP, and all_reduce sums what they give.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import segue

PAGE, PAGES, SPARE = 16, 96, 96  # tokens of a page; pages; the page behind them, for padding
CONTEXT, BUDGET, SEATS = 256, 64, 8  # most tokens of a request; of a step; requests that run at a time


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model."""

    layers: int = 4
    width: int = 128
    inner: int = 256
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 1000
    theta: float = 10_000.0

    @property
    def size(self) -> int:
        """Numbers in one head."""
        return self.width // self.heads


@dataclass(frozen=True)
class Step:
    """What attention needs to know on the host. ``pieces``: each request's new tokens and its length with them; None if all
    have one new token, and then all that attention needs is on the device."""

    pieces: tuple[tuple[int, int], ...] | None = None


@segue.break_point(trim=("q", "k", "v", "slots"))
def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], slots: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    """Keep ``k`` and ``v`` [N, kv heads, size] in the rows ``slots`` [N] of the cache, and have ``q`` [N, heads, size] attend.

    ``table`` [R, P]: the pages of each request. ``lengths`` [R]: its tokens, the new ones included. Gives [N, heads, size].
    """
    for kept, new in zip(cache, (k, v), strict=True):
        kept.index_copy_(0, slots, new)
    rows = (table[:, :, None] * PAGE + torch.arange(PAGE, device=q.device)).flatten(1)  # [R, P * PAGE]
    pieces = segue.current_forward_ctx().pieces
    if pieces is None:
        n = len(q)  # the requests behind are padding
        keys, values = (t[rows[:n]].transpose(1, 2) for t in cache)
        seen = torch.arange(rows.shape[1], device=q.device) < lengths[:n, None]
        mask = seen | (lengths[:n, None] == 0)  # a padded request looks at the spare page
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, mask[:, None, None], enable_gqa=True)[:, :, 0]
    out = []
    for request, (n, length) in enumerate(pieces):
        piece, q = q.split((n, len(q) - n))
        keys, values = (t[rows[request, :length]].transpose(0, 1)[None] for t in cache)
        causal = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
        out.append(F.scaled_dot_product_attention(piece.transpose(0, 1)[None], keys, values, causal, enable_gqa=True)[0])
    return torch.cat(out, 1).transpose(0, 1)


class Attention(nn.Module):
    """Attention with rotary positions over pages of its own."""

    def __init__(self, shape: Shape, ranks: int) -> None:
        super().__init__()
        self.size, own, kept = shape.size, shape.width // ranks, shape.kv_heads * shape.size // ranks
        self.q_proj, self.o_proj = nn.Linear(shape.width, own, bias=False), nn.Linear(own, shape.width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(shape.width, kept, bias=False) for _ in range(2))
        for name in ("keys", "values"):
            rows = torch.zeros((PAGES + 1) * PAGE, shape.kv_heads // ranks, shape.size)
            self.register_buffer(name, rows, persistent=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], *where: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.size)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(q, *rotary), rotated(k, *rotary)
        return summed(self.o_proj(paged_attention(q, k, v, (self.keys, self.values), *where).flatten(1)))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: ``cos`` and ``sin`` are [N, 1, size]."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def summed(x: Tensor) -> Tensor:
    """``x``, summed over the ranks in place. It is in a segment, as the ranks make the same calls in the same order."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


class MLP(nn.Module):
    """What each token does by itself."""

    def __init__(self, shape: Shape, ranks: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(shape.width, shape.inner // ranks, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(shape.inner // ranks, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return summed(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """Attention and MLP, with names as Hugging Face has them."""

    def __init__(self, shape: Shape, ranks: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(shape.width, eps=1e-5) for _ in range(2))
        self.self_attn, self.mlp = Attention(shape, ranks), MLP(shape, ranks)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], *where: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, *where)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """From the new tokens of a step to the next token of each request. ``ranks``: how many share each layer."""

    def __init__(self, shape: Shape, ranks: int = 1) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape, ranks) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        frequencies = shape.theta ** -(torch.arange(0, shape.size, 2) / shape.size)
        self.register_buffer("frequencies", torch.cat((frequencies, frequencies)), persistent=False)

    def forward(self, ids: Tensor, positions: Tensor, slots: Tensor, table: Tensor, lengths: Tensor, last: Tensor) -> Tensor:
        """``ids``, ``positions``, ``slots`` [N]; ``table`` [R, P], ``lengths`` [R]; ``last`` [R]: the row of each request's last
        token. Gives the greedy next tokens [R]."""
        angles = (positions[:, None] * self.frequencies)[:, None]
        rotary, x = (angles.cos(), angles.sin()), self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, rotary, slots, table, lengths)
        return self.lm_head(self.norm(x[last])).argmax(-1)


@dataclass
class Request:
    """``tokens``: the prompt, which the engine continues until there are ``most``. ``arrives``: at which step."""

    tokens: list[int]
    most: int
    arrives: int
    cached: int = 0  # how many of the tokens have keys and values
    pages: list[int] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Tokens that the model hasn't seen: one while it decodes."""
        return len(self.tokens) - self.cached


class Engine:
    """Serves requests by ``forward``, which is called like the model, with the :class:`Step` as ``ctx``."""

    def __init__(self, forward: Callable[..., Tensor], device: torch.device) -> None:
        self.forward, self.device = forward, device
        self.free, self.running = list(range(PAGES)), list[Request]()
        self.steps = self.generated = 0

    def serve(self, requests: Iterable[Request]) -> None:
        """Run steps until every request has its tokens."""
        waiting, clock = deque(sorted(requests, key=lambda request: request.arrives)), 0
        while waiting or self.running:
            while waiting and waiting[0].arrives <= clock and self._seat(waiting[0]):
                self.running.append(waiting.popleft())
            if self.running:
                self._step()
            clock += 1

    def _seat(self, request: Request) -> bool:
        """Give a request all the pages that it will need, so that none is ever sent away amid its text."""
        count = -(-request.most // PAGE)
        if len(self.running) == SEATS or count > len(self.free):
            return False
        request.pages, self.free = self.free[:count], self.free[count:]
        return True

    def _step(self) -> None:
        plan, left = [], BUDGET
        for request in sorted(self.running, key=lambda r: r.pending):  # so no long prompt holds up those that decode
            if n := min(request.pending, left):
                plan.append((request, n))
                left -= n
        following = self._forward(plan).tolist()
        for (request, n), token in zip(plan, following, strict=True):
            request.cached += n
            if request.pending:
                continue  # the rest of its prompt is to come
            request.tokens.append(token)
            self.generated += 1
            if len(request.tokens) == request.most:
                self.running.remove(request)
                self.free += request.pages
        self.steps += 1

    def _forward(self, plan: list[tuple[Request, int]]) -> Tensor:
        pieces = tuple((n, request.cached + n) for request, n in plan)
        places = [(r, p) for r, n in plan for p in range(r.cached, r.cached + n)]
        inputs = (
            [r.tokens[p] for r, p in places],
            [p for _, p in places],
            [r.pages[p // PAGE] * PAGE + p % PAGE for r, p in places],
            [r.pages + [SPARE] * (CONTEXT // PAGE - len(r.pages)) for r, _ in plan],
            [length for _, length in pieces],
            [end - 1 for end in accumulate(n for _, n in plan)],
        )
        step = Step(None if all(n == 1 for n, _ in pieces) else pieces)
        return self.forward(*(torch.tensor(values, device=self.device) for values in inputs), ctx=step)


def graphs_of(model: Model, device: torch.device) -> segue.GraphRunner:
    """A runner of the model that has captured full graphs for decode steps, and breakable ones for all others."""
    runner = segue.GraphRunner(
        model,
        inputs={
            **{name: segue.Input(token_dim=0, pad=pad) for name, pad in (("ids", 0), ("positions", 0), ("slots", SPARE * PAGE))},
            **{name: segue.Input(request_dim=0, pad=pad) for name, pad in (("table", SPARE), ("lengths", 0), ("last", 0))},
        },
        buckets=[16, 32, BUDGET],
        request_buckets=[SEATS],
        output_token_dim=None,
        output_request_dim=0,
        strategies=[segue.Full(lambda args, kwargs, ctx: ctx.pieces is None, [1, 2, 4, SEATS]), segue.Breakable()],
        device="emulator" if device.type == "cpu" else device,
        progress=False,
    )
    for n in (1, 2):  # a decode step, and a piece of a prompt
        row, spare = torch.zeros(n, dtype=torch.long, device=device), torch.full((1, CONTEXT // PAGE), SPARE, device=device)
        step = Step(None if n == 1 else ((n, n),))
        runner.capture(row, row, row + SPARE * PAGE, spare, row[:1] + n, row[:1] + n - 1, ctx=step)
    return runner


def random_model() -> tuple[Model, list[int]]:
    """A model with random weights, the same ones each time, and a text of random tokens."""
    torch.manual_seed(0)
    model = Model(shape := Shape())
    for layer in model.layers:
        nn.init.constant_(layer.input_layernorm.weight, 3.0)  # or attention would look at all alike, and hardly matter
    return model, torch.randint(shape.vocabulary, (1000,)).tolist()


def smollm2() -> tuple[Model, list[int]]:
    """SmolLM2-135M, which is fetched once, and this file as a text."""
    from segue.cli import demo_weights

    theirs, tokenizer = demo_weights.load(None, torch.device("cpu"))
    c = theirs.config
    shape = Shape(c.num_hidden_layers, c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads)
    model = Model(replace(shape, vocabulary=c.vocab_size, theta=c.rope_parameters["rope_theta"]))
    model.load_state_dict({name.removeprefix("model."): weight for name, weight in theirs.state_dict().items()})
    return model, tokenizer(Path(__file__).read_text()).input_ids


def share_of(model: Model) -> Model:
    """What this rank has of a model."""
    ranks, rank, shared = dist.get_world_size(), dist.get_rank(), {}
    if model.shape.kv_heads % ranks:
        raise SystemExit(f"{model.shape.kv_heads} heads of keys and values can't be shared by {ranks} ranks")
    for name, weight in model.state_dict().items():
        by_input = name.endswith(("o_proj.weight", "down_proj.weight"))
        shared[name] = weight.chunk(ranks, int(by_input))[rank] if "_proj" in name else weight
    share = Model(model.shape, ranks)
    share.load_state_dict(shared)
    return share


def requests_of(text: list[int], count: int = 12) -> list[Request]:
    """Requests that arrive over time, to go on with pieces of ``text`` of different lengths. They are the same ones each time."""
    draw = Random(0)
    pieces = [(draw.randrange(len(text) - 150), draw.randint(1, 150), draw.randint(8, 60)) for _ in range(count)]
    return [Request(text[start : start + n], n + more, 3 * i) for i, (start, n, more) in enumerate(pieces)]


def served(forward: Callable[..., Tensor], device: torch.device, text: list[int]) -> tuple[list[list[int]], Engine, float]:
    """Serve all requests twice, first to warm up. Returns their tokens, the engine, and the new tokens per second."""
    for _ in range(2):
        requests, engine, start = requests_of(text), Engine(forward, device), time.perf_counter()
        engine.serve(requests)
    return [request.tokens for request in requests], engine, engine.generated / (time.perf_counter() - start)


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    """Serve the requests both ways. Returns 1 if any token differs."""
    parser = argparse.ArgumentParser(description="Serve a dozen requests by the plain model and out of graphs.")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M-Instruct instead of random weights")
    model, text = smollm2() if parser.parse_args(arguments).smollm2 else random_model()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    rank, ranks = 0, 1
    if "RANK" in os.environ:  # torchrun has started this
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
        rank, ranks, model = dist.get_rank(), dist.get_world_size(), share_of(model)
    model.to(device).eval()

    def plain(*inputs: Tensor, ctx: Step) -> Tensor:
        with segue.active_forward(ctx):
            return model(*inputs)

    wanted, engine, by_plain = served(plain, device, text)
    with graphs_of(model, device) as runner:
        tokens, _, by_graphs = served(runner, device, text)
        stats = runner.stats
    same = torch.tensor([tokens == wanted], dtype=torch.int32, device=device)
    if ranks > 1:
        dist.all_reduce(same, dist.ReduceOp.MIN)  # on each rank
        dist.destroy_process_group()
    counts = {name: stats.strategies.get(name, 0) for name in ("full", "breakable")}
    if rank == 0:
        if device.type == "cpu":
            print("emulated on CPU: the figures of speed mean nothing")
        print(f"{len(tokens)} requests, {engine.generated} new tokens in {engine.steps} steps, served twice; ranks: {ranks}")
        print(f"tokens per second: {by_plain:.0f} by the plain model, {by_graphs:.0f} out of graphs")
        print(f"steps out of graphs: {counts['full']} full, {counts['breakable']} breakable, {stats.eager} eager")
        print(f"tokens are equal: {bool(same)}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
