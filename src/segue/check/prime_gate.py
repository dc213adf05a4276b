"""The gate of a prime graph: the comparisons that it must pass before it may serve anyone.

One graph runs each prompt length in ascending and then in descending order. Before each run the scratch cache, the free
blocks of the pool and the session hold NaN. Logits, hidden states and every byte of every cache are compared with the
trunk's eager run at the same padded shape on a fresh cache, and, to rounding, with its run of each prompt at its own length.
Then greedy steps continue from both caches. The perplexity of a text is compared where one is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.check.cache_parts import CachePart
from segue.check.compare import difference, distance, poison, tensors_in
from segue.check.perplexity import perplexity
from segue.errors import SegueError
from segue.prime import PrimeGraph, Reference
from segue.prime.reference import reference
from segue.prime.requests import Batch

_LENGTHS = (47, 128, 300)
# How far a prompt may be from the forward at its true length, as a part of the largest value.
# A prompt without padding has other matrix shapes, so it is rounded otherwise: 8-bit values may land on the next step, and
# results computed from them show it. Where padded rows count, results are off by ten times as much.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_COARSE = 1.5e-1
_SAME = "same"
_COPIES = 32  # copies of the reference's cache that show what a step may give that doesn't repeat itself


@dataclass
class GateReport:
    """What the gate found.

    ``rows``: a table with one row for each run. ``findings``: a sentence for each difference. ``perplexity``: of the text that
    was given, in words; empty without one.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    perplexity: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing was found, so that the graph may serve."""
        return not self.findings


def check_prime(
    prime: PrimeGraph,
    lengths: Sequence[int] | None = None,
    steps: int = 16,
    progress: Callable[[str], None] = lambda line: None,
    text: Tensor | Sequence[int] | None = None,
) -> GateReport:
    """Run the gate on one graph.

    Args:
        lengths: prompt lengths in tokens; by default those of ``min_tokens``, 47, 128, 300, bucket - 1 and bucket that fit,
            and the bucket with a second prompt. A graph for several requests also runs each length divided among them.
        steps: how many greedy steps follow each run, made by ``trunk.step(token, session)``. A trunk without ``step`` makes
            none, and the report says so.
        progress: is called with a line before each run.
        text: token ids [n], whose perplexity by the graph is compared with that by the eager forward at each window's length.
            None: nothing is compared.
    """
    gate = _Gate(prime, steps)
    for direction, plan in (("up", gate.plan(lengths)), ("down", gate.plan(lengths)[::-1])):
        for label, prompts in plan:
            progress(f"{label}, {direction}")
            gate.run(label, direction, prompts)
    if text is not None:
        progress("perplexity")
        gate.compare_perplexity(text)
    return gate.report


class _Gate:
    """The runs on one graph. Each comparison gives a cell of the run's row, and a finding where something differs."""

    def __init__(self, prime: PrimeGraph, steps: int) -> None:
        self.prime, self.trunk, self.report = prime, prime.trunk, GateReport()
        self.step: Callable[[Tensor, Any], Tensor] | None = getattr(prime.trunk, "step", None)
        self.steps = steps if self.step is not None else 0
        self.capacity = prime.bucket + max(self.steps, 1)
        self.vocabulary = prime.reference([0] * self.trunk.min_tokens).logits.shape[1]
        self.seen: set[str] = set()  # labels of the runs that were made

    def plan(self, lengths: Sequence[int] | None) -> list[tuple[str, list[Tensor]]]:
        """The label and the prompts of each run, in ascending order of length."""
        bucket, least, requests = self.prime.bucket, self.trunk.min_tokens, self.prime.requests
        wanted = lengths if lengths is not None else (least, *_LENGTHS, bucket - 1, bucket)
        fitting = sorted({n for n in wanted if least <= n <= bucket})
        found = [(f"{n} tokens", [self._prompt(n, 0)]) for n in fitting]
        if lengths is None:
            found.append((f"{bucket} tokens, another prompt", [self._prompt(bucket, 1)]))
        if requests > 1:
            for n in fitting:
                parts = _divided(n, requests, least)
                found.append((f"{'+'.join(map(str, parts))} tokens", [self._prompt(m, r) for r, m in enumerate(parts)]))
        return found

    def run(self, label: str, direction: str, prompts: list[Tensor]) -> None:
        """Make one run and all its comparisons."""
        first = label not in self.seen
        self.seen.add(label)
        batch = self.prime.batch(prompts)
        want = self.prime.reference(prompts)
        sessions = [self._session() for _ in prompts]
        before = [{path: t.clone() for path, t in tensors_in(s).items()} for s in sessions]
        self._poison()
        row: dict[str, Any] = {"prompt": label, "way": direction}
        here = f"{label}, {direction}"
        try:
            with torch.no_grad():
                got = self.prime.run(prompts, sessions)
        except SegueError as e:
            self._find(here, f"refused: {e}")
            self.report.rows.append({**row, "logits": "refused"})
            return
        count = len(prompts)
        row["logits"] = self._outputs(here, batch, "logits", got.logits, want.logits[:count])
        row["hidden"] = self._outputs(here, batch, "hidden", got.hidden, want.hidden[:count])
        row["cache"] = self._caches(here, batch, sessions, want)
        row["past the prompt"] = self._past(here, batch, sessions, before, want)
        row["pads"] = self._pads(here, batch, sessions, want) if first else None
        row["all rows"] = self._all_rows(here, prompts, batch) if first else None
        row["control"] = self._control(here, prompts, batch, sessions, want) if first else None
        row["greedy"] = self._greedy(here, batch, sessions, got.logits, want)  # comes last, because the sessions grow
        self.report.rows.append(row)

    def compare_perplexity(self, text: Tensor | Sequence[int]) -> None:
        """Compare the perplexity of a text."""
        ids = torch.as_tensor(text, dtype=torch.int64).to(self.prime.device.torch_device)
        try:
            found = perplexity(self.prime, ids, self._session)
        except SegueError as e:
            self._find("perplexity", f"refused: {e}")
        except (RuntimeError, ValueError) as e:
            self.report.perplexity = f"not compared: the trunk doesn't run unpadded ({type(e).__name__})"
        else:
            self.report.perplexity = str(found)
            if not found.ok:
                self._find("perplexity", f"{found}: they differ by more than {found.tolerance:g} of it")

    def _all_rows(self, here: str, prompts: list[Tensor], batch: Batch) -> str:
        """Check a run that gives all real rows: against the reference, and against each prompt alone at its own length."""
        prime = self.prime
        self._poison()
        with torch.no_grad():
            got = prime.run(prompts, [self._session() for _ in prompts], rows="all")
        want = prime.reference(prompts, rows="all")
        names = ("logits", "hidden")
        found = [(f"{name} of all rows", difference(getattr(got, name), getattr(want, name))) for name in names]
        start = 0
        for r, n in enumerate(batch.lengths):
            rows, start = slice(start, start + n), start + n
            if not n:
                continue
            try:
                alone = reference(self.trunk, prime.batch(prompts[r]), n, 1, prime.name, every=True)
            except (RuntimeError, ValueError) as e:
                return f"{self._verdict(here, found)}; doesn't run unpadded ({type(e).__name__})"
            for name in names:
                off = distance(getattr(got, name)[rows], wanted := getattr(alone, name))
                if off > _TOLERANCE.get(wanted.dtype, _COARSE):
                    what = _at(f"{name} of all rows, against its own length,", r, batch)
                    found.append((what, f"is off by {off:.2g} of its size"))
        return self._verdict(here, found)

    def _outputs(self, here: str, batch: Batch, name: str, got: Tensor, want: Tensor) -> str:
        real = [r for r, n in enumerate(batch.lengths) if n]
        return self._verdict(here, [(name, difference(got[real], want[real]))])

    def _caches(self, here: str, batch: Batch, sessions: list[Any], want: Reference) -> str:
        found: list[tuple[str, str | None]] = []
        count = 0
        for r, n in enumerate(batch.lengths):
            mine, theirs = tensors_in(sessions[r]), tensors_in(want.cache)
            if not n:
                continue
            length = self.trunk.get_length(sessions[r])
            found.append((_at("length", r, batch), None if length == n else f"{length} instead of {n}"))
            for path in theirs.keys() | mine.keys():
                name = _at(path, r, batch)
                if path not in mine or path not in theirs:
                    found.append((name, f"is in the {'session' if path in mine else 'reference'} only"))
                    continue
                part = CachePart.of(theirs[path], mine[path], self.prime.requests)
                if part is None:
                    found.append((name, f"has shape {tuple(mine[path].shape)}, and the reference {tuple(theirs[path].shape)}"))
                    continue
                count += 1
                share = part.in_cache(theirs[path], r, want.offsets[r], n)
                found.append((name, difference(part.in_session(mine[path], n), share)))
        return self._verdict(here, found, f"{count} tensors {_SAME}")

    def _past(self, here: str, batch: Batch, sessions: list[Any], before: list[dict[str, Tensor]], want: Reference) -> str:
        found: list[tuple[str, str | None]] = []
        for r, n in enumerate(batch.lengths):
            for path, t, _, part in self._parts(sessions[r], want.cache):
                old = before[r].get(path)
                if old is None:
                    continue
                now, then = (part.past_prompt(t, n), part.past_prompt(old, n)) if n else (t, old)
                if now is not None and then is not None:
                    changed = difference(now, then)
                    found.append((f"{_at(path, r, batch)} past its {n} rows", changed and f"was written: {changed}"))
        return self._verdict(here, found, "untouched")

    def _greedy(self, here: str, batch: Batch, sessions: list[Any], logits: Tensor, want: Reference) -> str | None:
        if self.step is None:
            return "no step()"
        for r, n in enumerate(batch.lengths):
            if not n:
                continue
            other = self._filled(r, n, want)
            a, b = logits[r : r + 1], want.logits[r : r + 1]
            given: list[Tensor] = []
            for i in range(self.steps):
                mine, theirs = a.argmax(-1), b.argmax(-1)
                given.append(theirs)
                if not torch.equal(mine, theirs):
                    what = f"token {mine.item()} instead of {theirs.item()}"
                    return self._verdict(here, [(_at(f"greedy step {i + 1}", r, batch), what)])
                with torch.inference_mode():
                    a, b = self.step(mine, sessions[r]), self.step(theirs, other)
                if (differs := difference(a, b)) is not None:
                    others = self._outcomes(r, n, want, given)
                    if any(torch.equal(a, other) for other in others):
                        return f"{i} steps {_SAME}, then step() doesn't repeat itself"
                    copies = f"{_COPIES} copies of the reference's own cache give {len(others)} results, and not this one"
                    name = _at(f"logits after greedy step {i + 1}", r, batch)
                    return self._verdict(here, [(name, f"{differs}; {copies}")])
        return f"{self.steps} steps {_SAME}"

    def _outcomes(self, r: int, n: int, want: Reference, given: Sequence[Tensor]) -> list[Tensor]:
        """The different logits that the same steps give from copies of the reference's cache.

        A step that doesn't repeat itself gives several: the last bits of torch's attention kernels for one query differ
        from run to run.
        """
        assert self.step is not None
        found: list[Tensor] = []
        for _ in range(_COPIES):
            session = self._filled(r, n, want)
            with torch.inference_mode():
                for token in given:
                    logits = self.step(token, session)
            if not any(torch.equal(logits, other) for other in found):
                found.append(logits)
        return found

    def _pads(self, here: str, batch: Batch, sessions: list[Any], want: Reference) -> str | None:
        """Check that other values in the padded rows change nothing, and that leaving out padded rows changes only rounding."""
        prime = self.prime
        total = batch.total
        if total == prime.bucket:
            return None
        draw = torch.Generator().manual_seed(total)
        like = self.trunk.embed(batch.ids[max(range(len(batch.ids)), key=lambda r: batch.lengths[r])])
        tail = torch.randn(prime.bucket - total, *like.shape[1:], generator=draw).to(like)
        noisy = reference(self.trunk, batch, prime.bucket, prime.requests, prime.name, tail)
        found = [
            (f"{name}, with other values in the padded rows,", difference(a, b))
            for name, a, b in self._views(batch, sessions, noisy, want)
        ]
        try:
            bare = reference(self.trunk, batch, total, prime.requests, prime.name)
        except (RuntimeError, ValueError) as e:
            return f"{self._verdict(here, found)}; doesn't run unpadded ({type(e).__name__})"
        for name, a, b in self._views(batch, sessions, want, bare):
            off = distance(a, b)
            if off > _TOLERANCE.get(b.dtype, _COARSE):
                found.append((f"{name}, padded against unpadded,", f"is off by {off:.2g} of its size"))
        return self._verdict(here, found)

    def _control(self, here: str, prompts: list[Tensor], batch: Batch, sessions: list[Any], want: Reference) -> str:
        """Check that the reference repeats itself over other memory, which is allocated and half freed here."""
        churn = [
            torch.full((n,), float("nan"), device=self.prime.device.torch_device) for n in (7, 512, 4096, 65536) for _ in range(8)
        ]
        del churn[::2]
        again = self.prime.reference(prompts)
        return self._verdict(
            here,
            [
                (f"{name} of the reference, run again,", difference(a, b))
                for name, a, b in self._views(batch, sessions, again, want)
            ],
        )

    def _views(self, batch: Batch, sessions: list[Any], a: Reference, b: Reference) -> list[tuple[str, Tensor, Tensor]]:
        """The tensors that two references must agree on, by name: outputs, and each session's share of the cache."""
        real = [r for r, n in enumerate(batch.lengths) if n]
        found = [("logits", a.logits[real], b.logits[real]), ("hidden", a.hidden[real], b.hidden[real])]
        of_a, of_b = tensors_in(a.cache), tensors_in(b.cache)
        for r in real:
            for path, _, _, part in self._parts(sessions[r], self.prime.scratch):
                if path in of_a and path in of_b:
                    mine, theirs = (part.in_cache(of[path], r, a.offsets[r], batch.lengths[r]) for of in (of_a, of_b))
                    found.append((_at(path, r, batch), mine, theirs))
        return found

    def _filled(self, r: int, n: int, want: Reference) -> Any:
        """A session filled from a reference's cache, tensor by tensor, by their shapes and not by the trunk's ``state``."""
        session = self._session()
        reserve = getattr(self.trunk, "reserve", None)
        if reserve is not None:
            reserve(session, n)
        self.trunk.set_length(session, n)
        with torch.inference_mode():
            for _, t, theirs, part in self._parts(session, want.cache):
                mine = part.in_session(t, n)
                mine.copy_(part.in_cache(theirs, r, want.offsets[r], n).reshape(mine.shape))
        return session

    def _session(self) -> Any:
        """A fresh session, in which every tensor with rows is poisoned."""
        make = getattr(self.trunk, "new_session", self.trunk.new_cache)
        with torch.inference_mode(False):
            session = make(self.capacity)
        for _, t, _, part in self._parts(session, self.prime.scratch):
            if part.rows:
                poison(t)
        return session

    def _parts(self, session: Any, cache: Any) -> Iterator[tuple[str, Tensor, Tensor, CachePart]]:
        """Path, tensor of the session, tensor of the cache and part, for each tensor whose shapes tell the part."""
        theirs = tensors_in(cache)
        for path, t in tensors_in(session).items():
            part = CachePart.of(theirs[path], t, self.prime.requests) if path in theirs else None
            if part is not None:
                yield path, t, theirs[path], part

    def _poison(self) -> None:
        """Poison what a run must not depend on: what the last run left in the scratch cache, and free memory."""
        prime = self.prime
        scratch = {_torch.storage_key(t) for t in tensors_in(prime.scratch).values()}
        written = [e.tensor for e in prime.capture.externals if e.written] if prime.capture is not None else []
        state = [s.tensor for s in self.trunk.state(prime.scratch).values()]
        for t in (*state, *(t for t in written if _torch.storage_key(t) in scratch)):
            poison(t)
        prime.pool.poison()

    def _prompt(self, n: int, which: int) -> Tensor:
        draw = torch.Generator().manual_seed(1000 * which + n)
        return torch.randint(0, self.vocabulary, (n,), generator=draw).to(self.prime.device.torch_device)

    def _verdict(self, here: str, found: Sequence[tuple[str, str | None]], right: str = _SAME) -> str:
        wrong = [(name, what) for name, what in found if what]
        for name, what in wrong:
            self._find(here, f"{name}: {what}")
        return "DIFFERS: " + ", ".join(name for name, _ in wrong) if wrong else right

    def _find(self, here: str, what: str) -> None:
        self.report.findings.append(f"{here}: {what}")


def _at(name: str, request: int, batch: Batch) -> str:
    return name if len(batch.lengths) == 1 else f"{name} of request {request}"


def _divided(n: int, requests: int, least: int) -> list[int]:
    """``n`` tokens divided unevenly among requests, of which the second is empty where there are more than two."""
    parts = [0] * requests
    left = n
    for r in range(requests):
        if r == 1 and requests > 2:
            continue
        take = left if r == requests - 1 else max(least, left // 3)
        if left - take and left - take < least:
            take = left
        parts[r] = min(take, left) if min(take, left) >= least else 0
        left -= parts[r]
    return parts
